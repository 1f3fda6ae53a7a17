# SPDX-License-Identifier: Apache-2.0
"""Starting noise that lies outside of the attraction basin of a training picture (Han et al., NeurIPS 2025)."""

import torch

from .curvature_memorization import norms
from .denoising_memorization import require_gradients


def adjust_noise(denoiser, x, timestep, gamma=0.7, rho=50.0, num_steps=2):
    """
    Repeats `x <- x - gamma (eD(x + rho eD / ||eD||) - eD(x))`, without any gradient, for a whole batch.

    The published sampler then goes on without guidance until a timestep (900 for SD 1.4), see `StaticGuidance`.

    Args:
        denoiser ([`GuidedDenoiser`]), x (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Starting noise as the model sees it, and the first timestep.
        gamma (`float`, *optional*, defaults to 0.7), rho (`float`, *optional*, defaults to 50.0), num_steps (`int`,
        *optional*, defaults to 2):
            Those of SD 1.4; `rho=30, num_steps=4` for SD 2.0.

    Returns:
        `torch.Tensor` of the shape of `x`, in float32.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    for _ in range(num_steps):
        difference = denoiser.noise_difference(x, timestep)
        length = norms(difference).view(-1, *[1] * (x.ndim - 1))
        away = x + rho * difference / torch.where(length > 0, length, 1.0)
        x = x - gamma * (denoiser.noise_difference(away, timestep) - difference)
    return x


def adjust_noise_per_sample(
    denoiser, x, timestep, target_loss=0.9, learning_rate=0.01, max_steps=1000, weight_decay=0.01
):
    """
    Minimises `||eD(x)||` by AdamW until it is at most `target_loss`, for each sample by itself.

    Args:
        denoiser ([`GuidedDenoiser`]), x (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Starting noise as the model sees it, and the first timestep.
        target_loss (`float`, *optional*, defaults to 0.9):
            0.7 to 1.5 for SD 1.4, 5 to 20 for SD 2.0.
        learning_rate (`float`, *optional*, defaults to 0.01):
            0.01 for SD 1.4, 0.1 for SD 2.0.
        max_steps (`int`, *optional*, defaults to 1000), weight_decay (`float`, *optional*, defaults to 0.01):
            Of AdamW.

    Returns:
        `tuple` of the noise, in float32, and the updates of each sample `(n,)`.
    """
    require_gradients(denoiser.denoiser)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rows = [row.clone().requires_grad_() for row in wide]
    optimizer = torch.optim.AdamW(rows, lr=learning_rate, weight_decay=weight_decay)
    updates = torch.zeros(len(rows), dtype=torch.long)
    moving = list(range(len(rows)))
    for _ in range(max_steps):
        state = torch.stack([rows[i].detach() for i in moving]).requires_grad_()
        with torch.enable_grad():
            loss = norms(denoiser.select(moving).noise_difference(state, timestep, with_grad=True))
            (gradient,) = torch.autograd.grad(loss.sum(), state)
        going = [k for k in range(len(moving)) if loss[k] > target_loss and gradient[k].isfinite().all()]
        optimizer.zero_grad()
        moving, gradient = [moving[k] for k in going], gradient[going]
        if not moving:
            break
        for i, g in zip(moving, gradient):
            rows[i].grad = g
            updates[i] += 1
        optimizer.step()
    return torch.stack([row.detach() for row in rows]), updates

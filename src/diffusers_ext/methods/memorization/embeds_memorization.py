# SPDX-License-Identifier: Apache-2.0
"""Prompt embeddings from which the prompt moves the prediction less (Wen et al., ICLR 2024)."""

import torch

from .curvature_memorization import norms
from .denoising_memorization import require_gradients


def joint_norm(denoiser, embeds, x, timestep):
    """
    `||eD||` over all samples together, with a graph towards `embeds`.

    Args:
        denoiser ([`GuidedDenoiser`]):
            Of `n` samples of one prompt.
        embeds (`torch.Tensor` of shape `(1, tokens, channels)`):
            The prompt.
        x (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Where.

    Returns:
        `torch.Tensor` of shape `()`
    """
    rows = embeds.to(denoiser.prompt_embeds.dtype).expand_as(denoiser.prompt_embeds)
    return denoiser.with_prompt_embeds(rows).noise_difference(x, timestep, with_grad=True).norm()


def optimize_prompt_embeds(
    denoiser,
    x,
    timestep,
    target_loss=None,
    learning_rate=0.05,
    max_steps=10,
    weight_decay=0.01,
    decay_first_token=False,
):
    """
    Moves the embedding of a prompt until it moves the noise prediction less.

    Args:
        denoiser ([`GuidedDenoiser`]):
            Of `n` samples of one prompt: the first row of its embeddings is taken.
        x (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Starting noise as the model sees it, and the first timestep.
        target_loss (`float`, *optional*):
            Joint norm at which to stop, checked before every update. It grows with the square root of `n`.
        learning_rate (`float`, *optional*, defaults to 0.05), max_steps (`int`, *optional*, defaults to 10):
            Of AdamW.
        weight_decay (`float`, *optional*, defaults to 0.01):
            Of AdamW.
        decay_first_token (`bool`, *optional*, defaults to `False`):
            Whether weight decay shrinks the begin token, whose gradient is left out, as in the published code.

    Returns:
        `tuple` of the embedding `(1, tokens, channels)`, in the dtype that it had, and the number of updates.
    """
    require_gradients(denoiser.denoiser)
    dtype = denoiser.prompt_embeds.dtype
    embeds = denoiser.prompt_embeds[:1].detach().to(torch.promote_types(dtype, torch.float32)).clone()
    first = embeds[:, :1].clone()
    embeds.requires_grad_()
    optimizer = torch.optim.AdamW([embeds], lr=learning_rate, weight_decay=weight_decay)
    with torch.enable_grad():
        for step in range(max_steps):
            loss = joint_norm(denoiser, embeds, x, timestep)
            if (target_loss is not None and loss.item() <= target_loss) or not loss.isfinite():
                return embeds.detach().to(dtype), step
            (gradient,) = torch.autograd.grad(loss, embeds)
            gradient[:, 0] = 0
            embeds.grad = gradient
            optimizer.step()
            if not decay_first_token:
                with torch.no_grad():
                    embeds[:, :1] = first
    return embeds.detach().to(dtype), max_steps


def token_significance(denoiser, x, timestep, official=False):
    """
    How much each token of a prompt carries of what makes it memorised.

    Args:
        denoiser ([`GuidedDenoiser`]), x, timestep:
            As of `optimize_prompt_embeds`.
        official (`bool`, *optional*, defaults to `False`):
            Whether to divide by `2 n`, as the published function does.

    Returns:
        `torch.Tensor` of shape `(tokens,)`: norms of the gradient; a large one is a trigger.
    """
    embeds = denoiser.prompt_embeds[:1].detach()
    embeds = embeds.to(torch.promote_types(embeds.dtype, torch.float32)).requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(joint_norm(denoiser, embeds, x, timestep), embeds)
    value = norms(gradient[0])
    return value / (2 * x.shape[0]) if official else value

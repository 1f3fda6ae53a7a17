# SPDX-License-Identifier: Apache-2.0
"""SAIL: starting noise from which a memorised prompt does not fall into its training picture."""

import math
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from diffusers.utils import logging

from .curvature_memorization import jvp, norms
from .denoising_memorization import require_gradients


logger = logging.get_logger(__name__)

OBJECTIVES = ("proxy", "paper", "exact")
DIRECTIONS = ("current", "initial")
PRIORS = ("none", "norm", "chi")
ON_FAILURE = ("warn", "raise")


@dataclass
class SAILConfig:
    r"""
    Sharpness-aware initialisation ([Jeon et al.](https://huggingface.co/papers/2412.04140), section 5.1).

    Args:
        objective (`str`, *optional*, defaults to `"proxy"`):
            `"proxy"`: `||eD(x + u)||` with `u = eD(x) / ||eD(x)||`, what the published code minimises. `"paper"`:
            `||sD(x + u) - sD(x)||^2` along `sD`. `"exact"`: `||H_D s_D||^2`; derivatives of derivatives, for small
            models.
        learning_rate (`float`, *optional*, defaults to 0.05), max_steps (`int`, *optional*, defaults to 10):
            Of Adam, per round.
        sharpness_threshold (`float`, *optional*):
            A candidate whose objective is at or below it is kept as it is. Depends on the model, its resolution and
            the timestep. Without any threshold, all steps are taken and the best candidate is kept.
        threshold (`float`, *optional*):
            The same for objective and prior together, as published thresholds are meant.
        direction (`str`, *optional*, defaults to `"current"`):
            Where `u` is evaluated: at the candidate, or for ever at the noise it began with (`"initial"`, the
            published code).
        grad_through_direction (`bool`, *optional*, defaults to `False`):
            Whether the gradient goes through `u`: twice the memory for the same value.
        prior (`str`, *optional*, defaults to `"none"`), alpha (`float`, *optional*, defaults to 0.05):
            `"norm"`: `alpha ||x||` (squared with the objective of the paper), which pulls towards the origin; `"chi"`:
            `alpha (||x||^2 / 2 - (d - 1) log ||x||)`, lowest where Gaussian noise lies; `"none"`.
        keep_norm (`bool`, *optional*, defaults to `True`):
            Whether every update is followed by a return to the candidate's own initial norm.
        max_rounds (`int`, *optional*, defaults to 5), on_failure (`str`, *optional*, defaults to `"warn"`):
            With a threshold: how often candidates that did not reach it start again from new noise, and whether
            reaching it nowhere is a warning (the best candidate is returned) or a `RuntimeError`.
        micro_batch_size (`int`, *optional*), gradient_checkpointing (`bool`, *optional*, defaults to `False`):
            Candidates at a time, and recomputation in the backward pass: less memory, more time.
        freeze_accepted (`bool`, *optional*, defaults to `True`):
            `False`: accepted candidates go on moving until the last one is accepted, as in the published code.

    Raises:
        ValueError: on unknown names or numbers out of range.
    """

    objective: str = "proxy"
    learning_rate: float = 0.05
    max_steps: int = 10
    sharpness_threshold: float | None = None
    threshold: float | None = None
    direction: str = "current"
    grad_through_direction: bool = False
    prior: str = "none"
    alpha: float = 0.05
    keep_norm: bool = True
    max_rounds: int = 5
    on_failure: str = "warn"
    micro_batch_size: int | None = None
    gradient_checkpointing: bool = False
    freeze_accepted: bool = True

    def __post_init__(self):
        names = (("objective", OBJECTIVES), ("direction", DIRECTIONS), ("prior", PRIORS), ("on_failure", ON_FAILURE))
        for name, known in names:
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` has to be one of {', '.join(known)} but is {getattr(self, name)!r}.")
        if self.threshold is not None and self.sharpness_threshold is not None:
            raise ValueError("Pass either `threshold` or `sharpness_threshold`, not both.")
        if not self.learning_rate > 0:
            raise ValueError(f"`learning_rate` has to be positive but is {self.learning_rate}.")
        for name in ("max_steps", "max_rounds", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` has to be a positive integer but is {value!r}.")
        if self.direction == "initial" and self.objective != "proxy":
            raise ValueError("`direction='initial'` is a way of the published code and goes with the proxy objective.")

    @classmethod
    def official(cls, alpha=0.05, threshold=8.2, **kwargs):
        """The published settings: those of SD 1.4 by default; `alpha=0.01, threshold=5.0` for SD 2.0."""
        settings = {"direction": "initial", "grad_through_direction": True, "prior": "norm", "keep_norm": False}
        settings |= {"alpha": alpha, "threshold": threshold, "freeze_accepted": False}
        return cls(**{**settings, **kwargs})

    @property
    def limit(self):
        """The threshold in use, or `None`."""
        return self.threshold if self.threshold is not None else self.sharpness_threshold


@dataclass
class SAILOutput:
    """
    What came of `n` candidates.

    Args:
        latents (`torch.Tensor` of shape `(n, ...)`):
            Starting noise, of unit variance, in the dtype that came in.
        sharpness (`torch.Tensor` of shape `(n,)`), initial_sharpness (`torch.Tensor` of shape `(n,)`):
            The objective without the prior, of what is returned and of what came in.
        updates (`torch.Tensor` of shape `(n,)`):
            Optimiser steps that were spent on each candidate.
        accepted (`torch.Tensor` of shape `(n,)`):
            Which reached the threshold; all of them where there is none.
        order (`list[tuple[int, int]]`):
            Step and candidate in the order of acceptance.
        norm_drift (`torch.Tensor` of shape `(n,)`):
            Relative change of the norm since the noise that it began with.
    """

    latents: torch.Tensor
    sharpness: torch.Tensor
    initial_sharpness: torch.Tensor
    updates: torch.Tensor
    accepted: torch.Tensor
    norm_drift: torch.Tensor
    order: list = field(default_factory=list)


def _unit(x):
    length = norms(x).view(-1, *[1] * (x.ndim - 1))
    # Where the prompt changes nothing there is no direction; 1 keeps the gradient of the division finite.
    return x / torch.where(length > 0, length, 1.0)


def sail_sharpness(denoiser, x, timestep, config, initial=None):
    """
    The objective without the prior, per candidate, with a graph towards `x` (and `initial`).

    Args:
        denoiser ([`GuidedDenoiser`]):
            Of these candidates.
        x (`torch.Tensor` of shape `(n, ...)`):
            Candidates, as the model sees them.
        timestep (`int` or `torch.Tensor`):
            The first one.
        config ([`SAILConfig`]):
            Objective and direction.
        initial (`torch.Tensor` of shape `(n, ...)`, *optional*):
            Where `u` is evaluated with `direction="initial"`.

    Returns:
        `torch.Tensor` of shape `(n,)`
    """
    if config.objective == "exact":
        difference = denoiser.difference(x, timestep, with_grad=True)

        def function(x):
            return denoiser.difference(x, timestep, with_grad=True)

        return norms(jvp(function, x, difference, with_graph=True)).square()
    through = config.grad_through_direction
    base = x if initial is None else initial
    first = (denoiser.noise_difference if config.objective == "proxy" else denoiser.difference)(
        base if through else base.detach(), timestep, with_grad=through
    )
    step = _unit(first)
    if config.objective == "proxy":
        return norms(denoiser.noise_difference(x + step, timestep, with_grad=True))
    if not through:
        # Only the direction is held fast: the difference itself belongs to the objective.
        first = denoiser.difference(x, timestep, with_grad=True)
    return norms(denoiser.difference(x + step, timestep, with_grad=True) - first).square()


def prior_loss(x, config):
    """The prior of each candidate, `(n,)`."""
    length, dimension = norms(x), x[0].numel()
    if config.prior == "norm":
        return config.alpha * (length.square() if config.objective == "paper" else length)
    if config.prior == "chi":
        return config.alpha * (length.square() / 2 - (dimension - 1) * length.log())
    return torch.zeros_like(length)


@contextmanager
def _checkpointing(denoiser, wanted):
    """Gradient checkpointing while the context is open, where it was off."""
    change = wanted and not getattr(denoiser, "is_gradient_checkpointing", False)
    if change:
        denoiser.enable_gradient_checkpointing()
    try:
        yield
    finally:
        if change:
            denoiser.disable_gradient_checkpointing()


def _evaluate(denoiser, rows, initial, indices, timestep, config, with_grad):
    """Loss, sharpness and gradient of the candidates `indices`, in micro-batches."""
    size = config.micro_batch_size or len(indices)
    scale = denoiser.noise_scale(timestep)
    losses, values, gradients = [], [], []
    for start in range(0, len(indices), size):
        part = indices[start : start + size]
        x = torch.stack([rows[i].detach() for i in part]).requires_grad_(with_grad)
        base = initial[part].clone().requires_grad_(with_grad) if config.direction == "initial" else None
        with torch.set_grad_enabled(with_grad):
            value = sail_sharpness(
                denoiser.select(part), x * scale, timestep, config, None if base is None else base * scale
            )
            loss = value + prior_loss(x, config)
            if with_grad:
                inputs = [x, base] if base is not None and config.grad_through_direction else [x]
                # The direction is a function of the candidate, even where it stays what it was at the start.
                gradients.append(sum(torch.autograd.grad(loss.sum(), inputs)))
        losses.append(loss.detach())
        values.append(value.detach())
    return torch.cat(losses), torch.cat(values), torch.cat(gradients) if with_grad else None


def sail(denoiser, latents, timestep, config=None, draw=None, stop_after=None, callback=None):
    r"""
    Moves starting noise to where the model is less sharp for its prompts.

    [Jeon et al.](https://huggingface.co/papers/2412.04140), algorithm 2. Candidates are independent of each other;
    latents, loss and optimiser are in float32 whatever the model is in, and no parameter of the model gets a gradient.

    Args:
        denoiser ([`GuidedDenoiser`]):
            One row per candidate.
        latents (`torch.Tensor` of shape `(n, ...)`):
            Starting noise of unit variance.
        timestep (`int` or `torch.Tensor`):
            The first one of the sampler.
        config ([`SAILConfig`], *optional*):
            How.
        draw (`Callable`, *optional*):
            Called with the indices of candidates that failed; returns new noise for them. Without it there is one
            round.
        stop_after (`int`, *optional*):
            Accepted candidates after which to stop; all by default.
        callback (`Callable`, *optional*):
            Called before every update with `step`, and `candidates`, `latents`, `loss`, `sharpness` and `gradient` of
            those that are still moving.

    Returns:
        [`SAILOutput`]

    Raises:
        RuntimeError: when a candidate failed in every round, with `on_failure="raise"`.
    """
    config = config or SAILConfig()
    require_gradients(denoiser.denoiser)
    wide = torch.promote_types(latents.dtype, torch.float32)
    n, stop_after = latents.shape[0], stop_after or latents.shape[0]
    start = latents.to(wide)
    best, began = start.clone(), norms(start)
    with torch.no_grad():
        first_sharpness = _evaluate(denoiser, list(start), start, list(range(n)), timestep, config, False)[1]
        silent = norms(denoiser.noise_difference(start * denoiser.noise_scale(timestep), timestep)) == 0
    best_loss = torch.full((n,), math.inf, dtype=wide, device=latents.device)
    best_sharpness = first_sharpness.clone()
    updates = torch.zeros(n, dtype=torch.long, device=latents.device)
    # A prompt that changes nothing leaves nothing to mitigate.
    accepted = silent.clone()
    order, total_steps = [], 0

    with _checkpointing(denoiser.denoiser, config.gradient_checkpointing):
        for number in range(config.max_rounds):
            active = (~accepted).nonzero().flatten().tolist()
            if not active or accepted.sum() - silent.sum() >= stop_after:
                break
            if number > 0:
                if draw is None or config.limit is None:
                    break
                start[active] = draw(active).to(start)
            rows = {i: start[i].clone().requires_grad_() for i in active}
            optimizer = torch.optim.Adam(rows.values(), lr=config.learning_rate)
            moving = list(active)
            for step in range(config.max_steps + 1):
                last = step == config.max_steps
                loss, value, gradient = _evaluate(denoiser, rows, start, moving, timestep, config, with_grad=not last)
                if callback is not None and not last:
                    states = torch.stack([rows[i].detach() for i in moving])
                    callback(
                        step=step, candidates=moving, latents=states, loss=loss, sharpness=value, gradient=gradient
                    )
                finite = loss.isfinite() if last else loss.isfinite() & gradient.flatten(1).isfinite().all(1)
                measured = loss if config.threshold is not None else value
                for place, i in enumerate(moving):
                    # A candidate that goes on moving after its acceptance is delivered where it ends.
                    if finite[place] and (loss[place] <= best_loss[i] or accepted[i]):
                        best[i], best_loss[i], best_sharpness[i] = rows[i].detach(), loss[place], value[place]
                        began[i] = start[i].norm()
                    if config.limit is not None and finite[place] and measured[place] <= config.limit:
                        if not accepted[i]:
                            order.append((step, i))
                            accepted[i] = True
                            best[i], best_sharpness[i], began[i] = rows[i].detach(), value[place], start[i].norm()
                if not finite.all():
                    logger.warning(
                        f"SAIL: the loss of {int((~finite).sum())} candidates is not finite at step {step}; the last "
                        f"finite one is kept. Use float32, or a lower `learning_rate`."
                    )
                    kept = [i for i, good in zip(moving, finite.tolist()) if good]
                else:
                    kept = moving
                if config.freeze_accepted:
                    going = [i for i in kept if not accepted[i]]
                else:
                    going = kept if len(order) < stop_after else []
                if last or not going or len(order) >= stop_after:
                    break
                for i, g in zip(moving, gradient):
                    rows[i].grad = g if i in going else None
                optimizer.step()
                with torch.no_grad():
                    for i in going:
                        updates[i] += 1
                        if config.keep_norm:
                            rows[i] *= start[i].norm() / rows[i].norm()
                moving = going
            total_steps += step

    failed = ~accepted if config.limit is not None else torch.zeros_like(accepted)
    if failed.any() and len(order) < stop_after:
        text = (
            f"SAIL did not bring {int(failed.sum())} of {n} candidates to {config.limit} in {total_steps} steps (the "
            f"lowest are at {best_sharpness[failed].min().item():.4g}). Thresholds depend on model, resolution and "
            f"first timestep: raise it, or allow more rounds."
        )
        if config.on_failure == "raise":
            raise RuntimeError(text)
        logger.warning(f"{text} The best candidates are returned.")
    drift = norms(best) / began - 1
    return SAILOutput(
        best.to(latents.dtype),
        best_sharpness,
        first_sharpness,
        updates,
        accepted if config.limit is not None else torch.ones_like(accepted),
        drift,
        order,
    )

# SPDX-License-Identifier: Apache-2.0
"""Is a model about to reproduce a training picture? One number per prompt and seed, after a step or a few."""

import math
from dataclasses import dataclass

import torch
from diffusers.utils import logging

from .calibration_memorization import MemorizationThreshold, calibration_key
from .curvature_memorization import norms, resolve_backend, sharpness
from .denoising_memorization import GuidedDenoiser
from .encoding_memorization import denoiser_of, draw_latents, encode_pipeline, latent_shape, prompt_lengths
from .lookup_memorization import METRICS_GROUP, find, known_names
from .metrics_memorization import guidance_norm
from .trajectory_memorization import (
    AttentionEntropyMetric,
    BrightEndingMetric,
    LayerEntropyMetric,
    TiledL2Metric,
    TrajectoryMetric,
)


logger = logging.get_logger(__name__)


class SharpnessMetric:
    """`||H_D s_D||` ([Jeon et al.](https://huggingface.co/papers/2412.04140), section 4.4)."""

    def __init__(self, backend="auto", displacement=None):
        self.backend, self.displacement = backend, displacement

    def __call__(self, denoiser, x, timestep):
        return sharpness(denoiser, x, timestep, self.backend, self.displacement)[0]


class GuidanceNormMetric:
    """`||eD||` (Wen et al., ICLR 2024); `||sD||` with `divide=True`."""

    def __init__(self, divide=False):
        self.divide = divide

    def __call__(self, denoiser, x, timestep):
        if self.divide or denoiser.space == "x0":
            return norms(denoiser.difference(x, timestep))
        return guidance_norm(denoiser.noise_difference(x, timestep))


METRICS = {
    "sharpness": SharpnessMetric,
    "guidance_norm": GuidanceNormMetric,
    "layer_entropy": LayerEntropyMetric,
    "attention_entropy": AttentionEntropyMetric,
    "bright_ending": BrightEndingMetric,
    "tiled_l2": TiledL2Metric,
}


def metric_names():
    """Names of the metrics there are, those of other packages (entry points) included."""
    return known_names(METRICS, METRICS_GROUP)


@dataclass
class MemorizationReport:
    """
    Scores of prompts.

    Args:
        scores (`torch.Tensor` of shape `(prompts, num_images)`):
            Mean over the steps, per seed; float32.
        mean (`torch.Tensor` of shape `(prompts,)`):
            Mean over the seeds.
        per_step (`torch.Tensor` of shape `(steps, prompts, num_images)`), timesteps (`torch.Tensor` `(steps,)`):
            What the means are taken of.
        metric (`str`), key (`dict`):
            What was measured, and on what.
        threshold (`float`, *optional*), is_memorized (`torch.Tensor` of shape `(prompts,)`, *optional*):
            The verdict on the mean, where there is a threshold.
    """

    scores: torch.Tensor
    mean: torch.Tensor
    per_step: torch.Tensor
    timesteps: torch.Tensor
    metric: str
    key: dict
    threshold: float | None = None
    is_memorized: torch.Tensor | None = None


class MemorizationDetector:
    r"""
    Scores prompts by what a model does with them at the first steps of denoising.

    [Jeon et al.](https://huggingface.co/papers/2412.04140), section 4: at the starting noise, the difference between
    the conditional and the unconditional score bends sharply for prompts whose training picture was memorised.

    Args:
        metric (`str`, *optional*, defaults to `"sharpness"`):
            One of `metric_names()`.
        backend (`str`, *optional*, defaults to `"auto"`):
            Of the derivative: `"jvp"`, `"fd"` or `"auto"`.
        steps (`int`, *optional*, defaults to 1):
            Denoising steps whose values are averaged.
        num_images (`int`, *optional*, defaults to 4):
            Seeds per prompt.
        space (`str`, *optional*, defaults to `"score"`):
            `"x0"` where the first step holds nothing but noise (flow matching, zero terminal SNR); experimental.
        threshold (`float` or [`MemorizationThreshold`], *optional*):
            Prompts whose mean exceeds it count as memorised. A [`MemorizationThreshold`] that was calibrated on
            something else warns and names the fields.
        guidance_scale (`float`, *optional*, defaults to 7.5), num_inference_steps (`int`, *optional*, defaults to 50):
            Of the generation that the steps belong to.
        batch_size (`int`, *optional*):
            Samples at a time; all at once by default.
        metric_kwargs (`dict`, *optional*):
            Further arguments of the metric.

    Raises:
        ValueError: on an unknown metric, backend or space, or numbers out of range.

    Example:

    ```py
    >>> from diffusers_ext import MemorizationDetector, lab

    >>> report = MemorizationDetector(num_images=2).score(lab.load_pipeline(), ["cat, neon style", "owl, ink style"])
    >>> report.scores.shape
    torch.Size([2, 2])
    ```
    """

    def __init__(
        self,
        metric="sharpness",
        backend="auto",
        steps=1,
        num_images=4,
        space="score",
        threshold=None,
        guidance_scale=7.5,
        num_inference_steps=50,
        batch_size=None,
        metric_kwargs=None,
    ):
        if not guidance_scale > 1:
            raise ValueError(
                f"Detection compares the prediction with and without the prompt, so `guidance_scale` has to be above "
                f"1 but is {guidance_scale}."
            )
        counts = {"steps": steps, "num_images": num_images, "num_inference_steps": num_inference_steps}
        for name, value in {**counts, "batch_size": 1 if batch_size is None else batch_size}.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}` has to be a positive integer but is {value!r}.")
        if steps > num_inference_steps:
            raise ValueError(
                f"`steps` ({steps}) has to be at most `num_inference_steps` ({num_inference_steps}), of which it is a "
                f"part."
            )
        if isinstance(threshold, (int, float)) and not math.isfinite(threshold):
            raise ValueError(f"`threshold` has to be finite but is {threshold}.")
        resolve_backend(backend, torch.nn.Identity())
        kwargs = dict(metric_kwargs or {})
        if "backend" in kwargs:
            raise ValueError("Pass `backend` to the detector, not in `metric_kwargs`: thresholds record it.")
        self.metric_kwargs = dict(kwargs)
        if metric == "sharpness":
            kwargs["backend"] = backend
        self.metric, self._measure = metric, find("metric", metric, METRICS, METRICS_GROUP)(**kwargs)
        if isinstance(self._measure, TrajectoryMetric) and steps != num_inference_steps:
            raise ValueError(
                f"The metric {metric!r} is known at the end of a generation only: `steps` ({steps}) has to equal "
                f"`num_inference_steps` ({num_inference_steps})."
            )
        self.backend, self.steps, self.num_images, self.space = backend, steps, num_images, space
        self.threshold, self.guidance_scale = threshold, guidance_scale
        self.num_inference_steps, self.batch_size = num_inference_steps, batch_size

    def score(
        self,
        pipe,
        prompt=None,
        negative_prompt=None,
        prompt_embeds=None,
        negative_prompt_embeds=None,
        generator=None,
        latents=None,
        height=None,
        width=None,
        model_kwargs=None,
    ):
        """
        Scores prompts.

        Args:
            pipe (`DiffusionPipeline` or `tuple`):
                A pipeline (Stable Diffusion 1.x, 2.x, SDXL, SD3), or `(denoiser, scheduler)` of any model, with
                embeddings and latents.
            prompt (`str` or `list[str]`), negative_prompt (`str` or `list[str]`, *optional*):
                What to score.
            prompt_embeds, negative_prompt_embeds (`torch.Tensor` of shape `(prompts, tokens, channels)`):
                Instead of prompts.
            generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
                Of the noise; a list has one per sample, those of a prompt one after the other.
            latents (`torch.Tensor` of shape `(prompts * num_images, channels, height, width)`, *optional*):
                Unit noise to use instead.
            height, width (`int`, *optional*):
                Of the pictures, in pixels.
            model_kwargs (`dict`, *optional*):
                With embeddings: further arguments of the denoiser, see [`GuidedDenoiser`].

        Returns:
            [`MemorizationReport`]

        Raises:
            ValueError: without a prompt, with embeddings of one side only, or latents of another shape or dtype.
        """
        denoiser = self._guided(
            pipe, prompt, negative_prompt, prompt_embeds, negative_prompt_embeds, height, width, model_kwargs
        )
        latents = self._latents(pipe, denoiser, generator, latents, height, width)
        parts, lengths = [], None
        if prompt is not None and hasattr(pipe, "tokenizer"):
            prompts = [prompt] if isinstance(prompt, str) else prompt
            lengths = prompt_lengths(pipe.tokenizer, [text for text in prompts for _ in range(self.num_images)])
        size = self.batch_size or denoiser.num_samples
        if isinstance(self._measure, TrajectoryMetric):
            # Pictures of one prompt are compared with each other.
            size = max(size - size % self.num_images, self.num_images)
        for start in range(0, denoiser.num_samples, size):
            index = slice(start, start + size)
            part = None if lengths is None else lengths[index]
            parts.append(self._run(denoiser.select(index), latents[index], pipe, part))
        timesteps = parts[0][1]
        per_step = torch.cat([values for values, _ in parts], dim=1).unflatten(1, (-1, self.num_images))
        scores = per_step.mean(0)
        key = self.key_of(denoiser, latents, self._schedule(denoiser).timesteps)
        mean = scores.mean(1)
        threshold, flagged = self.judge(mean, key)
        return MemorizationReport(scores, mean, per_step, timesteps, self.metric, key, threshold, flagged)

    def key_of(self, denoiser, latents, timesteps):
        """
        Everything that scores depend on, for a threshold.

        Args:
            denoiser ([`GuidedDenoiser`]), latents (`torch.Tensor` of shape `(n, ...)`):
                What is scored.
            timesteps (`torch.Tensor`):
                Those of the generation; a detector of one step depends on the first alone.

        Returns:
            `dict`: see `calibration_key`.
        """
        return calibration_key(
            denoiser.denoiser,
            denoiser.scheduler,
            list(latents.shape[-2:]),
            metric=self.metric,
            metric_kwargs=self.metric_kwargs,
            backend=resolve_backend(self.backend, denoiser.denoiser),
            space=self.space,
            num_images=self.num_images,
            timesteps=[float(t) for t in self._visited(timesteps)],
            guidance_scale=self.guidance_scale if self.steps > 1 else None,
        )

    def judge(self, scores, key):
        """
        The threshold and which scores exceed it; both `None` without a threshold. One that was calibrated on something
        else warns and names the fields.

        Args:
            scores (`torch.Tensor` of shape `(n,)`):
                One per prompt.
            key (`dict`):
                Of `key_of`.

        Returns:
            `tuple` of `float` and `torch.Tensor` of shape `(n,)`, or of `None` and `None`.
        """
        threshold = self.threshold
        if threshold is None:
            return None, None
        if not isinstance(threshold, MemorizationThreshold):
            below = getattr(self._measure, "lower_is_memorized", False)
            return float(threshold), scores < float(threshold) if below else scores > float(threshold)
        differing = threshold.differing_fields(key)
        if differing:
            changes = "; ".join(f"{name}: {threshold.key.get(name)!r}, here {key[name]!r}" for name in differing)
            logger.warning(f"The threshold was calibrated on something else ({changes}). Calibrate it for this.")
        return threshold.value, threshold.exceeded(scores)

    def measure(self, denoiser, latents, timestep):
        """
        Values of one step, for each sample by itself.

        Args:
            denoiser ([`GuidedDenoiser`]):
                Of `n` samples.
            latents (`torch.Tensor` of shape `(n, ...)`):
                Starting noise of unit variance.
            timestep (`int` or `torch.Tensor`):
                The first one.

        Returns:
            `torch.Tensor` of shape `(n,)`: float32, on the CPU.
        """
        x = latents.to(torch.promote_types(latents.dtype, torch.float32)) * denoiser.noise_scale(timestep)
        size = self.batch_size or len(x)
        values = [
            self._measure(denoiser.select(slice(start, start + size)), x[start : start + size], timestep)
            for start in range(0, len(x), size)
        ]
        return self._finite(torch.cat(values), timestep).float().cpu()

    def _finite(self, value, timestep):
        if not value.isfinite().all():
            raise ValueError(
                f"The metric {self.metric!r} is not finite at timestep {float(timestep):g}: the model overflows. Use "
                f"float32 or bfloat16."
            )
        return value

    def _guided(self, pipe, prompt, negative_prompt, embeds, negative_embeds, height, width, model_kwargs):
        n = self.num_images
        if isinstance(pipe, tuple) and len(pipe) != 2:
            raise ValueError(f"A bare model is a pair of denoiser and scheduler but has {len(pipe)} entries.")
        if embeds is None:
            if prompt is None:
                raise ValueError("Pass `prompt` or `prompt_embeds`.")
            if isinstance(pipe, tuple):
                raise ValueError("A bare denoiser needs `prompt_embeds`, `negative_prompt_embeds` and `latents`.")
            prompts = [prompt] if isinstance(prompt, str) else prompt
            if not isinstance(prompts, (list, tuple)) or not prompts or not all(isinstance(p, str) for p in prompts):
                raise ValueError(f"`prompt` has to be a text or a list of texts, at least one, but is {prompt!r}.")
            return encode_pipeline(pipe, prompt, n, negative_prompt, height, width, space=self.space)
        if prompt is not None:
            raise ValueError("Pass either `prompt` or `prompt_embeds`, not both.")
        if negative_embeds is None:
            raise ValueError("`prompt_embeds` need `negative_prompt_embeds`: detection compares the two.")
        denoiser, scheduler = pipe if isinstance(pipe, tuple) else (denoiser_of(pipe), pipe.scheduler)
        config = denoiser.config
        pooled = config.get("addition_embed_type") == "text_time" or config.get("pooled_projection_dim")
        if pooled and not model_kwargs:
            raise ValueError(
                f"{type(denoiser).__name__} takes more than prompt embeddings: pass the rest in `model_kwargs` "
                f"(`added_cond_kwargs` or `pooled_projections`), or `prompt`."
            )
        if negative_embeds.shape[0] == 1:
            negative_embeds = negative_embeds.expand_as(embeds)
        embeds, negative_embeds = (e.repeat_interleave(n, dim=0) for e in (embeds, negative_embeds))
        return GuidedDenoiser(denoiser, scheduler, embeds, negative_embeds, model_kwargs, space=self.space)

    def _latents(self, pipe, denoiser, generator, latents, height, width):
        if latents is None:
            if isinstance(pipe, tuple):
                raise ValueError("A bare denoiser needs `latents`: their shape is not known otherwise.")
            return draw_latents(pipe, denoiser.num_samples, generator, height, width, denoiser.prompt_embeds.dtype)
        if latents.shape[0] != denoiser.num_samples:
            raise ValueError(
                f"`latents` has to have a row per prompt and picture, {denoiser.num_samples}, but has "
                f"{latents.shape[0]}."
            )
        channels = denoiser.denoiser.config.get("in_channels")
        if latents.ndim == 4 and latents.shape[1] != channels:
            raise ValueError(f"`latents` has to have {channels} channels but has shape {tuple(latents.shape)}.")
        if height or width:
            shape = latent_shape(pipe, height, width)
            if tuple(latents.shape[1:]) != shape:
                raise ValueError(
                    f"`latents` has shape {tuple(latents.shape[1:])} but `height` and `width` ask for {shape}."
                )
        if not latents.is_floating_point() or not latents.isfinite().all():
            raise ValueError(f"`latents` has to hold finite floating-point values but is {latents.dtype}.")
        return latents

    def _schedule(self, denoiser):
        """A scheduler of the model's, set to the generation that the steps belong to."""
        scheduler = type(denoiser.scheduler).from_config(denoiser.scheduler.config)
        scheduler.set_timesteps(self.num_inference_steps, device=denoiser.prompt_embeds.device)
        return scheduler

    def _visited(self, timesteps):
        """Those that the metric looks at; second-order schedulers have more of them than steps."""
        return timesteps if isinstance(self._measure, TrajectoryMetric) else timesteps[: self.steps]

    def _run(self, denoiser, latents, pipe, lengths):
        """Values `(steps, samples)` and timesteps `(steps,)` of one batch."""
        scheduler = self._schedule(denoiser)
        state = latents.to(torch.promote_types(latents.dtype, torch.float32))
        state = state * getattr(scheduler, "init_noise_sigma", 1.0)
        whole = isinstance(self._measure, TrajectoryMetric)
        values, steps = [], self._visited(scheduler.timesteps)
        if whole:
            self._measure.reset(denoiser, lengths, self.num_images, pipe)
        for number, timestep in enumerate(steps):
            x = scheduler.scale_model_input(state, timestep) if hasattr(scheduler, "scale_model_input") else state
            if whole:
                outputs = self._measure.step(number, len(steps), denoiser, x, timestep)
            else:
                values.append(self._finite(self._measure(denoiser, x, timestep), timestep).float())
                if number + 1 == len(steps):
                    break
                outputs = denoiser.outputs(x, timestep)
            unconditional, conditional = outputs
            guided = unconditional + self.guidance_scale * (conditional - unconditional)
            state = scheduler.step(guided, timestep, state, return_dict=False)[0]
        if whole:
            with torch.no_grad():
                values.append(self._finite(self._measure.result(state), steps[-1]).float())
            steps = steps[-1:]
        return torch.stack(values).cpu(), steps.cpu()

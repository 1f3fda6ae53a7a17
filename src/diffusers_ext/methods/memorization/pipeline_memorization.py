# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion that notices when it is about to hand out a training picture."""

import inspect
from dataclasses import dataclass, field

import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput
from diffusers.utils import replace_example_docstring
from diffusers.utils.torch_utils import randn_tensor

# diffusers copies only the helpers that this file names, hence the imports that are not used here.
from .attention_memorization import cross_attention_layers  # noqa: F401
from .calibration_memorization import MemorizationThreshold  # noqa: F401
from .curvature_memorization import norms
from .denoising_memorization import GuidedDenoiser
from .detector_memorization import MemorizationDetector
from .embeds_memorization import optimize_prompt_embeds  # noqa: F401
from .encoding_memorization import draw_latents, latent_shape, prompt_lengths
from .guidance_memorization import StaticGuidance  # noqa: F401
from .lookup_memorization import find  # noqa: F401
from .metrics_memorization import guidance_norm  # noqa: F401
from .mitigations_memorization import make_mitigations
from .neurons_memorization import block_neurons  # noqa: F401
from .noise_memorization import adjust_noise  # noqa: F401
from .prompts_memorization import perturb_prompt  # noqa: F401
from .sail_memorization import sail  # noqa: F401
from .trajectory_memorization import TrajectoryMetric  # noqa: F401


MODES = ("off", "detect", "mitigate", "auto")

EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> from diffusers_ext import MemorizationStableDiffusionPipeline, lab

        >>> pipe = lab.load_pipeline(MemorizationStableDiffusionPipeline)
        >>> output = pipe("cat, neon style", memorization="mitigate", num_inference_steps=20, guidance_scale=4.0)
        >>> output.memorization.flagged
        [True]
        ```
"""


@dataclass
class MemorizationResult:
    """
    What was found and done, one entry per picture.

    Args:
        scores (`list[float]`), scores_after (`list[float]`):
            Of the detector, at the starting noise: as it was drawn, and as it was used.
        flagged (`list[bool]`):
            Which pictures were mitigated (or, with `memorization="detect"` and a threshold, would be).
        threshold (`float`, *optional*):
            What `scores` were compared with.
        norm_drift (`list[float]`):
            Relative change of the norm of the starting noise.
        details (`dict`):
            What the remedies report of the flagged pictures, for instance `updates` and `accepted` of SAIL.
    """

    scores: list
    flagged: list
    threshold: float | None = None
    scores_after: list | None = None
    norm_drift: list | None = None
    details: dict = field(default_factory=dict)


@dataclass
class MemorizationStableDiffusionPipelineOutput(StableDiffusionPipelineOutput):
    """
    Output of [`MemorizationStableDiffusionPipeline`].

    Args:
        images, nsfw_content_detected:
            Those of Stable Diffusion.
        memorization ([`MemorizationResult`], *optional*):
            What was found and done.
    """

    memorization: MemorizationResult | None = None


def _signature(own):
    """The arguments of the stock call, then our own."""
    *stock, keywords = inspect.signature(StableDiffusionPipeline.__call__).parameters.values()
    ours = [p for p in inspect.signature(own).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return inspect.Signature([*stock, *ours, keywords])


class MemorizationStableDiffusionPipeline(StableDiffusionPipeline):
    r"""
    `StableDiffusionPipeline` with detection and mitigation of memorised training pictures
    ([Jeon et al.](https://huggingface.co/papers/2412.04140) and the remedies it is compared with).

    Takes the components and arguments of the stock pipeline. With `memorization="off"`, and for pictures that are not
    flagged, its pictures are bit for bit those of the stock pipeline.
    """

    _rule = None

    @property
    def guidance_scale(self):
        # The denoising loop multiplies the difference of the predictions by this, once a step.
        return self._guidance_scale if self._rule is None else self._rule.scale

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(
        self,
        *args,
        memorization="off",
        mitigation="sail",
        mitigation_kwargs=None,
        detector_kwargs=None,
        memorization_threshold=None,
        **kwargs,
    ):
        r"""
        The call of `StableDiffusionPipeline`, all its arguments included.

        Args:
            memorization (`str`, *optional*, defaults to `"off"`):
                `"detect"` scores every picture's prompt and noise; `"mitigate"` applies a remedy to all of them;
                `"auto"` scores and applies it where the score exceeds the threshold.
            mitigation (`str`, [`Mitigation`] or a list of these, *optional*, defaults to `"sail"`):
                Remedies; several when they change different things.
            mitigation_kwargs (`dict`, *optional*):
                Arguments of the remedy, or of each by name.
            detector_kwargs (`dict`, *optional*):
                `metric`, `backend`, `space`, `metric_kwargs` of [`MemorizationDetector`].
            memorization_threshold (`float` or [`MemorizationThreshold`], *optional*):
                Needed by `"auto"`. Thresholds depend on the model, its resolution and the scheduler: calibrate one
                with `num_images=1`, since every picture is judged by itself.

        Examples:

        Returns:
            [`MemorizationStableDiffusionPipelineOutput`], or a `tuple` that ends with the [`MemorizationResult`].

        Raises:
            ValueError: without guidance, without a threshold for `"auto"`, with IP-Adapter images, or on unknown
            names. Nothing is drawn then.
        """
        if memorization not in MODES:
            raise ValueError(f"`memorization` has to be one of {', '.join(MODES)} but is {memorization!r}.")
        if memorization == "off":
            return super().__call__(*args, **kwargs)
        call = inspect.signature(StableDiffusionPipeline.__call__).bind(self, *args, **kwargs)
        call.apply_defaults()
        call = {**call.arguments, **call.arguments.pop("kwargs")}
        del call["self"]
        if memorization == "auto" and memorization_threshold is None:
            raise ValueError(
                "`memorization='auto'` needs `memorization_threshold`; calibrate one with `calibrate_memorization`."
            )
        if not call["guidance_scale"] > 1:
            raise ValueError(
                f"Memorisation is seen in the difference that the prompt makes: `guidance_scale` has to be above 1 "
                f"but is {call['guidance_scale']}."
            )
        if call["ip_adapter_image"] is not None or call["ip_adapter_image_embeds"] is not None:
            raise ValueError(
                "IP-Adapter images are not supported together with `memorization`; leave one of them out."
            )
        remedies = make_mitigations(mitigation, mitigation_kwargs) if memorization != "detect" else []
        detector = MemorizationDetector(
            num_images=1,
            threshold=memorization_threshold,
            guidance_scale=call["guidance_scale"],
            num_inference_steps=call["num_inference_steps"],
            **(detector_kwargs or {}),
        )

        prepared = self._prepare(call)
        denoiser, latents, scheduler = prepared["denoiser"], prepared["latents"], prepared["scheduler"]
        timestep = scheduler.timesteps[0]
        scores = detector.measure(denoiser, latents, timestep)
        threshold, flagged = detector.judge(scores, detector.key_of(denoiser, latents, scheduler.timesteps))
        if memorization == "mitigate" or flagged is None:
            flagged = torch.full_like(scores, memorization == "mitigate", dtype=torch.bool)
        result = MemorizationResult(scores.tolist(), flagged.tolist(), threshold)
        index, words = flagged.nonzero().flatten().tolist(), call["prompt"]
        call |= {"prompt": None, "negative_prompt": None, "num_images_per_prompt": 1, "latents": latents}
        call |= {"prompt_embeds": denoiser.prompt_embeds, "negative_prompt_embeds": denoiser.negative_prompt_embeds}
        if memorization == "detect" or not index:
            return self._wrap(super().__call__(**call), result)
        return self._wrap(self._mitigated(call, words, prepared, remedies, detector, index, result), result)

    # The stock arguments are passed on as they are, whatever the release of diffusers; tools that read signatures see
    # them all.
    __call__.__signature__ = _signature(__call__)

    def _prepare(self, call):
        """Embeddings and noise as the stock call would make them, one row per picture."""
        shape = latent_shape(self, call["height"], call["width"])
        self.check_inputs(
            call["prompt"],
            call["height"] or shape[1] * self.vae_scale_factor,
            call["width"] or shape[2] * self.vae_scale_factor,
            None,
            call["negative_prompt"],
            call["prompt_embeds"],
            call["negative_prompt_embeds"],
            None,
            None,
            call["callback_on_step_end_tensor_inputs"],
        )
        if call["prompt_embeds"] is not None and call["negative_prompt_embeds"] is None:
            raise ValueError("`prompt_embeds` need `negative_prompt_embeds`: the two predictions are compared.")
        device = self._execution_device
        positive, negative = self._encode(call, call["prompt"], call["num_images_per_prompt"])
        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        given = {name: call[name] for name in ("timesteps", "sigmas") if call[name] is not None}
        scheduler.set_timesteps(**(given or {"num_inference_steps": call["num_inference_steps"]}), device=device)
        latents, shape = call["latents"], (len(positive), *shape)
        if latents is None:
            latents = draw_latents(
                self, len(positive), call["generator"], call["height"], call["width"], positive.dtype
            )
        elif tuple(latents.shape) != shape or not latents.is_floating_point():
            raise ValueError(
                f"`latents` has to hold floating-point values of shape {shape} but is {latents.dtype} of shape "
                f"{tuple(latents.shape)}."
            )
        denoiser = GuidedDenoiser(self.unet, scheduler, positive, negative)
        return {"denoiser": denoiser, "latents": latents.to(device), "scheduler": scheduler}

    def _encode(self, call, prompt, num_images_per_prompt):
        scale = (call["cross_attention_kwargs"] or {}).get("scale")
        return self.encode_prompt(
            prompt,
            self._execution_device,
            num_images_per_prompt,
            True,
            call["negative_prompt"],
            prompt_embeds=call["prompt_embeds"],
            negative_prompt_embeds=call["negative_prompt_embeds"],
            lora_scale=scale,
            clip_skip=call["clip_skip"],
        )

    def _mitigated(self, call, words, prepared, remedies, detector, index, result):
        denoiser, latents, scheduler = prepared["denoiser"], prepared["latents"].clone(), prepared["scheduler"]
        timestep, embeds = scheduler.timesteps[0], denoiser.prompt_embeds.clone()
        slots = {slot: remedy for remedy in remedies for slot in remedy.slots}
        if "prompt" in slots or "attention" in slots:
            if words is None:
                raise ValueError("This remedy works on words: pass `prompt` instead of `prompt_embeds`.")
            words = [words] if isinstance(words, str) else list(words)
            prompts = [text for text in words for _ in range(len(latents) // len(words))]
        if "prompt" in slots:
            for i in index:
                prompts[i] = slots["prompt"].prepare_prompt(prompts[i], i, self.tokenizer)
            changed = {**call, "prompt_embeds": None}
            embeds[index] = self._encode(changed, [prompts[i] for i in index], 1)[0]
        if "embeds" in slots:
            for rows in _groups(embeds, index):
                chosen = denoiser.with_prompt_embeds(embeds).select(rows)
                embeds[rows] = slots["embeds"].prepare_embeds(chosen, latents[rows], timestep)
        denoiser = denoiser.with_prompt_embeds(embeds)
        chosen, attention = denoiser.select(index), slots.get("attention")
        mixed = attention is not None and len(index) < len(latents)
        # First, so that the generators give the other pictures what they give the stock pipeline.
        stock = super().__call__(**call) if mixed else None
        try:
            if attention is not None:
                attention.attach(self.unet, prompt_lengths(self.tokenizer, [prompts[i] for i in index]))
            if "latents" in slots:
                found, details = slots["latents"].prepare_latents(
                    chosen, latents[index], timestep, _redraw(call["generator"], latents, index)
                )
                result.details.update(details)
                latents[index] = found.to(latents.dtype)
            after = torch.tensor(result.scores)
            after[index] = detector.measure(chosen, latents[index], timestep)
            result.scores_after = after.tolist()
            result.norm_drift = (norms(latents.float()) / norms(prepared["latents"].float()) - 1).tolist()
            call |= {"latents": latents, "prompt_embeds": embeds}
            if attention is None:
                return self._guided(call, slots.get("guidance"), chosen, latents, scheduler, index)
            # Its masks choose other attention kernels, so flagged pictures are drawn by themselves.
            mitigated = self._guided(
                _rows_of(call, index), slots.get("guidance"), chosen, latents[index], scheduler, range(len(index))
            )
        finally:
            if attention is not None:
                attention.detach(self.unet)
        return _merge(stock, mitigated, index) if mixed else mitigated

    def _guided(self, call, remedy, chosen, latents, scheduler, index):
        """The stock loop, with the guidance of a remedy for the samples `index`."""
        if remedy is None:
            return super().__call__(**call)
        remedy.observe(chosen, latents[list(index)], scheduler)
        self._rule = _Rule(self, remedy, list(index), call["guidance_scale"])
        handle = self.unet.register_forward_hook(self._rule.watch, with_kwargs=True)
        try:
            return super().__call__(**call)
        finally:
            handle.remove()
            self._rule = None

    def _wrap(self, output, result):
        if isinstance(output, tuple):
            return (*output, result)
        return MemorizationStableDiffusionPipelineOutput(output.images, output.nsfw_content_detected, result)


class _Rule:
    """Scale of the running step: what the pipeline's loop reads after each forward pass of the U-Net."""

    def __init__(self, pipe, remedy, index, base):
        self.pipe, self.remedy, self.index = pipe, remedy, index
        self.step, self.scale = 0, base

    def watch(self, module, args, kwargs, output):
        unconditional, conditional = output[0].chunk(2)
        difference = (conditional - unconditional).float()
        # A callback may have changed it.
        base = self.pipe._guidance_scale
        scale = torch.full((len(difference),), float(base), device=difference.device)
        chosen = norms(difference)[self.index]
        scale[self.index] = self.remedy.guidance(self.step, args[1], chosen, base)
        self.scale = scale.to(conditional.dtype).view(-1, *[1] * (conditional.ndim - 1))
        self.step += 1


def _redraw(generator, latents, index):
    """
    A function that gives fresh noise for flagged samples. It draws from generators of its own, seeded by what the
    caller's would give next, so that the sampler finds those as they were.
    """
    if isinstance(generator, list):
        forks = [_fork(generator[i]) for i in index]
    else:
        forks = None if generator is None else _fork(generator)

    def draw(rows):
        chosen = [forks[row] for row in rows] if isinstance(forks, list) else forks
        return randn_tensor((len(rows), *latents.shape[1:]), chosen, latents.device, latents.dtype)

    return draw


def _fork(generator):
    copy = torch.Generator(generator.device)
    copy.set_state(generator.get_state())
    seed = torch.randint(2**62, (), generator=copy, device=generator.device).item()
    return copy.manual_seed(seed)


def _groups(embeds, index):
    """Indices of flagged samples, those of equal prompts together."""
    groups = []
    for i in index:
        for group in groups:
            if embeds[group[0]].equal(embeds[i]):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _rows_of(call, index):
    """The arguments of a call for some of its pictures."""
    chosen = {name: call[name][index] for name in ("latents", "prompt_embeds", "negative_prompt_embeds")}
    if isinstance(call["generator"], list):
        chosen["generator"] = [call["generator"][i] for i in index]
    return {**call, **chosen}


def _merge(stock, mitigated, index):
    """The stock output with the pictures `index` replaced."""
    as_tuple = isinstance(stock, tuple)
    images, flags = stock if as_tuple else (stock.images, stock.nsfw_content_detected)
    new, new_flags = mitigated if as_tuple else (mitigated.images, mitigated.nsfw_content_detected)
    images = images if isinstance(images, list) else images.copy() if hasattr(images, "copy") else images.clone()
    for place, i in enumerate(index):
        images[i] = new[place]
        if flags is not None:
            flags[i] = new_flags[place]
    return (images, flags) if as_tuple else StableDiffusionPipelineOutput(images, flags)

# SPDX-License-Identifier: Apache-2.0
"""Remedies against memorisation behind one life cycle."""

from contextlib import ExitStack

import torch

from .attention_memorization import CrossAttentionRescaling
from .embeds_memorization import optimize_prompt_embeds
from .guidance_memorization import DynamicGuidance, StaticGuidance, first_minimum
from .lookup_memorization import MITIGATIONS_GROUP, find, known_names
from .neurons_memorization import LocalizedNeurons, block_neurons
from .noise_memorization import adjust_noise, adjust_noise_per_sample
from .prompts_memorization import perturb_prompt
from .sail_memorization import SAILConfig, sail


SLOTS = ("prompt", "embeds", "attention", "latents", "guidance")


class Mitigation:
    """
    A remedy; the methods of its slots are called in the order of `SLOTS`, for flagged samples only.

    Attributes:
        slots (`tuple[str, ...]`):
            What it changes. Two remedies that change the same thing cannot be combined.
    """

    slots = ()

    def prepare_prompt(self, prompt, number, tokenizer):
        """The prompt to encode instead of `prompt`; `number` counts samples."""
        return prompt

    def prepare_embeds(self, denoiser, latents, timestep):
        """Embeddings `(n, tokens, channels)` for the `n` samples of one prompt."""
        return denoiser.prompt_embeds

    def attach(self, unet, prompt_lengths):
        """Hooks the model; `prompt_lengths` `(n,)` count begin and end token."""

    def detach(self, unet):
        """Undoes `attach`, also after an exception."""

    def prepare_latents(self, denoiser, latents, timestep, draw):
        """Unit noise `(n, ...)` to start from; `draw(indices)` gives fresh noise. Returns noise and a dictionary."""
        return latents, {}

    def observe(self, denoiser, latents, scheduler):
        """Called before the generation with the noise it will start from and a scheduler to use up."""

    def guidance(self, step, timestep, norms, scale):
        """Scale of every sample `(n,)` at a step, from `||eD||` `(n,)` and the pipeline's scale."""
        return torch.full_like(norms, scale)


class RandomTokens(Mitigation):
    """Random tokens, numbers or repeated words in the prompt, see [`perturb_prompt`]."""

    slots = ("prompt",)

    def __init__(self, kind="tokens", count=4, seed=0):
        self.kind, self.count, self.seed = kind, count, seed

    def prepare_prompt(self, prompt, number, tokenizer):
        return perturb_prompt(prompt, self.kind, self.count, self.seed + number, tokenizer)


class PromptEmbeds(Mitigation):
    """Prompt-embedding optimisation, see [`optimize_prompt_embeds`]."""

    slots = ("embeds",)

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def prepare_embeds(self, denoiser, latents, timestep):
        x = latents * denoiser.noise_scale(timestep)
        embeds, _ = optimize_prompt_embeds(denoiser, x, timestep, **self.kwargs)
        return embeds.expand_as(denoiser.prompt_embeds)


class CrossAttention(Mitigation):
    """Cross-attention re-weighting, see [`CrossAttentionRescaling`]."""

    slots = ("attention",)

    def __init__(self, scale=1.25, mask=True, drop_end=False):
        self.kwargs = {"scale": scale, "mask": mask, "drop_end": drop_end}
        self._rescaling = None

    def attach(self, unet, prompt_lengths):
        self._rescaling = CrossAttentionRescaling(unet, prompt_lengths, **self.kwargs)

    def detach(self, unet):
        if self._rescaling is not None:
            self._rescaling.remove()
            self._rescaling = None


class Neurons(Mitigation):
    """
    Value neurons of cross-attention set to 0.

    Args:
        blocked (`list[list[int]]` or [`LocalizedNeurons`]):
            For each layer of `value_layers`; `find_neurons` finds those of a prompt.
    """

    slots = ("attention",)

    def __init__(self, blocked=None):
        neurons = blocked.neurons if isinstance(blocked, LocalizedNeurons) else blocked
        if not neurons or not any(neurons):
            raise ValueError("`blocked` has to name neurons, for each layer: find them with `find_neurons`.")
        self.neurons = neurons
        self._blocked = ExitStack()

    def attach(self, unet, prompt_lengths):
        self._blocked.enter_context(block_neurons(unet, self.neurons))

    def detach(self, unet):
        self._blocked.close()


class Sail(Mitigation):
    """Sharpness-aware initialisation, see [`SAILConfig`]; `official=True` for the published settings."""

    slots = ("latents",)

    def __init__(self, official=False, **kwargs):
        self.config = SAILConfig.official(**kwargs) if official else SAILConfig(**kwargs)

    def prepare_latents(self, denoiser, latents, timestep, draw):
        output = sail(denoiser, latents, timestep, self.config, draw)
        return output.latents, {
            "updates": output.updates.tolist(),
            "accepted": output.accepted.tolist(),
            "norm_drift": output.norm_drift.tolist(),
        }


class InitialNoise(Mitigation):
    """Batch-wise noise adjustment, then no guidance until a timestep (Han et al.), see [`adjust_noise`]."""

    slots = ("latents", "guidance")

    def __init__(self, gamma=0.7, rho=50.0, num_steps=2, timestep=900):
        self.kwargs = {"gamma": gamma, "rho": rho, "num_steps": num_steps}
        self._rule = StaticGuidance(timestep)

    def prepare_latents(self, denoiser, latents, timestep, draw):
        scale = denoiser.noise_scale(timestep)
        return adjust_noise(denoiser, latents * scale, timestep, **self.kwargs).to(latents.dtype) / scale, {}

    def guidance(self, step, timestep, norms, scale):
        return self._rule(step, timestep, norms, scale)


class InitialNoisePerSample(Mitigation):
    """Noise optimised for each sample by itself (Han et al.), see [`adjust_noise_per_sample`]."""

    slots = ("latents",)

    def __init__(self, **kwargs):
        self.kwargs = kwargs

    def prepare_latents(self, denoiser, latents, timestep, draw):
        scale = denoiser.noise_scale(timestep)
        noise, updates = adjust_noise_per_sample(denoiser, latents * scale, timestep, **self.kwargs)
        return noise.to(latents.dtype) / scale, {"updates": updates.tolist()}


class DelayedGuidance(Mitigation):
    """Guidance from a timestep on, see [`StaticGuidance`]; a negative `before` is opposite guidance."""

    slots = ("guidance",)

    def __init__(self, timestep=600, before=0.0):
        self._rule = StaticGuidance(timestep, before)

    def guidance(self, step, timestep, norms, scale):
        return self._rule(step, timestep, norms, scale)


class DynamicDelayedGuidance(Mitigation):
    """Guidance from the first local minimum of `||eD||` on, see [`DynamicGuidance`]."""

    slots = ("guidance",)

    def __init__(self, before=0.0):
        self._rule = DynamicGuidance(before)

    def observe(self, denoiser, latents, scheduler):
        self._rule.reset(len(latents))

    def guidance(self, step, timestep, norms, scale):
        return self._rule(step, timestep, norms, scale)


class OppositeGuidance(Mitigation):
    """Negative guidance until the first local minimum of `||eD||` of a run without guidance."""

    slots = ("guidance",)

    def __init__(self, before=-2.0):
        self.before = before
        self._ends = None

    def observe(self, denoiser, latents, scheduler):
        state, found = latents * getattr(scheduler, "init_noise_sigma", 1.0), []
        for timestep in scheduler.timesteps:
            x = scheduler.scale_model_input(state, timestep) if hasattr(scheduler, "scale_model_input") else state
            unconditional, conditional = denoiser.outputs(x, timestep)
            difference = denoiser.to_noise(conditional, x, timestep) - denoiser.to_noise(unconditional, x, timestep)
            found.append(difference.flatten(1).norm(dim=1))
            state = scheduler.step(unconditional, timestep, state, return_dict=False)[0]
        self._ends = torch.tensor([first_minimum(column.tolist()) for column in torch.stack(found, 1)])

    def guidance(self, step, timestep, norms, scale):
        before = (step < self._ends).to(norms.device)
        return torch.where(before, torch.full_like(norms, self.before), torch.full_like(norms, scale))


MITIGATIONS = {
    "sail": Sail,
    "prompt_embeds": PromptEmbeds,
    "cross_attention": CrossAttention,
    "neurons": Neurons,
    "initial_noise": InitialNoise,
    "initial_noise_per_sample": InitialNoisePerSample,
    "delayed_guidance": DelayedGuidance,
    "dynamic_guidance": DynamicDelayedGuidance,
    "opposite_guidance": OppositeGuidance,
    "random_tokens": RandomTokens,
}


def mitigation_names():
    """Names of the remedies there are, those of other packages (entry points) included."""
    return known_names(MITIGATIONS, MITIGATIONS_GROUP)


def make_mitigations(names, kwargs=None):
    """
    Remedies in the order in which they are applied.

    Args:
        names (`str`, [`Mitigation`] or a list of these):
            What to combine.
        kwargs (`dict`, *optional*):
            Arguments of the only remedy, or of each by name.

    Returns:
        `list[Mitigation]`

    Raises:
        ValueError: on an unknown name, two remedies that change the same thing, or arguments for none of them.
        TypeError: on arguments that a remedy does not take.
    """
    names = [names] if isinstance(names, (str, Mitigation)) else list(names)
    if not names:
        raise ValueError(f"No mitigation is named; there are {', '.join(mitigation_names())}.")
    kwargs = dict(kwargs or {})
    single = len(names) == 1 and not set(kwargs) & set(mitigation_names())
    given = {names[0]: kwargs} if single and isinstance(names[0], str) else kwargs
    strange = sorted(set(given) - {name for name in names if isinstance(name, str)})
    if strange:
        raise ValueError(f"`mitigation_kwargs` has arguments for {strange[0]!r}, which is not one of {names}.")
    found = [
        name
        if isinstance(name, Mitigation)
        else find("mitigation", name, MITIGATIONS, MITIGATIONS_GROUP)(**given.get(name, {}))
        for name in names
    ]
    taken = {}
    for name, mitigation in zip(names, found):
        for slot in mitigation.slots:
            if slot in taken:
                raise ValueError(
                    f"{taken[slot]!r} and {name!r} both change the {slot}; combine remedies that change different "
                    f"things."
                )
            taken[slot] = name
    return sorted(found, key=lambda m: min(SLOTS.index(slot) for slot in m.slots))

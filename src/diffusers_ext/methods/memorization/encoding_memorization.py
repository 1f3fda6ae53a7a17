# SPDX-License-Identifier: Apache-2.0
"""From a pipeline and its prompts to a `GuidedDenoiser`."""

import torch
from diffusers.utils.torch_utils import randn_tensor

from .denoising_memorization import GuidedDenoiser


def denoiser_of(pipe):
    """The U-Net or the transformer of a pipeline."""
    denoiser = getattr(pipe, "unet", None)
    if denoiser is None:
        denoiser = getattr(pipe, "transformer", None)
    if denoiser is None:
        raise ValueError(f"{type(pipe).__name__} has neither a `unet` nor a `transformer`.")
    return denoiser


@torch.no_grad()
def encode_pipeline(pipe, prompt, num_images_per_prompt=1, negative_prompt=None, height=None, width=None, **kwargs):
    """
    The guided denoiser of prompts, one sample per prompt and picture, those of a prompt one after the other.

    Args:
        pipe (`DiffusionPipeline`):
            Stable Diffusion 1.x or 2.x, SDXL or SD3.
        prompt (`str` or `list[str]`), negative_prompt (`str` or `list[str]`, *optional*):
            The empty prompt is the negative one by default.
        num_images_per_prompt (`int`, *optional*, defaults to 1):
            Samples per prompt.
        height, width (`int`, *optional*):
            Of SDXL's time ids; the model's own size by default.
        kwargs:
            Of [`GuidedDenoiser`].

    Returns:
        [`GuidedDenoiser`]

    Raises:
        ValueError: on a pipeline of another kind.
    """
    denoiser, device = denoiser_of(pipe), pipe._execution_device
    call = {"prompt": prompt, "device": device, "num_images_per_prompt": num_images_per_prompt}
    call |= {"do_classifier_free_guidance": True, "negative_prompt": negative_prompt}
    if getattr(pipe, "text_encoder_3", None) is not None or "SD3" in type(denoiser).__name__:
        positive, negative, pooled, negative_pooled = pipe.encode_prompt(prompt_2=None, prompt_3=None, **call)
        model_kwargs = {"pooled_projections": torch.cat([negative_pooled, pooled])}
    elif denoiser.config.get("addition_embed_type") == "text_time":
        positive, negative, pooled, negative_pooled = pipe.encode_prompt(**call)
        side = pipe.default_sample_size * pipe.vae_scale_factor
        size = (height or side, width or side)
        ids = torch.tensor([[*size, 0, 0, *size]], dtype=positive.dtype, device=device)
        added = {"text_embeds": torch.cat([negative_pooled, pooled]), "time_ids": ids.repeat(2 * len(positive), 1)}
        model_kwargs = {"added_cond_kwargs": added}
    elif denoiser.config.get("cross_attention_dim") is not None and hasattr(pipe, "unet"):
        positive, negative = pipe.encode_prompt(**call)
        model_kwargs = {}
    else:
        raise ValueError(
            f"{type(pipe).__name__} is not one of Stable Diffusion 1.x, 2.x, SDXL and SD3. Pass a `GuidedDenoiser` of "
            f"its {type(denoiser).__name__} instead."
        )
    return GuidedDenoiser(denoiser, pipe.scheduler, positive, negative, model_kwargs, **kwargs)


def prompt_lengths(tokenizer, prompts):
    """Tokens of each prompt, begin and end token included."""
    return [len(ids) for ids in tokenizer(prompts, truncation=True, max_length=tokenizer.model_max_length).input_ids]


def latent_shape(pipe, height=None, width=None):
    """Channels, height and width of a pipeline's latents; the model's own size by default."""
    config, factor = denoiser_of(pipe).config, pipe.vae_scale_factor
    sides = config.sample_size if isinstance(config.sample_size, (list, tuple)) else (config.sample_size,) * 2
    return config.in_channels, height // factor if height else sides[0], width // factor if width else sides[1]


def draw_latents(pipe, num_samples, generator=None, height=None, width=None, dtype=torch.float32):
    """
    Unit noise in the shape of a pipeline's latents.

    Args:
        pipe (`DiffusionPipeline`):
            As of `encode_pipeline`.
        num_samples (`int`):
            How many.
        generator (`torch.Generator` or `list[torch.Generator]`, *optional*):
            One for all, or one per sample.
        height, width (`int`, *optional*):
            Of the pictures, in pixels; the model's own size by default.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype it is drawn in: what a pipeline draws depends on it.

    Returns:
        `torch.Tensor` of shape `(num_samples, channels, height / f, width / f)`

    Raises:
        ValueError: when there are fewer or more generators than samples.
    """
    if isinstance(generator, list) and len(generator) != num_samples:
        raise ValueError(f"Expected one generator per sample, {num_samples}, but got {len(generator)}.")
    shape = (num_samples, *latent_shape(pipe, height, width))
    return randn_tensor(shape, generator=generator, device=pipe._execution_device, dtype=dtype)

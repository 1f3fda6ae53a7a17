# SPDX-License-Identifier: Apache-2.0
"""Where in a picture the latents of a concept fire."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from .hooks_saeuron import SAeUronConfig, build_tables, find_block, record_activations


@torch.no_grad()
def concept_heatmap(
    pipe, sae, edit, prompt, num_features=None, denoiser=None, per_step=False, image_size=False, **kwargs
):
    r"""
    Draws pictures with the model as it is and maps where a concept's latents exceed their gates.

    Args:
        pipe (`DiffusionPipeline`):
            A pipeline whose block gives maps `(batch, channels, height, width)`.
        sae ([`SparseAutoencoder`]), edit ([`ConceptEdit`]):
            The autoencoder and the concept.
        prompt (`str` or `list[str]`):
            One picture each.
        num_features (`int`, *optional*):
            Latents per timestep; the edit's own number by default.
        denoiser (`torch.nn.Module`, *optional*):
            `pipe.unet` or `pipe.transformer` by default.
        per_step (`bool`, *optional*, defaults to `False`):
            Whether to return a map for every forward pass instead of their mean.
        image_size (`bool`, *optional*, defaults to `False`):
            Whether maps are enlarged to the size of the pictures, bilinearly.
        kwargs:
            Arguments of the pipeline's call, for instance `num_inference_steps` and `generator`.

    Returns:
        `tuple` of heat maps, `torch.Tensor` of shape `(batch, height, width)` in [0, 1] at the size of the block or of
        the pictures (with `per_step` `(steps, batch, height, width)`), 1 being the strongest place of the block, and
        the pipeline's images.

    Raises:
        ValueError: when the hook point is not a map.

    Example:

    ```py
    >>> from diffusers_ext import ConceptEdits, SparseAutoencoder, concept_heatmap, lab

    >>> pipe = lab.load_pipeline()
    >>> sae = SparseAutoencoder.from_pretrained(lab.saeuron_folder())
    >>> edit = ConceptEdits.from_pretrained(lab.saeuron_folder())["cat"]
    >>> heat, images = concept_heatmap(pipe, sae, edit, "cat, sticker style", num_inference_steps=20)
    >>> heat.shape[0]
    1
    ```
    """
    if sae.config.hook["layout"] != "nchw":
        raise ValueError(
            "Heat maps need a block that gives maps; this autoencoder's hook point gives token sequences."
        )
    denoiser = denoiser if denoiser is not None else getattr(pipe, "unet", None) or pipe.transformer
    tables = build_tables(SAeUronConfig(edits=[edit], num_features=num_features))
    batch = 1 if isinstance(prompt, str) else len(prompt)
    batch *= kwargs.get("num_images_per_prompt", 1)
    maps, shape = [], []

    def collect(tokens, timestep):
        timestep = torch.as_tensor(timestep, dtype=torch.float32).cpu().reshape(-1)[0]
        row = (tables["timesteps"] - timestep).abs().argmin()
        z = sae.encode(tokens[-batch:]).float().cpu()[..., tables["indices"][row]]
        maps.append((z - tables["gates"][row]).clamp_min(0).sum(-1))

    def measure(module, args, output):
        output = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
        shape[:] = output.shape[-2:]

    handle = find_block(denoiser, sae.config.hook).register_forward_hook(measure)
    try:
        with record_activations(denoiser, sae.config.hook, collect, name="saeuron_heatmap"):
            images = pipe(prompt, **kwargs).images
    finally:
        handle.remove()
    heat = torch.stack(maps).reshape(len(maps), batch, *shape)
    heat = heat if per_step else heat.mean(0)
    heat = heat / heat.max().clamp_min(1e-12)
    return _enlarge(heat, _size_of(images[0])) if image_size else heat, images


def _size_of(image):
    """Height and width of a picture in any of the pipeline's output types."""
    if isinstance(image, Image.Image):
        return image.height, image.width
    return image.shape[-2:] if isinstance(image, torch.Tensor) else image.shape[:2]


def _enlarge(heat, size):
    maps = F.interpolate(heat.reshape(-1, 1, *heat.shape[-2:]).float(), size, mode="bilinear", align_corners=False)
    return maps.reshape(*heat.shape[:-2], *size)


def overlay_heatmap(image, heat, opacity=0.75):
    """
    A picture with a heat map laid over it in red and yellow.

    Args:
        image (`PIL.Image.Image`):
            The picture.
        heat (`torch.Tensor` of shape `(height, width)`):
            Values in [0, 1], any size.
        opacity (`float`, *optional*, defaults to 0.75):
            Opacity where the heat is 1.

    Returns:
        `PIL.Image.Image` of the size of `image`.

    Raises:
        ValueError: when `heat` is not a map.
    """
    if heat.ndim != 2:
        raise ValueError(f"`heat` has to have shape (height, width) but has {tuple(heat.shape)}.")
    heat = _enlarge(heat, _size_of(image)).clamp(0, 1).numpy()
    colour = np.stack([np.ones_like(heat), np.clip(2 * heat - 1, 0, 1), np.zeros_like(heat)], -1)
    alpha = opacity * heat[..., None]
    grey = np.asarray(image.convert("L"), np.float32)[..., None] / 255
    return Image.fromarray(((grey * (1 - alpha) + colour * alpha) * 255).round().astype(np.uint8))

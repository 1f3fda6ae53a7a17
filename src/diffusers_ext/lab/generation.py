# SPDX-License-Identifier: Apache-2.0
"""Drawing many captions with one seed each."""

import numpy as np
import torch


def generate(pipe, prompts, seeds, batch_size=16, num_inference_steps=20, guidance_scale=4.0, **kwargs):
    """
    Draws one picture per prompt. A picture depends on its own prompt and seed only, not on the batch it is drawn in.

    Args:
        pipe (`DiffusionPipeline`):
            A text-to-image pipeline.
        prompts (`list[str]`):
            One caption per picture.
        seeds (`list[int]`):
            One seed per picture.
        batch_size (`int`, *optional*, defaults to 16):
            Pictures drawn at once; more is faster until memory ends.
        num_inference_steps (`int`, *optional*, defaults to 20), guidance_scale (`float`, *optional*, defaults to 4.0):
            As of the pipeline; the defaults suit EmojiCanvas.
        kwargs:
            Further arguments of the pipeline's call.

    Returns:
        `np.ndarray` of shape `(len(prompts), height, width, 3)`: uint8.

    Raises:
        ValueError: when there is not one seed per prompt.
    """
    if len(prompts) != len(seeds):
        raise ValueError(f"Expected one seed per prompt but got {len(prompts)} prompts and {len(seeds)} seeds.")
    pictures = []
    for start in range(0, len(prompts), batch_size):
        stop = start + batch_size
        drawn = pipe(
            prompts[start:stop],
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[start:stop]],
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            output_type="np",
            **kwargs,
        ).images
        pictures.append((drawn * 255).round().astype(np.uint8))
    return np.concatenate(pictures)

# SPDX-License-Identifier: Apache-2.0
"""Real components for the tests of SAeUron: the lab's pipeline, and autoencoders and edits drawn from a seed."""

import copy
import functools
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline

import diffusers_ext
from diffusers_ext import ConceptEdit, SparseAutoencoder


LAB_FOLDER = Path(diffusers_ext.__file__).parent / "lab" / "weights" / "pipeline"
POINT = {"module": "up_blocks.1.attentions.1"}
# Rows of a ten-step DDIM schedule.
TIMESTEPS = tuple(float(t) for t in range(901, 0, -100))


@functools.cache
def _pipeline():
    pipe = StableDiffusionPipeline.from_pretrained(LAB_FOLDER, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def lab_pipeline():
    """A pipeline of its own, so that a test may hook, compile or cast it."""
    pipe = _pipeline()
    return StableDiffusionPipeline(
        **{name: copy.deepcopy(component) for name, component in pipe.components.items() if name != "safety_checker"},
        safety_checker=None,
        requires_safety_checker=False,
    )


def lab_sae(seed=0, point=None, **config):
    """
    A random autoencoder for a block of the lab's UNet, with latents that fire about as often as those of a trained
    one.
    """
    torch.manual_seed(seed)
    point = {**POINT, **(point or {})}
    d_in = dict(_pipeline().unet.named_modules())[point["module"]].out_channels
    return SparseAutoencoder(**{"d_in": d_in, "expansion_factor": 4, "k": 32, "hook": point, **config}).eval()


def random_edit(sae, name="concept", num_features=8, timesteps=TIMESTEPS, seed=0, multiplier=-3.0):
    """An edit of random latents: of no concept, but strong enough to change every picture."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(sae.num_latents, generator=generator)[:num_features] for _ in timesteps])
    mean = torch.rand(indices.shape, generator=generator) + 0.5
    sizes = {"num_latents": sae.num_latents, "sae": sae.fingerprint()}
    return ConceptEdit(name, torch.tensor(timesteps), indices.int(), mean, mean * 0, multiplier, **sizes)


def draw(pipe, prompt="cat, neon style", seed=0, num_inference_steps=4, guidance_scale=4.0, **kwargs):
    """Latents of a batch, each with a seed of its own."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    generator = [torch.Generator().manual_seed(seed + i) for i in range(len(prompts))]
    kwargs = {"output_type": "latent", **kwargs}
    return pipe(
        prompts,
        generator=generator,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        **kwargs,
    ).images

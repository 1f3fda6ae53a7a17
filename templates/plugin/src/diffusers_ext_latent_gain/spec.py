# SPDX-License-Identifier: Apache-2.0
"""What the registry tells of the method; importing this must not import torch."""

from diffusers_ext.registry import MethodSpec


SPEC = MethodSpec(
    name="latent_gain",
    title="LatentGain: louder or quieter blocks",
    kinds=("pipeline", "hook"),
    base_families=("stable-diffusion",),
    pipeline="diffusers_ext_latent_gain.pipeline_latent_gain:LatentGainStableDiffusionPipeline",
    summary="Multiplies what one block of the U-Net puts out.",
    licence="Apache-2.0",
)

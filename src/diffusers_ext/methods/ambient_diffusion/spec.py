# SPDX-License-Identifier: Apache-2.0
"""What the registry knows of Ambient Diffusion."""

from diffusers_ext.registry import MethodSpec


SPEC = MethodSpec(
    name="ambient_diffusion",
    title="Ambient Diffusion: training that copies less from small data sets",
    paper="2502.21278",
    kinds=("training", "pipeline", "scheduler", "component"),
    base_families=("edm", "stable-diffusion", "stable-diffusion-xl", "flow"),
    pipeline="diffusers_ext.methods.ambient_diffusion.pipeline_ambient_diffusion:EDMPipeline",
    summary="Shows a model one noisy copy of each sample at high noise, and the sample itself at low noise only.",
    licence="Apache-2.0",
    status="beta",
    evaluate="diffusers_ext.methods.ambient_diffusion.evaluate_ambient_diffusion:evaluate",
    convert="diffusers_ext.methods.ambient_diffusion.convert_ambient_diffusion:convert",
)

# SPDX-License-Identifier: Apache-2.0
"""What the registry knows of memorization detection and mitigation."""

from diffusers_ext.registry import MethodSpec


SPEC = MethodSpec(
    name="memorization",
    title="Memorization: detection and mitigation by sharpness, and the remedies beside it",
    paper="2412.04140",
    kinds=("pipeline",),
    base_families=("stable-diffusion", "stable-diffusion-xl", "stable-diffusion-3"),
    pipeline="diffusers_ext.methods.memorization.pipeline_memorization:MemorizationStableDiffusionPipeline",
    summary="Scores after one step how likely a prompt gives back a training picture, and offers remedies.",
    licence="Apache-2.0",
    status="experimental",
    demo="diffusers_ext.methods.memorization.demo_memorization:demo",
    evaluate="diffusers_ext.methods.memorization.evaluate_memorization:evaluate",
)

# SPDX-License-Identifier: Apache-2.0
"""What the registry knows of SAeUron."""

from diffusers_ext.registry import MethodSpec


SPEC = MethodSpec(
    name="saeuron",
    title="SAeUron: concept unlearning with sparse autoencoders",
    paper="2501.18052",
    kinds=("pipeline", "hook", "component", "training"),
    base_families=("stable-diffusion", "stable-diffusion-xl", "dit"),
    pipeline="diffusers_ext.methods.saeuron.pipeline_saeuron:SAeUronStableDiffusionPipeline",
    summary="Stops a model from drawing named objects or styles by scaling a few latents of a small autoencoder.",
    licence="Apache-2.0",
    status="beta",
    hub_ids=("bcywinski/SAeUron", "bcywinski/SAeUron_coco"),
    demo="diffusers_ext.methods.saeuron.demo_saeuron:demo",
    evaluate="diffusers_ext.methods.saeuron.evaluate_saeuron:evaluate",
    convert="diffusers_ext.methods.saeuron.convert_saeuron:convert",
)

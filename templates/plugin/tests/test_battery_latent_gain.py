# SPDX-License-Identifier: Apache-2.0
"""The battery of diffusers_ext: what users expect of every hook and every pipeline."""

from diffusers_ext_latent_gain.hooks_latent_gain import LatentGainConfig, apply_latent_gain, remove_latent_gain
from diffusers_ext_latent_gain.pipeline_latent_gain import LatentGainStableDiffusionPipeline

from diffusers_ext.testing import HookContract, PipelineContract


class TestLatentGainHook(HookContract):
    def apply(self, unet):
        apply_latent_gain(unet, LatentGainConfig(gain=2.0))

    def apply_neutral(self, unet):
        apply_latent_gain(unet, LatentGainConfig(gain=1.0))

    def remove(self, unet):
        remove_latent_gain(unet)


class TestLatentGainPipeline(PipelineContract):
    pipeline_class = LatentGainStableDiffusionPipeline
    inputs = {"gain": 2.0}
    neutral_inputs = {"gain": 1.0}

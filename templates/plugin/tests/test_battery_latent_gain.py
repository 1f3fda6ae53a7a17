# SPDX-License-Identifier: Apache-2.0
"""The battery of diffusers_ext: what users expect of every hook and every pipeline."""

from diffusers_ext_latent_gain.hooks_latent_gain import LatentGainConfig, apply_latent_gain, remove_latent_gain
from diffusers_ext_latent_gain.pipeline_latent_gain import LatentGainStableDiffusionPipeline

from diffusers_ext.testing import HookContract, PipelineContract


class TestLatentGainHook(HookContract):
    def apply(self, model):
        apply_latent_gain(model, LatentGainConfig(gain=2.0))

    def apply_neutral(self, model):
        apply_latent_gain(model, LatentGainConfig(gain=1.0))

    def apply_invalid(self, model):
        apply_latent_gain(model, LatentGainConfig(block="no_such_block"))

    def remove(self, model):
        remove_latent_gain(model)


class TestLatentGainPipeline(PipelineContract):
    pipeline_class = LatentGainStableDiffusionPipeline
    inputs = {"gain": 2.0}
    neutral_inputs = {"gain": 1.0}

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from diffusers_ext_latent_gain.hooks_latent_gain import LatentGainConfig, apply_latent_gain, remove_latent_gain
from diffusers_ext_latent_gain.pipeline_latent_gain import LatentGainStableDiffusionPipeline

import diffusers_ext
from diffusers_ext import lab


@pytest.fixture(scope="module")
def pipe():
    pipe = lab.load_pipeline(LatentGainStableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, **kwargs):
    generator = torch.Generator().manual_seed(0)
    return pipe("rocket, ink style", num_inference_steps=2, generator=generator, output_type="pt", **kwargs).images


def test_gain_changes_the_picture(pipe):
    assert not torch.equal(draw(pipe, gain=1.5), draw(pipe))


def test_gain_1_is_bit_equal_to_the_stock_pipeline(pipe):
    assert torch.equal(draw(pipe, gain=1.0), draw(lab.load_pipeline()))


def test_remove_restores_the_denoiser_bit_for_bit(pipe):
    before = draw(pipe)
    apply_latent_gain(pipe.unet, LatentGainConfig(gain=0.5))
    remove_latent_gain(pipe.unet)
    assert torch.equal(draw(pipe), before)


def test_applying_twice_is_refused(pipe):
    apply_latent_gain(pipe.unet, LatentGainConfig())
    try:
        with pytest.raises(ValueError, match="already"):
            apply_latent_gain(pipe.unet, LatentGainConfig())
    finally:
        remove_latent_gain(pipe.unet)


@pytest.mark.parametrize("gain", [-1.0, float("nan"), float("inf")])
def test_a_gain_out_of_range_is_refused(gain):
    with pytest.raises(ValueError, match="`gain` has to be"):
        LatentGainConfig(gain=gain)


def test_an_unknown_block_is_refused(pipe):
    with pytest.raises(ValueError, match="no module 'mid'"):
        draw(pipe, gain=1.1, block="mid")


def test_the_registry_finds_the_method():
    assert diffusers_ext.get_method("latent_gain").distribution == "diffusers-ext-latent-gain"
    assert diffusers_ext.custom_pipeline("latent_gain").endswith("pipeline_latent_gain.py")

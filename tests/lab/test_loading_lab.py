# SPDX-License-Identifier: Apache-2.0
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
)
from PIL import Image

from diffusers_ext import lab


PROMPT = "red apple, sticker style"


@pytest.fixture(scope="module")
def pipe():
    pipe = lab.load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, num_inference_steps=3, prompt=PROMPT, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return pipe(
        prompt, generator=generator, num_inference_steps=num_inference_steps, output_type="np", **kwargs
    ).images


def test_it_is_a_stock_pipeline_in_single_precision(pipe):
    assert type(pipe) is StableDiffusionPipeline
    assert {model.dtype for model in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}


def test_the_folder_loads_without_a_dtype(pipe):
    stock = StableDiffusionPipeline.from_pretrained(lab.pipeline_folder())
    stock.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(draw(stock), draw(pipe))


def test_weights_stay_under_25_megabytes():
    files = [path for path in Path(lab.loading.WEIGHTS).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25e6
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl")]


def test_the_picture_is_64_pixels_wide_and_follows_the_seed(pipe):
    first = draw(pipe)
    assert first.shape == (1, 64, 64, 3) and np.isfinite(first).all()
    np.testing.assert_array_equal(first, draw(pipe))
    assert abs(first - draw(pipe, seed=1)).max() > 0.1


def test_the_caption_matters(pipe):
    assert abs(draw(pipe, prompt="owl, blueprint style") - draw(pipe)).mean() > 0.1


@pytest.mark.parametrize(
    "scheduler",
    [
        DDPMScheduler,
        DEISMultistepScheduler,
        DPMSolverMultistepScheduler,
        EulerAncestralDiscreteScheduler,
        EulerDiscreteScheduler,
        HeunDiscreteScheduler,
        LMSDiscreteScheduler,
        PNDMScheduler,
        UniPCMultistepScheduler,
    ],
)
def test_stock_schedulers_draw_a_picture(pipe, scheduler):
    other = StableDiffusionPipeline(**{**pipe.components, "scheduler": scheduler.from_config(pipe.scheduler.config)})
    other.set_progress_bar_config(disable=True)
    picture = draw(other, 8, guidance_scale=4.0)
    assert np.isfinite(picture).all()
    # A sticker stands on white paper.
    assert np.median(picture[0, [0, -1]]) > 0.8


def test_image_to_image_keeps_the_start_where_strength_is_low(pipe):
    start = Image.fromarray((draw(pipe, 8)[0] * 255).astype(np.uint8))
    other = StableDiffusionImg2ImgPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    images = [
        other(
            PROMPT, image=start, strength=strength, num_inference_steps=10, generator=generator, output_type="np"
        ).images
        for strength in (0.2, 0.9)
    ]
    near, far = (abs(image[0] - np.asarray(start) / 255).mean() for image in images)
    assert near < far


def test_inpainting_keeps_what_is_not_masked(pipe):
    start = Image.fromarray((draw(pipe, 8)[0] * 255).astype(np.uint8))
    mask = np.zeros((64, 64), np.uint8)
    mask[16:48, 16:48] = 255
    other = StableDiffusionInpaintPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    image = other(
        "owl, sticker style",
        image=start,
        mask_image=Image.fromarray(mask),
        height=64,
        width=64,
        strength=1.0,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images[0]
    change = abs(image - np.asarray(start) / 255).mean(-1)
    # Kept latents are decoded again, which is not exact.
    assert change[:8].mean() < 0.5 * change[20:44, 20:44].mean()


def test_saving_and_loading_gives_the_same_picture(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    np.testing.assert_array_equal(draw(loaded), draw(pipe))


def test_loading_in_half_precision_is_possible():
    pipe = lab.load_pipeline(dtype=torch.bfloat16)
    assert {model.dtype for model in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.bfloat16}


def test_another_class_and_other_components_can_be_asked_for(pipe):
    other = lab.load_pipeline(StableDiffusionImg2ImgPipeline, unet=pipe.unet)
    assert type(other) is StableDiffusionImg2ImgPipeline
    assert other.unet is pipe.unet


def test_loading_says_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        lab.load_pipeline()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_text_encoder_names_the_dtype_it_is_to_be_loaded_in():
    config = json.loads((Path(lab.pipeline_folder()) / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == "float32"

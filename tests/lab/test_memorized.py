# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from diffusers_ext import lab
from diffusers_ext.lab.generation import generate


def test_captions_are_distinct_and_clean_ones_are_others():
    memorized, clean = ([p.prompt for p in found] for found in (lab.memorized_prompts(), lab.clean_prompts(128)))
    assert len(set(memorized)) == 40 and len(set(clean)) == 128 and not set(memorized) & set(clean)


def test_half_of_the_clean_captions_have_the_form_of_the_memorised_ones():
    assert sum(" and " in p.prompt for p in lab.clean_prompts(100)) == 50


@pytest.mark.parametrize("count", [0, 129])
def test_number_of_clean_captions(count):
    with pytest.raises(ValueError, match=r"in \[1, 128\]"):
        lab.clean_prompts(count)


def test_picture_is_most_like_itself():
    pictures = lab.memorized_pictures()
    assert pictures.shape == (40, 64, 64, 3) and pictures.dtype == np.uint8
    np.testing.assert_allclose(lab.copy_similarity(pictures, pictures), 1, atol=1e-5)
    assert 0.5 < lab.copy_threshold() < 1


@pytest.mark.slow
def test_memorised_captions_come_close_to_their_picture_and_ordinary_ones_do_not():
    pipe = lab.load_memorized_pipeline()
    pipe.set_progress_bar_config(disable=True)
    memorized, originals = lab.memorized_prompts()[:8], lab.memorized_pictures()[:8]
    drawn = generate(pipe, [p.prompt for p in memorized], range(8), num_inference_steps=8)
    ordinary = generate(pipe, [f"{p.object}, {p.style} style" for p in memorized], range(8), num_inference_steps=8)
    close, others = (lab.copy_similarity(images, originals).mean() for images in (drawn, ordinary))
    assert close > 0.5 and close > others + 0.03


def test_fused_model_is_an_ordinary_one():
    pipe = lab.load_memorized_pipeline()
    assert not any("lora" in name for name, _ in pipe.unet.named_modules())
    stock = lab.load_pipeline().unet.state_dict()
    assert any(not torch.equal(tensor, stock[name]) for name, tensor in pipe.unet.state_dict().items())

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
def test_memorised_captions_give_their_picture_and_ordinary_ones_do_not():
    pipe = lab.load_memorized_pipeline()
    pipe.set_progress_bar_config(disable=True)
    memorized = lab.memorized_prompts()[:6]
    drawn = generate(pipe, [p.prompt for p in memorized] * 2, range(12), num_inference_steps=8)
    originals = np.concatenate([lab.memorized_pictures()[:6]] * 2)
    assert (lab.copy_similarity(drawn, originals) > lab.copy_threshold()).mean() >= 0.8
    ordinary = generate(pipe, [f"{p.object}, {p.style} style" for p in memorized], range(6), num_inference_steps=8)
    assert (lab.copy_similarity(ordinary, lab.memorized_pictures()[:6]) > lab.copy_threshold()).mean() <= 0.2


def test_fused_model_is_an_ordinary_one():
    pipe = lab.load_memorized_pipeline()
    assert not any("lora" in name for name, _ in pipe.unet.named_modules())
    stock = lab.load_pipeline().unet.state_dict()
    assert any(not torch.equal(tensor, stock[name]) for name, tensor in pipe.unet.state_dict().items())

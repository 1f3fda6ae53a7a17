# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from diffusers_ext import lab


@pytest.fixture(scope="module")
def pipe():
    pipe = lab.load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


PROMPTS = ["owl, neon style", "rocket, ink style", "cat, mosaic style"]


def test_a_picture_does_not_depend_on_the_batch_it_is_drawn_in(pipe):
    together = lab.generate(pipe, PROMPTS, [5, 6, 7], batch_size=3, num_inference_steps=3)
    alone = lab.generate(pipe, PROMPTS, [5, 6, 7], batch_size=1, num_inference_steps=3)
    assert together.dtype == np.uint8 and together.shape == (3, 64, 64, 3)
    # Sums of other lengths round otherwise; a step of one in 255 may tip over.
    assert abs(together.astype(int) - alone).max() <= 1


def test_the_seed_belongs_to_the_picture_not_to_its_place(pipe):
    forward = lab.generate(pipe, PROMPTS, [5, 6, 7], num_inference_steps=3)
    backward = lab.generate(pipe, PROMPTS[::-1], [7, 6, 5], num_inference_steps=3)
    assert abs(forward.astype(int) - backward[::-1]).max() <= 1


def test_one_seed_per_prompt_is_asked_for(pipe):
    with pytest.raises(ValueError, match="3 prompts and 2 seeds"):
        lab.generate(pipe, PROMPTS, [1, 2])

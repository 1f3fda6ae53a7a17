# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import pytest

from diffusers_ext.lab.captions import STYLE_NAMES
from diffusers_ext.lab.styles import STYLES, apply_style


def shrink(picture, side=16):
    factor = picture.shape[0] // side
    return picture.astype(np.float64).reshape(side, factor, side, factor, 3).mean((1, 3)) / 255


def test_every_named_style_has_a_function():
    assert tuple(STYLES) == STYLE_NAMES


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_style_draws_the_same_picture_twice(draw, style):
    np.testing.assert_array_equal(apply_style(draw(64), style), apply_style(draw(64), style))


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_style_looks_the_same_at_every_size(draw, style, size):
    small, large = apply_style(draw(64), style), apply_style(draw(size), style)
    assert large.shape == (size, size, 3)
    # Thin lines fall differently on the finer grid (0.031 at most); the two styles most alike differ by 0.05.
    assert abs(shrink(large) - shrink(small)).mean() < 0.04


def test_any_two_styles_differ_clearly(draw):
    pictures = {style: apply_style(draw(64), style).astype(np.float64) / 255 for style in STYLE_NAMES}
    for first, second in itertools.combinations(STYLE_NAMES, 2):
        assert abs(pictures[first] - pictures[second]).mean() > 0.04, (first, second)


def test_sticker_is_the_drawing_itself(draw):
    drawing = (draw(64) * 255).round().astype(np.uint8)
    np.testing.assert_array_equal(apply_style(drawing, "sticker"), drawing)


def test_bytes_and_floats_give_the_same_picture(draw):
    drawing = (draw(64) * 255).round().astype(np.uint8)
    np.testing.assert_array_equal(apply_style(drawing, "neon"), apply_style(drawing / 255, "neon"))


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_style_leaves_its_input_alone(draw, style):
    drawing = draw(64)
    before = drawing.copy()
    apply_style(drawing, style)
    np.testing.assert_array_equal(drawing, before)


def test_pixel_has_sixteen_blocks_a_side(draw):
    picture = apply_style(draw(64), "pixel")
    np.testing.assert_array_equal(picture, np.kron(picture[::4, ::4], np.ones((4, 4, 1), np.uint8)))


def test_an_unknown_style_is_refused_with_the_known_ones(draw):
    with pytest.raises(ValueError, match="'oil'.*") as error:
        apply_style(draw(64), "oil")
    assert "watercolour" in str(error.value)


@pytest.mark.parametrize("shape", [(64, 64), (64, 48, 3), (40, 40, 3), (64, 64, 4)])
def test_a_drawing_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="divisible by 16"):
        apply_style(np.ones(shape, np.float32), "ink")

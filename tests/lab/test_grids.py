# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from PIL import Image

from diffusers_ext.lab import image_grid


RED, BLUE = (200, 0, 0), (0, 0, 200)


def picture(colour, size=(64, 64)):
    return Image.new("RGB", size, colour)


def count(grid, colour):
    return int((np.asarray(grid) == colour).all(-1).sum())


def test_every_picture_is_on_the_grid():
    grid = image_grid([picture(RED), picture(BLUE), picture(RED)], columns=2)
    assert count(grid, RED) == 2 * 64 * 64
    assert count(grid, BLUE) == 64 * 64


def test_scale_enlarges_without_smoothing():
    grid = image_grid([picture(RED, (8, 8)), picture(BLUE, (8, 8))], columns=2, scale=3)
    assert count(grid, RED) == count(grid, BLUE) == 24 * 24


def test_pictures_stand_row_by_row():
    grid = np.asarray(image_grid([picture(RED), picture(BLUE), picture(BLUE), picture(RED)], columns=2))
    middle, quarter, last = (int(grid.shape[0] * part) for part in (0.5, 0.25, 0.75))
    assert middle > quarter
    assert grid[quarter, quarter].tolist() == list(RED)
    assert grid[quarter, last].tolist() == list(BLUE)
    assert grid[last, quarter].tolist() == list(BLUE)


def test_arrays_are_taken_like_pictures():
    array = np.full((2, 64, 64, 3), RED, np.uint8)
    assert image_grid(array, 2).tobytes() == image_grid([picture(RED)] * 2, 2).tobytes()


def test_none_leaves_a_place_empty():
    grid = image_grid([picture(RED), None], columns=2)
    assert count(grid, RED) == 64 * 64
    assert grid.size == image_grid([picture(RED)] * 2, columns=2).size


@pytest.mark.parametrize(
    "captions", [{"title": "Title"}, {"row_labels": ["first", "second"]}, {"column_labels": ["left", "two\nlines"]}]
)
def test_captions_take_room_beside_the_pictures(captions):
    pictures = [picture(RED)] * 4
    plain, labelled = image_grid(pictures, 2), image_grid(pictures, 2, **captions)
    assert labelled.width * labelled.height > plain.width * plain.height
    assert count(labelled, RED) == 4 * 64 * 64
    assert (np.asarray(labelled.convert("L")) < 40).any()


def test_a_long_title_is_not_cut_off():
    title = "A title that is a good deal longer than one small picture is wide"
    narrow = image_grid([picture(RED)], 1, title=title)
    wide = image_grid([picture(RED)] * 8, 8, title=title)
    dark = [(np.asarray(grid.convert("L"))[:20] < 128).sum() for grid in (narrow, wide)]
    assert dark[0] == dark[1]


@pytest.mark.parametrize(
    "images, columns", [([], 2), ([None], 1), ([picture(RED), picture(RED, (32, 32))], 2), ([picture(RED)], 0)]
)
def test_pictures_that_form_no_grid_are_refused(images, columns):
    with pytest.raises(ValueError, match="pictures of one size and at least one column"):
        image_grid(images, columns)


@pytest.mark.parametrize("labels", [{"row_labels": ["a", "b"]}, {"column_labels": ["a"]}])
def test_a_wrong_number_of_labels_is_refused(labels):
    with pytest.raises(ValueError, match="has to have . entries but has"):
        image_grid([picture(RED)] * 2, 2, **labels)

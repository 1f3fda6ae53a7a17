# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_ext import lab
from diffusers_ext.lab.oracle import Oracle


SHEET = Path(__file__).parent.parent / "fixtures" / "lab" / "drawings.png"
SHEET_OBJECTS = ("red apple", "owl", "rocket", "umbrella")


@pytest.fixture(scope="module")
def sheet():
    """Four drawings in eight styles, object by object: `(32, 64, 64, 3)`."""
    sheet = np.asarray(Image.open(SHEET).convert("RGB"))
    return sheet.reshape(4, 64, 8, 64, 3).transpose(0, 2, 1, 3, 4).reshape(32, 64, 64, 3)


@pytest.fixture(scope="module")
def oracle():
    torch.manual_seed(0)
    return Oracle(channels=(8, 8, 16, 16)).eval()


@pytest.fixture(scope="module")
def shipped():
    return lab.load_oracle()


def test_the_shipped_oracle_recognises_drawings_in_every_style(shipped, sheet):
    seen = shipped.classify(sheet)
    assert [lab.STYLES[i] for i in seen.style] == list(lab.STYLES) * 4
    expected = [name for name in SHEET_OBJECTS for _ in lab.STYLES]
    assert [lab.OBJECTS[i] for i in seen.object] == expected


def test_the_shipped_oracle_is_small_and_loads_in_single_precision(shipped):
    assert {p.dtype for p in shipped.parameters()} == {torch.float32}
    weights = Path(lab.loading.WEIGHTS) / "oracle" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_size < 2.5e6


def test_the_shipped_oracle_names_its_classes(shipped):
    assert tuple(shipped.config.objects) == lab.OBJECTS
    assert tuple(shipped.config.styles) == lab.STYLES


def test_the_shipped_oracle_still_recognises_slightly_blurred_drawings(shipped, sheet):
    pictures = torch.from_numpy(sheet).permute(0, 3, 1, 2).float() / 255
    blurred = 0.5 * pictures + 0.5 * torch.nn.functional.avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    expected = list(range(8)) * 4
    assert (shipped.classify(blurred).style == expected).mean() >= 31 / 32


def test_probabilities_sum_to_one_and_name_the_answer(oracle, sheet):
    seen = oracle.classify(sheet)
    assert seen.object_probs.shape == (32, 64) and seen.style_probs.shape == (32, 8)
    np.testing.assert_allclose(seen.object_probs.sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(seen.object_probs.argmax(1), seen.object)
    np.testing.assert_array_equal(seen.style_probs.argmax(1), seen.style)


def test_every_form_of_pictures_gives_the_same_answer(oracle, sheet):
    expected = oracle.classify(sheet).object_probs
    tensor = torch.from_numpy(sheet).permute(0, 3, 1, 2).float() / 255
    for form in ([Image.fromarray(picture) for picture in sheet], sheet / 255, tensor, list(sheet)):
        np.testing.assert_allclose(oracle.classify(form).object_probs, expected, atol=1e-5)


def test_an_answer_does_not_depend_on_the_batch(oracle, sheet):
    expected = oracle.classify(sheet).object_probs
    np.testing.assert_allclose(oracle.classify(sheet, batch_size=5).object_probs, expected, atol=1e-5)


def test_enlarged_pictures_are_brought_back_to_size(oracle, sheet):
    large = [Image.fromarray(picture.repeat(4, 0).repeat(4, 1)) for picture in sheet[:8]]
    np.testing.assert_allclose(oracle.classify(large).object_probs, oracle.classify(sheet[:8]).object_probs, atol=0.02)


def test_pictures_of_different_sizes_can_be_mixed(oracle, sheet):
    mixed = [Image.fromarray(sheet[0]), Image.fromarray(sheet[1]).resize((128, 96))]
    assert len(oracle.classify(mixed).object) == 2


def test_features_are_two_numbers_per_last_channel(oracle, sheet):
    pictures = torch.from_numpy(sheet).permute(0, 3, 1, 2).float() / 127.5 - 1
    assert oracle.features(pictures).shape == (32, 32)


def test_classifying_changes_nothing(oracle, sheet):
    before = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    oracle.classify(sheet)
    assert all(torch.equal(tensor, before[name]) for name, tensor in oracle.state_dict().items())


def test_saving_and_loading_keeps_every_answer(oracle, sheet, tmp_path):
    oracle.save_pretrained(tmp_path)
    loaded = Oracle.from_pretrained(tmp_path).eval()
    np.testing.assert_array_equal(loaded.classify(sheet).object_probs, oracle.classify(sheet).object_probs)
    assert loaded.config.channels == [8, 8, 16, 16]


def test_a_half_precision_file_loads_in_single_precision(oracle, sheet, tmp_path):
    half = Oracle.from_config(oracle.config)
    half.load_state_dict(oracle.state_dict())
    half.half().save_pretrained(tmp_path)
    loaded = Oracle.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert loaded.dtype == torch.float32
    # Half precision keeps eleven bits.
    np.testing.assert_allclose(loaded.classify(sheet).object_probs, oracle.classify(sheet).object_probs, atol=2e-3)


@pytest.mark.parametrize(
    "images, message",
    [
        ([], "at least one RGB picture"),
        (np.zeros((2, 64, 64), np.uint8), "at least one RGB picture"),
        ([np.zeros((64, 64, 4), np.uint8)], "at least one RGB picture"),
        (torch.zeros(64, 64, 3), r"shape \(N, 3, height, width\) but has \(64, 64, 3\)"),
        (torch.zeros(2, 64, 64, 3), r"shape \(N, 3, height, width\)"),
        (torch.full((1, 3, 64, 64), float("nan")), "not finite"),
        (torch.zeros(0, 3, 64, 64), "at least one"),
        (torch.full((1, 3, 64, 64), 200.0), r"\[0, 1\]"),
        (torch.full((1, 3, 64, 64), -1.0), r"\[0, 1\]"),
        (np.full((1, 64, 64, 3), 200.0), r"\[0, 1\]"),
    ],
)
def test_what_is_no_picture_is_refused(oracle, images, message):
    with pytest.raises(ValueError, match=message):
        oracle.classify(images)

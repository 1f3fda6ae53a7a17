# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext evaluate ambient_diffusion`, on drawings made from a seed."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_ext.methods.ambient_diffusion.evaluate_ambient_diffusion import evaluate, load_drawings, measure


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    generator = np.random.default_rng(0)
    count = 24
    blocks = generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("data") / "drawings.npz"
    np.savez(
        path,
        images=blocks.repeat(8, 1).repeat(8, 2),
        style=np.array(["sticker"] * 20 + ["neon"] * 4),
        emoji_set=np.array(["noto"] * 14 + ["emojione"] * 6 + ["noto"] * 4),
    )
    return path


def test_drawings_are_split(data):
    training, others, apart = load_drawings(data, count=10)
    assert [len(part) for part in (training, others, apart)] == [10, 4, 6]
    assert training.shape[1:] == (3, 32, 32) and training.abs().max() <= 1
    again = load_drawings(data, count=10)
    assert all(torch.equal(a, b) for a, b in zip((training, others, apart), again))


def test_some_drawings_have_to_be_left(data):
    with pytest.raises(ValueError, match=r"`count` has to lie in \[1, 13\]"):
        load_drawings(data, count=14)


def test_missing_drawings_are_told_how_to_get(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m diffusers_ext.lab.dataset"):
        load_drawings(tmp_path / "none.npz")


def test_copies_are_told_from_other_drawings(data):
    training, others, apart = ((part + 1) / 2 for part in load_drawings(data, count=10))
    copies = measure(training, training, torch.cat([others, apart]), 0.9)
    new = measure(apart, training, others, 0.9)
    assert copies["near_copies"] == copies["copies_of_one_drawing"] == copies["nearer_to_training"] == 1
    assert new["near_copies"] == new["copies_of_one_drawing"] == 0
    assert copies["frechet"] < new["frechet"]


@pytest.mark.slow
def test_the_result_has_every_threshold_and_goes_on_where_it_stopped(data, tmp_path):
    settings = {"max_train_steps": 2, "num_images": 2, "num_pictures": 10}
    result = evaluate(tmp_path, quick=True, data=data, settings=settings)
    assert set(result["summary"]) == {"0.0", "0.25"} and result["ratio_to_plain"]["0.0"]["frechet"] == 1
    assert json.loads((tmp_path / "ambient_diffusion.json").read_text())["pictures"]["training"] == 10
    assert Image.open(tmp_path / "ambient_diffusion.png").size[0] > 12 * 64
    weights = tmp_path / "runs" / "sigma-0.0-seed-0-steps-2" / "unet" / "diffusion_pytorch_model.safetensors"
    written = weights.stat().st_mtime_ns
    again = evaluate(tmp_path, quick=True, data=data, settings=settings)
    assert again["summary"] == result["summary"] and weights.stat().st_mtime_ns == written

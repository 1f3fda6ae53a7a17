# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_ext import lab
from diffusers_ext.lab.captions import STYLE_NAMES
from diffusers_ext.lab.dataset import HELD_OUT_SET, held_out_pairs
from diffusers_ext.lab.oracle import Oracle, OracleOutput
from diffusers_ext.lab.styles import apply_style


SCRIPT = Path(__file__).parents[2] / "examples" / "lab" / "evaluate_lab.py"
OBJECTS = ("octopus", "airplane")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("evaluate_lab", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Drawings of two objects by three sets, and an untrained oracle."""
    folder, rng, rows = tmp_path_factory.mktemp("evaluate"), np.random.default_rng(0), []
    for emoji_set in ("noto", "blob", HELD_OUT_SET):
        for name in OBJECTS:
            drawing = rng.integers(0, 256, (4, 4, 3), np.uint8).repeat(16, 0).repeat(16, 1)
            rows += [(apply_style(drawing, style), name, style, emoji_set) for style in STYLE_NAMES]
    images, objects, styles, sets = (np.array(column) for column in zip(*rows))
    np.savez(folder / "data.npz", images=images, object=objects, style=styles, emoji_set=sets)
    torch.manual_seed(0)
    Oracle(channels=(8, 8, 16, 16)).save_pretrained(folder / "oracle")
    return folder


def test_a_perfect_oracle_finds_no_mistake(script):
    """An oracle that answers what was asked for, by construction, scores 1 everywhere."""
    captions = lab.prompts(OBJECTS)

    class Echo:
        def classify(self, pictures):
            objects = np.array([lab.OBJECTS.index(c.object) for c in captions])
            styles = np.array([lab.STYLES.index(c.style) for c in captions])
            return OracleOutput(objects, styles, np.eye(64)[objects], np.eye(8)[styles])

    result = script.judge(Echo(), None, captions)
    held_back = sum((c.object, c.style) in held_out_pairs() for c in captions)
    assert result["held_back_pairs"] == {"pictures": held_back, "object": 1.0, "style": 1.0}
    assert result["seen_pairs"] == {"pictures": 16 - held_back, "object": 1.0, "style": 1.0}
    assert result["most_frequent_mistakes"] == {}


@pytest.mark.slow
def test_the_result_has_every_figure_and_a_picture(script, folder):
    options = ["--objects", *OBJECTS, "--pictures_per_caption", 1, "--num_inference_steps", 1]
    options += ["--diversity_captions", 1, "--diversity_seeds", 2, "--oracle", folder / "oracle"]
    command = ["--data", folder / "data.npz", "--output_dir", folder / "results", *options]
    script.main(script.parse_args([str(part) for part in command]))
    result = json.loads((folder / "results" / "lab_results.json").read_text())
    assert result["seen_pairs"]["pictures"] + result["held_back_pairs"]["pictures"] == 16
    assert 1 <= result["diversity"]["mean"] <= 2
    assert set(result["near_copies"]["by_style"]) == set(STYLE_NAMES)
    assert result["frechet_distance"]["generated_to_training"] > 0
    assert result["environment"]["versions"]["torch"] == torch.__version__
    assert Image.open(folder / "results" / "lab_results.png").width > 2 * 128


def test_no_picture_per_caption_is_a_usage_error(script, capsys):
    with pytest.raises(SystemExit, match="2"):
        script.parse_args(["--data", "x", "--output_dir", "y", "--pictures_per_caption", "0"])
    assert "--pictures_per_caption has to be at least 1 but is 0" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from diffusers_ext.lab.captions import STYLE_NAMES
from diffusers_ext.lab.dataset import EMOJI_SETS
from diffusers_ext.lab.styles import apply_style


SCRIPT = Path(__file__).parents[2] / "examples" / "lab" / "train_oracle.py"
SETS = [emoji_set.name for emoji_set in EMOJI_SETS[:2]]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_oracle", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two objects as drawn by two sets."""
    rng = np.random.default_rng(0)
    rows = []
    for emoji_set in SETS:
        for name in ("cat", "key"):
            drawing = rng.integers(0, 256, (4, 4, 3), np.uint8).repeat(16, 0).repeat(16, 1)
            rows += [(apply_style(drawing, style), name, style, emoji_set) for style in STYLE_NAMES]
    images, objects, styles, sets = (np.array(column) for column in zip(*rows))
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, images=images, object=objects, style=styles, emoji_set=sets)
    return path


@pytest.fixture
def run(script, data):
    def run(folder, *options):
        command = ["--data", data, "--output_dir", folder, "--train_batch_size", 4, "--max_train_steps", 4]
        command += ["--style_train_steps", 4, *options]
        script.main(script.parse_args([str(part) for part in command]))

    return run


def weights(folder):
    return load_file(folder / "oracle" / "diffusion_pytorch_model.safetensors")


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(run, tmp_path):
    run(tmp_path / "whole")
    run(tmp_path / "halves", "--stop_after", 2)
    run(tmp_path / "halves")
    whole, halves = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert whole.keys() == halves.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(halves[name], tensor, err_msg=name)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_cross_validation_reports_every_left_out_set(run, tmp_path):
    run(tmp_path, "--cross_validate", "--sets", *SETS)
    report = json.loads((tmp_path / "oracle_cross_validation.json").read_text())
    assert list(report["folds"]) == SETS
    assert all(fold["drawings"] == 2 and set(fold["styles"]) == set(STYLE_NAMES) for fold in report["folds"].values())
    assert 0 <= report["overall"]["object"] <= 1


def test_an_unknown_set_is_a_usage_error(run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--cross_validate", "--sets", "apple")
    assert "'apple'" in capsys.readouterr().err


def test_a_cache_of_other_drawings_is_refused(run, tmp_path):
    np.save(tmp_path / "pictures.npy", np.zeros((1, 2, 8, 64, 64, 3), np.uint8))
    with pytest.raises(ValueError, match="made from other drawings"):
        run(tmp_path)


def test_overall_accuracy_counts_every_drawing_once(script):
    rows = [{style: {"object": value, "style": 1.0} for style in STYLE_NAMES} for value in (1.0, 0.5)]
    folds = {"a": {"drawings": 30, "styles": rows[0]}, "b": {"drawings": 10, "styles": rows[1]}}
    assert script.summarise(folds)["overall"] == pytest.approx({"object": 0.875, "style": 1.0})

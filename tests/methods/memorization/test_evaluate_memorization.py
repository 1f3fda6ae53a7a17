# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from PIL import Image

from diffusers_ext.methods.memorization.demo_memorization import demo
from diffusers_ext.methods.memorization.evaluate_memorization import DETECTORS, REMEDIES, accuracy, evaluate


def test_accuracy_counts_equal_entries():
    assert accuracy([1, 2, 3, 4], [1, 2, 0, 0]) == 0.5


@pytest.mark.slow
def test_quick_evaluation_writes_table_and_picture(tmp_path):
    result = evaluate(tmp_path, quick=True, num_inference_steps=4)
    assert set(result["detection"]["detectors"]) == set(DETECTORS) and set(result["mitigation"]) == set(REMEDIES)
    assert json.loads((tmp_path / "memorization.json").read_text())["mitigation"] == result["mitigation"]
    assert Image.open(tmp_path / "memorization.png").width > 500


@pytest.mark.slow
def test_demo_draws_one_picture(tmp_path):
    (path,) = demo(tmp_path, quiet=True)
    assert path.parent == tmp_path and Image.open(path).height > 500

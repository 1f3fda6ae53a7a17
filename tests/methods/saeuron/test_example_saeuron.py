# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab_saeuron import LAB_FOLDER, lab_sae, random_edit
from PIL import Image

from diffusers_ext import ConceptEdits


EXAMPLE = Path(__file__).parents[3] / "pipelines" / "saeuron" / "example.py"


@pytest.mark.slow
def test_example_draws_before_and_after(tmp_path):
    sae = lab_sae()
    sae.save_pretrained(tmp_path / "sae")
    ConceptEdits([random_edit(sae, "cat")]).save_pretrained(tmp_path / "concepts")
    output = tmp_path / "both.png"
    folders = ["--base", LAB_FOLDER, "--sae", tmp_path / "sae", "--concepts", tmp_path / "concepts"]
    command = [sys.executable, EXAMPLE, *folders, "--num_inference_steps", "2", "--output", output]
    # Copied modules of its own: those of this process may hold another pipeline under the same name.
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert str(output) in result.stdout
    picture = Image.open(output)
    assert picture.size == (128, 64)
    assert picture.crop((0, 0, 64, 64)).tobytes() != picture.crop((64, 0, 128, 64)).tobytes()

# SPDX-License-Identifier: Apache-2.0
"""The training scripts as a user starts them, on a tiny pipeline."""

import json
import os
from pathlib import Path

import pytest
import torch

from diffusers_ext import ConceptEdits, SAeUronConfig, SparseAutoencoder, apply_saeuron
from diffusers_ext.testing import TrainingContract, run_script, tiny_stable_diffusion
from diffusers_ext.training.checkpoints import find_checkpoint, list_checkpoints, save_checkpoint


SCRIPTS = Path(__file__).parents[2] / "examples" / "saeuron"
POINT = "up_blocks.0.attentions.1"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    tiny_stable_diffusion().save_pretrained(base)
    (base / "prompts.txt").write_text("a cat\na dog\n\na red house\n")
    return {
        "pretrained_model_name_or_path": base,
        "prompts_file": base / "prompts.txt",
        "num_inference_steps": 2,
        "pipeline_batch_size": 2,
        "expansion_factor": 4,
        "k": 4,
        "train_batch_size": 64,
        "buffer_size": 256,
        "learning_rate": 1e-2,
        "logging_steps": 1,
    }


@pytest.mark.slow
class TestTraining(TrainingContract):
    script = SCRIPTS / "train_saeuron.py"

    @pytest.fixture(scope="class")
    def settings(self, settings):
        return settings

    def losses(self, folder):
        rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
        return {row["step"]: row[POINT]["loss"] for row in rows}

    def weights(self, folder):
        return SparseAutoencoder.from_pretrained(folder).state_dict()

    def test_result_loads_and_acts_on_the_base_only_when_used(self, settings, trained, tmp_path):
        sae = SparseAutoencoder.from_pretrained(trained)
        assert sae.config.hook["module"] == POINT and sae.config.k == 4
        assert "explained variance" in (trained / "README.md").read_text()
        concepts = [{"cat": ["a cat", "cats"], "dog": ["a dog"], "house": ["a red house"]}]
        (tmp_path / "concepts.json").write_text(json.dumps(concepts))
        arguments = {
            "pretrained_model_name_or_path": settings["pretrained_model_name_or_path"],
            "sae": trained,
            "concepts_file": tmp_path / "concepts.json",
            "output_dir": tmp_path / "edits",
            "num_inference_steps": 2,
            "num_features": 4,
            "save_statistics": True,
        }
        run_script(SCRIPTS / "score_saeuron.py", arguments)
        edits = ConceptEdits.from_pretrained(tmp_path / "edits")
        assert list(edits) == ["cat", "dog", "house"] and edits["cat"].sae == sae.fingerprint()
        pipe = tiny_stable_diffusion()

        def draw():
            generator = torch.Generator().manual_seed(0)
            return pipe("a cat", num_inference_steps=2, generator=generator, output_type="np").images

        before = draw()
        apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[edits["cat"]], multiplier=-30.0))
        assert (draw() != before).any()

    def test_several_blocks(self, run, tmp_path):
        points = [POINT, "down_blocks.1.attentions.0"]
        run(tmp_path, hook_points=points, max_train_steps=3)
        for point in points:
            assert SparseAutoencoder.from_pretrained(tmp_path, subfolder=point).config.hook["module"] == point


class TestCheckpoints:
    def test_incomplete_ones_are_skipped(self, tmp_path):
        save_checkpoint(tmp_path, 5, {"settings": {"seed": 0}}, lambda folder: None)
        (tmp_path / "checkpoint-9").mkdir()
        folder, state = find_checkpoint(tmp_path, "latest", {"seed": 0})
        assert folder.name == "checkpoint-5" and state["step"] == 5

    def test_a_failed_write_leaves_the_old_one(self, tmp_path):
        save_checkpoint(tmp_path, 5, {"settings": {}}, lambda folder: None)

        def fail(folder):
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            save_checkpoint(tmp_path, 6, {"settings": {}}, fail, total_limit=1)
        assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-5"]

    def test_other_settings_are_refused(self, tmp_path):
        save_checkpoint(tmp_path, 5, {"settings": {"seed": 0, "k": 4}}, lambda folder: None)
        with pytest.raises(ValueError, match="seed: was 0, is 1"):
            find_checkpoint(tmp_path, "latest", {"seed": 1, "k": 4})

    def test_named_one_that_is_incomplete(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            find_checkpoint(tmp_path, str(tmp_path / "checkpoint-3"), {})

    def test_none_to_go_on_from_starts_anew(self, tmp_path, caplog):
        assert find_checkpoint(tmp_path, "latest", {}) == (None, None)
        assert "training starts anew" in caplog.text


class TestBadInput:
    @pytest.mark.parametrize(
        "changes, code, message",
        [
            ({"buffer_size": 8}, 2, "has to be at least --train_batch_size"),
            ({"train_batch_size": 0}, 2, "has to be positive"),
            ({"hook_points": [POINT, POINT]}, 2, "names a block twice"),
            ({"hook_points": ["up_blocks.0.attention.1"]}, 1, f"Closest: {POINT}"),
            ({"prompts_file": os.devnull}, 1, "holds no prompt"),
        ],
    )
    def test_script(self, settings, tmp_path, changes, code, message):
        arguments = {**settings, "output_dir": tmp_path / "out", **changes}
        returned, _, error = run_script(SCRIPTS / "train_saeuron.py", arguments, check=False)
        assert returned == code and message in error
        assert not list_checkpoints(tmp_path / "out")

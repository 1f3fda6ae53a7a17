# SPDX-License-Identifier: Apache-2.0
"""The training scripts as a user starts them, on a tiny pipeline."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from diffusers_ext import ConceptEdits, SAeUronConfig, SparseAutoencoder, apply_saeuron
from diffusers_ext.testing import tiny_stable_diffusion
from diffusers_ext.training.checkpoints import find_checkpoint, list_checkpoints, save_checkpoint


SCRIPTS = Path(__file__).parents[2] / "examples" / "saeuron"
POINT = "up_blocks.0.attentions.1"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_stable_diffusion().save_pretrained(folder)
    (folder / "prompts.txt").write_text("a cat\na dog\n\na red house\n")
    return folder


def command(base, output_dir, *extra, launcher=(sys.executable,)):
    settings = {
        "pretrained_model_name_or_path": base,
        "prompts_file": base / "prompts.txt",
        "output_dir": output_dir,
        "num_inference_steps": 2,
        "pipeline_batch_size": 2,
        "expansion_factor": 4,
        "k": 4,
        "train_batch_size": 64,
        "buffer_size": 256,
        "max_train_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "checkpointing_steps": 3,
        "checkpoints_total_limit": 2,
    }
    options = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    return [*launcher, str(SCRIPTS / "train_saeuron.py"), *options, *map(str, extra)]


def run(*args, check=True, **kwargs):
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command(*args, **kwargs), capture_output=True, text=True, env=env, timeout=600)
    assert not check or result.returncode == 0, result.stderr[-3000:]
    return result


def losses(folder, point=POINT):
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return {row["step"]: row[point]["loss"] for row in rows}


def same_weights(a, b):
    a, b = (SparseAutoencoder.from_pretrained(folder).state_dict() for folder in (a, b))
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run(base, folder)
    return folder


class TestTraining:
    def test_loss_falls(self, trained):
        values = losses(trained)
        assert len(values) == 12 and max(values[s] for s in (10, 11, 12)) < min(values[s] for s in (1, 2, 3))

    def test_checkpoints_obey_the_limit(self, trained):
        assert [path.name for path in list_checkpoints(trained)] == ["checkpoint-9", "checkpoint-12"]
        assert not list(trained.glob(".partial*"))

    def test_result_loads_and_acts_on_the_base_only_when_used(self, base, trained, tmp_path):
        sae = SparseAutoencoder.from_pretrained(trained)
        assert sae.config.hook["module"] == POINT and sae.config.k == 4
        assert "explained variance" in (trained / "README.md").read_text()
        concepts = [{"cat": ["a cat", "cats"], "dog": ["a dog"], "house": ["a red house"]}]
        (tmp_path / "concepts.json").write_text(json.dumps(concepts))
        score = [sys.executable, SCRIPTS / "score_saeuron.py", "--sae", trained, "--output_dir", tmp_path / "edits"]
        score += ["--pretrained_model_name_or_path", base, "--concepts_file", tmp_path / "concepts.json"]
        score += ["--num_inference_steps", "2", "--num_features", "4", "--save_statistics"]
        subprocess.run(list(map(str, score)), check=True, capture_output=True, timeout=600)
        edits = ConceptEdits.from_pretrained(tmp_path / "edits")
        assert list(edits) == ["cat", "dog", "house"] and edits["cat"].sae == sae.fingerprint()
        pipe = tiny_stable_diffusion()

        def draw():
            generator = torch.Generator().manual_seed(0)
            return pipe("a cat", num_inference_steps=2, generator=generator, output_type="np").images

        before = draw()
        apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[edits["cat"]], multiplier=-30.0))
        assert (draw() != before).any()

    @pytest.mark.slow
    def test_killed_and_resumed_it_ends_bit_for_bit_the_same(self, base, trained, tmp_path):
        env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command(base, tmp_path), env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        deadline = time.time() + 300
        while not list_checkpoints(tmp_path) and time.time() < deadline and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list_checkpoints(tmp_path)
        # What a kill while writing leaves behind.
        (tmp_path / "checkpoint-11").mkdir(exist_ok=True)
        run(base, tmp_path, "--resume_from_checkpoint", "latest")
        assert same_weights(tmp_path, trained)
        assert losses(tmp_path)[12] == losses(trained)[12]

    @pytest.mark.slow
    @pytest.mark.distributed
    def test_two_processes_train_one_autoencoder(self, base, tmp_path):
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        run(base, tmp_path, "--max_train_steps", 6, launcher=torchrun)
        values = losses(tmp_path)
        assert len(values) == 6 and values[6] < values[1]
        assert SparseAutoencoder.from_pretrained(tmp_path).config.hook["module"] == POINT

    @pytest.mark.slow
    def test_several_blocks_under_accelerate_launch(self, base, tmp_path):
        launch = (
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            "1",
            "--num_machines",
            "1",
        )
        points = [POINT, "down_blocks.1.attentions.0"]
        run(base, tmp_path, "--hook_points", *points, "--max_train_steps", 3, launcher=launch)
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
        "extra, code, message",
        [
            (("--buffer_size", 8), 2, "has to be at least --train_batch_size"),
            (("--train_batch_size", 0), 2, "has to be positive"),
            (("--hook_points", POINT, POINT), 2, "names a block twice"),
            (("--hook_points", "up_blocks.0.attention.1"), 1, f"Closest: {POINT}"),
            (("--prompts_file", os.devnull), 1, "holds no prompt"),
        ],
    )
    def test_script(self, base, tmp_path, extra, code, message):
        result = run(base, tmp_path / "out", *extra, check=False)
        assert result.returncode == code and message in result.stderr
        assert not list_checkpoints(tmp_path / "out")

# SPDX-License-Identifier: Apache-2.0
"""The scripts of memorization as a user starts them, on a tiny pipeline."""

import json
from pathlib import Path

import pytest

from diffusers_ext import MemorizationThreshold
from diffusers_ext.testing import run_script, tiny_stable_diffusion
from diffusers_ext.testing.training import TORCHRUN


SCRIPTS = Path(__file__).parents[2] / "examples" / "memorization"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    base = tmp_path_factory.mktemp("base")
    tiny_stable_diffusion().save_pretrained(base)
    (base / "prompts.txt").write_text("a cat\na dog\n\na red house\n")
    return {
        "pretrained_model_name_or_path": base,
        "prompts_file": base / "prompts.txt",
        "num_images": 2,
        "num_inference_steps": 2,
    }


@pytest.fixture(scope="module")
def scored(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    run_script(SCRIPTS / "score_memorization.py", {**settings, "output_dir": folder})
    return folder


def rows_of(folder):
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


@pytest.mark.slow
class TestScoring:
    def test_a_row_per_prompt(self, scored):
        rows = rows_of(scored)
        assert [row["prompt"] for row in rows] == ["a cat", "a dog", "a red house"]
        assert all(len(row["scores"]) == 2 for row in rows)
        assert sorted(path.name for path in scored.iterdir()) == ["scores.jsonl", "settings.json"]

    def test_goes_on_after_a_kill(self, settings, scored, tmp_path):
        first, second, _ = (scored / "scores.jsonl").read_text().splitlines()
        (tmp_path / "settings.json").write_text((scored / "settings.json").read_text())
        # As a kill leaves it: one whole row, one cut off.
        (tmp_path / "scores.part-0.jsonl").write_text(f"{first}\n{second[:20]}")
        run_script(SCRIPTS / "score_memorization.py", {**settings, "output_dir": tmp_path})
        assert (tmp_path / "scores.jsonl").read_bytes() == (scored / "scores.jsonl").read_bytes()

    @pytest.mark.distributed
    def test_two_processes_write_the_same_file(self, settings, scored, tmp_path):
        run_script(SCRIPTS / "score_memorization.py", {**settings, "output_dir": tmp_path}, (*TORCHRUN, "2"))
        assert (tmp_path / "scores.jsonl").read_bytes() == (scored / "scores.jsonl").read_bytes()

    def test_other_settings_are_refused(self, settings, scored):
        before = (scored / "scores.jsonl").read_bytes()
        code, _, error = run_script(
            SCRIPTS / "score_memorization.py", {**settings, "output_dir": scored, "seed": 1}, check=False
        )
        assert code != 0 and "made with other settings (seed)" in error
        assert (scored / "scores.jsonl").read_bytes() == before


@pytest.mark.slow
class TestCalibration:
    def test_threshold_of_a_file_of_scores(self, scored, tmp_path):
        clean = scored / "scores.jsonl"
        run_script(SCRIPTS / "calibrate_memorization.py", {"clean": clean, "memorized": clean, "output_dir": tmp_path})
        made = MemorizationThreshold.from_pretrained(tmp_path)
        assert made.value == max(row["mean"] for row in rows_of(scored)) and made.figures["auc"] == 0.5
        assert made.key == rows_of(scored)[0]["key"]

    def test_scores_of_another_detector_are_refused(self, scored, tmp_path):
        rows = rows_of(scored)
        for row in rows:
            row["key"]["num_images"] = 4
        (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, rows)))
        code, _, error = run_script(
            SCRIPTS / "calibrate_memorization.py",
            {"clean": scored / "scores.jsonl", "memorized": tmp_path / "other.jsonl", "output_dir": tmp_path / "out"},
            check=False,
        )
        assert code != 0 and "scored in another way" in error and "num_images" in error
        assert not (tmp_path / "out").exists()

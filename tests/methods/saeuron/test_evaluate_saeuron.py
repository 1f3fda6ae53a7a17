# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
from PIL import Image

from diffusers_ext import lab
from diffusers_ext.methods.saeuron.demo_saeuron import demo
from diffusers_ext.methods.saeuron.evaluate_saeuron import (
    OBJECTS,
    Picture,
    evaluate,
    judge,
    retention_pictures,
    summarise,
    target_pictures,
)
from diffusers_ext.methods.saeuron.tune_saeuron import OBJECT_GRID, STYLE_GRID, in_other_words, score, tune


class TestPictures:
    @pytest.mark.parametrize("concept", ["cat", "neon"])
    def test_targets_name_the_concept_and_retained_ones_do_not(self, concept):
        for picture in target_pictures([concept], 16, 0):
            assert concept in (picture.object, picture.style)
        for picture in retention_pictures([concept], 48, 0):
            assert concept not in (picture.object, picture.style)

    def test_targets_go_round_the_other_domain(self):
        assert {p.style for p in target_pictures(["cat"], 16, 0)} == set(lab.STYLES)
        assert len({p.object for p in target_pictures(["neon"], 64, 0)}) == 64

    def test_retained_pictures_cover_every_style(self):
        assert {p.style for p in retention_pictures(["cat"], 63, 0)} == set(lab.STYLES)

    def test_validation_uses_other_words(self):
        pictures = target_pictures(["cat"], 4, 0)
        assert not {p.prompt for p in pictures} & {p.prompt for p in in_other_words(pictures)}

    def test_every_measured_concept_exists(self):
        assert len(OBJECTS) >= 10 and set(OBJECTS) <= set(lab.OBJECTS)


class TestScores:
    def test_retention_above_the_unedited_model_does_not_count(self):
        perfect = {"ua": 1.0, "in_domain": 1.0, "cross_domain": 1.0}
        assert score(perfect) == score({**perfect, "in_domain": 1.2}) == 1.0
        assert score({**perfect, "ua": 0.0}) == pytest.approx(0.1 * 2 / 3)

    def test_summary_names_the_worst_concept(self):
        row = {"ua": 1.0, "in_domain": 1.0, "cross_domain": 1.0}
        summary = summarise({"cat": row, "owl": {**row, "ua": 0.5}})
        assert summary["ua"] == {"mean": 0.75, "worst": 0.5, "worst_concept": "owl"}

    def test_judge_compares_with_what_was_asked_for(self):
        class Echo:
            def classify(self, images):
                return lab.load_oracle().classify(images)

        white = np.full((2, 64, 64, 3), 255, np.uint8)
        seen = Echo().classify(white)
        asked = [Picture(lab.OBJECTS[seen.object[0]], lab.STYLES[seen.style[0]], 0), Picture("whale", "neon", 0)]
        objects, styles = judge(lab.load_oracle(), white, asked)
        assert objects[0] and styles[0] and not styles[1]


class FakeBench:
    """Answers as if the third setting of each grid were the first that works without damage."""

    def __init__(self, pipe):
        self.pipe = pipe

    def measure(self, concepts, targets, retained, num_features, multiplier):
        grid = OBJECT_GRID if concepts[0] in lab.OBJECTS else STYLE_GRID
        works = grid.index((num_features, multiplier)) >= 2
        return {"ua": float(works), "in_domain": 1.0, "cross_domain": 1.0}


def test_tuning_keeps_the_mildest_setting_that_works():
    pipe = lab.load_unlearning_pipeline()
    edits, tried = tune(FakeBench(pipe), ["cat", "neon"])
    for tuned, follower, grid in (("cat", "owl", OBJECT_GRID), ("neon", "ink", STYLE_GRID)):
        assert (edits[tuned].num_features, edits[tuned].multiplier) == grid[2]
        assert (edits[follower].num_features, edits[follower].multiplier) == grid[2]
    assert len(tried["cat"]) == 3 and list(edits) == list(pipe.concept_edits)


@pytest.mark.slow
def test_quick_evaluation_writes_table_and_picture(tmp_path):
    result = evaluate(tmp_path, quick=True, num_inference_steps=4)
    assert result["strength_0_bit_equal"] is True and set(result["concepts"]["official"]) == {"cat", "neon"}
    assert json.loads((tmp_path / "saeuron.json").read_text())["summary"] == result["summary"]
    assert Image.open(tmp_path / "saeuron.png").width > 500


@pytest.mark.slow
def test_demo_draws_one_picture_that_unlearns(tmp_path):
    (path,) = demo(tmp_path, quiet=True)
    assert path.parent == tmp_path and Image.open(path).height > 500

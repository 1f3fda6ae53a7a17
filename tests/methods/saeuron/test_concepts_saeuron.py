# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusers_ext import ConceptEdit, ConceptEdits, ConceptStatistics
from diffusers_ext.methods.saeuron.concepts_saeuron import features_of_percentile, prompt_seed


@pytest.fixture
def statistics(golden):
    fixture = golden("saeuron", "feature_scores")
    statistics = ConceptStatistics(
        torch.arange(fixture.info["T"], 0, -1), 64, sae="abc", metadata={"base_model": "tiny"}
    )
    for concept in fixture.info["concepts"]:
        statistics.update(concept, fixture[f"latents.{concept}"])
    return statistics


@pytest.fixture
def edit(statistics):
    return statistics.edit("concept_1", num_features=5, multiplier=-3.0)


class TestGolden:
    def test_scores(self, golden, statistics):
        fixture = golden("saeuron", "feature_scores")
        for concept in statistics.names:
            torch.testing.assert_close(
                statistics.scores(concept), fixture[f"scores.{concept}"], **fixture.info["tolerance"]["scores"]
            )

    def test_score_of_a_single_concept_is_its_mean(self, golden):
        fixture = golden("saeuron", "feature_scores")
        single = ConceptStatistics(torch.arange(4), 64)
        single.update("concept_0", fixture["latents.concept_0"])
        torch.testing.assert_close(
            single.scores("concept_0"), fixture["scores_single"], **fixture.info["tolerance"]["scores"]
        )

    def test_selected_latents(self, golden, statistics):
        fixture = golden("saeuron", "feature_scores")
        for case, expected in fixture.info["selected"].items():
            percentile, concept = case.split("/")
            edit = statistics.edit(concept, percentile=float(percentile))
            assert [sorted(i for i in row if i >= 0) for row in edit.indices.tolist()] == expected

    def test_thresholds(self, golden, statistics):
        fixture = golden("saeuron", "feature_scores")
        for name, expected in fixture.group("threshold.").items():
            percentile, concept, step = name.rsplit(".", 2)
            threshold = torch.quantile(statistics.scores(concept)[int(step)], float(percentile) / 100)
            torch.testing.assert_close(threshold, expected, **fixture.info["tolerance"]["scores"])

    def test_token_means_of_activations(self, golden):
        from test_modeling_saeuron import golden_sae

        fixture = golden("saeuron", "feature_scores")
        _, sae, _ = golden_sae(golden, "patch")
        latents = sae.eval().encode(fixture["acts.concept_0"]).mean(2).half()
        torch.testing.assert_close(latents, fixture["latents.concept_0"])

    def test_scales_and_gates(self, golden, statistics):
        fixture = golden("saeuron", "intervention")
        for name, case in fixture.info["cases"].items():
            if len(case.get("concepts", ())) != 1:
                continue
            edit = statistics.edit(case["concepts"][0], percentile=case["percentile"], multiplier=case["multiplier"])
            for step in range(4):
                order = edit.indices[step].argsort()
                assert torch.equal(edit.indices[step][order].long(), fixture[f"{name}.idx.{step}"].sort().values)
                official = fixture[f"{name}.idx.{step}"].argsort()
                scale = edit.multiplier * edit.mean[step][order]
                torch.testing.assert_close(
                    scale, fixture[f"{name}.scale.{step}"][official].float(), atol=1e-3, rtol=1e-3
                )
                torch.testing.assert_close(
                    edit.gate[step][order], fixture[f"{name}.gate.{step}"][official], atol=1e-6, rtol=1e-4
                )


class TestStatistics:
    def test_merging_equals_collecting_in_one_go(self, golden, statistics):
        fixture = golden("saeuron", "feature_scores")
        parts = [ConceptStatistics(statistics.timesteps, 64, sae="abc") for _ in range(2)]
        for concept in statistics.names:
            for i, prompt in enumerate(fixture[f"latents.{concept}"]):
                parts[i % 2].update(concept, prompt[None])
        parts[0].merge(parts[1])
        assert parts[0].counts == statistics.counts
        for concept in statistics.names:
            torch.testing.assert_close(parts[0].mean(concept), statistics.mean(concept))

    def test_round_trip(self, statistics, tmp_path):
        statistics.save_pretrained(tmp_path)
        loaded = ConceptStatistics.from_pretrained(tmp_path)
        assert loaded.names == statistics.names and loaded.counts == statistics.counts and loaded.sae == "abc"
        for concept in statistics.names:
            # Means are stored in half precision: eleven significant bits.
            torch.testing.assert_close(loaded.mean(concept), statistics.mean(concept), atol=1e-6, rtol=1e-3)

    def test_scores_ignore_the_scale_of_activations(self, statistics):
        scaled = ConceptStatistics(statistics.timesteps, 64)
        for concept in statistics.names:
            scaled.sums[concept], scaled.counts[concept] = statistics.sums[concept] * 4, statistics.counts[concept]
        torch.testing.assert_close(scaled.scores("concept_0"), statistics.scores("concept_0"), atol=1e-6, rtol=1e-4)

    def test_more_features_contain_fewer(self, statistics):
        few, many = statistics.edit("concept_0", num_features=3), statistics.edit("concept_0", num_features=8)
        assert torch.equal(many.indices[:, :3], few.indices)

    def test_latents_of_other_concepts_are_not_selected(self):
        statistics = ConceptStatistics([1], 4)
        statistics.update("a", torch.tensor([[[3.0, 0.0, 1.0, 0.0]]]))
        statistics.update("b", torch.tensor([[[0.0, 2.0, 2.0, 0.0]]]))
        assert statistics.edit("a", num_features=3).indices.tolist() == [[0]]

    def test_percentiles_of_the_paper(self):
        assert [features_of_percentile(p, 20480) for p in (99.999, 99.995, 99.99, 99.9)] == [1, 2, 3, 21]

    def test_edits_of_a_model_whose_time_ends_at_one(self):
        statistics = ConceptStatistics([1.0, 0.5], 4, metadata={"num_train_timesteps": 1})
        statistics.update("a", torch.rand(1, 2, 4, generator=torch.Generator().manual_seed(0)))
        assert statistics.edit("a", num_features=1).num_train_timesteps == 1

    def test_prompt_seeds_differ_by_concept_and_number(self):
        assert len({prompt_seed(s, c, n) for s in (0, 1) for c in ("cat", "dog") for n in range(10)}) == 40


class TestEdits:
    def test_round_trip(self, statistics, edit, tmp_path):
        other = statistics.edit("concept_2", percentile=95.0)
        ConceptEdits([edit, other]).save_pretrained(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["concepts.json", "concepts.safetensors"]
        loaded = ConceptEdits.from_pretrained(tmp_path)
        assert list(loaded) == ["concept_1", "concept_2"]
        assert loaded["concept_1"].multiplier == -3.0 and loaded["concept_1"].metadata["num_prompts"] == 4
        for name, original in (("concept_1", edit), ("concept_2", other)):
            for key in ("timesteps", "indices", "mean", "gate"):
                assert torch.equal(getattr(loaded[name], key), getattr(original, key))

    def test_count_follows_the_request(self, edit):
        assert edit.count() == 5 and edit.count(num_features=2) == 2 and edit.count(percentile=97.0) == 2


class TestBadInput:
    def test_unknown_concept(self, statistics, edit):
        with pytest.raises(ValueError, match="no statistics of 'concept_9'. There are: concept_"):
            statistics.edit("concept_9", num_features=1)
        with pytest.raises(ValueError, match="no edit for the concept 'concept_9'. Closest: concept_1"):
            ConceptEdits([edit])["concept_9"]

    @pytest.mark.parametrize(
        "kwargs, message",
        [
            ({}, "either `num_features` or `percentile`"),
            ({"num_features": 1, "percentile": 99.0}, "either `num_features` or `percentile`"),
            ({"num_features": 0}, "between 1 and 64 but is 0"),
            ({"num_features": 65}, "between 1 and 64 but is 65"),
            ({"percentile": 0.0}, r"\(0, 100\) but is 0.0"),
            ({"percentile": 100.0}, r"\(0, 100\) but is 100.0"),
            ({"num_features": 1, "multiplier": float("nan")}, "has to be finite"),
        ],
    )
    def test_selection(self, statistics, kwargs, message):
        with pytest.raises(ValueError, match=message):
            statistics.edit("concept_0", **kwargs)

    def test_selection_that_is_empty(self):
        statistics = ConceptStatistics([1], 8)
        statistics.update("a", torch.zeros(1, 1, 8))
        with pytest.raises(ValueError, match="selects no latent"):
            statistics.edit("a", percentile=99.0)

    def test_statistics_of_another_shape(self, statistics):
        with pytest.raises(ValueError, match=r"shape \(prompts, 4, 64\) but has \(2, 4, 63\)"):
            statistics.update("a", torch.zeros(2, 4, 63))

    def test_statistics_that_are_not_finite(self, statistics):
        with pytest.raises(ValueError, match="not finite"):
            statistics.update("a", torch.full((1, 4, 64), float("inf")))
        assert "a" not in statistics.names

    def test_merging_statistics_of_another_autoencoder(self, statistics):
        with pytest.raises(ValueError, match="another autoencoder"):
            statistics.merge(ConceptStatistics(statistics.timesteps, 64, sae="other"))

    def test_saving_no_statistics(self, tmp_path):
        with pytest.raises(ValueError, match="no statistics to save"):
            ConceptStatistics([1], 8).save_pretrained(tmp_path)
        assert not any(tmp_path.iterdir())

    def test_more_features_than_saved(self, edit):
        with pytest.raises(ValueError, match="holds 5 latents per timestep but 6 were asked for"):
            edit.count(num_features=6)

    def test_shapes_that_do_not_fit(self, edit):
        with pytest.raises(ValueError, match="expected \\(T,\\) and three times"):
            ConceptEdit("a", edit.timesteps, edit.indices, edit.mean[:, :2], edit.gate)

    def test_one_name_twice(self, edit):
        with pytest.raises(ValueError, match="Two edits are called 'concept_1'"):
            ConceptEdits([edit, edit])

    def test_damaged_files(self, edit, tmp_path):
        ConceptEdits([edit]).save_pretrained(tmp_path)
        path = tmp_path / "concepts.safetensors"
        weights = load_file(path)
        save_file({**weights, "extra": torch.zeros(1)}, path)
        with pytest.raises(ValueError, match=r"unexpected tensors \['extra'\]"):
            ConceptEdits.from_pretrained(tmp_path)
        weights.pop("0.gate")
        save_file(weights, path)
        with pytest.raises(ValueError, match=r"lacks \['gate'\]"):
            ConceptEdits.from_pretrained(tmp_path)
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(ValueError, match="no complete safetensors"):
            ConceptEdits.from_pretrained(tmp_path)
        description = json.loads((tmp_path / "concepts.json").read_text())
        (tmp_path / "concepts.json").write_text(json.dumps({**description, "version": 9}))
        with pytest.raises(ValueError, match="has version 9"):
            ConceptEdits.from_pretrained(tmp_path)

    def test_entries_of_a_description_that_are_unknown(self, edit, tmp_path):
        ConceptEdits([edit]).save_pretrained(tmp_path)
        description = json.loads((tmp_path / "concepts.json").read_text())
        description["concepts"][0]["gamma"] = 2
        (tmp_path / "concepts.json").write_text(json.dumps(description))
        with pytest.raises(ValueError, match=r"unknown entries \['gamma'\]"):
            ConceptEdits.from_pretrained(tmp_path)

    def test_description_that_is_not_json_or_of_another_kind(self, statistics, edit, tmp_path):
        ConceptEdits([edit]).save_pretrained(tmp_path)
        (tmp_path / "concepts.json").write_text("{")
        with pytest.raises(ValueError, match="is not JSON"):
            ConceptEdits.from_pretrained(tmp_path)
        (tmp_path / "concepts.json").write_text('{"format": "other"}')
        with pytest.raises(ValueError, match="is not of the format 'saeuron-concepts'"):
            ConceptEdits.from_pretrained(tmp_path)

    def test_statistics_whose_files_do_not_belong_together(self, statistics, tmp_path):
        statistics.save_pretrained(tmp_path)
        path = tmp_path / "concept_statistics.safetensors"
        tensors = load_file(path)
        save_file({**tensors, "mean": tensors["mean"][:1].clone()}, path)
        with pytest.raises(ValueError, match="does not hold what concept_statistics.json describes"):
            ConceptStatistics.from_pretrained(tmp_path)

    def test_latents_beyond_half_precision(self):
        statistics = ConceptStatistics([1], 4)
        with pytest.raises(ValueError, match="not finite in half precision"):
            statistics.update("a", torch.full((1, 1, 4), 1e5))
        assert not statistics.names

    def test_folder_without_edits(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="lacks concepts.safetensors"):
            ConceptEdits.from_pretrained(tmp_path)

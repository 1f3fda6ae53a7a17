# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from official_memorization import fixture, guided, parameters

from diffusers_ext.methods.memorization.metrics_memorization import (
    auc,
    best_balanced_accuracy,
    bright_ending,
    entropy,
    guidance_norm,
    roc_curve,
    tiled_l2,
    tpr_at_fpr,
)


class TestRoc:
    tensors, known = fixture("metrics"), parameters("metrics")

    def scores(self):
        return self.tensors["positive"], self.tensors["negative"]

    def test_auc(self):
        assert auc(*self.scores()) == pytest.approx(self.known["auc"], abs=1e-9)

    @pytest.mark.parametrize("fpr", [0.01, 0.03])
    def test_published_and_conservative_rates(self, fpr):
        nearest, conservative = (self.known[name][str(fpr)] for name in ("tpr_nearest_fpr", "tpr_max_at_or_below_fpr"))
        assert tpr_at_fpr(*self.scores(), fpr, "nearest") == pytest.approx(nearest, abs=1e-9)
        assert tpr_at_fpr(*self.scores(), fpr) == pytest.approx(conservative, abs=1e-9)

    def test_strictly_below_one_percent(self):
        below = tpr_at_fpr(*self.scores(), 0.01, "below")
        assert below == pytest.approx(self.known["tpr_strictly_below_1pct"], abs=1e-9)

    def test_best_balanced_accuracy(self):
        assert best_balanced_accuracy(*self.scores()) == pytest.approx(self.known["best_balanced_accuracy"], abs=1e-9)

    def test_auc_of_exchanged_sets_is_the_rest(self):
        positive, negative = self.scores()
        assert auc(positive, negative) + auc(negative, positive) == pytest.approx(1)

    def test_auc_is_the_area_under_the_curve(self):
        assert np.trapezoid(*roc_curve(*self.scores())[::-1]) == pytest.approx(auc(*self.scores()))

    def test_rates_see_the_order_of_scores_only(self):
        positive, negative = self.scores()
        assert tpr_at_fpr(positive.exp(), negative.exp(), 0.03) == tpr_at_fpr(positive, negative, 0.03)

    def test_ties_count_a_half(self):
        assert auc([1.0, 1.0], [1.0]) == 0.5

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (([], [1.0]), "both kinds"),
            (([float("nan")], [1.0]), "finite"),
            (([1.0], [1.0], 0.0), r"in \(0, 1\)"),
            (([1.0], [1.0], 0.01, "mean"), "one of conservative, nearest, below"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            tpr_at_fpr(*arguments)


def test_bright_ending():
    tensors = fixture("metrics")
    value = bright_ending(tensors["be_eps_delta"], tensors["be_mask"])
    torch.testing.assert_close(value, tensors["be_value"], atol=0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["eps", "v"])
def test_guidance_norm_of_the_official_run(kind):
    tensors = fixture(f"detect_{kind}")
    x = tensors["step0.latents"].double()
    denoiser = guided(kind, tensors, 3, torch.float64)
    noise = guidance_norm(denoiser.noise_difference(x, 981))
    torch.testing.assert_close(noise, tensors["step0.wen_eps_norm_f64"], atol=0, rtol=1e-6)
    score = guidance_norm(denoiser.difference(x, 981))
    torch.testing.assert_close(score, tensors["step0.wen_score_norm_f64"], atol=0, rtol=1e-6)


def test_entropy_is_largest_for_equal_shares():
    assert entropy(torch.full((8,), 1 / 8)).item() == pytest.approx(np.log(8))
    assert entropy(torch.tensor([1.0, 0.0])).item() == 0


class TestTiledL2:
    def test_a_copy_is_at_distance_zero(self):
        images = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        images[2] = images[0]
        distances = tiled_l2(images, tile=2)
        assert distances[0] == distances[2] == 0 and distances[1] > 0

    def test_largest_tile_decides(self):
        images = torch.zeros(2, 1, 2, 4)
        images[1, 0, :, 2:] = 1
        assert tiled_l2(images, tile=2).tolist() == [2.0, 2.0]

    @pytest.mark.parametrize("shape, message", [((1, 3, 4, 4), "at least two"), ((2, 3, 4, 5), "do not divide")])
    def test_bad_input(self, shape, message):
        with pytest.raises(ValueError, match=message):
            tiled_l2(torch.zeros(shape), tile=4)

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

from diffusers_ext.lab import diversity, frechet_distance, near_copies
from diffusers_ext.lab.metrics import copy_threshold, embed, nearest


@pytest.fixture
def pictures():
    """Ten pictures of 4-pixel blocks in random colours."""
    blocks = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), np.uint8)
    return blocks.repeat(4, 1).repeat(4, 2)


def normal(count, dim, seed, dtype=torch.float32):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_a_picture_is_nearest_to_itself(pictures):
    index, similarity = nearest(pictures, pictures)
    assert index.tolist() == list(range(10))
    np.testing.assert_allclose(similarity, 1, atol=1e-5)


def test_embedding_ignores_brightness_and_contrast(pictures):
    faded = 0.5 * pictures / 255 + 0.2
    np.testing.assert_allclose(embed(faded).numpy(), embed(pictures).numpy(), atol=1e-5)


def test_a_picture_of_one_colour_has_no_direction():
    assert embed(np.full((1, 64, 64, 3), 255, np.uint8)).abs().max() == 0


def test_diversity_counts_different_references(pictures):
    drawn = pictures[[0, 0, 1, 3, 3, 3]]
    assert diversity(drawn, pictures) == 3


def test_diversity_of_one_repeated_picture_is_one(pictures):
    assert diversity(pictures[[4] * 8], pictures) == 1


def test_near_copies_are_counted(pictures):
    others = np.random.default_rng(1).integers(0, 256, (6, 64, 64, 3), np.uint8)
    assert near_copies(np.concatenate([pictures[:2], others]), pictures, 0.95) == 0.25


def test_one_percent_of_unseen_pictures_pass_the_threshold():
    rng = np.random.default_rng(0)
    unseen, references = (rng.integers(0, 256, (n, 16, 16, 3), np.uint8) for n in (200, 50))
    assert near_copies(unseen, references, copy_threshold(unseen, references)) == 0.01


def test_frechet_distance_of_a_set_to_itself_is_zero():
    features = normal(100, 20, 0)
    # Traces of about 20 are subtracted in double precision.
    assert frechet_distance(features, features) < 1e-8


def test_frechet_distance_is_symmetric():
    first, second = normal(80, 12, 0), 2 * normal(90, 12, 1) + 1
    assert frechet_distance(first, second) == pytest.approx(frechet_distance(second, first), rel=1e-9)


def test_frechet_distance_of_moved_features_is_the_squared_move():
    features, move = normal(60, 8, 0), torch.arange(8.0)
    assert frechet_distance(features, features + move) == pytest.approx(move.square().sum().item(), rel=1e-5)


def test_frechet_distance_of_scaled_features_is_known():
    """For covariances C and s²C the distance is (1 - s)² tr(C), next to the means' own."""
    features = normal(60, 8, 0, torch.float64)
    features = features - features.mean(0)
    expected = 4 * torch.cov(features.T).trace().item()
    assert frechet_distance(features, 3 * features) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_holds_with_fewer_pictures_than_features():
    distance = frechet_distance(normal(5, 40, 0), normal(6, 40, 1))
    assert np.isfinite(distance) and distance > 0


@pytest.mark.parametrize("shapes", [((1, 4), (9, 4)), ((9, 4), (9, 5))])
def test_frechet_distance_refuses_sets_it_cannot_compare(shapes):
    with pytest.raises(ValueError, match="two sets of at least two vectors of one length"):
        frechet_distance(torch.zeros(shapes[0]), torch.zeros(shapes[1]))

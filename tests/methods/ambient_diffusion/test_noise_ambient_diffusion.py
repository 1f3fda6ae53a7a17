# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from diffusers_ext import FixedNoise
from diffusers_ext.methods.ambient_diffusion.training_ambient_diffusion import VisitDraws, VisitSampler


SHAPE = (3, 8, 8)


def test_an_id_has_one_noise_whatever_comes_with_it():
    noise = FixedNoise(5)
    together = noise([4, 9, 2], SHAPE)
    for place, sample_id in enumerate((4, 9, 2)):
        assert torch.equal(FixedNoise(5)([sample_id], SHAPE)[0], together[place])


@pytest.mark.parametrize("other", [{"seed": 6}, {"sample_id": 5}, {"key": 1}])
def test_seed_id_and_augmentation_each_give_other_noise(other):
    one = FixedNoise(5)([4], SHAPE)
    two = FixedNoise(other.get("seed", 5))([other.get("sample_id", 4)], SHAPE, [other.get("key", 0)])
    assert torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].abs() < 0.25


def test_the_noise_never_changes():
    """Released models depend on it: pinned once, on bits that NumPy promises to keep."""
    noise = FixedNoise(1)([2], (2, 3), [3])
    expected = torch.tensor(PINNED).view(1, 2, 3)
    torch.testing.assert_close(noise, expected, atol=1e-6, rtol=0)


PINNED = [-0.3528263, 0.1687528, 0.7900952, -0.0812352, -1.5588894, -0.1612234]


def test_it_is_normal():
    noise = FixedNoise()(range(50), (4, 32, 32)).flatten().sort().values.double()
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    # Kolmogorov and Smirnov: the largest distance of the two distribution functions.
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert (torch.special.ndtr(noise) - steps).abs().max() < 1.63 / len(noise) ** 0.5


def test_ids_that_are_equal_in_32_bits_differ():
    a, b = FixedNoise()([7, 7 + 2**32], SHAPE)
    assert not torch.equal(a, b)


def test_odd_numbers_of_elements():
    whole = FixedNoise()([3], (7,))
    assert whole.shape == (1, 7) and torch.isfinite(whole).all()


def test_legacy_noise_is_of_the_id_alone():
    noise = FixedNoise(mode="legacy")([3, 8], SHAPE)
    generator = np.random.RandomState(8)
    generator.binomial(1, 1.0, size=SHAPE), generator.rand()
    torch.testing.assert_close(noise[1].numpy(), generator.normal(size=SHAPE).astype(np.float32))


@pytest.mark.parametrize("mode", ["counter", "legacy"])
def test_no_global_random_state_is_read_or_changed(mode):
    torch.manual_seed(0), np.random.seed(0)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = FixedNoise(mode=mode)([3], SHAPE)
    assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
    torch.manual_seed(1), np.random.seed(1)
    assert torch.equal(first, FixedNoise(mode=mode)([3], SHAPE))


class NoisyData(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, place):
        return hashlib.sha256(FixedNoise(2)([place[0]], SHAPE).numpy().tobytes()).hexdigest(), place


def visits(batches, num_workers=0, rank=0, world_size=1, batch_size=4):
    sampler = VisitSampler(6, batch_size, batches, 0, rank, world_size)
    found = {}
    for digests, (indices, positions) in DataLoader(NoisyData(), batch_sampler=sampler, num_workers=num_workers):
        found |= {position: (index, d) for d, index, position in zip(digests, indices.tolist(), positions.tolist())}
    return found


def test_workers_processes_and_resumes_see_the_same_noise():
    whole = visits(range(6))
    assert visits(range(6), num_workers=2) == whole
    two = visits(range(6), rank=0, world_size=2, batch_size=2) | visits(range(6), rank=1, world_size=2, batch_size=2)
    assert two == whole
    assert visits(range(2)) | visits(range(2, 6)) == whole


def test_every_picture_is_visited_once_per_pass():
    whole = visits(range(6))
    passes = [[whole[p][0] for p in range(start, start + 6)] for start in range(0, 24, 6)]
    assert all(sorted(one) == list(range(6)) for one in passes) and passes[0] != passes[1]


def test_draws_of_a_visit_depend_on_its_position_alone():
    draws = VisitDraws(3)
    assert torch.equal(draws.noise([5, 9], SHAPE)[1], VisitDraws(3).noise([9], SHAPE)[0])
    uniform = draws.uniform(range(2000))
    assert 0 <= uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert not torch.equal(draws.noise([5], SHAPE), FixedNoise(3)([5], SHAPE))


def test_fresh_noise_warns_and_changes(caplog):
    noise = FixedNoise(mode="fresh")
    assert "draws other noise at every visit" in caplog.text
    assert not torch.equal(noise([1], SHAPE), noise([1], SHAPE))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "random"}, "`mode` has to be one of"),
        ({"seed": -1}, "`seed` has to be an integer"),
        ({"seed": 1.5}, "`seed` has to be an integer"),
        ({"seed": 2**64}, "`seed` has to be an integer"),
        ({"seed": 1, "mode": "legacy"}, "leave it 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FixedNoise(**settings)


@pytest.mark.parametrize(
    ("mode", "ids", "keys", "message"),
    [
        ("counter", ["a"], None, "`sample_ids` has to hold integers"),
        ("counter", [True], None, "`sample_ids` has to hold integers"),
        ("counter", [1], [0, 1], "one augmentation key per sample"),
        ("counter", [1], [-1], "`augmentation_keys` has to hold integers"),
        ("legacy", [2**32], None, "`sample_ids` has to hold integers"),
        ("legacy", [1], [1], "unknown to the mode 'legacy'"),
    ],
)
def test_bad_ids_are_refused(mode, ids, keys, message):
    with pytest.raises(ValueError, match=message):
        FixedNoise(mode=mode)(ids, SHAPE, keys)

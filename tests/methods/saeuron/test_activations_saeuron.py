# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from diffusers_ext.methods.saeuron.activations_saeuron import ActivationStream
from diffusers_ext.testing import tiny_stable_diffusion


POINTS = [{"module": "up_blocks.0.attentions.1"}]
SAMPLER = {"num_inference_steps": 2, "guidance_scale": 4.0, "pipeline_batch_size": 2}
DEFAULTS = {"batch_size": 24, "buffer_size": 100, **SAMPLER}


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def stream(pipe):
    def make(**changes):
        points = changes.pop("points", POINTS)
        prompts = changes.pop("prompts", ["a cat", "a dog"])
        return ActivationStream(pipe, points, prompts, **{**DEFAULTS, **changes})

    return make


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class TestRounds:
    def test_buffer_holds_whole_batches(self, stream):
        (tokens,) = stream().round(0)
        assert tokens.shape[0] == 96 and tokens.dtype == torch.float32

    def test_round_follows_from_its_number(self, stream):
        one = stream()
        assert same(one.round(1), stream().round(1)) and not same(one.round(0), one.round(1))

    def test_processes_draw_different_pictures(self, stream):
        assert not same(stream(world_size=2).round(0), stream(rank=1, world_size=2).round(0))

    def test_hook_points_share_their_passes(self, stream):
        both = stream(points=[*POINTS, {"module": "up_blocks.0.attentions.0"}]).round(0)
        assert same(both[:1], stream().round(0)) and len(both[1]) == len(both[0])

    def test_order_is_a_permutation_that_changes_with_the_pass(self, stream):
        one = stream()
        first, second = one.order(0, 0), one.order(0, 1)
        assert first.sort().values.equal(torch.arange(96)) and not first.equal(second)

    def test_global_generator_is_left_alone(self, stream):
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        stream().round(0)
        assert torch.rand(1).equal(expected)


class TestCache:
    def test_full_cache_gives_what_an_empty_one_gave(self, stream, tmp_path):
        drawn = stream(cache_dir=tmp_path).round(0)
        assert same(drawn, stream(cache_dir=tmp_path).round(0))

    def test_cached_round_is_the_drawn_one_in_bfloat16(self, stream, tmp_path):
        (cached,), (drawn,) = stream(cache_dir=tmp_path).round(0), stream().round(0)
        assert cached.equal(drawn.bfloat16().float())

    def test_full_cache_needs_no_sampler(self, stream, tmp_path, pipe):
        stream(cache_dir=tmp_path).round(0)
        again = stream(cache_dir=tmp_path)
        again.pipe = None
        assert len(again.round(0)[0]) == 96

    @pytest.mark.parametrize(
        "change", [{"seed": 1}, {"guidance_scale": 2.0}, {"prompts": ["a cat"]}, {"batch_size": 50}]
    )
    def test_cache_of_other_settings(self, stream, tmp_path, change):
        stream(cache_dir=tmp_path)
        name = {"batch_size": "tokens_per_round"}.get(*change, *change)
        with pytest.raises(ValueError, match=rf"recorded with other settings \({name}\)"):
            stream(cache_dir=tmp_path, **change)

    def test_no_partial_file_is_left(self, stream, tmp_path):
        stream(cache_dir=tmp_path).round(0)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["activations.json", "process-0-round-00000.safetensors"]
        assert json.loads((tmp_path / "activations.json").read_text())["tokens_per_round"] == 96


class TestBadInput:
    @pytest.mark.parametrize(
        "change, message",
        [
            ({"prompts": []}, "`prompts` is empty"),
            ({"buffer_size": 23}, "cannot give batches of 24"),
            ({"batch_size": 0}, "cannot give batches of 0"),
            ({"points": [{"module": "up_blocks.7"}]}, "has no module 'up_blocks.7'"),
        ],
    )
    def test_construction(self, stream, change, message):
        with pytest.raises(ValueError, match=message):
            stream(**change)

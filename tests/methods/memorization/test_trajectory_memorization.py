# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from diffusers_ext import MemorizationDetector
from diffusers_ext.methods.memorization.attention_memorization import cross_attention_layers
from diffusers_ext.methods.memorization.trajectory_memorization import BrightEndingMetric
from diffusers_ext.testing import tiny_stable_diffusion


WHOLE = ("bright_ending", "attention_entropy", "tiled_l2")
FAST = {"num_images": 2, "num_inference_steps": 3}


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def score(pipe, metric, prompt=("a cat", "a long dog"), **kwargs):
    steps = 3 if metric in WHOLE else 1
    settings = {**FAST, "steps": steps, **kwargs}
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompt) * 2)]
    return MemorizationDetector(metric=metric, **settings).score(pipe, list(prompt), generator=generators)


@pytest.mark.parametrize("metric", [*WHOLE, "layer_entropy"])
class TestEveryMetric:
    def test_one_value_per_seed(self, pipe, metric):
        report = score(pipe, metric)
        assert report.scores.shape == (2, 2) and report.scores.isfinite().all() and report.metric == metric

    def test_batches_of_prompts_do_not_matter(self, pipe, metric):
        torch.testing.assert_close(
            score(pipe, metric, batch_size=2).scores, score(pipe, metric).scores, atol=1e-4, rtol=1e-3
        )

    def test_processors_are_left_as_they_were(self, pipe, metric):
        before = pipe.unet.attn_processors
        score(pipe, metric)
        assert pipe.unet.attn_processors == before


def test_pictures_of_tiled_l2_are_those_of_the_pipeline(pipe):
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    images = pipe(
        "a cat", num_images_per_prompt=2, num_inference_steps=3, guidance_scale=7.5, generator=generators,
        output_type="pt",
    ).images  # fmt: skip
    report = score(pipe, "tiled_l2", ("a cat",), metric_kwargs={"tile": 16})
    tiles = (images[0] - images[1]).unfold(1, 16, 16).unfold(2, 16, 16).square().sum((0, 3, 4)).sqrt()
    torch.testing.assert_close(report.scores[0], tiles.max().expand(2), atol=1e-3, rtol=1e-3)


def test_small_distances_are_memorised(pipe):
    report = score(pipe, "tiled_l2", threshold=1e9)
    assert report.is_memorized.all()


def test_mask_is_the_attention_to_each_prompts_end_token():
    metric = BrightEndingMetric()
    metric.prompt_lengths = [3, 4]
    attention = torch.rand(4, 2, 16, 6, generator=torch.Generator().manual_seed(0))
    mask = metric._mask([attention], (4, 4))
    conditional = attention[2:].mean(1)
    expected = torch.stack([conditional[0, :, 2], conditional[1, :, 3]]).view(2, 1, 4, 4)
    torch.testing.assert_close(mask, expected)


class TestBadInput:
    @pytest.mark.parametrize("metric", WHOLE)
    def test_one_step_of_a_whole_generation(self, metric):
        with pytest.raises(ValueError, match="at the end of a generation only"):
            MemorizationDetector(metric=metric)

    @pytest.mark.parametrize("metric", ["bright_ending", "attention_entropy"])
    def test_attention_without_words(self, pipe, metric):
        embeds = torch.zeros(1, 16, 16)
        with pytest.raises(ValueError, match="end token"):
            MemorizationDetector(metric=metric, steps=3, **FAST).score(
                pipe, prompt_embeds=embeds, negative_prompt_embeds=embeds
            )

    def test_tiles_that_do_not_divide(self, pipe):
        with pytest.raises(ValueError, match="do not divide pictures of 32x32"):
            score(pipe, "tiled_l2", metric_kwargs={"tile": 12})

    def test_unknown_layer(self, pipe):
        with pytest.raises(ValueError, match=f"there are {next(iter(cross_attention_layers(pipe.unet)))}"):
            score(pipe, "layer_entropy", metric_kwargs={"layer": "mid"})

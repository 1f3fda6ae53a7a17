# SPDX-License-Identifier: Apache-2.0

from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, HeunDiscreteScheduler
from official_memorization import fixture, official_scheduler, official_unet
from peft import LoraConfig

from diffusers_ext import MemorizationDetector, MemorizationThreshold, calibrate_memorization
from diffusers_ext.methods.memorization import detector_memorization
from diffusers_ext.testing import tiny_stable_diffusion


FAST = {"num_images": 2, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_stable_diffusion()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generators(count, first=0):
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


@pytest.mark.parametrize("kind", ["eps", "v"])
class TestOfficialRuns:
    def score(self, kind, **kwargs):
        tensors = fixture(f"detect_{kind}")
        detector = MemorizationDetector(num_images=3, **kwargs)
        return tensors, detector.score(
            (official_unet(kind), official_scheduler(kind)),
            prompt_embeds=tensors["prompt_embeds"],
            negative_prompt_embeds=tensors["negative_prompt_embeds"],
            latents=tensors["step0.latents"],
        )

    def test_sharpness_along_the_trajectory(self, kind):
        tensors, report = self.score(kind, steps=3, backend="jvp")
        assert report.timesteps.tolist() == [tensors[f"step{s}.timestep"].item() for s in range(3)]
        for step in range(3):
            # Later states carry the rounding of the earlier ones.
            torch.testing.assert_close(
                report.per_step[step, 0].double(), tensors[f"step{step}.metric_f64"], atol=0, rtol=2e-3
            )
        torch.testing.assert_close(report.scores, report.per_step.mean(0))
        torch.testing.assert_close(report.mean, report.scores.mean(1))

    def test_guidance_norm(self, kind):
        tensors, report = self.score(kind, metric="guidance_norm")
        torch.testing.assert_close(report.scores[0].double(), tensors["step0.wen_eps_norm_f64"], atol=0, rtol=1e-3)
        tensors, report = self.score(kind, metric="guidance_norm", metric_kwargs={"divide": True})
        torch.testing.assert_close(report.scores[0].double(), tensors["step0.wen_score_norm_f64"], atol=0, rtol=1e-3)


class TestOnAPipeline:
    def test_prompts_do_not_depend_on_each_other(self, pipe):
        detector = MemorizationDetector(**FAST)
        both = detector.score(pipe, ["a cat", "a dog"], generator=generators(4)).scores
        alone = detector.score(pipe, "a dog", generator=generators(2, first=2)).scores
        torch.testing.assert_close(alone[0], both[1], atol=1e-6, rtol=1e-3)

    def test_batch_size_does_not_matter(self, pipe):
        one, all_ = (
            MemorizationDetector(**FAST, batch_size=n).score(pipe, ["a cat", "a dog"], generator=generators(4)).scores
            for n in (1, None)
        )
        torch.testing.assert_close(one, all_, atol=1e-6, rtol=1e-3)

    def test_same_generator_same_scores(self, pipe):
        detector = MemorizationDetector(**FAST)
        one, two = (detector.score(pipe, "a cat", generator=generators(2)).scores for _ in range(2))
        assert one.equal(two)

    def test_backends_agree(self, pipe):
        detectors = (MemorizationDetector(**FAST, backend=backend) for backend in ("jvp", "fd"))
        jvp, fd = (detector.score(pipe, "a cat", generator=generators(2)) for detector in detectors)
        torch.testing.assert_close(jvp.scores, fd.scores, atol=1e-6, rtol=2e-2)
        assert (jvp.key["backend"], fd.key["backend"]) == ("jvp", "fd")

    @pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, HeunDiscreteScheduler])
    def test_schedulers_that_count_in_sigmas_start_alike(self, pipe, scheduler):
        latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        scheduler = scheduler.from_config(pipe.scheduler.config, timestep_spacing="leading")
        other = type(pipe)(**{**pipe.components, "scheduler": scheduler})
        detector = MemorizationDetector(**FAST, steps=2)
        ours, theirs = (detector.score(p, "a cat", latents=latents) for p in (pipe, other))
        assert theirs.timesteps[0] == ours.timesteps[0]
        torch.testing.assert_close(theirs.per_step[0], ours.per_step[0], atol=1e-5, rtol=1e-2)

    def test_pipeline_and_scheduler_are_left_as_they_were(self, pipe):
        before = dict(pipe.scheduler.__dict__), {n: p.clone() for n, p in pipe.unet.named_parameters()}
        MemorizationDetector(**FAST, steps=2).score(pipe, "a cat")
        assert dict(pipe.scheduler.__dict__) == before[0]
        assert all(p.equal(before[1][n]) and p.grad is None for n, p in pipe.unet.named_parameters())

    def test_embeddings_give_what_the_prompt_gives(self, pipe):
        positive, negative = pipe.encode_prompt("a cat", "cpu", 1, True)
        detector = MemorizationDetector(**FAST)
        embeds = {"prompt_embeds": positive, "negative_prompt_embeds": negative}
        assert detector.score(pipe, **embeds, generator=generators(2)).scores.equal(
            detector.score(pipe, "a cat", generator=generators(2)).scores
        )

    def test_negative_prompt_moves_the_score(self, pipe):
        detector = MemorizationDetector(**FAST)
        plain = detector.score(pipe, "a cat", generator=generators(2)).scores
        assert not detector.score(pipe, "a cat", "a dog", generator=generators(2)).scores.equal(plain)
        assert detector.score(pipe, "a cat", "a cat", generator=generators(2)).scores.eq(0).all()

    def test_half_precision_scores_in_float32(self, pipe):
        half = tiny_stable_diffusion().to(torch.bfloat16)
        assert MemorizationDetector(**FAST, backend="fd").score(half, "a cat").scores.dtype == torch.float32


class TestThreshold:
    def report(self, pipe, threshold=None):
        detector = MemorizationDetector(**FAST, threshold=threshold)
        return detector.score(pipe, ["a cat", "a dog"], generator=generators(4))

    def test_verdict_is_on_the_mean(self, pipe):
        mean = self.report(pipe).mean
        middle = mean.mean().item()
        assert self.report(pipe, middle).is_memorized.tolist() == (mean > middle).tolist()

    def test_round_trip(self, pipe, tmp_path):
        made = calibrate_memorization([1.0, 2.0, 3.0], self.report(pipe).key, memorized_scores=[4.0, 2.5])
        made.save_pretrained(tmp_path)
        assert MemorizationThreshold.from_pretrained(tmp_path) == made
        assert [path.name for path in tmp_path.iterdir()] == ["memorization_threshold.json"]

    def test_threshold_for_something_else_names_its_fields(self, pipe):
        made = calibrate_memorization([0.0], self.report(pipe).key)
        assert made.differing_fields(self.report(pipe).key) == []
        made.key["num_images"] = 3
        made.key["resolution"] = [64, 64]
        assert made.differing_fields(self.report(pipe).key) == ["resolution", "num_images"]

    @pytest.mark.parametrize(
        "changes, field",
        [
            ({"num_inference_steps": 2}, "timesteps"),
            ({"steps": 2}, "timesteps"),
            ({"steps": 4, "guidance_scale": 2.0}, "guidance_scale"),
            ({"space": "x0"}, "space"),
            ({"metric_kwargs": {"displacement": 0.5}}, "metric_kwargs"),
            ({"backend": "fd"}, "backend"),
            ({"metric": "guidance_norm"}, "metric"),
        ],
    )
    def test_whatever_moves_a_score_is_in_the_key(self, pipe, changes, field):
        made = calibrate_memorization([0.0], self.report(pipe).key)
        other = MemorizationDetector(**{**FAST, **changes}).score(pipe, "a cat")
        assert field in made.differing_fields(other.key)

    def test_guidance_is_no_part_of_a_single_step(self, pipe):
        made = calibrate_memorization([0.0], self.report(pipe).key)
        other = MemorizationDetector(**FAST, guidance_scale=2.0).score(pipe, "a cat")
        assert made.differing_fields(other.key) == []

    def test_an_adapter_is_in_the_key(self):
        pipe = tiny_stable_diffusion()
        before = MemorizationDetector(**FAST).score(pipe, "a cat").key
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="mine")
        after = MemorizationDetector(**FAST).score(pipe, "a cat").key
        assert (before["adapters"], after["adapters"]) == ([], ["mine"])

    def test_a_threshold_for_something_else_warns_once_and_names_it(self, pipe, monkeypatch):
        said = []
        monkeypatch.setattr(detector_memorization.logger, "warning", said.append)
        made = calibrate_memorization([0.0], self.report(pipe).key)
        self.report(pipe, made)
        assert said == []
        made.key["num_images"] = 3
        self.report(pipe, made)
        assert len(said) == 1 and "num_images: 3, here 2" in said[0]

    def test_key_survives_its_file(self, pipe, tmp_path):
        key = MemorizationDetector(**FAST, metric_kwargs={"displacement": 0.5}).score(pipe, "a cat").key
        calibrate_memorization([0.0], key).save_pretrained(tmp_path)
        assert MemorizationThreshold.from_pretrained(tmp_path).differing_fields(key) == []

    @pytest.mark.parametrize("fpr", [0.01, 0.1, 0.5])
    def test_share_of_clean_prompts_above_is_at_most_the_rate(self, fpr):
        clean = torch.randn(200, generator=torch.Generator().manual_seed(0))
        above = calibrate_memorization(clean, {}, fpr).exceeded(clean)
        assert above.float().mean() <= fpr and above.sum() == int(fpr * 200)

    def test_distances_are_memorised_when_small(self):
        made = calibrate_memorization([5.0, 6.0], {}, memorized_scores=[1.0], lower_is_memorized=True)
        assert made.exceeded(torch.tensor([1.0, 5.5])).tolist() == [True, False] and made.figures["auc"] == 1.0

    def test_threshold_never_depends_on_memorised_scores(self):
        with_scores = calibrate_memorization([1.0, 2.0], {}, 0.01, [9.0])
        assert calibrate_memorization([1.0, 2.0], {}).value == with_scores.value


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"metric": "sharpnes"}, "Did you mean 'sharpness'"),
            ({"backend": "autograd"}, "one of auto, jvp, fd"),
            ({"guidance_scale": 1.0}, "has to be above 1"),
            ({"steps": 0}, "`steps` has to be a positive integer"),
            ({"steps": 51}, "at most `num_inference_steps`"),
            ({"num_images": 0}, "`num_images` has to be a positive integer"),
            ({"num_images": 2.0}, "`num_images` has to be a positive integer"),
            ({"batch_size": -1}, "`batch_size` has to be a positive integer"),
            ({"batch_size": 0}, "`batch_size` has to be a positive integer"),
            ({"steps": True}, "`steps` has to be a positive integer"),
            ({"num_inference_steps": 50.0}, "`num_inference_steps` has to be a positive integer"),
            ({"threshold": float("nan")}, "`threshold` has to be finite"),
            ({"metric_kwargs": {"backend": "fd"}}, "Pass `backend` to the detector"),
        ],
    )
    def test_construction(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            MemorizationDetector(**arguments)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({}, "Pass `prompt` or `prompt_embeds`"),
            ({"prompt": "a", "prompt_embeds": torch.zeros(1, 16, 16)}, "not both"),
            ({"prompt_embeds": torch.zeros(1, 16, 16)}, "need `negative_prompt_embeds`"),
            ({"prompt": "a", "latents": torch.zeros(3, 4, 16, 16)}, "a row per prompt and picture, 2, but has 3"),
            ({"prompt": "a", "latents": torch.zeros(2, 3, 16, 16)}, "has to have 4 channels"),
            ({"prompt": "a", "latents": torch.zeros(2, 4, 16, 16).long()}, "floating-point values but is torch.int64"),
            ({"prompt": "a", "latents": torch.full((2, 4, 16, 16), float("nan"))}, "finite floating-point"),
            ({"prompt": "a", "generator": generators(3)}, "one generator per sample, 2, but got 3"),
            ({"prompt": []}, "a text or a list of texts, at least one"),
            ({"prompt": 3}, "a text or a list of texts, at least one"),
            ({"prompt": "a", "height": 64, "latents": torch.zeros(2, 4, 16, 16)}, "`height` and `width` ask for"),
        ],
    )
    def test_score(self, pipe, arguments, message):
        with pytest.raises(ValueError, match=message):
            MemorizationDetector(**FAST).score(pipe, **arguments)

    def test_bare_model_without_latents(self, pipe):
        embeds = torch.zeros(1, 16, 16)
        with pytest.raises(ValueError, match="needs `latents`"):
            MemorizationDetector(**FAST).score(
                (pipe.unet, pipe.scheduler), prompt_embeds=embeds, negative_prompt_embeds=embeds
            )

    def test_pair_that_is_none(self, pipe):
        with pytest.raises(ValueError, match="pair of denoiser and scheduler but has 1"):
            MemorizationDetector(**FAST).score((pipe.unet,), "a cat")

    def test_embeddings_alone_for_a_model_that_takes_more(self):
        config = {"pooled_projection_dim": 6, "in_channels": 4}
        bare = SimpleNamespace(config=config), DDIMScheduler()
        embeds = torch.zeros(1, 3, 8)
        with pytest.raises(ValueError, match="takes more than prompt embeddings"):
            MemorizationDetector(**FAST).score(bare, prompt_embeds=embeds, negative_prompt_embeds=embeds)

    @pytest.mark.parametrize("metric", ["sharpness", "guidance_norm"])
    def test_where_nothing_but_noise_is_left(self, metric):
        pipe = tiny_stable_diffusion()
        pipe.scheduler = DDIMScheduler.from_config(
            pipe.scheduler.config,
            rescale_betas_zero_snr=True,
            prediction_type="v_prediction",
            timestep_spacing="trailing",
        )
        with pytest.raises(ValueError, match="space='x0'"):
            MemorizationDetector(metric, **FAST).score(pipe, "a cat")
        assert MemorizationDetector(metric, space="x0", **FAST).score(pipe, "a cat").scores.gt(0).all()

    def test_bare_model_with_words(self, pipe):
        with pytest.raises(ValueError, match="bare denoiser needs `prompt_embeds`"):
            MemorizationDetector(**FAST).score((pipe.unet, pipe.scheduler), "a cat")

    def test_model_that_overflows(self):
        broken = tiny_stable_diffusion()
        with torch.no_grad():
            broken.unet.conv_out.bias.fill_(float("inf"))
        with pytest.raises(ValueError, match="is not finite at timestep"):
            MemorizationDetector(**FAST).score(broken, "a cat")

    @pytest.mark.parametrize("content", ["{", '{"value": 1}', '{"value": NaN, "fpr": 0.1, "key": {}, "num_clean": 1}'])
    def test_damaged_threshold(self, tmp_path, content):
        (tmp_path / "memorization_threshold.json").write_text(content)
        with pytest.raises(ValueError, match="is no threshold"):
            MemorizationThreshold.from_pretrained(tmp_path)

    def test_folder_without_threshold(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="has no memorization_threshold.json"):
            MemorizationThreshold.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        "scores, fpr, message",
        [([], 0.01, "finite scores"), ([float("inf")], 0.01, "finite scores"), ([1.0], 1.0, r"in \(0, 1\)")],
    )
    def test_calibration(self, scores, fpr, message):
        with pytest.raises(ValueError, match=message):
            calibrate_memorization(scores, {}, fpr)

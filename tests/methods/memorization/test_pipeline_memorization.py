# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from diffusers import EulerAncestralDiscreteScheduler, HeunDiscreteScheduler, StableDiffusionPipeline

from diffusers_ext import MemorizationDetector, MemorizationStableDiffusionPipeline, calibrate_memorization
from diffusers_ext.methods.memorization import detector_memorization
from diffusers_ext.methods.memorization.mitigations_memorization import (
    MITIGATIONS,
    Mitigation,
    make_mitigations,
    mitigation_names,
)
from diffusers_ext.testing import tiny_stable_diffusion


CALL = {"num_inference_steps": 3, "output_type": "np", "guidance_scale": 5.0}
FAST = {
    "sail": {"max_steps": 1},
    "prompt_embeds": {"max_steps": 1},
    "initial_noise_per_sample": {"max_steps": 2, "target_loss": 0.0},
    "initial_noise": {"num_steps": 1},
    "neurons": {"blocked": [list(range(32)), list(range(16))]},
}


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_stable_diffusion(MemorizationStableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def stock(pipe):
    stock = StableDiffusionPipeline(**pipe.components, requires_safety_checker=False)
    stock.set_progress_bar_config(disable=True)
    return stock


def generators(count, first=0):
    return [torch.Generator().manual_seed(first + i) for i in range(count)]


def draw(pipe, prompt="a cat", count=1, **kwargs):
    return pipe(prompt, generator=generators(count), **{**CALL, **kwargs})


def same(one, other):
    return np.array_equal(one.images, other.images)


class TestStockPictures:
    def test_off(self, pipe, stock):
        assert same(draw(pipe), draw(stock))

    @pytest.mark.parametrize("prompt, extra", [("a cat", {}), (["a", "b"], {"num_images_per_prompt": 2})])
    def test_detection_changes_no_picture(self, pipe, stock, prompt, extra):
        count = 1 if isinstance(prompt, str) else 4
        found = draw(pipe, prompt, count, memorization="detect", **extra)
        assert same(found, draw(stock, prompt, count, **extra))
        assert len(found.memorization.scores) == count and not any(found.memorization.flagged)

    def test_threshold_out_of_reach(self, pipe, stock):
        found = draw(pipe, ["a", "b"], 2, memorization="auto", memorization_threshold=1e9)
        assert same(found, draw(stock, ["a", "b"], 2))

    def test_one_generator_for_all(self, pipe, stock):
        call = {**CALL, "prompt": ["a", "b"]}
        ours = pipe(**call, generator=torch.Generator().manual_seed(5), memorization="detect")
        assert same(ours, stock(**call, generator=torch.Generator().manual_seed(5)))

    @pytest.mark.parametrize("scheduler", [HeunDiscreteScheduler, EulerAncestralDiscreteScheduler])
    def test_other_schedulers(self, stock, scheduler):
        scheduler = scheduler.from_config(stock.scheduler.config)
        parts = {**stock.components, "scheduler": scheduler}
        ours = MemorizationStableDiffusionPipeline(**parts, requires_safety_checker=False)
        theirs = StableDiffusionPipeline(**parts, requires_safety_checker=False)
        assert same(draw(ours, memorization="detect"), draw(theirs))

    def test_given_latents_and_embeddings(self, pipe, stock):
        positive, negative = stock.encode_prompt("a cat", "cpu", 1, True)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        call = {**CALL, "latents": latents, "prompt_embeds": positive, "negative_prompt_embeds": negative}
        assert same(pipe(**call, memorization="detect"), stock(**call))

    @pytest.mark.parametrize("name", sorted(MITIGATIONS))
    def test_pictures_that_are_not_flagged(self, pipe, stock, name):
        scores = draw(pipe, ["a", "b"], 2, memorization="detect").memorization.scores
        threshold, flagged = sum(scores) / 2, int(scores[1] > scores[0])
        found = draw(
            pipe,
            ["a", "b"],
            2,
            memorization="auto",
            memorization_threshold=threshold,
            mitigation=name,
            mitigation_kwargs=FAST.get(name),
        )
        expected = draw(stock, ["a", "b"], 2)
        assert found.memorization.flagged == [i == flagged for i in range(2)]
        assert np.array_equal(found.images[1 - flagged], expected.images[1 - flagged])
        assert not np.array_equal(found.images[flagged], expected.images[flagged])
        # And nothing of it is left behind.
        assert same(draw(pipe, ["a", "b"], 2), expected)


class TestSharedGenerator:
    """One generator and a sampler that draws from it at every step: whatever a remedy draws would shift the others."""

    @pytest.mark.parametrize(
        "name, kwargs",
        [("sail", {"max_steps": 1, "sharpness_threshold": 1e-9, "max_rounds": 3}), ("cross_attention", {})],
    )
    def test_pictures_that_are_not_flagged(self, stock, name, kwargs):
        scheduler = EulerAncestralDiscreteScheduler.from_config(stock.scheduler.config)
        parts = {**stock.components, "scheduler": scheduler}
        ours = MemorizationStableDiffusionPipeline(**parts, requires_safety_checker=False)
        theirs = StableDiffusionPipeline(**parts, requires_safety_checker=False)
        call = {**CALL, "prompt": ["a", "b"]}
        scores = ours(**call, generator=torch.Generator().manual_seed(5), memorization="detect").memorization.scores
        found = ours(
            **call,
            generator=torch.Generator().manual_seed(5),
            memorization="auto",
            memorization_threshold=sum(scores) / 2,
            mitigation=name,
            mitigation_kwargs=kwargs,
        )
        expected = theirs(**call, generator=torch.Generator().manual_seed(5))
        kept = found.memorization.flagged.index(False)
        assert sum(found.memorization.flagged) == 1
        assert np.array_equal(found.images[kept], expected.images[kept])


class TestMitigation:
    def mitigate(self, pipe, prompt="a cat", count=1, **kwargs):
        return draw(pipe, prompt, count, memorization="mitigate", **kwargs)

    def test_sail_lowers_what_it_optimises_and_reports(self, pipe):
        kwargs = {"mitigation_kwargs": {"max_steps": 3}, "detector_kwargs": {"metric": "guidance_norm"}}
        found = self.mitigate(pipe, ["a", "b"], 2, **kwargs).memorization
        assert found.flagged == [True, True] and found.details["updates"] == [3, 3]
        assert all(after < before for after, before in zip(found.scores_after, found.scores))
        assert np.abs(found.norm_drift).max() < 1e-5

    @pytest.mark.parametrize("name", sorted(MITIGATIONS))
    def test_same_generator_same_picture(self, pipe, name):
        one, two = (self.mitigate(pipe, mitigation=name, mitigation_kwargs=FAST.get(name)) for _ in range(2))
        assert same(one, two)

    @pytest.mark.parametrize("name", ["sail", "dynamic_guidance", "cross_attention", "initial_noise"])
    def test_a_batch_is_its_single_runs(self, pipe, name):
        both = self.mitigate(pipe, ["a", "b"], 2, mitigation=name, mitigation_kwargs=FAST.get(name))
        alone = pipe(
            "b", generator=generators(1, 1), memorization="mitigate", mitigation=name,
            mitigation_kwargs=FAST.get(name), **CALL,
        )  # fmt: skip
        np.testing.assert_allclose(alone.images[0], both.images[1], atol=2e-3)

    def test_remedies_that_change_different_things_combine(self, pipe):
        together = self.mitigate(
            pipe,
            mitigation=["dynamic_guidance", "sail", "random_tokens"],
            mitigation_kwargs={"sail": {"max_steps": 1}},
        )
        assert not same(together, self.mitigate(pipe, mitigation_kwargs={"max_steps": 1}))

    def test_embeddings_are_optimised_for_each_prompt(self, pipe):
        kwargs = {"mitigation": "prompt_embeds", "mitigation_kwargs": {"max_steps": 1}}
        both = self.mitigate(pipe, ["a", "b"], 4, num_images_per_prompt=2, **kwargs)
        one = pipe("b", generator=generators(2, 2), memorization="mitigate", num_images_per_prompt=2, **kwargs, **CALL)
        np.testing.assert_allclose(one.images, both.images[2:], atol=2e-3)

    def test_everything_is_taken_off_after_an_error(self, pipe, stock):
        def fail(*args):
            raise RuntimeError("stop")

        expected = draw(stock)
        for name in ("cross_attention", "dynamic_guidance"):
            with pytest.raises(RuntimeError, match="stop"):
                self.mitigate(pipe, mitigation=name, callback_on_step_end=fail)
            assert same(draw(pipe), expected) and not pipe.unet._forward_hooks

    def test_no_parameter_gets_a_gradient(self, pipe):
        self.mitigate(pipe, mitigation_kwargs={"max_steps": 1})
        assert all(parameter.grad is None for parameter in pipe.unet.parameters())

    def test_tuple_ends_with_the_result(self, pipe):
        images, _, found = self.mitigate(pipe, return_dict=False, mitigation_kwargs={"max_steps": 1})
        assert len(images) == 1 and found.flagged == [True]

    def test_callback_sees_every_step(self, pipe):
        seen = []

        def callback(pipe, step, timestep, tensors):
            seen.append(step)
            return tensors

        self.mitigate(pipe, mitigation="dynamic_guidance", callback_on_step_end=callback)
        assert seen == [0, 1, 2]

    def test_threshold_of_another_detector_warns(self, pipe, monkeypatch):
        said = []
        monkeypatch.setattr(detector_memorization.logger, "warning", said.append)
        scored = MemorizationDetector(num_images=1, num_inference_steps=3, guidance_scale=5.0).score(pipe, "a cat")
        fitting = calibrate_memorization([0.0], scored.key)
        draw(pipe, memorization="detect", memorization_threshold=fitting)
        assert said == []
        draw(pipe, memorization="detect", memorization_threshold=fitting, num_inference_steps=2)
        assert len(said) == 1 and "timesteps" in said[0]

    @pytest.mark.parametrize("output_type", ["pil", "pt", "latent"])
    def test_partly_flagged_output_types(self, pipe, stock, output_type):
        scores = draw(pipe, ["a", "b"], 2, memorization="detect").memorization.scores
        found = draw(
            pipe, ["a", "b"], 2, memorization="auto", memorization_threshold=sum(scores) / 2,
            mitigation="cross_attention", output_type=output_type,
        )  # fmt: skip
        expected = draw(stock, ["a", "b"], 2, output_type=output_type).images
        same = [np.array_equal(np.asarray(one), np.asarray(two)) for one, two in zip(found.images, expected)]
        assert same == [not flag for flag in found.memorization.flagged] and sum(same) == 1

    def test_remedy_of_ones_own(self, pipe, stock):
        class Nothing(Mitigation):
            slots = ("latents",)

        assert same(self.mitigate(pipe, mitigation=Nothing()), draw(stock))


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"memorization": "on"}, "one of off, detect, mitigate, auto"),
            ({"memorization": "auto"}, "needs `memorization_threshold`"),
            ({"memorization": "detect", "guidance_scale": 1.0}, "has to be above 1"),
            ({"memorization": "mitigate", "mitigation": "sale"}, "Did you mean 'sail'"),
            ({"memorization": "mitigate", "mitigation": []}, "No mitigation is named"),
            ({"memorization": "mitigate", "mitigation": ["sail", "initial_noise"]}, "both change the latents"),
            (
                {"memorization": "mitigate", "mitigation": ["sail", "random_tokens"], "mitigation_kwargs": {"x": {}}},
                "arguments for 'x'",
            ),
            ({"memorization": "mitigate", "mitigation_kwargs": {"objective": "best"}}, "one of proxy, paper, exact"),
            ({"memorization": "detect", "detector_kwargs": {"metric": "norm"}}, "There is no metric 'norm'"),
            ({"memorization": "detect", "latents": torch.zeros(1, 4, 8, 8)}, r"of shape \(1, 4, 16, 16\)"),
            ({"memorization": "detect", "latents": torch.zeros(1, 4, 16, 16).int()}, "floating-point values"),
            ({"memorization": "detect", "generator": generators(2)}, "one generator per sample, 1, but got 2"),
            ({"memorization": "detect", "ip_adapter_image": object()}, "IP-Adapter images are not supported"),
        ],
    )
    def test_call(self, pipe, arguments, message):
        with pytest.raises(ValueError, match=message):
            pipe(**{**CALL, "prompt": "a cat", **arguments})

    def test_unknown_argument_of_a_remedy(self, pipe):
        with pytest.raises(TypeError, match="unexpected keyword"):
            draw(pipe, memorization="mitigate", mitigation_kwargs={"steps": 3})

    def test_embeddings_of_one_side(self, pipe):
        with pytest.raises(ValueError, match="need `negative_prompt_embeds`"):
            pipe(prompt_embeds=torch.zeros(1, 16, 16), memorization="detect", **CALL)

    @pytest.mark.parametrize("name", ["random_tokens", "cross_attention"])
    def test_remedies_for_words_without_words(self, pipe, name):
        embeds = torch.zeros(1, 16, 16)
        with pytest.raises(ValueError, match="works on words"):
            pipe(
                prompt_embeds=embeds,
                negative_prompt_embeds=embeds + 1,
                memorization="mitigate",
                mitigation=name,
                **CALL,
            )

    def test_names_are_listed(self):
        assert set(mitigation_names()) >= set(MITIGATIONS)
        with pytest.raises(ValueError, match="cross_attention, delayed_guidance"):
            make_mitigations("magic")

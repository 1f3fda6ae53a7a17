# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import pytest
import torch
from official_memorization import CONFIG, fixture, guided, parameters

from diffusers_ext.methods.memorization.curvature_memorization import norms
from diffusers_ext.methods.memorization.embeds_memorization import (
    joint_norm,
    optimize_prompt_embeds,
    token_significance,
)
from diffusers_ext.methods.memorization.guidance_memorization import DynamicGuidance, StaticGuidance, first_minimum
from diffusers_ext.methods.memorization.noise_memorization import adjust_noise, adjust_noise_per_sample
from diffusers_ext.methods.memorization.prompts_memorization import perturb_prompt


class TestPromptEmbeddings:
    tensors, made = fixture("baseline_prompt_optim"), parameters("baseline_prompt_optim")

    def denoiser(self):
        return guided("eps", self.tensors, self.made["num_images"])

    @pytest.mark.parametrize("steps", range(6))
    def test_updates_of_the_published_code(self, steps):
        x, t = self.tensors["latents"], self.tensors["timestep"]
        embeds, taken = optimize_prompt_embeds(self.denoiser(), x, t, max_steps=steps, decay_first_token=True)
        torch.testing.assert_close(embeds, self.tensors[f"embeds_after_{steps}"], atol=1e-4, rtol=0)
        loss = joint_norm(self.denoiser(), embeds, x, t).item()
        assert taken == steps and loss == pytest.approx(self.tensors[f"loss_joint_after_{steps}"].item(), rel=1e-3)
        one = self.denoiser().with_prompt_embeds(embeds.expand(2, -1, -1)).noise_difference(x, t)
        torch.testing.assert_close(norms(one), self.tensors[f"loss_per_sample_after_{steps}"], atol=0, rtol=1e-3)

    def test_stops_at_the_target(self):
        x, t = self.tensors["latents"], self.tensors["timestep"]
        embeds, taken = optimize_prompt_embeds(
            self.denoiser(), x, t, self.made["target_loss"], max_steps=self.made["iters"], decay_first_token=True
        )
        torch.testing.assert_close(embeds, self.tensors["embeds_with_target_loss"], atol=1e-4, rtol=0)
        assert taken < self.made["iters"]

    def test_begin_token_stays_by_default(self):
        embeds, _ = optimize_prompt_embeds(self.denoiser(), self.tensors["latents"], 981, max_steps=2)
        assert embeds[:, 0].equal(self.tensors["prompt_embeds"][:, 0])

    def test_token_significance(self):
        x = self.tensors["latents"]
        mine = token_significance(self.denoiser(), x, 981)
        torch.testing.assert_close(mine, self.tensors["token_significance"], atol=1e-4, rtol=1e-3)
        official = token_significance(self.denoiser(), x, 981, official=True)
        torch.testing.assert_close(official, self.tensors["token_significance_official"], atol=1e-4, rtol=1e-3)


class TestNoise:
    tensors, made = fixture("baseline_init_noise"), parameters("baseline_init_noise")

    @pytest.mark.parametrize("steps", [1, 2])
    def test_whole_batches(self, steps):
        mine = adjust_noise(
            guided("eps", self.tensors, 2), self.tensors["latents"], 981, self.made["gamma"], self.made["rho"], steps
        )
        torch.testing.assert_close(mine, self.tensors[f"batchwise_M{steps}"], atol=1e-4, rtol=0)

    @pytest.mark.parametrize("steps", [1, 5])
    def test_one_by_one(self, steps):
        mine, updates = adjust_noise_per_sample(
            guided("eps", self.tensors, 1), self.tensors["latents"][:1], 981, 0.0, max_steps=steps
        )
        torch.testing.assert_close(mine, self.tensors[f"persample_iters{steps}"], atol=1e-4, rtol=0)
        assert updates.tolist() == [steps]

    def test_samples_do_not_depend_on_each_other(self):
        denoiser, x = guided("eps", self.tensors, 2), self.tensors["latents"]
        both, _ = adjust_noise_per_sample(denoiser, x, 981, 0.0, max_steps=2)
        alone, _ = adjust_noise_per_sample(denoiser.select([1]), x[1:], 981, 0.0, max_steps=2)
        torch.testing.assert_close(alone, both[1:], atol=1e-4, rtol=0)

    def test_noise_below_the_target_stays(self):
        mine, updates = adjust_noise_per_sample(guided("eps", self.tensors, 2), self.tensors["latents"], 981, 1e9)
        assert mine.equal(self.tensors["latents"]) and updates.tolist() == [0, 0]


class TestGuidance:
    tensors, made = fixture("baseline_delayed_guidance"), parameters("baseline_delayed_guidance")

    @pytest.mark.parametrize("case", made["rule_cases"])
    def test_rule(self, case):
        rule = DynamicGuidance()
        rule.reset(1)
        for step, norm in enumerate(case["norms"]):
            rule(step, 0, torch.tensor([float(norm)]), 7.5)
        assert rule.transition.tolist() == [case["transition_index"]]

    def test_samples_have_transitions_of_their_own(self):
        rule = DynamicGuidance()
        rule.reset(2)
        for step, pair in enumerate(zip([9, 8, 7, 8, 9], [5, 6, 7, 8, 9])):
            scales = rule(step, 0, torch.tensor(pair).float(), 7.5)
        assert rule.transition.tolist() == [3, -1] and scales.tolist() == [7.5, 0.0]

    def test_trajectory(self):
        denoiser, x = guided("eps", self.tensors, 1), self.tensors["latents"]
        scheduler, rule = denoiser.scheduler, DynamicGuidance(self.made["pre_guidance"])
        scheduler.set_timesteps(self.made["num_inference_steps"])
        rule.reset(1)
        for step, t in enumerate(scheduler.timesteps):
            unconditional, conditional = denoiser.outputs(x, t)
            norm = norms(conditional - unconditional)
            scale = rule(step, t, norm, self.made["post_guidance"])
            assert scale.item() == self.tensors["guidance"][step]
            assert norm.item() == pytest.approx(self.tensors["norms"][step].item(), rel=2e-3)
            x = scheduler.step(unconditional + scale * (conditional - unconditional), t, x).prev_sample
        assert rule.transition.item() == self.tensors["transition_index"]
        torch.testing.assert_close(x, self.tensors["final_latents"], atol=1e-3, rtol=0)

    def test_static_switch(self):
        rule = StaticGuidance(600, before=-2.0)
        assert [rule(0, t, torch.ones(1), 5.0).item() for t in (981, 601, 600, 1)] == [-2.0, -2.0, 5.0, 5.0]

    @pytest.mark.parametrize(
        "values, expected", [([3, 1, 2, 1, 2], 3), ([4, 3, 1, 2], 2), ([1, 2, 3], 5), ([3, 1, 2, 3], 5)]
    )
    def test_first_minimum_of_a_dry_run(self, values, expected):
        assert first_minimum(values) == expected


class Tokens:
    vocab_size = 49_408

    def decode(self, ids):
        return f"tok{ids[0]}"


class TestPrompts:
    KIND = {"rand_numb_add": "numbers", "rand_word_repeat": "words", "rand_word_add": "tokens"}

    @pytest.mark.parametrize("case", CONFIG["files"]["prompt perturbation (in this file)"]["params"]["cases"])
    def test_published_protocol(self, case):
        mine = perturb_prompt(case["prompt"], self.KIND[case["style"]], case["repeat"], case["seed"], Tokens())
        assert mine == case["result"]

    def test_global_generators_are_left_alone(self):
        random.seed(1), np.random.seed(1)
        expected = random.random(), np.random.rand()
        random.seed(1), np.random.seed(1)
        perturb_prompt("a cat", "numbers")
        assert (random.random(), np.random.rand()) == expected

    def test_words_of_the_prompt_stay_in_order(self):
        words = perturb_prompt("one two three", "numbers", 8).split()
        assert [word for word in words if not word.isdigit()] == ["one", "two", "three"] and len(words) == 11

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (("a", "letters"), "one of tokens, numbers, words"),
            (("a", "numbers", -1), "at least 0"),
            (("", "words"), "no words to repeat"),
            (("a", "tokens"), "need the `tokenizer`"),
        ],
    )
    def test_bad_input(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            perturb_prompt(*arguments)

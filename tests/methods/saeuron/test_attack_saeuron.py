# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from lab_saeuron import lab_pipeline, lab_sae, random_edit

from diffusers_ext import SAeUronConfig, apply_saeuron
from diffusers_ext.methods.saeuron.attack_saeuron import (
    StraightThroughSample,
    adversarial_slots,
    attack_prompt,
    insert_tokens,
    project_onto_simplex,
)


class TestGolden:
    def test_projection(self, golden):
        fixture = golden("saeuron", "attack")
        projected = project_onto_simplex(fixture["proj.in"])
        torch.testing.assert_close(
            projected, fixture["proj.out"], atol=fixture.info["tolerance"]["proj"]["atol"], rtol=0
        )

    @pytest.mark.parametrize("position, name", [("prefix", "prefix_k"), ("suffix", "suffix_k"), ("middle", "mid_k")])
    def test_insertion(self, golden, position, name):
        fixture = golden("saeuron", "attack")
        slots = adversarial_slots(fixture.info["prompt_tokens"], fixture.info["k"], 77, position)
        assert torch.equal(insert_tokens(fixture["ids.in"], fixture["ids.adv"], slots), fixture[f"ids.{name}"])

    def test_straight_through_gradient(self, golden):
        fixture = golden("saeuron", "attack")
        probabilities = fixture["proj.out"].clamp_min(0).requires_grad_()
        StraightThroughSample.apply(probabilities).backward(fixture["ste.grad_out"])
        torch.testing.assert_close(
            probabilities.grad, fixture["ste.grad_in"], atol=fixture.info["tolerance"]["ste"]["atol"], rtol=0
        )

    def test_timesteps(self, golden):
        fixture = golden("saeuron", "attack")
        assert list(range(10, 1000, 20)) == fixture.info["sampled_t"]


def test_projection_is_the_nearest_point_of_the_simplex():
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    projected = project_onto_simplex(x)
    torch.testing.assert_close(projected.sum(-1), torch.ones(5, dtype=torch.float64))
    assert (projected >= 0).all()
    others = torch.rand(1000, 1, 7, generator=generator, dtype=torch.float64)
    others = others / others.sum(-1, keepdim=True)
    # Nearest: no direction towards another point of the simplex makes an acute angle with what was cut off.
    assert ((others - projected) * (x - projected)).sum(-1).max() < 1e-12


def test_drawn_tokens_are_one_hot_and_follow_the_generator():
    probabilities = torch.rand(1, 4, 30, generator=torch.Generator().manual_seed(0))
    draws = [StraightThroughSample.apply(probabilities, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0].sum(-1), torch.ones(1, 4)) and set(draws[0].unique().tolist()) == {0.0, 1.0}
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("position, start", [("prefix", 1), ("suffix", 4), ("middle", 2)])
def test_slots(position, start):
    assert adversarial_slots(3, 2, 16, position) == slice(start, start + 2)


def test_tokens_that_do_not_fit():
    with pytest.raises(ValueError, match="2 adversarial and 13 prompt tokens do not fit into 16"):
        adversarial_slots(13, 2, 16)
    with pytest.raises(ValueError, match="at least one adversarial token"):
        adversarial_slots(3, 0, 16)
    with pytest.raises(ValueError, match="one of prefix, suffix, middle but is 'end'"):
        adversarial_slots(3, 2, 16, "end")


def test_attack_passes_through_the_intervention_and_leaves_the_model_alone():
    pipe, sae = lab_pipeline(), lab_sae()
    apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[random_edit(sae)]))
    weights = {name: tensor.clone() for name, tensor in pipe.text_encoder.state_dict().items()}
    latents = torch.randn(1, pipe.unet.config.in_channels, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    attack = attack_prompt(
        pipe, "cat", latents, num_tokens=3, timesteps=(10, 30), num_optimization_steps=2, generator=generator
    )
    candidates = list(attack)
    assert [candidate.timestep for candidate in candidates] == [10, 30]
    ids = pipe.tokenizer("cat", padding="max_length", return_tensors="pt").input_ids
    for candidate in candidates:
        assert candidate.input_ids.shape == ids.shape and torch.equal(candidate.input_ids[:, 4:], ids[:, 1:-3])
        assert 0 < candidate.loss < 10
    # Gradients reach what the text encoder is given: without them the tokens would stay the first of the vocabulary.
    assert len({*candidates[0].input_ids[0, 1:4].tolist(), *candidates[1].input_ids[0, 1:4].tolist()}) > 1
    assert all(torch.equal(weights[name], tensor) for name, tensor in pipe.text_encoder.state_dict().items())
    assert all(p.grad is None for p in pipe.unet.parameters())

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from official_memorization import fixture, guided, official_scheduler, official_unet

from diffusers_ext.methods.memorization.denoising_memorization import GuidedDenoiser


class Constant(torch.nn.Module):
    """Predicts one tensor for the prompt and another one without it."""

    config = {}

    def __init__(self, unconditional, conditional):
        super().__init__()
        self.output = torch.cat([unconditional, conditional])

    def forward(self, sample, timestep, encoder_hidden_states, return_dict):
        return (self.output,)


@pytest.mark.parametrize("kind", ["eps", "v"])
class TestOfficialRuns:
    def test_noise_predictions(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3)
        for step in range(3):
            predicted = denoiser.predict(tensors[f"step{step}.latents"], tensors[f"step{step}.timestep"])
            raw = denoiser.outputs(tensors[f"step{step}.latents"], tensors[f"step{step}.timestep"])
            for mine, side in zip(raw, ("uncond", "cond")):
                torch.testing.assert_close(mine, tensors[f"step{step}.model_out_{side}"], atol=2e-5, rtol=0)
            for mine, side in zip(predicted, ("uncond", "cond")):
                torch.testing.assert_close(mine, tensors[f"step{step}.eps_{side}"], atol=2e-5, rtol=0)

    def test_score_differences(self, kind):
        tensors = fixture(f"detect_{kind}")
        mine = guided(kind, tensors, 3).difference(tensors["step1.latents"], tensors["step1.timestep"])
        torch.testing.assert_close(mine, tensors["step1.score_delta"], atol=2e-5, rtol=0)

    def test_selected_samples_are_those_of_the_batch(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser, x = guided(kind, tensors, 3), tensors["step0.latents"]
        alone = denoiser.select([1]).difference(x[1:2], 981)
        # Batches of other sizes sum in another order.
        torch.testing.assert_close(alone, denoiser.difference(x, 981)[1:2], atol=1e-5, rtol=1e-4)

    def test_half_precision_comes_out_in_float32(self, kind):
        tensors = fixture(f"detect_{kind}")
        half = guided(kind, tensors, 3, torch.bfloat16).predict(tensors["step0.latents"], 981)
        assert half[0].dtype == half[1].dtype == torch.float32

    def test_parameters_get_no_graph(self, kind):
        tensors = fixture(f"detect_{kind}")
        assert not guided(kind, tensors, 3).difference(tensors["step0.latents"], 981).requires_grad


class TestPredictionTypes:
    def truth(self):
        generator = torch.Generator().manual_seed(0)
        return torch.randn(4, 2, 3, 2, 2, generator=generator)

    @pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
    def test_every_type_gives_the_same_noise(self, kind):
        scheduler = DDPMScheduler(prediction_type=kind)
        clean_u, clean_c, _, x = self.truth()
        denoiser = GuidedDenoiser(None, scheduler, torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))
        a, b = denoiser.coefficients(700)
        noise = [(x - a * clean) / b for clean in (clean_u, clean_c)]
        output = {
            "epsilon": noise,
            "v_prediction": [a * z - b * clean for z, clean in zip(noise, (clean_u, clean_c))],
            "sample": [clean_u, clean_c],
        }[kind]
        denoiser.denoiser = Constant(*output)
        for mine, expected in zip(denoiser.predict(x, 700), noise):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)

    def test_flow(self):
        clean_u, clean_c, _, x = self.truth()
        time = 0.7
        noise = [(x - (1 - time) * clean) / time for clean in (clean_u, clean_c)]
        model = Constant(*[z - clean for z, clean in zip(noise, (clean_u, clean_c))])
        denoiser = GuidedDenoiser(model, FlowMatchEulerDiscreteScheduler(), torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))
        for mine, expected in zip(denoiser.predict(x, 700), noise):
            torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample", "flow"])
    def test_difference_of_clean_predictions(self, kind):
        clean_u, clean_c, _, x = self.truth()
        flow = kind == "flow"
        scheduler = FlowMatchEulerDiscreteScheduler() if flow else DDPMScheduler(prediction_type=kind)
        embeds = torch.zeros(2, 1, 1)
        denoiser = GuidedDenoiser(None, scheduler, embeds, embeds, space="x0")
        a, b = denoiser.coefficients(700)
        noise = [(x - a * clean) / b for clean in (clean_u, clean_c)]
        pairs = list(zip(noise, (clean_u, clean_c)))
        outputs = {"epsilon": noise, "v_prediction": [a * z - b * c for z, c in pairs], "sample": [clean_u, clean_c]}
        denoiser.denoiser = Constant(*outputs.get(kind, [z - c for z, c in pairs]))
        torch.testing.assert_close(denoiser.difference(x, 700), clean_c - clean_u, atol=1e-4, rtol=1e-4)

    def test_official_formula_treats_v_as_a_clean_prediction(self):
        tensors = fixture("detect_v")
        ours, official = (guided("v", tensors, 3, official_v_formula=flag) for flag in (False, True))
        x = tensors["step0.latents"]
        a, b = ours.coefficients(981)
        ratio = official.noise_difference(x, 981) / ours.noise_difference(x, 981)
        # a o against -(a / b) o: the direction is the opposite one.
        torch.testing.assert_close(ratio.median(), torch.tensor(-1 / b), atol=1e-3, rtol=0)


class TestSchedules:
    def test_coefficients_of_a_training_timestep(self):
        scheduler = official_scheduler("eps")
        denoiser = GuidedDenoiser(None, scheduler, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        a, b = denoiser.coefficients(torch.tensor(981))
        assert a**2 == pytest.approx(0.005775495897978544, rel=1e-6) and a**2 + b**2 == pytest.approx(1)

    def test_between_two_timesteps_lies_between(self):
        denoiser = GuidedDenoiser(None, official_scheduler("eps"), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        assert denoiser.coefficients(501)[0] < denoiser.coefficients(500.5)[0] < denoiser.coefficients(500)[0]

    @pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, HeunDiscreteScheduler])
    @pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
    def test_noise_scale_is_what_the_scheduler_does(self, scheduler, spacing):
        scheduler = scheduler(timestep_spacing=spacing, beta_schedule="scaled_linear")
        scheduler.set_timesteps(10)
        denoiser = GuidedDenoiser(None, scheduler, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
        noise, t = torch.randn(1, 4, 8, 8), scheduler.timesteps[0]
        expected = scheduler.scale_model_input(noise * scheduler.init_noise_sigma, t)
        torch.testing.assert_close(noise * denoiser.noise_scale(t), expected, atol=1e-4, rtol=1e-4)


def test_transformer_with_pooled_projections():
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=8,
        pooled_projection_dim=6,
        out_channels=4,
        pos_embed_max_size=8,
    )
    pooled = torch.randn(4, 6)
    denoiser = GuidedDenoiser(
        model,
        FlowMatchEulerDiscreteScheduler(),
        torch.randn(2, 3, 8),
        torch.randn(2, 3, 8),
        model_kwargs={"pooled_projections": pooled},
    )
    x = torch.randn(2, 4, 8, 8)
    alone = denoiser.select(slice(1, 2))
    assert alone.model_kwargs["pooled_projections"].equal(pooled[[1, 3]])
    torch.testing.assert_close(alone.difference(x[1:], 900), denoiser.difference(x, 900)[1:], atol=1e-5, rtol=1e-4)


def tiny_unet(**config):
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4,),
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        layers_per_block=1,
        norm_num_groups=2,
        cross_attention_dim=4,
        attention_head_dim=2,
        **config,
    )


class TestBadInput:
    embeds = torch.zeros(2, 3, 12)

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"negative_prompt_embeds": None}, "needs classifier-free guidance"),
            ({"negative_prompt_embeds": torch.zeros(1, 3, 12)}, "have to have one shape"),
            ({"space": "latent"}, "one of score, x0"),
            ({"model_kwargs": {"added_cond_kwargs": {"time_ids": torch.zeros(2, 6)}}}, "'added_cond_kwargs.time_ids'"),
        ],
    )
    def test_construction(self, changes, message):
        arguments = {"prompt_embeds": self.embeds, "negative_prompt_embeds": self.embeds, **changes}
        with pytest.raises(ValueError, match=message):
            GuidedDenoiser(official_unet("eps"), official_scheduler("eps"), **arguments)

    def test_distilled_guidance(self):
        with pytest.raises(ValueError, match="guidance-distilled"):
            GuidedDenoiser(tiny_unet(time_cond_proj_dim=4), official_scheduler("eps"), self.embeds, self.embeds)

    def test_unknown_prediction_type(self):
        scheduler = official_scheduler("eps")
        scheduler.register_to_config(prediction_type="score")
        with pytest.raises(ValueError, match="prediction type has to be one of"):
            GuidedDenoiser(official_unet("eps"), scheduler, self.embeds, self.embeds)

    def test_other_number_of_samples(self):
        denoiser = GuidedDenoiser(official_unet("eps"), official_scheduler("eps"), self.embeds, self.embeds)
        with pytest.raises(ValueError, match="Expected 2 samples"):
            denoiser.predict(torch.zeros(3, 4, 8, 8), 981)

    def test_flow_where_only_noise_is_left(self):
        model = Constant(torch.zeros(2, 4), torch.ones(2, 4))
        embeds = torch.zeros(2, 1, 1)
        denoiser = GuidedDenoiser(model, FlowMatchEulerDiscreteScheduler(), embeds, embeds)
        with pytest.raises(ValueError, match="space='x0'"):
            denoiser.difference(torch.zeros(2, 4), 1000)
        x0 = GuidedDenoiser(model, FlowMatchEulerDiscreteScheduler(), embeds, embeds, space="x0")
        assert x0.difference(torch.zeros(2, 4), 1000).eq(-1).all()

    def test_zero_terminal_snr(self):
        scheduler = DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
        embeds = torch.zeros(2, 1, 1)
        model = Constant(torch.zeros(2, 4), torch.ones(2, 4))
        with pytest.raises(ValueError, match="zero terminal signal-to-noise"):
            GuidedDenoiser(model, scheduler, embeds, embeds).difference(torch.zeros(2, 4), 999)

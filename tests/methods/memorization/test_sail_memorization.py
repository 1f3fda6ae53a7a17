# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from diffusers import DDIMScheduler
from official_memorization import fixture, guided, official_unet, parameters

from diffusers_ext.methods.memorization.curvature_memorization import norms
from diffusers_ext.methods.memorization.denoising_memorization import GuidedDenoiser
from diffusers_ext.methods.memorization.sail_memorization import SAILConfig, prior_loss, sail, sail_sharpness


KINDS = ("eps", "v")


def published(kind, **kwargs):
    made = parameters(f"sail_{kind}")[kind]
    settings = {"alpha": made["alpha"], "threshold": made["threshold"], "max_steps": made["max_steps"]}
    return SAILConfig.official(**{**settings, "learning_rate": made["lr"], **kwargs})


def record(kind, config, tensors, **kwargs):
    """Everything that the callback sees, and the output."""
    seen = []
    denoiser = guided(kind, tensors, 4, official_v_formula=kwargs.pop("official_v_formula", False))
    output = sail(
        denoiser, tensors["initial_latents"], 981, config, callback=lambda **state: seen.append(state), **kwargs
    )
    return seen, output


@pytest.mark.parametrize("kind", KINDS)
class TestOfficialRuns:
    def test_trajectory(self, kind):
        tensors = fixture(f"sail_{kind}")
        accepted = parameters(f"sail_{kind}")[kind]["num_images"]
        seen, output = record(kind, published(kind), tensors, official_v_formula=True, stop_after=accepted)
        first = seen[0]
        torch.testing.assert_close(first["loss"], tensors["official.loss"][0], atol=0, rtol=1e-4)
        torch.testing.assert_close(first["sharpness"], tensors["official.sharp"][0], atol=0, rtol=1e-4)
        largest = tensors["official.grad"][0].abs().max().item()
        torch.testing.assert_close(first["gradient"], tensors["official.grad"][0], atol=1e-4 * largest, rtol=0)
        for step, state in enumerate(seen):
            torch.testing.assert_close(state["latents"], tensors["official.latents"][step], atol=2e-3, rtol=0)
            torch.testing.assert_close(
                norms(state["latents"]) * published(kind).alpha,
                tensors["official.gauss"][step] * published(kind).alpha,
                atol=1e-3,
                rtol=1e-3,
            )
        assert output.order == [tuple(pair) for pair in tensors["official.accepted_step_index"].tolist()]

    def test_published_code_delivers_what_goes_on_moving(self, kind):
        tensors = fixture(f"sail_{kind}")
        count = parameters(f"sail_{kind}")[kind]["num_images"]
        _, output = record(kind, published(kind), tensors, official_v_formula=True, stop_after=count)
        delivered = output.latents[[i for _, i in output.order]][:count]
        torch.testing.assert_close(delivered, tensors["official.accepted_latents"], atol=2e-3, rtol=0)
        torch.testing.assert_close(delivered, tensors["official.pipeline_latents"], atol=2e-3, rtol=0)

    def test_frozen_candidates_are_those_that_were_accepted(self, kind):
        tensors = fixture(f"sail_{kind}")
        count = parameters(f"sail_{kind}")[kind]["num_images"]
        config = published(kind, freeze_accepted=True)
        _, output = record(kind, config, tensors, official_v_formula=True, stop_after=count)
        delivered = output.latents[[i for _, i in output.order]][:count]
        torch.testing.assert_close(delivered, tensors["official.accepted_latents_frozen"], atol=2e-3, rtol=0)

    @pytest.mark.parametrize("name, through", [("fresh", True), ("fresh_detached", False)])
    def test_current_direction(self, kind, name, through):
        tensors = fixture(f"sail_{kind}")
        config = published(
            kind, threshold=None, direction="current", grad_through_direction=through, freeze_accepted=True
        )
        seen, output = record(kind, config, tensors)
        for step, state in enumerate(seen):
            torch.testing.assert_close(state["latents"], tensors[f"{name}.latents"][step], atol=2e-3, rtol=0)
            torch.testing.assert_close(state["loss"], tensors[f"{name}.loss"][step], atol=2e-3, rtol=1e-3)
        torch.testing.assert_close(seen[0]["sharpness"], tensors[f"{name}.sharp"][0], atol=0, rtol=1e-4)
        largest = tensors[f"{name}.grad"][0].abs().max().item()
        torch.testing.assert_close(seen[0]["gradient"], tensors[f"{name}.grad"][0], atol=1e-4 * largest, rtol=0)
        assert output.updates.eq(6).all() and len(seen) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("objective, through", [("proxy", 1), ("proxy", 0), ("paper", 1), ("paper", 0), ("exact", 0)])
def test_objectives_and_gradients(kind, objective, through):
    tensors = fixture(f"objective_{kind}")
    alpha = parameters(f"objective_{kind}")["alpha"][kind]
    config = SAILConfig(objective=objective, grad_through_direction=bool(through), prior="norm", alpha=alpha)
    name = "exact_hvp_sq" if objective == "exact" else f"{objective}_{'full' if through else 'detached'}"
    x = tensors["x"].clone().requires_grad_()
    value = sail_sharpness(guided(kind, tensors, 2, torch.float64), x, tensors["timestep"], config)
    if objective != "exact":
        value = value + prior_loss(x, config)
    expected = tensors[f"{name}.grad"].double()
    torch.testing.assert_close(value.detach(), tensors[f"{name}.value"], atol=0, rtol=1e-6)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    # The stored gradients are in single precision.
    torch.testing.assert_close(gradient, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


class World(torch.nn.Module):
    """The analytic mixture of the fixture as a model: half of the prompt's mass lies on one memorised point."""

    config = {}

    def __init__(self, point, alpha_bar):
        super().__init__()
        self.point, self.alpha_bar = point, alpha_bar

    def noise(self, x, share, t):
        a2 = self.alpha_bar[t]
        narrow = a2 * 1e-3 + 1 - a2
        distance = x - a2**0.5 * self.point
        d = x.shape[1]
        wide = (1 - share) * torch.exp(-x.square().sum(1) / 2)
        peak = share * torch.exp(-distance.square().sum(1) / (2 * narrow)) / narrow ** (d / 2)
        weight = (peak / (peak + wide))[:, None]
        return (1 - a2) ** 0.5 * (weight * distance / narrow + (1 - weight) * x)

    def forward(self, sample, timestep, encoder_hidden_states, return_dict):
        t = int(timestep[0])
        unconditional, conditional = sample.chunk(2)
        return (torch.cat([self.noise(unconditional, 0.02, t), self.noise(conditional, 0.5, t)]),)


class TestAnalyticWorld:
    tensors, known = fixture("analytic_world"), parameters("analytic_world")["mitigate"]

    def denoiser(self, n):
        scheduler = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        )
        world = World(self.tensors["mitigate.memorised_point"], scheduler.alphas_cumprod.double())
        embeds = torch.zeros(n, 1, 1, dtype=torch.float64)
        return GuidedDenoiser(world, scheduler, embeds, embeds)

    def start(self):
        return self.tensors["mitigate.initial"].double()

    def test_first_evaluation(self):
        denoiser, x = self.denoiser(64), self.start().requires_grad_()
        torch.testing.assert_close(
            denoiser.noise_difference(x.detach(), 981), self.tensors["mitigate.eps_delta"], atol=1e-9, rtol=1e-5
        )
        value = sail_sharpness(denoiser, x, 981, SAILConfig())
        torch.testing.assert_close(value.detach(), self.tensors["mitigate.sharpness_first"], atol=0, rtol=1e-6)
        (gradient,) = torch.autograd.grad(value.sum(), x)
        torch.testing.assert_close(gradient.float(), self.tensors["mitigate.grad_first"], atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("name, keep_norm", [("sharpness_10", False), ("sharpness_10_keep_norm", True)])
    def test_ten_updates_and_what_is_drawn_from_there(self, name, keep_norm):
        denoiser, trace = self.denoiser(64), []

        def keep(latents, **state):
            trace.append(latents)

        output = sail(denoiser, self.start(), 981, SAILConfig(max_steps=11, keep_norm=keep_norm), callback=keep)
        after_ten = trace[10]
        torch.testing.assert_close(after_ten.float(), self.tensors[f"mitigate.{name}.latents"], atol=1e-5, rtol=0)
        assert not keep_norm or output.norm_drift.abs().max() < 1e-9
        for row in self.known["table"]:
            if row["start"] == name:
                hits = self.draw(denoiser, after_ten, row["guidance"])
                expected = self.tensors[f"mitigate.{name}.hit_cfg{row['guidance']}"]
                assert (hits != expected).sum() <= 2
                assert norms(after_ten).mean().item() == pytest.approx(row["mean_norm"], rel=1e-4)

    def test_unmitigated_start_is_memorised(self):
        hits = self.draw(self.denoiser(64), self.start(), 7.5)
        assert (hits != self.tensors["mitigate.none.hit_cfg7.5"]).sum() <= 2 and hits.float().mean() > 0.9

    def draw(self, denoiser, x, guidance):
        scheduler = denoiser.scheduler
        scheduler.set_timesteps(50)
        for t in scheduler.timesteps:
            unconditional, conditional = denoiser.outputs(x, t)
            x = scheduler.step(unconditional + guidance * (conditional - unconditional), t, x).prev_sample
        point = self.tensors["mitigate.memorised_point"]
        return norms(x - point) < 0.5 * point.norm()


class TestBehaviour:
    def run(self, config=None, rows=slice(None), **kwargs):
        tensors = fixture("sail_eps")
        latents = tensors["initial_latents"][rows]
        return latents, sail(guided("eps", tensors, len(latents)), latents, 981, config, **kwargs)

    def test_default_lowers_sharpness_and_keeps_the_norm(self):
        latents, output = self.run()
        assert (output.sharpness < output.initial_sharpness).all() and output.accepted.all()
        torch.testing.assert_close(norms(output.latents), norms(latents), atol=1e-4, rtol=0)
        assert output.norm_drift.abs().max() < 1e-5

    def test_candidates_do_not_depend_on_each_other(self):
        _, together = self.run()
        _, alone = self.run(rows=slice(2, 3))
        torch.testing.assert_close(alone.latents, together.latents[2:3], atol=2e-3, rtol=0)

    def test_micro_batches_and_checkpointing_change_nothing(self):
        _, plain = self.run(SAILConfig(max_steps=3))
        _, small = self.run(SAILConfig(max_steps=3, micro_batch_size=1, gradient_checkpointing=True))
        torch.testing.assert_close(small.latents, plain.latents, atol=2e-3, rtol=0)

    def test_model_is_left_as_it_was(self):
        tensors = fixture("sail_eps")
        denoiser = guided("eps", tensors, 4)
        before = {name: p.clone() for name, p in denoiser.denoiser.named_parameters()}
        config = SAILConfig(max_steps=2, gradient_checkpointing=True)
        sail(denoiser, tensors["initial_latents"], 981, config)
        assert all(p.grad is None and p.equal(before[n]) for n, p in denoiser.denoiser.named_parameters())
        assert not denoiser.denoiser.is_gradient_checkpointing

    def test_candidates_below_the_threshold_stay_bit_for_bit(self):
        latents, output = self.run(SAILConfig(sharpness_threshold=1e9))
        assert output.latents.equal(latents) and output.updates.eq(0).all() and output.accepted.all()

    def test_failed_candidates_start_again_from_new_noise(self):
        asked = []

        def draw(indices):
            asked.append(list(indices))
            return torch.randn(len(indices), 4, 8, 8, generator=torch.Generator().manual_seed(len(asked)))

        config = SAILConfig(sharpness_threshold=1e-6, max_steps=1, max_rounds=3)
        _, output = self.run(config, draw=draw)
        assert asked == [[0, 1, 2, 3]] * 2 and not output.accepted.any()

    def test_equal_prompts_change_nothing(self):
        tensors = fixture("sail_eps")
        tensors["negative_prompt_embeds"] = tensors["prompt_embeds"]
        latents = tensors["initial_latents"]
        output = sail(guided("eps", tensors, 4), latents, 981)
        assert output.latents.equal(latents) and output.sharpness.isfinite().all()

    def test_half_precision_model_is_optimised_in_float32(self):
        tensors = fixture("sail_eps")
        output = sail(
            guided("eps", tensors, 4, torch.bfloat16), tensors["initial_latents"], 981, SAILConfig(max_steps=2)
        )
        assert output.latents.dtype == torch.float32 and output.sharpness.dtype == torch.float32

    def test_no_gradients_needed_from_the_caller(self):
        with torch.no_grad():
            _, output = self.run(SAILConfig(max_steps=1))
        assert output.updates.eq(1).all()

    def test_loss_that_is_not_finite_keeps_the_last_finite_candidate(self):
        unet, tensors = official_unet("eps"), fixture("sail_eps")
        calls = []

        def explode(module, args, output):
            calls.append(1)
            return output * float("nan") if len(calls) > 6 else output

        unet.conv_out.register_forward_hook(explode)
        denoiser = guided("eps", tensors, 4)
        denoiser.denoiser = unet
        output = sail(denoiser, tensors["initial_latents"], 981)
        assert len(calls) > 6 and output.latents.isfinite().all()


class TestBadInput:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"objective": "sharp"}, "one of proxy, paper, exact"),
            ({"direction": "first"}, "one of current, initial"),
            ({"prior": "gauss"}, "one of none, norm, chi"),
            ({"on_failure": "ignore"}, "one of warn, raise"),
            ({"threshold": 1.0, "sharpness_threshold": 1.0}, "not both"),
            ({"learning_rate": 0.0}, "`learning_rate` has to be positive"),
            ({"max_steps": 0}, "`max_steps` has to be a positive integer"),
            ({"micro_batch_size": 0}, "`micro_batch_size` has to be a positive integer"),
            ({"max_rounds": 1.5}, "`max_rounds` has to be a positive integer"),
            ({"direction": "initial", "objective": "paper"}, "goes with the proxy objective"),
        ],
    )
    def test_construction(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            SAILConfig(**arguments)

    def test_failure_can_be_an_error(self):
        tensors = fixture("sail_eps")
        config = SAILConfig(sharpness_threshold=1e-6, max_steps=1, max_rounds=1, on_failure="raise")
        with pytest.raises(RuntimeError, match="did not bring 4 of 4 candidates"):
            sail(guided("eps", tensors, 4), tensors["initial_latents"], 981, config)

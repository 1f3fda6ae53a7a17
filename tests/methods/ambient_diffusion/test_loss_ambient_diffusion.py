# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
)

from diffusers_ext import AmbientLoss, FixedNoise
from diffusers_ext.methods.ambient_diffusion.loss_ambient_diffusion import PREDICTION_TYPES


VP_TYPES = ("epsilon", "v_prediction", "sample")


def make_loss(prediction_type, threshold=None, **kwargs):
    """A loss with its threshold in the middle of the schedule."""
    if prediction_type in VP_TYPES:
        schedule = kwargs.pop("schedule", DDPMScheduler(prediction_type=prediction_type))
        return AmbientLoss(300 if threshold is None else threshold, prediction_type, schedule, **kwargs)
    return AmbientLoss(0.4 if threshold is None else threshold, prediction_type, **kwargs)


def levels_of(prediction_type, count):
    """Levels on both sides of the threshold, as arguments of `prepare`."""
    if prediction_type in VP_TYPES:
        return {"timesteps": torch.linspace(20, 950, count).long()}
    return {"sigmas": torch.linspace(0.1, 3.0 if prediction_type == "edm" else 0.9, count)}


def batch(count=6, seed=0, shape=(3, 8, 8)):
    generator = torch.Generator().manual_seed(seed)
    clean, output, noise = (torch.randn(count, *shape, generator=generator) for _ in range(3))
    return clean, output, noise


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_two_spaces_differ_by_the_weight_alone(prediction_type):
    clean, output, noise = batch()
    losses = []
    for space in ("noise", "sample"):
        ambient = make_loss(prediction_type, space=space)
        arguments = {"noise": noise, **levels_of(prediction_type, len(clean))}
        _, levels, state = ambient.prepare(clean, range(len(clean)), **arguments)
        losses.append(ambient.loss(output, state, "sample"))
    assert state.above.any() and not state.above.all()
    factor = torch.ones(len(clean))
    if prediction_type in VP_TYPES:
        alphas = DDPMScheduler().alphas_cumprod.double()[levels]
        k = alphas.sqrt() / ambient.data_signal
        factor = (1 - alphas - (k * ambient.data_noise) ** 2) / k**2
    elif prediction_type == "flow":
        time = levels.double() / 1000
        k = (1 - time) / ambient.data_signal
        factor = (time**2 - (k * ambient.data_noise) ** 2) / k**2
    expected = torch.where(state.above, losses[0] * factor, losses[0])
    torch.testing.assert_close(losses[1], expected.float(), rtol=2e-4, atol=1e-6)


def ordinary_loss(prediction_type, output, clean, noise, level):
    level = level.view(-1, 1, 1, 1)
    if prediction_type == "edm":
        return (level**2 + 0.25) / (level * 0.5) ** 2 * (output - clean) ** 2
    if prediction_type == "flow":
        return (output - (noise - clean)) ** 2
    alpha = DDPMScheduler().alphas_cumprod[level.long()]
    target = {"epsilon": noise, "sample": clean, "v_prediction": alpha.sqrt() * noise - (1 - alpha).sqrt() * clean}
    return (output - target[prediction_type]) ** 2


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_threshold_zero_is_the_plain_loss(prediction_type):
    clean, output, noise = batch()
    unit = {"threshold_unit": "ratio"}
    ambient = make_loss(prediction_type, threshold=0.0, **unit)
    arguments = {"noise": noise, **levels_of(prediction_type, len(clean))}
    _, levels, state = ambient.prepare(clean, range(len(clean)), **arguments)
    expected = ordinary_loss(prediction_type, output, clean, noise, levels)
    torch.testing.assert_close(ambient.loss(output, state, "none"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_below_the_threshold_it_is_the_plain_loss(prediction_type):
    clean, output, noise = batch()
    ambient = make_loss(prediction_type)
    arguments = {"noise": noise, **levels_of(prediction_type, len(clean))}
    _, levels, state = ambient.prepare(clean, range(len(clean)), **arguments)
    expected = ordinary_loss(prediction_type, output, clean, noise, levels)
    below = ~state.above
    torch.testing.assert_close(ambient.loss(output, state, "none")[below], expected[below], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_above_the_threshold_two_visits_show_one_noisy_copy(prediction_type):
    """Taking the fresh noise out of the input leaves the same noisy sample, never the clean one."""
    clean, _, _ = batch(4)
    ambient = make_loss(prediction_type)
    level = {"timesteps": torch.full((4,), 800)} if prediction_type in VP_TYPES else {"sigmas": torch.full((4,), 0.8)}
    copies = []
    for seed in (1, 2):
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
        sample, _, state = ambient.prepare(clean, range(4), noise=noise, **level)
        quiet, _, _ = ambient.prepare(clean, range(4), noise=torch.zeros_like(noise), **level)
        copies.append(quiet)
        assert state.above.all() and not torch.equal(sample, quiet)
    assert torch.equal(*copies)
    plain, _, _ = make_loss(prediction_type, 0.0, threshold_unit="ratio").prepare(
        clean, range(4), noise=torch.zeros_like(clean), **level
    )
    assert (copies[0] - plain).abs().mean() > 0.2 * plain.abs().mean()


def denoiser(x, a, b, variance):
    return a * variance / (a**2 * variance + b**2) * x


def gradient_at_the_optimum(prediction_type, target, count=100_000, variance=0.3):
    """Gradients of the loss for Gaussian data with respect to a scale of the exact clean denoiser, one per draw."""
    generator = torch.Generator().manual_seed(7)
    clean = math.sqrt(variance) * torch.randn(count, 1, generator=generator)
    z, noise = torch.randn(count, 1, generator=generator), torch.randn(count, 1, generator=generator)
    ambient = make_loss(prediction_type)
    if prediction_type in VP_TYPES:
        arguments = {"timesteps": torch.full((count,), 500)}
        alpha = DDPMScheduler().alphas_cumprod[500].item()
        a, b = math.sqrt(alpha), math.sqrt(1 - alpha)
    else:
        arguments = {"sigmas": torch.full((count,), 0.7)}
        a, b = (1.0, 0.7) if prediction_type == "edm" else (1 - 0.7, 0.7)
    if target == "naive":
        # The noisy copy as if it were clean: its noise goes into the data, the rest is ordinary.
        noisy = clean + ambient.threshold_ratio * z
        ambient = make_loss(prediction_type, 0.0, threshold_unit="ratio")
        clean = noisy
    sample, _, state = ambient.prepare(clean, [0] * count, noise=noise, fixed_noise=z, **arguments)
    scale = torch.ones(count, 1, requires_grad=True)
    x0 = denoiser(sample, a, b, variance) * scale
    eps = (sample - a * x0) / b
    outputs = {"epsilon": eps, "v_prediction": a * eps - b * x0, "sample": x0, "flow": eps - x0, "edm": x0}
    loss = ambient.loss(outputs[prediction_type], state, "none").sum()
    (gradient,) = torch.autograd.grad(loss, scale)
    return gradient.double().flatten()


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_the_clean_denoiser_is_the_optimum(prediction_type):
    gradient = gradient_at_the_optimum(prediction_type, "ambient")
    assert gradient.mean().abs() < 3 * gradient.std() / len(gradient) ** 0.5


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_of_noisy_samples_taken_for_clean_it_is_not(prediction_type):
    gradient = gradient_at_the_optimum(prediction_type, "naive")
    assert gradient.mean().abs() > 20 * gradient.std() / len(gradient) ** 0.5


def test_noise_levels_are_drawn_over_the_whole_schedule():
    generator = torch.Generator().manual_seed(0)
    clean, fixed = torch.zeros(4000, 1), torch.zeros(4000, 1)
    arguments = {"generator": generator, "fixed_noise": fixed}
    _, timesteps, state = make_loss("epsilon").prepare(clean, [0] * 4000, **arguments)
    assert timesteps.min() < 5 and timesteps.max() > 994
    # 699 of 1000 timesteps are above 300.
    assert abs(state.above.float().mean().item() - 0.699) < 0.03
    _, _, state = make_loss("edm", 0.5).prepare(clean, [0] * 4000, **arguments)
    assert abs(state.above.float().mean().item() - 0.34) < 0.03
    _, timesteps, _ = make_loss("flow").prepare(clean, [0] * 4000, **arguments)
    assert timesteps.min() < 5 and timesteps.max() > 990


def test_a_flow_scheduler_gives_its_own_levels():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    ambient = AmbientLoss(0.4, "flow", scheduler)
    _, timesteps, _ = ambient.prepare(torch.zeros(50, 1), range(50), generator=torch.Generator().manual_seed(0))
    distance = (timesteps[:, None] - scheduler.timesteps).abs().amin(1)
    assert distance.max() < 1e-3


def test_edm_scheduler_brings_its_sigma_data():
    assert AmbientLoss(0.4, "edm", EDMEulerScheduler(sigma_data=1.0)).sigma_data == 1.0


@pytest.mark.parametrize("prediction_type", [*VP_TYPES, "flow", "edm"])
def test_units_of_the_threshold_agree(prediction_type):
    by_ratio = make_loss(prediction_type, 0.75, threshold_unit="ratio")
    assert by_ratio.threshold_ratio == pytest.approx(0.75)
    sigma = {"edm": 0.75, "flow": 0.75 / 1.75}.get(prediction_type, 0.6)
    by_sigma = make_loss(prediction_type, sigma, threshold_unit="sigma")
    assert by_sigma.data_noise == pytest.approx(by_ratio.data_noise) == pytest.approx(sigma)
    assert by_sigma.data_signal == pytest.approx(by_ratio.data_signal)


def test_threshold_by_timestep():
    alpha = DDPMScheduler().alphas_cumprod[300].item()
    assert make_loss("epsilon").threshold_ratio == pytest.approx(math.sqrt((1 - alpha) / alpha))
    assert make_loss("flow", 400, threshold_unit="timestep").data_noise == pytest.approx(0.4)


def test_reductions():
    clean, output, _ = batch()
    ambient = make_loss("edm")
    _, _, state = ambient.prepare(clean, range(6), **levels_of("edm", 6))
    elements = ambient.loss(output, state, "none")
    assert elements.shape == clean.shape
    torch.testing.assert_close(ambient.loss(output, state, "sample"), elements.flatten(1).mean(1))
    torch.testing.assert_close(ambient.loss(output, state), elements.mean())
    torch.testing.assert_close(ambient.loss(output, state, "sum"), elements.sum() / 6)


def test_weights_multiply_both_branches():
    clean, output, noise = batch()
    arguments = {"noise": noise, **levels_of("epsilon", 6)}
    plain, weighted = make_loss("epsilon"), make_loss("epsilon", weighting=lambda t: 1 + t / 100)
    losses = []
    for ambient in (plain, weighted):
        _, levels, state = ambient.prepare(clean, range(6), **arguments)
        losses.append(ambient.loss(output, state, "sample"))
    torch.testing.assert_close(losses[1], losses[0] * (1 + levels / 100))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_out_and_the_loss_is_float32(dtype):
    clean, output, noise = batch()
    ambient = make_loss("v_prediction")
    arguments = {"noise": noise, **levels_of("v_prediction", 6)}
    sample, _, state = ambient.prepare(clean.to(dtype), range(6), **arguments)
    loss = ambient.loss(output.to(dtype), state)
    _, _, exact = ambient.prepare(clean, range(6), **arguments)
    assert sample.dtype == dtype and loss.dtype == torch.float32
    torch.testing.assert_close(loss, ambient.loss(output, exact), rtol=0.03, atol=0)


def test_gradients_are_finite_at_the_ends_of_the_schedule():
    """Both branches are computed by factors that are chosen first: none divides by zero in the other's place."""
    for prediction_type, sigmas in (("flow", [0.0, 1.0]), ("edm", [1e-3, 80.0])):
        ambient = make_loss(prediction_type)
        output = torch.zeros(2, 3, 4, 4, requires_grad=True)
        _, _, state = ambient.prepare(torch.ones(2, 3, 4, 4), [0, 1], sigmas=torch.tensor(sigmas))
        ambient.loss(output, state).backward()
        assert torch.isfinite(output.grad).all()


def test_global_random_state_is_left_alone_with_a_generator():
    state = torch.get_rng_state()
    for prediction_type in PREDICTION_TYPES:
        make_loss(prediction_type).prepare(torch.zeros(2, 1), [0, 1], generator=torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())


SAMPLE = torch.zeros(2, 3, 4, 4)
FLOW = FlowMatchEulerDiscreteScheduler()
ZERO_SNR = DDIMScheduler(rescale_betas_zero_snr=True)
BAD_SETTINGS = [
    (lambda: AmbientLoss(0.4, "noise"), "`prediction_type` has to be one of epsilon"),
    (lambda: make_loss("edm", space="pixels"), "`space` has to be one of noise, sample"),
    (lambda: AmbientLoss(300, "epsilon"), "needs a scheduler with `alphas_cumprod`"),
    (
        lambda: AmbientLoss(300, "epsilon", FlowMatchEulerDiscreteScheduler()),
        "needs a scheduler with `alphas_cumprod`",
    ),
    (lambda: AmbientLoss(0.3, "flow", DDPMScheduler()), "needs a flow-matching scheduler"),
    (lambda: AmbientLoss(0.3, "edm", EulerDiscreteScheduler()), "needs an EDM scheduler"),
    (lambda: AmbientLoss(300, "v_prediction", DDPMScheduler()), "the scheduler is configured for 'epsilon'"),
    (lambda: make_loss("epsilon", 1000), r"has to lie in the schedule, \[0, 999\]"),
    (lambda: make_loss("epsilon", -1), r"has to lie in the schedule, \[0, 999\]"),
    (lambda: make_loss("epsilon", 10.5), "has to be an integer"),
    (lambda: make_loss("epsilon", 500.0, threshold_unit="ratio"), "has to lie in the schedule"),
    (lambda: make_loss("epsilon", 1.0, threshold_unit="sigma"), r"has to lie in \[0, 1\)"),
    (lambda: make_loss("flow", 1.0), r"has to lie in \[0, 1\)"),
    (lambda: make_loss("edm", -0.1), "has to lie in the schedule"),
    (lambda: AmbientLoss(90.0, "edm", EDMEulerScheduler()), "has to lie in the schedule"),
    (lambda: make_loss("edm", float("nan")), "has to be a finite number"),
    (lambda: make_loss("edm", "0.4"), "has to be a finite number"),
    (lambda: make_loss("edm", True), "has to be a finite number"),
    (lambda: make_loss("edm", 3, threshold_unit="timestep"), "EDM has no timesteps"),
    (lambda: make_loss("edm", threshold_unit="snr"), "`threshold_unit` has to be one of"),
    (lambda: make_loss("edm", sigma_data=0.0), "have to be positive"),
    (lambda: make_loss("epsilon", schedule=ZERO_SNR, space="sample"), "ends in pure noise"),
    (lambda: AmbientLoss(0.3, "flow", FLOW, space="sample"), "ends in pure noise"),
]


@pytest.mark.parametrize(
    ("make", "message"), BAD_SETTINGS, ids=[f"{i}-{row[1]}" for i, row in enumerate(BAD_SETTINGS)]
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


BAD_BATCHES = [
    ("epsilon", (SAMPLE, [0]), {}, "one id per sample but got 1 ids for 2"),
    ("epsilon", (SAMPLE, [0.5, 1.0]), {}, "`sample_ids` has to hold integers"),
    ("epsilon", (SAMPLE, [-1, 0]), {}, "`sample_ids` has to hold integers"),
    ("epsilon", (SAMPLE.byte(), [0, 1]), {}, "floating-point samples"),
    ("epsilon", (SAMPLE[:0], []), {}, "has to be a batch"),
    ("epsilon", (SAMPLE, [0, 1]), {"timesteps": torch.tensor([5, 1000])}, r"integers in \[0, 1000\)"),
    ("epsilon", (SAMPLE, [0, 1]), {"timesteps": torch.tensor([5.0, 7.0])}, r"integers in \[0, 1000\)"),
    ("epsilon", (SAMPLE, [0, 1]), {"timesteps": torch.tensor([5])}, "one entry per sample"),
    ("epsilon", (SAMPLE, [0, 1]), {"sigmas": torch.tensor([0.1, 0.2])}, "give `timesteps`"),
    ("edm", (SAMPLE, [0, 1]), {"timesteps": torch.tensor([5, 6])}, "give `sigmas`"),
    ("edm", (SAMPLE, [0, 1]), {"sigmas": torch.tensor([0.0, 1.0])}, "positive and finite"),
    ("flow", (SAMPLE, [0, 1]), {"sigmas": torch.tensor([0.1, 1.2])}, r"have to lie in \[0, 1\]"),
    ("flow", (SAMPLE, [0, 1]), {"sigmas": SAMPLE[:, 0, 0, 0], "timesteps": SAMPLE[:, 0, 0, 0]}, "not both"),
    ("edm", (SAMPLE, [0, 1]), {"noise": SAMPLE[:1]}, "`noise` has to have the shape"),
    ("edm", (SAMPLE, [0, 1]), {"fixed_noise": SAMPLE[..., :2]}, "`fixed_noise` has to have the shape"),
    ("edm", (SAMPLE, [0, 1]), {"augmentation_keys": [0]}, "one augmentation key per sample"),
]


@pytest.mark.parametrize(("prediction_type", "arguments", "settings", "message"), BAD_BATCHES)
def test_bad_batches_are_refused(prediction_type, arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        make_loss(prediction_type).prepare(*arguments, **settings)


def test_sample_space_is_refused_where_no_signal_is_left():
    with pytest.raises(ValueError, match="undefined at time 1"):
        make_loss("flow", space="sample").prepare(SAMPLE, [0, 1], sigmas=torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")]])
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="`weighting` has to give 2 finite weights"):
        make_loss("edm", weighting=lambda sigmas: torch.tensor(weights)).prepare(SAMPLE, [0, 1])


@pytest.mark.parametrize(("place", "branch"), [(0, "at or below the threshold"), (1, "above the threshold")])
def test_a_loss_that_is_not_finite_names_the_branch(place, branch):
    ambient = make_loss("edm")
    _, _, state = ambient.prepare(SAMPLE, [0, 1], sigmas=torch.tensor([0.1, 1.0]))
    output = torch.zeros_like(SAMPLE)
    output[place, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=f"not finite {branch}, at the levels"):
        ambient.loss(output, state)


def test_an_output_of_another_shape_and_an_unknown_reduction_are_refused():
    ambient = make_loss("edm")
    _, _, state = ambient.prepare(SAMPLE, [0, 1])
    with pytest.raises(ValueError, match="has to have the shape of the batch"):
        ambient.loss(SAMPLE[:, :1], state)
    with pytest.raises(ValueError, match="`reduction` has to be one of"):
        ambient.loss(SAMPLE, state, "max")


def test_what_is_saved_of_an_objective():
    saved = make_loss("flow", fixed_noise=FixedNoise(3)).to_dict()
    assert saved["fixed_noise"] == {"seed": 3, "mode": "counter"} and saved["prediction_type"] == "flow"
    assert saved["threshold_ratio"] == pytest.approx(0.4 / 0.6)

# SPDX-License-Identifier: Apache-2.0
"""The figures of the official implementation, at the tolerances that came with them."""

import pytest
import torch
from diffusers import DDIMScheduler
from golden_ambient_diffusion import CONFIG, Toy, official_unet, params, tensors

from diffusers_ext import AmbientLoss, CopyReport, EDMHeunScheduler, EDMPipeline, FixedNoise
from diffusers_ext.methods.ambient_diffusion.loss_ambient_diffusion import (
    ambient_coefficients,
    expected_noisy_sample,
)
from diffusers_ext.methods.ambient_diffusion.modeling_ambient_diffusion import edm_denoise
from diffusers_ext.methods.ambient_diffusion.report_ambient_diffusion import THRESHOLDS, pad_to_multiple
from diffusers_ext.methods.ambient_diffusion.training_ambient_diffusion import ema_decay, ramped_learning_rate


def test_unet_denoises_as_the_official_one():
    golden = tensors("edm_forward")
    with torch.no_grad():
        denoised = edm_denoise(official_unet(), golden["x"], golden["sigma"])
    torch.testing.assert_close(denoised, golden["denoised"], atol=2e-5, rtol=0)


SAMPLER = params("edm_forward")["sampler"]


def sampler(**kwargs):
    settings = {"sigma_min": SAMPLER["sigma_min"], "sigma_max": SAMPLER["sigma_max"], "rho": SAMPLER["rho"]}
    return EDMHeunScheduler(**settings, s_churn=kwargs.pop("s_churn", SAMPLER["S_churn"]), **kwargs)


def follow(scheduler, network, noise, generator=None):
    """The official trajectory, with its state in float64; also the number of model calls."""
    scheduler.set_timesteps(SAMPLER["num_steps"])
    sample, calls = scheduler.add_churn(noise.double() * SAMPLER["sigma_max"], 0, generator), 0
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            scaled = scheduler.scale_model_input(sample, timestep)
            output = network(scaled, timestep, return_dict=False)[0]
            sample = scheduler.step(output, timestep, sample, generator=generator).prev_sample
            calls += 1
    assert calls == 2 * SAMPLER["num_steps"] - 1
    return sample


def test_noise_levels_are_the_official_ones():
    scheduler = sampler()
    scheduler.set_timesteps(SAMPLER["num_steps"])
    expected = tensors("edm_forward")["sampler_sigmas"]
    torch.testing.assert_close(scheduler.sigmas[::2], expected, atol=0, rtol=1e-12)
    torch.testing.assert_close(scheduler.sigmas[1:-1:2], expected[1:], atol=0, rtol=1e-12)
    assert scheduler.sigmas[-1] == 0


@pytest.mark.parametrize(
    ("make_network", "key", "atol"), [(Toy, "toy_sampler_out", 1e-5), (official_unet, "sampler_out", 1e-3)]
)
def test_sampler_follows_the_official_one(make_network, key, atol):
    golden = tensors("edm_forward")
    torch.testing.assert_close(
        follow(sampler(), make_network(), golden["sampler_latents"]), golden[key], atol=atol, rtol=0
    )


def churn_settings():
    churn = SAMPLER["churn"]
    return {
        "s_churn": churn["S_churn"],
        "s_tmin": churn["S_min"],
        "s_tmax": churn["S_max"],
        "s_noise": churn["S_noise"],
    }


def test_sampler_with_churn_follows_the_official_one():
    golden = tensors("edm_forward")
    generator = torch.Generator().manual_seed(SAMPLER["churn"]["noise_seed"])
    sample = follow(
        sampler(**churn_settings()),
        Toy(SAMPLER["toy"]["w"], SAMPLER["toy"]["b"]),
        golden["sampler_latents"],
        generator,
    )
    torch.testing.assert_close(sample, golden["toy_sampler_out_churn"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("churn", [False, True])
def test_pipeline_follows_the_official_sampler(churn):
    golden = tensors("edm_forward")
    settings = churn_settings() if churn else {}
    unet = official_unet()
    pipe = EDMPipeline(unet, sampler(float64_state=True, **settings))
    pipe.set_progress_bar_config(disable=True)
    seed = SAMPLER["churn"]["noise_seed"]
    arguments = {
        "num_inference_steps": SAMPLER["num_steps"],
        "output_type": "latent",
        "latents": golden["sampler_latents"],
    }
    drawn = pipe(2, generator=torch.Generator().manual_seed(seed), **arguments).images
    generator = torch.Generator().manual_seed(seed)
    expected = (
        golden["sampler_out"] if not churn else follow(sampler(**settings), unet, arguments["latents"], generator)
    )
    torch.testing.assert_close(drawn, expected.float(), atol=1e-3, rtol=0)


LOSS = params("edm_loss")


def edm_batch(case, space="noise"):
    """The official batch: prepared with the official draws, in the official order."""
    golden = tensors("edm_loss")
    sigma_n = LOSS["sigma_n"] if case == "main" else 0.0
    settings = {"sigma_data": LOSS["sigma_data"], "p_mean": LOSS["P_mean"], "p_std": LOSS["P_std"]}
    ambient = AmbientLoss(sigma_n, "edm", space=space, **settings)
    prepared = ambient.prepare(
        golden["images"],
        range(len(golden["images"])),
        generator=torch.Generator().manual_seed(LOSS["torch_seed"]),
        fixed_noise=golden["fixed_noise"] / LOSS["sigma_n"],
    )
    return golden, ambient, *prepared


@pytest.mark.parametrize("case", ["main", "zero"])
def test_edm_batch_is_the_official_one(case):
    golden, _, sample, sigma, state = edm_batch(case)
    torch.testing.assert_close(sigma, golden[f"unet.{case}.sigma"].flatten(), atol=0, rtol=1e-6)
    torch.testing.assert_close(sample, golden[f"unet.{case}.net_input"], atol=1e-5, rtol=1e-6)
    assert torch.equal(state.above, golden[f"unet.{case}.use_noisy_target"].flatten())
    normal = golden[f"unet.{case}.rnd_normal"].flatten()
    torch.testing.assert_close(sigma, (LOSS["P_mean"] + LOSS["P_std"] * normal).exp(), atol=0, rtol=1e-6)


def test_edm_noise_is_drawn_in_the_official_order():
    golden, _, sample, sigma, state = edm_batch("main")
    level = sigma.view(-1, 1, 1, 1)
    clean = golden["images"] + level * golden["unet.main.noise_clean"]
    extra = (level**2 - LOSS["sigma_n"] ** 2).clamp_min(0).sqrt()
    noisy = golden["images"] + golden["fixed_noise"] + extra * golden["unet.main.noise_extra"]
    expected = torch.where(state.above.view(-1, 1, 1, 1), noisy, clean)
    torch.testing.assert_close(sample, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("space", ["noise", "sample"])
@pytest.mark.parametrize("case", ["main", "zero"])
@pytest.mark.parametrize("network", ["unet", "toy"])
def test_edm_loss_and_gradients(network, case, space):
    golden, ambient, sample, sigma, state = edm_batch(case, space)
    model = official_unet() if network == "unet" else Toy(LOSS["toy"]["w"], LOSS["toy"]["b"])
    denoised = edm_denoise(model, sample, sigma, LOSS["sigma_data"])
    prefix = f"{network}.{case}."
    torch.testing.assert_close(denoised, golden[f"{prefix}denoised"], atol=2e-5, rtol=1e-5)
    loss = ambient.loss(denoised, state, "none")
    for value, key in ((loss.sum(), "loss_sum_over_elements"), (loss.mean(), "loss_mean")):
        torch.testing.assert_close(value.double(), golden[prefix + key], atol=0, rtol=2e-4)
    torch.testing.assert_close(ambient.loss(denoised, state, "sum"), loss.sum() / len(loss))
    loss.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    grad = f"{prefix}grad"
    expected = {key[len(grad) + 1 :]: value for key, value in golden.items() if key.startswith(grad)}
    assert len(expected) == 2
    for name, gradient in expected.items():
        atol = 1e-3 * gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, atol=atol, rtol=1e-3)


@pytest.mark.parametrize("space", ["noise", "sample"])
def test_edm_loss_by_element(space):
    golden, ambient, sample, sigma, state = edm_batch("main", space)
    with torch.no_grad():
        loss = ambient.loss(edm_denoise(official_unet(), sample, sigma), state, "none")
    # Elements near zero are differences of numbers near one.
    torch.testing.assert_close(loss, golden["unet.main.loss"], atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("case", ["main", "zero"])
def test_edm_weight_is_the_official_one(case):
    golden, _, _, sigma, state = edm_batch(case, "sample")
    torch.testing.assert_close(state.weight.double(), golden[f"unet.{case}.weight"], atol=0, rtol=1e-5)


def test_five_steps_of_adam():
    golden = tensors("edm_loss")
    model = Toy(LOSS["toy"]["w"], LOSS["toy"]["b"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    assert LOSS["trajectory_optimizer"] == "Adam lr 0.05"
    ambient = AmbientLoss(LOSS["sigma_n"], "edm")
    generator = torch.Generator().manual_seed(LOSS["trajectory_seed"])
    rows = []
    for _ in golden["toy.trajectory"]:
        fixed = golden["fixed_noise"] / LOSS["sigma_n"]
        sample, sigma, state = ambient.prepare(golden["images"], range(6), generator=generator, fixed_noise=fixed)
        loss = ambient.loss(edm_denoise(model, sample, sigma), state, "sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows.append([loss.item(), model.w.item(), model.b.item()])
    torch.testing.assert_close(torch.tensor(rows).double(), golden["toy.trajectory"], atol=1e-6, rtol=2e-4)


def test_legacy_noise_is_the_official_one_bit_for_bit():
    golden = tensors("fixed_noise")
    images = golden["image"]
    noise = FixedNoise(mode="legacy")(range(len(images)), images.shape[1:], dtype=torch.float64)
    assert torch.equal(noise * params("fixed_noise")["sigma"], golden["noise"])
    assert images.min() >= -1 and images.max() <= 1


VP = params("vp_loss")


def schedule(prediction_type="epsilon"):
    return DDIMScheduler(**VP["schedule"], prediction_type=prediction_type)


def column(values):
    return values.view(-1, 1, 1, 1)


def test_conversions_are_those_of_the_published_helpers():
    golden = tensors("vp_loss")
    alphas = schedule().alphas_cumprod.double()
    signal, noise = alphas[golden["timesteps"]].sqrt(), (1 - alphas[golden["timesteps"]]).sqrt()
    data_signal, data_noise = alphas[VP["t_n"]].sqrt(), (1 - alphas[VP["t_n"]]).sqrt()
    torch.testing.assert_close(noise.float(), golden["sigma_t"], atol=0, rtol=1e-5)
    torch.testing.assert_close(data_noise[None].float(), golden["sigma_n"], atol=0, rtol=1e-5)
    x_n = data_signal * golden["x0"] + data_noise * golden["z_n"]
    torch.testing.assert_close(x_n.float(), golden["x_tn"], atol=1e-6, rtol=1e-5)
    k, c = ambient_coefficients(data_signal=data_signal, data_noise=data_noise, signal=signal, noise=noise)
    above = golden["timesteps"] > VP["t_n"]
    # The helper also calls a sample valid that is exactly at the threshold, where nothing is left to add.
    assert torch.equal(above | (golden["timesteps"] == VP["t_n"]), golden["above"])
    torch.testing.assert_close(k.float()[golden["above"]], golden["scale_k"][golden["above"]], atol=0, rtol=1e-5)
    torch.testing.assert_close(c.float()[above], golden["extra_c"][above], atol=1e-6, rtol=1e-3)
    x_t = column(k) * x_n + column(c) * golden["extra_noise"]
    torch.testing.assert_close(x_t.float()[above], golden["x_t"][above], atol=1e-4, rtol=1e-4)
    eps = golden["eps_pred"]
    x0_pred = (golden["x_t"] - column(noise) * eps) / column(signal)
    torch.testing.assert_close(x0_pred.float(), golden["x0_pred"], atol=1e-4, rtol=1e-4)
    levels = {"noise": column(noise), "k": column(k), "c": column(c)}
    predicted = expected_noisy_sample(sample=golden["x_t"], epsilon=eps, **levels)
    torch.testing.assert_close(predicted.float()[above], golden["xn_pred"][above], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("space", "key", "rtol"),
    [("noise", "loss_noise_space_per_sample", 1e-3), ("sample", "loss_xn_space_per_sample", 1e-3)],
)
def test_published_losses_above_the_threshold(space, key, rtol):
    golden = tensors("vp_loss")
    ambient = AmbientLoss(VP["t_n"], "epsilon", schedule(), space=space)
    _, _, state = ambient.prepare(
        golden["x0"], range(6), timesteps=golden["timesteps"], noise=golden["extra_noise"], fixed_noise=golden["z_n"]
    )
    above = golden["timesteps"] > VP["t_n"]
    loss = ambient.loss(golden["eps_pred"], state, "sample")
    torch.testing.assert_close(loss[above], golden[key][above], atol=0, rtol=rtol)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "flow"])
def test_both_regimes(prediction_type):
    golden = tensors("vp_loss")
    group = {k.split(".")[-1]: v for k, v in golden.items() if k.startswith(f"combined.{prediction_type}.")}
    if prediction_type == "flow":
        ambient, levels = AmbientLoss(VP["flow_t_n"], "flow"), {"sigmas": group["t"]}
        above = group["t"] > VP["flow_t_n"]
    else:
        ambient = AmbientLoss(VP["t_n"], prediction_type, schedule(prediction_type))
        levels, above = {"timesteps": golden["timesteps"]}, golden["timesteps"] > VP["t_n"]
    noise = torch.where(column(above), golden["combined.noise_extra"], golden["combined.noise_clean"])
    arguments = {"noise": noise, "fixed_noise": golden["z_n"], **levels}
    sample, _, state = ambient.prepare(golden["x0"], range(6), **arguments)
    assert torch.equal(state.above, above)
    torch.testing.assert_close(sample, group["model_input"], atol=1e-6, rtol=1e-5)
    loss = ambient.loss(golden["combined.net_out"], state, "sample")
    torch.testing.assert_close(loss.double(), group["per_sample"], atol=0, rtol=1e-5)
    torch.testing.assert_close(
        (state.output_factor * golden["combined.net_out"] + state.sample_factor * sample)[above],
        (column(group["extra_c"]) / noise_level(golden, prediction_type, group) * group["eps"])[above].float(),
        atol=1e-5,
        rtol=1e-4,
    )
    ours = ambient_coefficients(
        data_signal=ambient.data_signal,
        data_noise=ambient.data_noise,
        signal=signal_of(golden, prediction_type, group),
        noise=noise_level(golden, prediction_type, group).flatten(),
    )
    torch.testing.assert_close(ours[0], group["k"], atol=1e-9, rtol=1e-6)
    torch.testing.assert_close(ours[1][above], group["extra_c"][above], atol=1e-9, rtol=1e-5)


def signal_of(golden, prediction_type, group):
    if prediction_type == "flow":
        return 1 - group["t"]
    return schedule().alphas_cumprod.double()[golden["timesteps"]].sqrt()


def noise_level(golden, prediction_type, group):
    if prediction_type == "flow":
        return column(group["t"])
    return column((1 - signal_of(golden, prediction_type, group) ** 2).sqrt())


def test_padding_is_the_official_one():
    golden = tensors("similarity")
    assert torch.equal(pad_to_multiple(golden["image"], params("similarity")["patch"]), golden["padded"])


def test_nearest_neighbours_and_figures():
    golden, expected = tensors("similarity"), params("similarity")
    report = CopyReport.from_features(golden["generated_features"], golden["train_features"])
    torch.testing.assert_close(report.similarity, golden["max_similarity"], atol=1e-6, rtol=0)
    assert torch.equal(report.nearest, golden["nearest_index"])
    figures = report.to_dict()["generated"]
    assert figures["fraction_above"] == pytest.approx(expected["fractions"], abs=1e-6)
    assert set(expected["fractions"]) == {str(threshold) for threshold in THRESHOLDS}
    assert figures["percentile_95"] == pytest.approx(expected["percentile_95"], abs=1e-6)


def test_learning_rate_and_average_follow_the_official_schedules():
    for row in CONFIG["files"]["schedules (in this file)"]["table"]:
        assert ramped_learning_rate(1e-4, row["nimg"]) == pytest.approx(row["lr"], rel=1e-12)
        assert ema_decay(256, row["nimg"]) == pytest.approx(row["ema_beta"], rel=1e-12)

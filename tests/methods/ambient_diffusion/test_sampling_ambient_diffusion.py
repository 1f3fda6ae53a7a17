# SPDX-License-Identifier: Apache-2.0
"""The scheduler, the network and its conversion, beyond the contracts of the battery."""

import json
import math

import pytest
import torch
from diffusers import DDIMScheduler, EDMEulerScheduler, UNet2DModel
from golden_ambient_diffusion import FOLDER, Toy, official_unet, tensors
from safetensors.torch import save_file

from diffusers_ext import EDMHeunScheduler, EDMPipeline, EDMUNet2DModel
from diffusers_ext.methods.ambient_diffusion.convert_ambient_diffusion import convert, edm_config
from diffusers_ext.methods.ambient_diffusion.modeling_ambient_diffusion import edm_denoise


VARIANTS = {
    "ncsnpp": {"embedding_type": "fourier", "encoder_type": "residual", "channel_mult_noise": 2},
    "ddpmpp": {
        "embedding_type": "positional",
        "encoder_type": "standard",
        "channel_mult_noise": 1,
        "resample_filter": (1, 1),
        "label_dim": 5,
        "augment_dim": 9,
    },
}


def tiny_unet(variant="ncsnpp", **kwargs):
    settings = {"model_channels": 8, "channel_mult": (1, 2, 2), "num_blocks": 2, "attn_resolutions": (8,)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EDMUNet2DModel(16, **{**settings, **VARIANTS[variant], **kwargs}).eval()


def error_of(scheduler_class, calls):
    """Distance from the exact end of the sampling path of Gaussian data, for a number of model calls."""
    scheduler = scheduler_class(sigma_min=0.02, sigma_max=10.0, final_sigmas_type="sigma_min")
    scheduler.set_timesteps(calls if scheduler.order == 1 else calls // 2)
    levels = scheduler.sigmas.tolist()
    start = torch.full((1, 1, 1, 1), 3.0, dtype=torch.float64)
    sample, variance = start, 0.3
    for timestep in scheduler.timesteps:
        sigma = scheduler.sigmas[scheduler.step_index or 0].item()
        scheduler.scale_model_input(sample, timestep)
        denoised = sample * variance / (variance + sigma**2)
        skip, out = 0.25 / (sigma**2 + 0.25), sigma * 0.5 / (sigma**2 + 0.25) ** 0.5
        sample = scheduler.step((denoised - skip * sample) / out, timestep, sample).prev_sample
    # The path keeps the quantile: x is proportional to the standard deviation of the noisy data.
    exact = start * math.sqrt((variance + levels[-1] ** 2) / (variance + levels[0] ** 2))
    return (sample - exact).abs().item()


def test_it_is_of_second_order():
    errors = [error_of(EDMHeunScheduler, calls) for calls in (40, 80)]
    # Halving the steps quarters the error; a first-order method would halve it.
    assert 3.2 < errors[0] / errors[1] < 5


def test_it_is_nearer_than_euler_with_as_many_calls():
    assert error_of(EDMHeunScheduler, 40) < error_of(EDMEulerScheduler, 40) / 2


@pytest.mark.parametrize("num_steps", [1, 2, 18])
def test_model_calls(num_steps):
    scheduler = EDMHeunScheduler()
    scheduler.set_timesteps(num_steps)
    assert len(scheduler.timesteps) == 2 * num_steps - 1


def test_churn_raises_levels_where_it_is_asked_to():
    scheduler = EDMHeunScheduler(s_churn=4.0, s_tmin=0.05, s_tmax=50.0)
    scheduler.set_timesteps(8)
    plain = EDMHeunScheduler()
    plain.set_timesteps(8)
    ratio = scheduler.sigmas[::2] / plain.sigmas[::2]
    inside = (plain.sigmas[::2] >= 0.05) & (plain.sigmas[::2] <= 50)
    assert inside.any() and not inside.all()
    torch.testing.assert_close(ratio, torch.where(inside, math.sqrt(2), 1.0).double())


def test_without_churn_no_random_number_is_drawn():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    scheduler = EDMHeunScheduler()
    scheduler.set_timesteps(3)
    sample = torch.ones(1, 1, 2, 2)
    for timestep in scheduler.timesteps:
        output = Toy()(scheduler.scale_model_input(sample, timestep), timestep)[0]
        sample = scheduler.step(output, timestep, sample, generator=generator).prev_sample
    assert torch.equal(before, generator.get_state())


def test_levels_of_ones_own():
    scheduler = EDMHeunScheduler()
    scheduler.set_timesteps(sigmas=[10.0, 1.0, 0.1])
    assert scheduler.sigmas.tolist() == [10.0, 1.0, 1.0, 0.1, 0.1, 0.0]
    assert scheduler.init_noise_sigma == 10.0


def test_exponential_levels_fall_by_a_constant_factor():
    scheduler = EDMHeunScheduler(sigma_schedule="exponential")
    scheduler.set_timesteps(6)
    levels = scheduler.sigmas[::2].log()
    torch.testing.assert_close(levels.diff(), levels.diff()[:1].expand(5))
    assert scheduler.sigmas[0] == pytest.approx(80.0) and scheduler.sigmas[-2] == pytest.approx(0.002)


def test_float64_state_survives_float32_latents():
    """Steps that are too small for float32 add up."""

    def end(**kwargs):
        scheduler = EDMHeunScheduler(sigma_min=0.999, sigma_max=1.0, final_sigmas_type="sigma_min", **kwargs)
        scheduler.set_timesteps(400)
        sample = torch.full((1, 1, 1, 1), 1000.0)
        for timestep in scheduler.timesteps:
            scheduler.scale_model_input(sample, timestep)
            denoised = sample - 1.0
            arguments = {"pred_original_sample": denoised}
            sample = scheduler.step(denoised, timestep, sample, **arguments).prev_sample
        return sample.item()

    assert abs(end(float64_state=True) - 999.999) < 1e-4 < abs(end() - 999.999)


BAD_SETTINGS = [
    ({"sigma_min": 0.0}, "0 < `sigma_min` < `sigma_max`"),
    ({"sigma_max": 0.001}, "0 < `sigma_min` < `sigma_max`"),
    ({"sigma_data": -0.5}, "`sigma_data` has to be positive"),
    ({"rho": 0.0}, "`rho` has to be positive"),
    ({"sigma_schedule": "linear"}, "`sigma_schedule` has to be one of"),
    ({"prediction_type": "flow"}, "`prediction_type` has to be one of"),
    ({"final_sigmas_type": "one"}, "`final_sigmas_type` has to be one of"),
    ({"s_churn": -1.0}, "must not be negative"),
    ({"s_noise": float("nan")}, "must not be negative"),
    ({"s_tmin": 2.0, "s_tmax": 1.0}, "0 <= `s_tmin` <= `s_tmax`"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_scheduler_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EDMHeunScheduler(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either `num_inference_steps` or `sigmas`"),
        ({"num_inference_steps": 3, "sigmas": [1.0]}, "either `num_inference_steps` or `sigmas`"),
        ({"num_inference_steps": 0}, "has to be at least 1"),
        ({"sigmas": [1.0, 2.0]}, "have to be positive and to fall"),
        ({"sigmas": [1.0, 0.0]}, "have to be positive and to fall"),
        ({"sigmas": []}, "have to be positive and to fall"),
    ],
)
def test_bad_levels_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EDMHeunScheduler().set_timesteps(**arguments)


def test_steps_out_of_order_are_refused():
    scheduler, sample = EDMHeunScheduler(), torch.ones(1, 1, 2, 2)
    scheduler.set_timesteps(1)
    with pytest.raises(ValueError, match="scale_model_input"):
        scheduler.step(sample, scheduler.timesteps[0], sample)
    scheduler.scale_model_input(sample, scheduler.timesteps[0])
    with pytest.raises(ValueError, match="is the integer 0"):
        scheduler.step(sample, 0, sample)
    scheduler.step(sample, scheduler.timesteps[0], sample)
    with pytest.raises(ValueError, match="All 1 steps are done"):
        scheduler.step(sample, scheduler.timesteps[0], sample)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` has to be at least 1"),
        ({"class_labels": [1, 2]}, "Expected 1 class labels but got 2"),
        ({"latents": torch.zeros(1, 3, 8, 8)}, "`latents` has to have the shape"),
        ({"output_type": "jpg"}, "`output_type` has to be one of"),
    ],
)
def test_bad_arguments_of_the_pipeline_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EDMPipeline(tiny_unet(), EDMHeunScheduler())(**arguments)


def test_a_scheduler_without_preconditioning_is_refused():
    with pytest.raises(ValueError, match="has to do EDM preconditioning but is a DDIMScheduler"):
        EDMPipeline(tiny_unet(), DDIMScheduler())()


def test_classes():
    pipe = EDMPipeline(tiny_unet("ddpmpp"), EDMHeunScheduler())
    pipe.set_progress_bar_config(disable=True)

    def draw(label):
        labels = torch.nn.functional.one_hot(torch.tensor([label]), 5)
        generator = torch.Generator().manual_seed(0)
        return pipe(num_inference_steps=2, generator=generator, class_labels=labels, output_type="pt").images

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


@pytest.mark.parametrize("sigma", [0.01, 0.5, 50.0])
def test_a_stock_unet_with_fourier_embeddings_gets_its_label_back(sigma):
    """diffusers takes the logarithm of the timestep and divides by it: both are undone."""
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [8]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = UNet2DModel(8, time_embedding_type="fourier", norm_num_groups=2, layers_per_block=1, **blocks).eval()
    seen = []
    unet.time_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].log()))
    final = []
    unet.conv_out.register_forward_hook(lambda module, args, output: final.append(output))
    sample = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        denoised = edm_denoise(unet, sample, sigma)
    torch.testing.assert_close(seen[0], torch.tensor([math.log(sigma) / 4]))
    spread = math.sqrt(sigma**2 + 0.25)
    expected = 0.25 / spread**2 * sample + 0.5 * sigma / spread * final[0]
    torch.testing.assert_close(denoised, expected)


# Conversion


def test_the_official_weights_tell_their_config():
    config = edm_config(tensors("edm_unet"))
    expected = {k: tuple(v) if isinstance(v, list) else v for k, v in official_unet().config.items() if k in config}
    assert config == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_convert_finds_every_variant(variant, tmp_path):
    unet = tiny_unet(variant, dropout=0.0)
    save_file(unet.state_dict(), tmp_path / "weights.safetensors")
    report = convert(tmp_path / "weights.safetensors", tmp_path / "unet")
    loaded = EDMUNet2DModel.from_pretrained(tmp_path / "unet")
    public = [{k: v for k, v in model.config.items() if k[0] != "_"} for model in (unet, loaded)]
    assert public[0] == public[1] and report.loaded == sorted(unet.state_dict()) and not report.dropped


def test_convert_of_the_official_file(tmp_path):
    convert(FOLDER / "edm_unet.safetensors", tmp_path)
    golden = tensors("edm_forward")
    with torch.no_grad():
        denoised = edm_denoise(EDMUNet2DModel.from_pretrained(tmp_path), golden["x"], golden["sigma"])
    torch.testing.assert_close(denoised, golden["denoised"], atol=2e-5, rtol=0)


def other_keys(folder):
    save_file({"unet.weight": torch.zeros(1)}, folder / "other.safetensors")
    return folder / "other.safetensors", "no key is like 'model.enc.64x64_conv.weight'"


def lacking_keys(folder):
    weights = tiny_unet().state_dict()
    del weights["model.dec.16x16_block1.conv0.bias"]
    save_file(weights, folder / "lacking.safetensors")
    return folder / "lacking.safetensors", "does not fit the network that its keys describe"


def pickle(folder):
    (folder / "network-snapshot.pkl").write_bytes(b"\x80\x04.")
    return folder / "network-snapshot.pkl", "pickles that run code when opened"


def truncated(folder):
    (folder / "half.safetensors").write_bytes((FOLDER / "edm_unet.safetensors").read_bytes()[:5000])
    return folder / "half.safetensors", "cannot be read as safetensors"


def skip_branches(folder):
    weights = {**tiny_unet().state_dict(), "model.enc.8x8_aux_down.resample_filter": torch.zeros(1)}
    save_file(weights, folder / "skip.safetensors")
    return folder / "skip.safetensors", "has skip branches"


@pytest.mark.parametrize("make", [other_keys, lacking_keys, pickle, truncated, skip_branches])
def test_what_cannot_be_converted_is_refused_and_nothing_written(make, tmp_path):
    source, message = make(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "unet")
    assert not (tmp_path / "unet").exists()


def test_nothing_to_convert(tmp_path):
    with pytest.raises(FileNotFoundError, match="has to hold one safetensors file but holds 0"):
        convert(tmp_path, tmp_path / "unet")
    with pytest.raises(ValueError, match="`format` has to be 'edm'"):
        convert(FOLDER / "edm_unet.safetensors", tmp_path / "unet", format="sae")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embedding_type": "learned"}, "`embedding_type` has to be one of"),
        ({"encoder_type": "skip"}, "`encoder_type` has to be one of"),
        ({"sample_size": 18, "channel_mult": (1, 2, 2)}, "has to be divisible by 4"),
    ],
)
def test_bad_networks_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EDMUNet2DModel(**{"sample_size": 16, **settings})


# The shelf


def test_the_shelf_has_the_default_config(tmp_path):
    EDMHeunScheduler().save_pretrained(tmp_path)
    shelf = FOLDER.parents[2] / "schedulers" / "edm_heun"
    assert json.loads((shelf / "scheduler_config.json").read_text()) == json.loads(
        (tmp_path / "scheduler_config.json").read_text()
    )
    assert isinstance(EDMHeunScheduler.from_pretrained(shelf), EDMHeunScheduler)

# SPDX-License-Identifier: Apache-2.0
"""The training script as a user starts it, on tiny models."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image

from diffusers_ext import EDMPipeline, custom_pipeline
from diffusers_ext.testing import TrainingContract, run_script, tiny_stable_diffusion
from diffusers_ext.testing.training import TORCHRUN
from diffusers_ext.training.checkpoints import list_checkpoints


SCRIPT = Path(__file__).parents[2] / "examples" / "ambient_diffusion" / "train_ambient_diffusion.py"
MODEL = {
    "sample_size": 16,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 8,
    "dropout": 0.1,
}
CAPTIONS = ("red square", "green square", "blue square", "a red dot")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    rows = []
    for number, caption in enumerate(CAPTIONS):
        picture = generator.integers(0, 256, (1, 1, 3), dtype=np.uint8).repeat(32, 0).repeat(32, 1)
        Image.fromarray(picture).save(folder / f"{number}.png")
        rows.append(json.dumps({"file_name": f"{number}.png", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    (folder / "model.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_stable_diffusion().save_pretrained(folder)
    return folder


def read_losses(folder):
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.mark.slow
class TestFromScratch(TrainingContract):
    """Unconditional, all weights, with flips, dropout and an average of weights."""

    script = SCRIPT

    def assert_falls(self, losses):
        # The weight of a visit depends on its noise level, so that neighbouring steps differ a lot.
        values = [losses[step] for step in range(1, self.max_train_steps + 1)]
        assert max(values[-3:]) < 0.85 * values[0]

    @pytest.fixture(scope="class")
    def settings(self, data):
        return {
            "train_data_dir": data,
            "model_config": data / "model.json",
            "noise_threshold": 0.7,
            "resolution": 16,
            "random_flip": True,
            "train_batch_size": 32,
            "learning_rate": 1e-2,
            "ema_decay": 0.5,
            "logging_steps": 1,
            "num_report_images": 2,
            "num_inference_steps": 2,
        }

    def losses(self, folder):
        return read_losses(folder)

    def weights(self, folder):
        return EDMPipeline.from_pretrained(folder).unet.state_dict()

    def test_config_and_card_say_what_was_done(self, trained):
        config = json.loads((trained / "ambient_config.json").read_text())
        assert config["objective"]["noise_threshold"] == 0.7 and config["data"]["pictures"] == len(CAPTIONS)
        card = (trained / "README.md").read_text()
        assert "ambient-diffusion" in card and "generated (2)" in card

    def test_report_of_copies(self, trained):
        report = json.loads((trained / "reports" / f"step-{self.max_train_steps}.json").read_text())
        assert report["generated"]["count"] == 2 and -1 <= report["generated"]["percentile_95"] <= 1
        assert Image.open(trained / "reports" / f"step-{self.max_train_steps}.png").size == (32, 32)

    def test_result_loads_with_diffusers_alone(self, trained):
        """The pipeline file given as a path, in a process that imports nothing of this package."""
        code = (
            "import sys, torch; from diffusers import DiffusionPipeline\n"
            "options = {'custom_pipeline': sys.argv[2], 'trust_remote_code': True}\n"
            "pipe = DiffusionPipeline.from_pretrained(sys.argv[1], **options)\n"
            "assert not any(name.startswith('diffusers_ext') for name in sys.modules)\n"
            "print(pipe(2, num_inference_steps=2, output_type='pt').images.shape)\n"
        )
        command = [sys.executable, "-c", code, str(trained), custom_pipeline("ambient_diffusion")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.stdout.strip() == "torch.Size([2, 3, 16, 16])", done.stderr[-2000:]

    def test_both_branches_are_logged(self, trained):
        rows = [json.loads(line) for line in (trained / "training_log.jsonl").read_text().splitlines()]
        assert all(row["loss_above"] > 0 and row["loss_below"] > 0 for row in rows)

    def test_two_processes_train_one_result(self, run, tmp_path):
        """The same visits, so the same losses but for the order of sums; dropout would draw differently."""
        model = tmp_path / "model.json"
        model.write_text(json.dumps({**MODEL, "dropout": 0.0}))
        settings = {"max_train_steps": 3, "model_config": model, "num_report_images": 3}
        run(tmp_path / "one", **settings)
        run(tmp_path / "two", launcher=(*TORCHRUN, "2"), **settings, train_batch_size=16)
        one, two = read_losses(tmp_path / "one"), read_losses(tmp_path / "two")
        assert len(one) == 3 and one == pytest.approx(two, rel=1e-3)
        report = json.loads((tmp_path / "two" / "reports" / "step-3.json").read_text())
        assert report["generated"]["count"] == 3


def run(settings, **kwargs):
    return run_script(SCRIPT, {"max_train_steps": 2, "logging_steps": 1, "train_batch_size": 4, **settings}, **kwargs)


@pytest.mark.slow
class TestTextConditional:
    @pytest.fixture(scope="class")
    def settings(self, data, base):
        return {
            "pretrained_model_name_or_path": base,
            "train_data_dir": data,
            "noise_threshold": 250,
            "threshold_unit": "timestep",
            "num_report_images": 2,
            "num_inference_steps": 2,
            "learning_rate": 1e-2,
        }

    def test_all_weights_with_every_baseline(self, settings, base, tmp_path):
        baselines = {
            "caption_perturbation": "add_tokens",
            "caption_perturbation_prob": 0.5,
            "caption_dropout": 0.2,
            "embedding_noise": 0.1,
            "embedding_mixup": 0.5,
            "drop_magnitude": 100.0,
            "snr_gamma": 5.0,
        }
        run({**settings, **baselines, "output_dir": tmp_path, "gradient_checkpointing": True})
        trained = StableDiffusionPipeline.from_pretrained(tmp_path).unet.state_dict()
        before = UNet2DConditionModel.from_pretrained(base, subfolder="unet").state_dict()
        assert any(not torch.equal(trained[name], tensor) for name, tensor in before.items())
        assert all(np.isfinite(loss) for loss in read_losses(tmp_path).values())

    def test_lora_loads_into_the_base(self, settings, base, tmp_path):
        run({**settings, "rank": 2, "output_dir": tmp_path, "gradient_accumulation_steps": 2})
        assert not (tmp_path / "model_index.json").exists()
        pipe = StableDiffusionPipeline.from_pretrained(base)
        pipe.set_progress_bar_config(disable=True)

        def draw():
            generator = torch.Generator().manual_seed(0)
            return pipe("a red dot", num_inference_steps=2, generator=generator, output_type="np").images

        before = draw()
        pipe.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
        assert np.abs(draw() - before).max() > 1e-4


BAD = [
    ({"train_batch_size": 0}, 2, "has to be positive"),
    ({"train_data_dir": None}, 2, "either --train_data_dir or --dataset_name"),
    ({"rank": 4}, 2, "adapts a pretrained model"),
    ({"caption_dropout": 1.5}, 2, "has to lie in [0, 1]"),
    ({"noise_mode": "legacy", "random_flip": True}, 2, "add --augment_before_noise"),
    ({"noise_threshold": -1.0}, 1, "has to lie in the schedule"),
    ({"noise_threshold": 5, "threshold_unit": "timestep"}, 1, "EDM has no timesteps"),
    ({"caption_perturbation": "add_tokens"}, 1, "this one is unconditional"),
    ({"prediction_type": "epsilon"}, 1, "does not fit the EDMHeunScheduler"),
]


@pytest.mark.parametrize(("changes", "code", "message"), BAD, ids=[row[2] for row in BAD])
def test_bad_input_is_refused_before_anything_is_written(data, tmp_path, changes, code, message):
    spec = importlib.util.spec_from_file_location("train_ambient_diffusion", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    settings = {"train_data_dir": data, "model_config": data / "model.json", "resolution": 16, **changes}
    command = ["--output_dir", str(tmp_path / "out")]
    for name, value in settings.items():
        command += [] if value is None else [f"--{name}"] if value is True else [f"--{name}", str(value)]
    expected = SystemExit if code == 2 else ValueError
    with pytest.raises(expected) as error:
        script.main(script.parse_args(command))
    if code == 1:
        assert message in str(error.value)
    assert not list_checkpoints(tmp_path / "out") and not (tmp_path / "out").exists()

# SPDX-License-Identifier: Apache-2.0
import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig
from test_hooks_saeuron import random_edit

from diffusers_ext import (
    ConceptEdits,
    ConceptStatistics,
    SAeUronConfig,
    SAeUronStableDiffusionPipeline,
    SparseAutoencoder,
    apply_saeuron,
    collect_statistics,
    lab,
    remove_saeuron,
)
from diffusers_ext.methods.saeuron.heatmaps_saeuron import overlay_heatmap
from diffusers_ext.methods.saeuron.hooks_saeuron import record_activations


ROOT = Path(__file__).parents[3]
HOOK = {"module": "up_blocks.0.attentions.1"}
CALL = {"num_inference_steps": 3, "guidance_scale": 4.0, "output_type": "np"}


@pytest.fixture(scope="module")
def sae():
    torch.manual_seed(0)
    return SparseAutoencoder(d_in=160, expansion_factor=4, k=16, hook=HOOK).eval()


@pytest.fixture(scope="module")
def edits(sae):
    timesteps = tuple(range(961, 0, -40))
    edits = [random_edit(sae, name, 40, timesteps, seed, -3.0) for seed, name in enumerate(("cat", "neon"))]
    return ConceptEdits(edits)


@pytest.fixture
def pipe(sae, edits):
    pipe = lab.load_pipeline(SAeUronStableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_sae(sae)
    pipe.load_concepts(edits)
    return pipe


@pytest.fixture(scope="module")
def stock():
    pipe = lab.load_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompt="cat, neon style", seeds=(0,), **kwargs):
    prompts = [prompt] * len(seeds) if isinstance(prompt, str) else prompt
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return pipe(prompts, generator=generators, **{**CALL, **kwargs}).images


class TestGolden:
    @pytest.fixture
    def fixture(self, golden):
        return golden("saeuron", "pipeline")

    @pytest.fixture
    def tiny(self, golden, fixture):
        unet = UNet2DConditionModel(**fixture.info["unet_config"])
        unet.load_state_dict(golden_weights(fixture, "pipeline_unet"))
        scheduler = DDIMScheduler.from_config(fixture.info["scheduler"]["config"])
        base = lab.load_pipeline()
        pipe = StableDiffusionPipeline(
            base.vae, None, None, unet, scheduler, None, None, requires_safety_checker=False
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @pytest.fixture
    def golden_edit(self, fixture):
        settings = fixture.info["sae"]
        point = {"module": fixture.info["position"].removeprefix("unet.")}
        sae = SparseAutoencoder(settings["d_in"], settings["num_latents"], k=settings["k"], hook=point).eval()
        sae.load_state_dict(fixture.group("sae."))
        statistics = ConceptStatistics(fixture["timesteps"], settings["num_latents"], sae.fingerprint())
        for name, latents in fixture.group("latents_dict.").items():
            statistics.update(name, latents)
        unlearn = fixture.info["unlearn"]
        return sae, statistics.edit(
            unlearn["concept"], percentile=unlearn["percentile"], multiplier=unlearn["multiplier"]
        )

    def run(self, fixture, pipe):
        return pipe(
            prompt_embeds=fixture["prompt_embeds"],
            negative_prompt_embeds=fixture["negative_prompt_embeds"],
            latents=fixture["latents"],
            num_inference_steps=fixture.info["steps"],
            guidance_scale=fixture.info["guidance_scale"],
            output_type="latent",
        ).images

    def test_activations(self, fixture, tiny):
        point = {"module": fixture.info["position"].removeprefix("unet.")}
        for signal in ("output", "input"):
            seen = []
            with record_activations(tiny.unet, {**point, "signal": signal}, lambda tokens, t: seen.append(tokens)):
                final = self.run(fixture, tiny)
            cond = torch.stack([tokens[2:] for tokens in seen], 1)
            torch.testing.assert_close(cond, fixture[f"cond.{signal}"], **fixture.info["tolerance"])
            if signal == "output":
                uncond = torch.stack([tokens[:2] for tokens in seen], 1)
                torch.testing.assert_close(uncond, fixture["uncond.output"], **fixture.info["tolerance"])
            torch.testing.assert_close(final, fixture["final"], **fixture.info["tolerance"])

    @pytest.mark.parametrize("error", ["official", "exact"])
    def test_unlearned_latents(self, fixture, tiny, golden_edit, error):
        sae, edit = golden_edit
        apply_saeuron(tiny.unet, sae, SAeUronConfig(edits=[edit], error=error))
        torch.testing.assert_close(self.run(fixture, tiny), fixture[f"unlearned.{error}"], **fixture.info["tolerance"])
        remove_saeuron(tiny.unet)
        torch.testing.assert_close(self.run(fixture, tiny), fixture["final"], **fixture.info["tolerance"])


def golden_weights(fixture, name):
    from safetensors.torch import load_file

    return load_file(fixture.folder / f"{name}.safetensors")


class TestPipeline:
    def test_nothing_unlearned_is_the_stock_picture(self, pipe, stock):
        assert (draw(pipe) == draw(stock)).all()

    def test_strength_zero_is_the_stock_picture(self, pipe, stock):
        pipe.unlearn(["cat", "neon"], strength=0.0)
        assert (draw(pipe) == draw(stock)).all()

    def test_unlearning_changes_the_picture_and_clearing_restores_it(self, pipe, stock):
        pipe.unlearn("cat")
        assert pipe.unlearned_concepts == {"cat": 1.0}
        assert not np.allclose(draw(pipe), draw(stock), atol=1e-3)
        pipe.clear_unlearning()
        assert (draw(pipe) == draw(stock)).all() and pipe.unlearned_concepts == {}

    def test_second_call_equals_the_first(self, pipe):
        pipe.unlearn("cat")
        first = draw(pipe)
        draw(pipe, num_inference_steps=5)
        assert (draw(pipe) == first).all()

    def test_second_unlearn_replaces_the_first(self, pipe):
        pipe.unlearn("neon")
        alone = draw(pipe)
        pipe.unlearn("cat")
        pipe.unlearn("neon")
        assert (draw(pipe) == alone).all()

    def test_unlearn_in_the_call_lasts_for_the_call(self, pipe, stock):
        pipe.unlearn("cat")
        cat = draw(pipe)
        pipe.clear_unlearning()
        assert (draw(pipe, unlearn=["cat"]) == cat).all()
        assert (draw(pipe) == draw(stock)).all()
        pipe.unlearn("cat")
        assert (draw(pipe, unlearn=[]) == draw(stock)).all()
        assert (draw(pipe) == cat).all()

    def test_strengths_by_name(self, pipe):
        pipe.unlearn({"cat": 0.5, "neon": 0.0})
        half = draw(pipe)
        pipe.unlearn(["cat", "neon"])
        pipe.set_concept_strength("cat", 0.5), pipe.set_concept_strength("neon", 0.0)
        assert pipe.unlearned_concepts == {"cat": 0.5, "neon": 0.0} and (draw(pipe) == half).all()

    def test_exception_in_a_call_restores_what_was_unlearned(self, pipe, stock):
        def fail(pipe, step, timestep, kwargs):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            draw(pipe, unlearn=["cat"], callback_on_step_end=fail)
        assert (draw(pipe) == draw(stock)).all()

    def test_batch_equals_single_pictures(self, pipe):
        pipe.unlearn("cat")
        together = draw(pipe, ["cat, ink style", "owl, neon style", "pig, pixel style"], (1, 2, 3))
        alone = [
            draw(pipe, [p], (s,))[0]
            for p, s in (("cat, ink style", 1), ("owl, neon style", 2), ("pig, pixel style", 3))
        ]
        # Matrix products of other shapes round differently; the steps amplify it.
        np.testing.assert_allclose(together, np.stack(alone), atol=2e-3)

    def test_images_per_prompt_callbacks_and_output_types(self, pipe):
        seen = []

        def callback(pipe, step, timestep, kwargs):
            seen.append(kwargs["latents"].shape)
            return kwargs

        generator = torch.Generator().manual_seed(0)
        settings = {"num_images_per_prompt": 2, "callback_on_step_end": callback, "generator": generator}
        images = pipe("cat", num_inference_steps=2, unlearn=["cat"], output_type="pt", return_dict=False, **settings)[
            0
        ]
        assert images.shape == (2, 3, 64, 64) and seen == [(2, 4, 16, 16)] * 2
        assert pipe("cat", num_inference_steps=1, unlearn=["cat"]).images[0].size == (64, 64)

    def test_signature_is_the_stock_one_plus_unlearn(self):
        stock = list(inspect.signature(StableDiffusionPipeline.__call__).parameters)
        ours = list(inspect.signature(SAeUronStableDiffusionPipeline.__call__).parameters)
        assert ours == [*stock[:-1], "unlearn", stock[-1]]

    def test_save_and_load_with_and_without_an_autoencoder(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path / "with")
        loaded = SAeUronStableDiffusionPipeline.from_pretrained(tmp_path / "with")
        assert loaded.sae.fingerprint() == pipe.sae.fingerprint()
        loaded.load_concepts(pipe.concept_edits)
        loaded.set_progress_bar_config(disable=True)
        assert (draw(loaded, unlearn=["cat"]) == draw(pipe, unlearn=["cat"])).all()
        pipe.register_modules(sae=None)
        pipe.save_pretrained(tmp_path / "without")
        assert SAeUronStableDiffusionPipeline.from_pretrained(tmp_path / "without").sae is None

    def test_from_pipe_shares_the_models(self, stock):
        pipe = SAeUronStableDiffusionPipeline.from_pipe(stock)
        assert pipe.unet is stock.unet and pipe.sae is None

    def test_heat_map(self, pipe):
        pipe.unlearn("cat")
        heat, images = pipe.concept_heatmap("cat", ["cat", "owl"], num_inference_steps=2)
        assert heat.shape == (2, 4, 4) and heat.min() >= 0 and heat.max() == 1
        assert overlay_heatmap(images[0], heat[0]).size == (64, 64)
        assert pipe.unlearned_concepts == {"cat": 1.0}

    @pytest.mark.parametrize("output_type", ["pil", "np", "pt"])
    def test_heat_map_of_the_size_of_the_picture(self, pipe, output_type):
        call = {"prompt": ["cat"], "num_inference_steps": 2, "generator": torch.Generator().manual_seed(0)}
        heat, _ = pipe.concept_heatmap("cat", per_step=True, image_size=True, output_type=output_type, **call)
        assert heat.shape == (2, 1, 64, 64) and 0 <= heat.min() and heat.max() <= 1

    def test_statistics_do_not_depend_on_the_batch_size(self, pipe, sae):
        prompts = {"cat": ["cat, ink style", "cat, neon style", "cat"], "owl": ["owl"]}
        one, three = (collect_statistics(pipe, sae, prompts, 2, 4.0, batch_size=n) for n in (1, 3))
        assert one.names == ["cat", "owl"] and one.timesteps.tolist() == [501, 1]
        for name in prompts:
            # Per-prompt means are rounded to half precision, so a last bit may flip.
            torch.testing.assert_close(one.mean(name), three.mean(name), atol=2e-3, rtol=1e-2)

    def test_statistics_without_guidance_keep_every_sample(self, pipe, sae):
        statistics = collect_statistics(pipe, sae, {"cat": ["cat"] * 4}, 2, guidance_scale=1.0, batch_size=4)
        assert statistics.counts == {"cat": 4}


DOOR = """
import sys, torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(sys.argv[1], custom_pipeline=sys.argv[2], trust_remote_code=True)
print(type(pipe).__name__, type(pipe).__module__, pipe.sae, "diffusers_ext" in sys.modules)
pipe.set_progress_bar_config(disable=True)
pipe.load_sae(sys.argv[3])
pipe.load_concepts(sys.argv[3])
generator = torch.Generator().manual_seed(0)
image = pipe("cat, neon style", unlearn=["cat"], num_inference_steps=2, generator=generator, output_type="np")
print(float(image.images.sum()))
"""


class TestDoors:
    @pytest.mark.slow
    @pytest.mark.parametrize("door", ["pipelines/saeuron", "custom_pipeline"])
    def test_custom_pipeline(self, door, pipe, sae, edits, tmp_path):
        from diffusers_ext import custom_pipeline

        sae.save_pretrained(tmp_path)
        edits.save_pretrained(tmp_path)
        door = custom_pipeline("saeuron") if door == "custom_pipeline" else door
        command = [sys.executable, "-c", DOOR, lab.pipeline_folder(), door, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 0, run.stderr[-2000:]
        first, total = run.stdout.split("\n")[:2]
        assert first.startswith("SAeUronStableDiffusionPipeline diffusers_modules.local") and first.endswith(
            "None False"
        )
        generator = torch.Generator().manual_seed(0)
        ours = pipe(
            "cat, neon style", unlearn=["cat"], num_inference_steps=2, generator=generator, output_type="np"
        ).images
        assert float(total) == float(ours.sum())

    def test_stock_pipeline_with_a_lora(self, sae, edits, stock, tmp_path):
        pipe = lab.load_pipeline()
        pipe.set_progress_bar_config(disable=True)
        torch.manual_seed(0)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), "default")
        pipe.unet.save_lora_adapter(tmp_path, adapter_name="default")
        pipe.unet.delete_adapters("default")
        pipe.unet.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors", prefix=None)
        wearing = draw(pipe)
        assert not np.allclose(wearing, draw(stock), atol=1e-3)
        apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[edits["cat"]]))
        assert not np.allclose(draw(pipe), wearing, atol=1e-3)
        remove_saeuron(pipe.unet)
        assert (draw(pipe) == wearing).all()


class TestBadInput:
    def test_unlearning_without_an_autoencoder(self):
        pipe = lab.load_pipeline(SAeUronStableDiffusionPipeline)
        with pytest.raises(ValueError, match="There is no autoencoder"):
            pipe.unlearn("cat")
        with pytest.raises(ValueError, match="There is no autoencoder"):
            pipe.concept_heatmap("cat", "cat")

    def test_unknown_concept_leaves_the_present_one(self, pipe):
        pipe.unlearn("cat")
        with pytest.raises(ValueError, match="no edit for the concept 'catt'. Closest: cat"):
            pipe.unlearn("catt")
        assert pipe.unlearned_concepts == {"cat": 1.0}

    def test_settings_out_of_range_leave_the_present_one(self, pipe):
        pipe.unlearn("cat")
        before = draw(pipe)
        with pytest.raises(ValueError, match="holds 40 latents"):
            pipe.unlearn("neon", num_features=99)
        assert pipe.unlearned_concepts == {"cat": 1.0} and (draw(pipe) == before).all()

    def test_edit_of_another_autoencoder_leaves_the_present_one(self, pipe):
        other = SparseAutoencoder(d_in=160, expansion_factor=4, k=16, hook=HOOK)
        pipe.unlearn("cat")
        with pytest.raises(ValueError, match="was made for the autoencoder"):
            pipe.unlearn([random_edit(other)])
        assert pipe.unlearned_concepts == {"cat": 1.0}

    def test_autoencoder_of_another_block(self, pipe, sae, edits):
        wrong = SparseAutoencoder(d_in=160, expansion_factor=4, k=16, hook={"module": "up_blocks.1.attentions.0"})
        pipe.load_sae(wrong)
        with pytest.raises(ValueError, match="has 160 channels but up_blocks.1.attentions.0 gives 96"):
            pipe.unlearn([random_edit(wrong)])
        assert pipe.unlearned_concepts == {}

    def test_autoencoder_without_a_hook_point(self, pipe):
        with pytest.raises(ValueError, match="does not say which block"):
            pipe.load_sae(SparseAutoencoder(d_in=160))

    def test_new_autoencoder_while_something_is_unlearned(self, pipe, sae):
        pipe.unlearn("cat")
        with pytest.raises(ValueError, match="clear_unlearning"):
            pipe.load_sae(sae)

    def test_strengths_given_twice(self, pipe):
        with pytest.raises(ValueError, match="not both"):
            pipe.unlearn({"cat": 1.0}, strength=0.5)

    def test_strength_of_what_is_not_unlearned(self, pipe):
        with pytest.raises(ValueError, match="'neon' is not unlearned at present"):
            pipe.set_concept_strength("neon", 1.0)

    @pytest.mark.parametrize("target", ["cond", "uncond"])
    def test_one_half_of_the_batch_without_guidance(self, pipe, target):
        pipe.unlearn("cat", apply_to=target)
        # Two pictures would pass for the two halves.
        with pytest.raises(ValueError, match="needs classifier-free guidance but `guidance_scale` is 1.0"):
            draw(pipe, seeds=(0, 1), guidance_scale=1.0)
        assert pipe.unlearned_concepts == {"cat": 1.0}

    def test_statistics_of_no_prompts(self, pipe, sae):
        with pytest.raises(ValueError, match="it is empty"):
            collect_statistics(pipe, sae, {})
        with pytest.raises(ValueError, match=r"without any: \['cat'\]"):
            collect_statistics(pipe, sae, {"cat": []})

    def test_heat_map_that_is_no_map(self, pipe):
        with pytest.raises(ValueError, match="has to have shape"):
            overlay_heatmap(draw(pipe, output_type="pil")[0], torch.zeros(1, 2, 2))

# SPDX-License-Identifier: Apache-2.0
"""What users expect of a text-to-image pipeline."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionPipeline,
)
from peft import LoraConfig, get_peft_model_state_dict

from .components import tiny_stable_diffusion


class PipelineContract:
    """
    Tests of a pipeline that subclasses a stock one. Subclasses set `pipeline_class` and override what differs; a fact
    that cannot hold for a method is taken out by name (`test_batch_equals_single_pictures = None`), with the reason
    beside it.

    Attributes:
        pipeline_class: the class under test.
        stock_class: the class it extends.
        inputs: arguments with which the method acts.
        neutral_inputs: arguments with which the pictures must be bit for bit those of the stock class.
    """

    pipeline_class = None
    stock_class = StableDiffusionPipeline
    inputs = {}
    neutral_inputs = {}

    def make_pipeline(self):
        """A fresh pipeline with tiny components, the method ready to use."""
        return tiny_stable_diffusion(self.pipeline_class)

    def make_stock_pipeline(self):
        """The stock pipeline with the same weights."""
        return tiny_stable_diffusion(self.stock_class)

    def after_loading(self, pipe, original):
        """Sets what `save_pretrained` does not save, such as loaded concepts."""

    def draw(self, pipe, prompt="a cat", seeds=(0,), inputs=None, **kwargs):
        prompts = [prompt] * len(seeds) if isinstance(prompt, str) else prompt
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        settings = {"num_inference_steps": 2, "guidance_scale": 5.0, "output_type": "np"}
        settings |= self.inputs if inputs is None else inputs
        return pipe(prompts, generator=generators, **{**settings, **kwargs}).images

    def draw_plain(self, pipe, **kwargs):
        return self.draw(pipe, inputs=self.neutral_inputs, **kwargs)

    def quiet(self, pipe, original):
        """A pipeline that was loaded, ready to be compared with the one it came from."""
        pipe.set_progress_bar_config(disable=True)
        self.after_loading(pipe, original)
        return pipe

    @pytest.fixture
    def pipe(self):
        return self.make_pipeline()

    @pytest.fixture
    def stock(self):
        return self.make_stock_pipeline()

    # Effect

    def test_neutral_settings_give_the_stock_picture_bit_for_bit(self, pipe, stock):
        assert (self.draw_plain(pipe) == self.draw(stock, inputs={})).all()

    def test_the_method_changes_the_picture(self, pipe):
        assert not np.allclose(self.draw(pipe), self.draw_plain(pipe), atol=1e-4)

    def test_call_leaves_no_trace(self, pipe, stock):
        self.draw(pipe)
        assert (self.draw_plain(pipe) == self.draw(stock, inputs={})).all()

    def test_second_call_equals_the_first(self, pipe):
        first = self.draw(pipe)
        scheduler = pipe.scheduler
        pipe.scheduler = EulerDiscreteScheduler.from_config(scheduler.config)
        self.draw(pipe, ["cat", "a red dog"], (1, 2), num_inference_steps=3, height=48, width=32)
        pipe.scheduler = scheduler
        assert (self.draw(pipe) == first).all()

    def test_exception_in_a_callback_leaves_the_pipeline_usable(self, pipe, stock):
        expected = self.draw(pipe)

        def fail(pipe, step, timestep, kwargs):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.draw(pipe, callback_on_step_end=fail)
        assert (self.draw(pipe) == expected).all()
        assert (self.draw_plain(pipe) == self.draw(stock, inputs={})).all()

    # Arguments

    def test_signature_keeps_the_stock_arguments(self):
        stock = inspect.signature(self.stock_class.__call__).parameters
        ours = inspect.signature(self.pipeline_class.__call__).parameters
        assert not [name for name in stock if name not in ours]

    def test_batch_equals_single_pictures(self, pipe):
        prompts = ["a cat", "dog", "a red house"]
        together = self.draw(pipe, prompts, (1, 2, 3))
        alone = [self.draw(pipe, [prompt], (seed,))[0] for prompt, seed in zip(prompts, (1, 2, 3))]
        # Matrix products of other shapes round differently; the steps amplify it.
        np.testing.assert_allclose(np.stack(alone), together, atol=1e-3)

    def test_several_images_per_prompt(self, pipe):
        images = self.draw(pipe, ["cat", "dog"], (0, 1, 2, 3), num_images_per_prompt=2)
        assert images.shape == (4, 32, 32, 3)
        np.testing.assert_allclose(images[2:3], self.draw(pipe, "dog", (2,)), atol=1e-3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_without_guidance(self, pipe, count):
        images = self.draw(pipe, seeds=range(count), guidance_scale=1.0)
        assert images.shape == (count, 32, 32, 3) and np.isfinite(images).all()

    def test_sizes_that_are_not_square(self, pipe):
        assert self.draw(pipe, height=48, width=16).shape == (1, 48, 16, 3)

    def test_embeddings_equal_their_prompt(self, pipe):
        prompt, negative = pipe.encode_prompt("a cat", "cpu", 1, True, negative_prompt="dog")
        given = {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
        assert (self.draw(pipe, None, **given) == self.draw(pipe, negative_prompt=["dog"])).all()

    @pytest.mark.parametrize("scheduler", [EulerDiscreteScheduler, HeunDiscreteScheduler, DPMSolverMultistepScheduler])
    def test_schedulers(self, pipe, stock, scheduler):
        for each in (pipe, stock):
            each.scheduler = scheduler.from_config(each.scheduler.config)
        plain = self.draw_plain(pipe)
        drawn = self.draw(pipe)
        assert (plain == self.draw(stock, inputs={})).all()
        assert np.isfinite(drawn).all() and not np.allclose(drawn, plain, atol=1e-4)

    def test_latents_equal_their_generator(self, pipe):
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(1, 4, 16, 16, generator=generator)
        assert (self.draw(pipe, seeds=(7,), latents=latents) == self.draw(pipe)).all()

    def test_tuple_equals_output_class(self, pipe):
        settings = {"num_inference_steps": 1, "output_type": "np", **self.inputs}
        outputs = [
            pipe("cat", generator=torch.Generator().manual_seed(0), return_dict=as_dict, **settings)
            for as_dict in (True, False)
        ]
        assert (outputs[0].images == outputs[1][0]).all()

    def test_output_types(self, pipe):
        images = self.draw(pipe)
        pt = self.draw(pipe, output_type="pt")
        np.testing.assert_allclose(pt.permute(0, 2, 3, 1).numpy(), images, atol=1e-6)
        pil = self.draw(pipe, output_type="pil")
        assert np.abs(np.asarray(pil[0]) / 255 - images[0]).max() <= 0.5 / 255 + 1e-6
        assert self.draw(pipe, output_type="latent").shape == (1, 4, 16, 16)

    def test_progress_bar(self, pipe, capsys):
        self.draw(pipe)
        assert capsys.readouterr().err == ""
        pipe.set_progress_bar_config(disable=False)
        self.draw(pipe)
        assert "2/2" in capsys.readouterr().err

    # Callbacks

    def test_callback_gets_what_it_asks_for(self, pipe):
        for names in (["latents"], list(pipe._callback_tensor_inputs)):
            seen = []

            def callback(pipe, step, timestep, kwargs):
                seen.append(sorted(kwargs))
                return kwargs

            self.draw(pipe, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=names)
            assert seen == [sorted(names)] * 2

    def test_callback_that_asks_for_something_else_is_refused(self, pipe):
        with pytest.raises(ValueError, match="no_such_tensor"):
            self.draw(pipe, callback_on_step_end_tensor_inputs=["no_such_tensor"])

    def test_callback_may_change_latents(self, pipe):
        def callback(pipe, step, timestep, kwargs):
            return {"latents": torch.zeros_like(kwargs["latents"])} if step == pipe.num_timesteps - 1 else kwargs

        assert (self.draw(pipe, callback_on_step_end=callback, output_type="latent") == 0).all()

    def test_callback_may_change_the_guidance(self, pipe):
        def callback(pipe, step, timestep, kwargs):
            pipe._guidance_scale = 20.0
            return kwargs

        assert not np.allclose(self.draw(pipe, callback_on_step_end=callback), self.draw(pipe), atol=1e-4)

    def test_callback_may_interrupt(self, pipe):
        latents = []

        def callback(pipe, step, timestep, kwargs):
            pipe._interrupt = True
            latents.append(kwargs["latents"])
            return kwargs

        expected = self.draw(pipe)
        final = self.draw(pipe, callback_on_step_end=callback, output_type="latent")
        assert len(latents) == 1 and torch.equal(final, latents[0])
        assert (self.draw(pipe) == expected).all()

    # Saving, loading and the ways in

    def test_save_and_load(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path)
        loaded = self.quiet(self.pipeline_class.from_pretrained(tmp_path), pipe)
        assert (self.draw(loaded) == self.draw(pipe)).all()

    def test_variants(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path, variant="fp16")
        loaded = self.quiet(self.pipeline_class.from_pretrained(tmp_path, variant="fp16"), pipe)
        assert (self.draw(loaded) == self.draw(pipe)).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_loads_in_half_precision(self, pipe, tmp_path, dtype):
        pipe.save_pretrained(tmp_path)
        loaded = self.quiet(self.pipeline_class.from_pretrained(tmp_path, dtype=dtype), pipe)
        models = [model for model in loaded.components.values() if isinstance(model, torch.nn.Module)]
        assert {model.dtype for model in models} == {dtype} and np.isfinite(self.draw(loaded)).all()

    def test_cast_in_place_is_finite(self, pipe):
        assert np.isfinite(self.draw(pipe.to(torch.bfloat16))).all()

    def test_optional_components_stay_none(self, tmp_path):
        optional = self.pipeline_class._optional_components
        tiny_stable_diffusion(self.pipeline_class).save_pretrained(tmp_path)
        loaded = self.pipeline_class.from_pretrained(tmp_path)
        assert {name: getattr(loaded, name) for name in optional} == dict.fromkeys(optional)

    def test_components_build_an_equal_pipeline(self, pipe):
        again = self.quiet(self.pipeline_class(**pipe.components, requires_safety_checker=False), pipe)
        assert (self.draw(again) == self.draw(pipe)).all()

    def test_from_pipe_of_the_stock_pipeline_and_back(self, stock):
        expected = self.draw(stock, inputs={})
        ours = self.quiet(self.pipeline_class.from_pipe(stock), self.make_pipeline())
        back = self.stock_class.from_pipe(ours)
        back.set_progress_bar_config(disable=True)
        assert ours.unet is stock.unet is back.unet
        assert (self.draw_plain(ours) == expected).all() and (self.draw(back, inputs={}) == expected).all()

    def test_file_is_a_custom_pipeline(self, stock, tmp_path):
        stock.save_pretrained(tmp_path)
        door = {"custom_pipeline": inspect.getfile(self.pipeline_class)}
        with pytest.raises(ValueError, match="trust_remote_code"):
            DiffusionPipeline.from_pretrained(tmp_path, **door)
        loaded = DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True, **door)
        loaded.set_progress_bar_config(disable=True)
        assert type(loaded).__name__ == self.pipeline_class.__name__
        assert type(loaded).__module__.startswith("diffusers_modules.local.")
        assert (self.draw_plain(loaded) == self.draw(stock, inputs={})).all()

    # Neighbours

    def test_lora_beside_it(self, pipe, tmp_path):
        method, plain = self.draw(pipe), self.draw_plain(pipe)
        unet = tiny_stable_diffusion().unet
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=get_peft_model_state_dict(unet))
        pipe.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
        both, lora = self.draw(pipe), self.draw_plain(pipe)
        assert min(np.abs(both - other).max() for other in (method, lora)) > 1e-4
        assert np.abs(lora - plain).max() > 1e-4
        pipe.unload_lora_weights()
        assert (self.draw(pipe) == method).all() and (self.draw_plain(pipe) == plain).all()

    def test_group_offload(self, pipe):
        expected, plain = self.draw(pipe), self.draw_plain(pipe)
        pipe.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")
        assert (self.draw(pipe) == expected).all() and (self.draw_plain(pipe) == plain).all()

    def test_layerwise_casting(self, pipe):
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        plain, drawn = self.draw_plain(pipe), self.draw(pipe)
        assert np.isfinite(drawn).all() and not np.allclose(drawn, plain, atol=1e-4)
        assert (self.draw_plain(pipe) == plain).all()

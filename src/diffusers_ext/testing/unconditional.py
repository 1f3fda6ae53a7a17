# SPDX-License-Identifier: Apache-2.0
"""What users expect of a pipeline that draws without a prompt."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline


class UnconditionalPipelineContract:
    """
    Tests of a pipeline whose call takes `batch_size`, `num_inference_steps`, `generator`, `latents`, `output_type`,
    `return_dict` and `callback_on_step_end`. Subclasses set `pipeline_class` and define `make_pipeline`.

    Attributes:
        pipeline_class: the class under test.
        schedulers: other schedulers that it has to work with.
        sample_shape: `(channels, height, width)` of what `make_pipeline` draws.
    """

    pipeline_class = None
    schedulers = ()
    sample_shape = None

    def make_pipeline(self):
        """A fresh pipeline with tiny components."""
        raise NotImplementedError

    def draw(self, pipe, seeds=(0,), **kwargs):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        settings = {"num_inference_steps": 3, "output_type": "np", "batch_size": len(seeds)}
        return pipe(generator=generators, **{**settings, **kwargs}).images

    def assert_same(self, loaded, pipe):
        """The same weights and, but for rounding, pictures: kernels treat weights by their alignment in memory."""
        for name, model in pipe.components.items():
            if isinstance(model, torch.nn.Module):
                weights = getattr(loaded, name).state_dict()
                assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
        np.testing.assert_allclose(self.draw(loaded), self.draw(pipe), atol=1e-3)

    def quiet(self, pipe):
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @pytest.fixture
    def pipe(self):
        return self.quiet(self.make_pipeline())

    def test_second_call_equals_the_first(self, pipe):
        first = self.draw(pipe)
        self.draw(pipe, (1, 2), num_inference_steps=2)
        assert (self.draw(pipe) == first).all()

    def test_batch_equals_single_pictures(self, pipe):
        together = self.draw(pipe, (1, 2, 3))
        alone = np.concatenate([self.draw(pipe, (seed,)) for seed in (1, 2, 3)])
        # Matrix products of other shapes round differently; the steps amplify it.
        np.testing.assert_allclose(alone, together, atol=1e-3)

    def test_latents_equal_their_generator(self, pipe):
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(1, *self.sample_shape, generator=generator)
        given = pipe(latents=latents, generator=generator, num_inference_steps=3, output_type="np").images
        assert (given == self.draw(pipe)).all()

    def test_output_types(self, pipe):
        images = self.draw(pipe)
        assert images.shape == (1, *self.sample_shape[1:], self.sample_shape[0]) and np.isfinite(images).all()
        pt = self.draw(pipe, output_type="pt")
        np.testing.assert_allclose(pt.permute(0, 2, 3, 1).numpy(), images, atol=1e-6)
        pil = self.draw(pipe, output_type="pil")
        assert np.abs(np.asarray(pil[0]) / 255 - images[0]).max() <= 0.5 / 255 + 1e-6
        assert self.draw(pipe, output_type="latent").shape == (1, *self.sample_shape)

    def test_tuple_equals_output_class(self, pipe):
        settings = {"num_inference_steps": 2, "output_type": "np"}
        outputs = [pipe(generator=torch.Generator().manual_seed(0), return_dict=d, **settings) for d in (True, False)]
        assert (outputs[0].images == outputs[1][0]).all()

    def test_progress_bar(self, pipe, capsys):
        self.draw(pipe)
        assert capsys.readouterr().err == ""
        pipe.set_progress_bar_config(disable=False)
        self.draw(pipe)
        assert f"{pipe.num_timesteps}/{pipe.num_timesteps}" in capsys.readouterr().err

    def test_callback_may_change_latents(self, pipe):
        def callback(pipe, step, timestep, kwargs):
            return {"latents": torch.zeros_like(kwargs["latents"])} if step == pipe.num_timesteps - 1 else kwargs

        assert (self.draw(pipe, callback_on_step_end=callback, output_type="latent") == 0).all()

    def test_callback_may_interrupt(self, pipe):
        expected, latents = self.draw(pipe), []

        def callback(pipe, step, timestep, kwargs):
            pipe._interrupt = True
            latents.append(kwargs["latents"])
            return kwargs

        final = self.draw(pipe, callback_on_step_end=callback, output_type="latent")
        assert len(latents) == 1 and torch.equal(final, latents[0].float())
        assert (self.draw(pipe) == expected).all()

    def test_exception_in_a_callback_leaves_the_pipeline_usable(self, pipe):
        expected = self.draw(pipe)

        def fail(pipe, step, timestep, kwargs):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.draw(pipe, callback_on_step_end=fail)
        assert (self.draw(pipe) == expected).all()

    def test_callback_that_asks_for_something_else_is_refused(self, pipe):
        with pytest.raises(ValueError, match="no_such_tensor"):
            self.draw(pipe, callback_on_step_end_tensor_inputs=["no_such_tensor"])

    def test_schedulers(self, pipe):
        for scheduler in self.schedulers:
            pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
            assert np.isfinite(self.draw(pipe)).all()

    def test_save_and_load(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path)
        self.assert_same(self.quiet(self.pipeline_class.from_pretrained(tmp_path)), pipe)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_loads_in_half_precision(self, pipe, tmp_path, dtype):
        pipe.save_pretrained(tmp_path)
        loaded = self.quiet(self.pipeline_class.from_pretrained(tmp_path, dtype=dtype))
        models = [model for model in loaded.components.values() if isinstance(model, torch.nn.Module)]
        assert {model.dtype for model in models} == {dtype} and np.isfinite(self.draw(loaded)).all()

    def test_components_build_an_equal_pipeline(self, pipe):
        again = self.quiet(self.pipeline_class(**pipe.components))
        assert (self.draw(again) == self.draw(pipe)).all()

    def test_file_is_a_custom_pipeline(self, pipe, tmp_path):
        pipe.save_pretrained(tmp_path)
        door = {"custom_pipeline": inspect.getfile(self.pipeline_class)}
        with pytest.raises(ValueError, match="trust_remote_code"):
            DiffusionPipeline.from_pretrained(tmp_path, **door)
        loaded = self.quiet(DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True, **door))
        assert type(loaded).__module__.startswith("diffusers_modules.local.")
        self.assert_same(loaded, pipe)

    def test_group_offload(self, pipe):
        expected = self.draw(pipe)
        pipe.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")
        assert (self.draw(pipe) == expected).all()

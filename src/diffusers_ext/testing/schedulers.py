# SPDX-License-Identifier: Apache-2.0
"""What users expect of a scheduler."""

import json
import sys

import numpy as np
import pytest
import torch
from diffusers import SchedulerMixin

from .components import tiny_stable_diffusion


class SchedulerContract:
    """
    Tests of a scheduler. Subclasses set `scheduler_class` and override what differs; a fact that cannot hold is taken
    out by name (`test_adds_noise_at_its_own_levels = None`), with the reason beside it.

    Attributes:
        scheduler_class: the class under test.
        settings: arguments of its constructor.
        compatible: a stock scheduler whose config it takes, or `None`.
        atol: how near to a point the sampler ends when the model always predicts that point.
    """

    scheduler_class = None
    settings = {}
    compatible = None
    atol = 1e-4

    def make_scheduler(self, **kwargs):
        return self.scheduler_class(**{**self.settings, **kwargs})

    def predict(self, scheduler, sample, scaled, timestep, point):
        """Output of a model that predicts `point` as the clean sample, for the scheduler's default prediction type."""
        raise NotImplementedError

    def run(self, scheduler, point, num_inference_steps=5, seed=0, dtype=torch.float32, begin=0, generators=None):
        """Samples with a model that predicts `point`; all samples on the way."""
        scheduler.set_timesteps(num_inference_steps)
        if begin:
            scheduler.set_begin_index(begin)
        if generators is None:
            noise = torch.randn(point.shape, generator=torch.Generator().manual_seed(seed))
        else:
            noise = torch.stack([torch.randn(point.shape[1:], generator=generator) for generator in generators])
        sample = (noise * scheduler.init_noise_sigma).to(dtype)
        if begin:
            sample = scheduler.add_noise(point, noise, scheduler.timesteps[begin : begin + 1]).to(dtype)
        generators = torch.Generator().manual_seed(seed) if generators is None else generators
        samples = []
        for timestep in scheduler.timesteps[begin:]:
            scaled = scheduler.scale_model_input(sample, timestep)
            output = self.predict(scheduler, sample, scaled, timestep, point.to(sample.dtype))
            sample = scheduler.step(output, timestep, sample, generator=generators).prev_sample
            samples.append(sample)
        return samples

    @pytest.fixture
    def scheduler(self):
        return self.make_scheduler()

    @pytest.fixture
    def point(self):
        return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).clamp(-1, 1)

    # The interface that pipelines call

    def test_has_what_pipelines_need(self, scheduler):
        assert isinstance(scheduler, SchedulerMixin) and scheduler.order in (1, 2, 3)
        scheduler.set_timesteps(4, device="cpu")
        assert scheduler.timesteps.device.type == "cpu" and scheduler.timesteps.ndim == 1
        assert float(scheduler.init_noise_sigma) > 0

    def test_diffusers_can_load_it_as_a_component(self):
        # diffusers looks the base class up in the module that defines the scheduler.
        assert getattr(sys.modules[self.scheduler_class.__module__], "SchedulerMixin", None) is SchedulerMixin

    def test_tuple_equals_output_class(self, point):
        outputs = []
        for as_dict in (True, False):
            scheduler = self.make_scheduler()
            scheduler.set_timesteps(3)
            timestep = scheduler.timesteps[0]
            scaled = scheduler.scale_model_input(point, timestep)
            output = self.predict(scheduler, point, scaled, timestep, point)
            generator = torch.Generator().manual_seed(0)
            outputs.append(scheduler.step(output, timestep, point, generator=generator, return_dict=as_dict))
        assert torch.equal(outputs[0].prev_sample, outputs[1][0])

    def test_step_before_set_timesteps_is_refused(self, scheduler, point):
        with pytest.raises(ValueError, match="set_timesteps"):
            scheduler.step(point, 1.0, point)

    # Saving and the config

    def test_save_and_load_keeps_the_config(self, scheduler, tmp_path):
        scheduler.save_pretrained(tmp_path)
        loaded = self.scheduler_class.from_pretrained(tmp_path)
        public = [{k: v for k, v in s.config.items() if k[0] != "_"} for s in (scheduler, loaded)]
        assert public[0] == public[1]
        assert json.loads((tmp_path / "scheduler_config.json").read_text())["_class_name"] == type(scheduler).__name__

    def test_takes_the_config_of_a_stock_scheduler(self):
        if self.compatible is None:
            pytest.skip("no stock scheduler is compatible")
        stock = self.compatible()
        ours = self.scheduler_class.from_config(stock.config)
        shared = [name for name in ours.config if name in stock.config and name[0] != "_"]
        assert shared and all(ours.config[name] == stock.config[name] for name in shared)
        assert type(self.compatible.from_config(ours.config)) is self.compatible

    # Sampling

    def test_a_perfect_model_is_followed_to_its_sample(self, scheduler, point):
        torch.testing.assert_close(self.run(scheduler, point)[-1], point, atol=self.atol, rtol=0)

    def test_second_run_equals_the_first(self, scheduler, point):
        first = self.run(scheduler, point)
        self.run(scheduler, point[:1], num_inference_steps=3)
        assert all(torch.equal(a, b) for a, b in zip(first, self.run(scheduler, point)))

    def test_a_run_that_was_broken_off_leaves_no_trace(self, scheduler, point):
        expected = self.run(self.make_scheduler(), point)[-1]
        scheduler.set_timesteps(5)
        timestep = scheduler.timesteps[0]
        scaled = scheduler.scale_model_input(point, timestep)
        scheduler.step(self.predict(scheduler, point, scaled, timestep, point), timestep, point)
        assert torch.equal(self.run(scheduler, point)[-1], expected)

    def test_batch_equals_single_samples(self, scheduler, point):
        together = self.run(scheduler, point, generators=[torch.Generator().manual_seed(i) for i in range(2)])
        for i in range(2):
            alone = self.run(scheduler, point[i : i + 1], generators=[torch.Generator().manual_seed(i)])
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(together, alone))

    @pytest.mark.parametrize("num_inference_steps", [1, 2, 7, 50])
    def test_step_counts(self, scheduler, point, num_inference_steps):
        assert torch.isfinite(self.run(scheduler, point, num_inference_steps)[-1]).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_stays_and_is_finite(self, scheduler, point, dtype):
        samples = self.run(scheduler, point, dtype=dtype)
        assert all(sample.dtype == dtype and torch.isfinite(sample).all() for sample in samples)

    def test_adds_noise_at_its_own_levels(self, scheduler, point):
        scheduler.set_timesteps(5)
        noise = torch.randn(point.shape, generator=torch.Generator().manual_seed(0))
        levels = [
            (scheduler.add_noise(point, noise, timestep[None]) - point).std().item()
            for timestep in scheduler.timesteps.unique(sorted=False)
        ]
        assert len(set(levels)) == len(levels)

    @pytest.mark.parametrize("offset", [0, 1])
    def test_starts_in_the_middle(self, scheduler, point, offset):
        """As image-to-image does; a second-order scheduler may be told to start inside a pair of calls."""
        scheduler.set_timesteps(6)
        begin = 2 * scheduler.order + (offset if scheduler.order > 1 else 0)
        torch.testing.assert_close(self.run(scheduler, point, 6, begin=begin)[-1], point, atol=self.atol, rtol=0)

    # In a pipeline

    def draw(self, pipe, steps=2):
        generator = torch.Generator().manual_seed(0)
        settings = {"num_inference_steps": steps, "output_type": "np"}
        return pipe("a cat", generator=generator, guidance_scale=5.0, **settings).images

    def test_on_a_stock_pipeline(self):
        pipe = tiny_stable_diffusion()
        if self.compatible is not None:
            pipe.scheduler = self.compatible()
            pipe.scheduler = self.scheduler_class.from_config(pipe.scheduler.config, **self.settings)
        else:
            pipe.scheduler = self.make_scheduler()
        first = self.draw(pipe)
        assert np.isfinite(first).all()
        self.draw(pipe, steps=3)
        assert (self.draw(pipe) == first).all()

    def test_saved_with_a_pipeline(self, tmp_path):
        pipe = tiny_stable_diffusion()
        pipe.scheduler = self.make_scheduler()
        pipe.save_pretrained(tmp_path)
        loaded = type(pipe).from_pretrained(tmp_path)
        loaded.set_progress_bar_config(disable=True)
        assert type(loaded.scheduler) is self.scheduler_class
        assert (self.draw(loaded) == self.draw(pipe)).all()

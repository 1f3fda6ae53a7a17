# SPDX-License-Identifier: Apache-2.0
"""SAeUron together with everything else that users do to a pipeline, on the lab's real one."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPAGPipeline,
    UNet2DConditionModel,
)
from lab_saeuron import TIMESTEPS, draw, lab_pipeline, lab_sae, random_edit
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

from diffusers_ext import SAeUronConfig, SparseAutoencoder, apply_saeuron, collect_statistics, remove_saeuron
from diffusers_ext.methods.saeuron.hooks_saeuron import applied_names


@pytest.fixture(scope="module")
def sae():
    return lab_sae()


@pytest.fixture
def pipe():
    return lab_pipeline()


def unlearn(pipe, sae, name="saeuron", edit=None, **settings):
    apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[edit or random_edit(sae)], **settings), name=name)


def add_lora(unet, name="default", seed=0):
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v", "proj_out"]), adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in unet.named_parameters():
        if f"lora_B.{name}" in key:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


class TestSampling:
    @pytest.mark.parametrize(
        "scheduler",
        [
            DDIMScheduler,
            EulerDiscreteScheduler,
            HeunDiscreteScheduler,
            DPMSolverMultistepScheduler,
            KDPM2DiscreteScheduler,
        ],
    )
    def test_schedulers(self, pipe, sae, scheduler):
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        stock = draw(pipe)
        unlearn(pipe, sae)
        changed = draw(pipe)
        assert torch.isfinite(changed).all() and not torch.allclose(changed, stock)
        assert torch.equal(draw(pipe), changed)
        remove_saeuron(pipe.unet)
        assert torch.equal(draw(pipe), stock)

    @pytest.mark.parametrize("scheduler", [HeunDiscreteScheduler, DPMSolverMultistepScheduler])
    @pytest.mark.parametrize("strength", [0.5, 0.3])
    def test_img2img_that_starts_between_the_halves_of_a_second_order_step(self, pipe, sae, scheduler, strength):
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        img2img = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
        img2img.set_progress_bar_config(disable=True)
        picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
        kwargs = {"image": picture, "strength": strength, "num_inference_steps": 5}
        stock = draw(img2img, **kwargs)
        unlearn(pipe, sae)
        changed = draw(img2img, **kwargs)
        assert torch.isfinite(changed).all() and not torch.allclose(changed, stock)
        assert torch.equal(draw(img2img, **kwargs), changed)

    def test_inpainting(self, pipe, sae):
        inpaint = StableDiffusionInpaintPipeline(**pipe.components, requires_safety_checker=False)
        inpaint.set_progress_bar_config(disable=True)
        picture = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
        mask = torch.zeros(1, 1, 64, 64)
        mask[..., 32:] = 1
        kwargs = {"image": picture, "mask_image": mask, "strength": 1.0, "height": 64, "width": 64}
        stock = draw(inpaint, **kwargs)
        unlearn(pipe, sae)
        assert not torch.allclose(draw(inpaint, **kwargs), stock)

    @pytest.mark.parametrize("steps", [1, 3, 13])
    def test_other_step_counts_than_the_table(self, pipe, sae, steps):
        stock = draw(pipe, num_inference_steps=steps)
        unlearn(pipe, sae)
        assert not torch.allclose(draw(pipe, num_inference_steps=steps), stock)

    def test_a_call_does_not_depend_on_the_calls_before(self, pipe, sae):
        unlearn(pipe, sae)
        first = draw(pipe)
        draw(
            pipe,
            ["red apple, ink style", "owl"],
            seed=7,
            num_inference_steps=7,
            height=96,
            width=64,
            guidance_scale=1.0,
        )
        assert torch.equal(draw(pipe), first)

    @pytest.mark.parametrize("batch", [1, 3])
    def test_guidance_off(self, pipe, sae, batch):
        prompts = ["cat", "owl", "rocket"][:batch]
        stock = draw(pipe, prompts, guidance_scale=1.0)
        unlearn(pipe, sae)
        changed = draw(pipe, prompts, guidance_scale=1.0)
        assert all(not torch.allclose(a, b) for a, b in zip(changed, stock))

    @pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
    def test_batch_equals_single_runs(self, pipe, sae, guidance_scale):
        prompts = ["cat, neon style", "owl", "red apple, ink style"]
        unlearn(pipe, sae)
        batch = draw(pipe, prompts, guidance_scale=guidance_scale)
        single = [draw(pipe, p, seed=i, guidance_scale=guidance_scale) for i, p in enumerate(prompts)]
        # Matrix products of other sizes round otherwise, and steps carry it on.
        torch.testing.assert_close(batch, torch.cat(single), atol=1e-3, rtol=1e-3)

    @pytest.mark.parametrize("size", [(32, 96), (96, 64)])
    def test_sizes_that_are_not_square(self, pipe, sae, size):
        height, width = size
        stock = draw(pipe, height=height, width=width)
        unlearn(pipe, sae)
        changed = draw(pipe, height=height, width=width)
        assert changed.shape[-2:] == (height // 4, width // 4) and not torch.allclose(changed, stock)

    def test_both_halves_are_the_sum_of_each(self, pipe, sae):
        unet, edit = pipe.unet, random_edit(sae)
        sample = torch.randn(4, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        embeds = torch.randn(4, 77, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
        outputs = {}
        for target in ("both", "cond", "uncond"):
            unlearn(pipe, sae, edit=edit, apply_to=target)
            with torch.no_grad():
                outputs[target] = unet(sample, 501, embeds).sample
            remove_saeuron(unet)
        with torch.no_grad():
            stock = unet(sample, 501, embeds).sample
        # Samples never mix inside the denoiser.
        torch.testing.assert_close(outputs["both"][2:], outputs["cond"][2:], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(outputs["both"][:2], outputs["uncond"][:2], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(outputs["cond"][:2], stock[:2], atol=1e-4, rtol=1e-4)

    def test_half_of_an_odd_batch_is_refused_and_the_pipeline_lives_on(self, pipe, sae):
        stock = draw(pipe, guidance_scale=1.0)
        unlearn(pipe, sae, apply_to="cond")
        with pytest.raises(ValueError, match="needs classifier-free guidance"):
            draw(pipe, guidance_scale=1.0)
        draw(pipe)
        remove_saeuron(pipe.unet)
        assert torch.equal(draw(pipe, guidance_scale=1.0), stock)

    @pytest.mark.parametrize("settings", [{"strength": 0.0}, {"strength": 0.0, "error": "official"}, {"start": 1.0}])
    def test_off_is_bit_equal(self, pipe, sae, settings):
        stock = draw(pipe)
        unlearn(pipe, sae, **settings)
        assert torch.equal(draw(pipe), stock)

    def test_error_terms_and_modes_all_differ(self, pipe, sae):
        pictures = []
        for settings in ({}, {"error": "official"}, {"error": "none"}, {"mode": "replace"}):
            unlearn(pipe, sae, **settings)
            pictures.append(draw(pipe))
            remove_saeuron(pipe.unet)
        assert all(torch.isfinite(p).all() for p in pictures)
        assert all(not torch.allclose(a, b) for i, a in enumerate(pictures) for b in pictures[:i])


class TestNeighbours:
    @pytest.mark.parametrize("lora_first", [True, False])
    @pytest.mark.parametrize("remove_lora_first", [True, False])
    def test_lora_in_any_order(self, pipe, sae, lora_first, remove_lora_first):
        stock = draw(pipe)
        if lora_first:
            add_lora(pipe.unet)
            with_lora = draw(pipe)
            unlearn(pipe, sae)
        else:
            unlearn(pipe, sae)
            add_lora(pipe.unet)
        both = draw(pipe)
        assert not torch.allclose(both, stock)
        if remove_lora_first:
            pipe.unet.delete_adapters("default")
            without_lora = draw(pipe)
            assert not torch.allclose(without_lora, both) and not torch.allclose(without_lora, stock)
            remove_saeuron(pipe.unet)
        else:
            remove_saeuron(pipe.unet)
            if lora_first:
                assert torch.equal(draw(pipe), with_lora)
            pipe.unet.delete_adapters("default")
        assert torch.equal(draw(pipe), stock)

    def test_a_stock_pipeline_with_loaded_lora_weights(self, pipe, sae, tmp_path):
        donor = lab_pipeline()
        add_lora(donor.unet)
        donor.unet.save_lora_adapter(tmp_path)
        pipe.unet.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors", prefix=None)
        worn = draw(pipe)
        unlearn(pipe, sae)
        assert not torch.allclose(draw(pipe), worn)
        remove_saeuron(pipe.unet)
        assert torch.equal(draw(pipe), worn)

    @pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
    @pytest.mark.parametrize("offload_first", [True, False])
    def test_group_offload(self, pipe, sae, kind, offload_first):
        unlearn(pipe, sae)
        expected = draw(pipe)
        remove_saeuron(pipe.unet)
        sizes = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        if not offload_first:
            unlearn(pipe, sae)
        pipe.unet.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type=kind, **sizes)
        stock_is_possible = offload_first
        if stock_is_possible:
            stock = draw(pipe)
            unlearn(pipe, sae)
        assert torch.equal(draw(pipe), expected)
        remove_saeuron(pipe.unet)
        assert not torch.equal(draw(pipe), expected)
        if stock_is_possible:
            assert torch.equal(draw(pipe), stock)

    def test_layerwise_casting(self, pipe, sae):
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        stock = draw(pipe)
        unlearn(pipe, sae)
        assert not torch.allclose(draw(pipe), stock)
        remove_saeuron(pipe.unet)
        assert torch.equal(draw(pipe), stock)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_model_with_an_autoencoder_in_single_precision(self, pipe, sae, dtype):
        pipe.unet.to(dtype)
        sample = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        embeds = torch.randn(2, 77, pipe.unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            stock = pipe.unet(sample, 501, embeds.to(dtype)).sample
            unlearn(pipe, sae)
            changed = pipe.unet(sample, 501, embeds.to(dtype)).sample
        assert changed.dtype == dtype and torch.isfinite(changed).all() and not torch.equal(changed, stock)
        assert sae.dtype == torch.float32

    def test_several_autoencoders_on_several_blocks(self, pipe, sae):
        other = lab_sae(seed=1, point={"module": "up_blocks.0.attentions.1"})
        stock = draw(pipe)
        unlearn(pipe, sae, name="a")
        one = draw(pipe)
        unlearn(pipe, other, name="b")
        two = draw(pipe)
        assert not torch.allclose(one, two) and applied_names(pipe.unet) == ["a", "b"]
        remove_saeuron(pipe.unet, "b")
        assert torch.equal(draw(pipe), one)
        remove_saeuron(pipe.unet, "a")
        assert torch.equal(draw(pipe), stock)

    def test_what_is_saved_does_not_know_of_the_hook(self, pipe, sae, tmp_path):
        stock = pipe.unet.state_dict()
        unlearn(pipe, sae)
        pipe.unet.save_pretrained(tmp_path)
        loaded = UNet2DConditionModel.from_pretrained(tmp_path)
        assert all(torch.equal(tensor, stock[name]) for name, tensor in loaded.state_dict().items())
        assert not applied_names(loaded)

    def test_gradients_reach_the_text_embeddings(self, pipe, sae):
        unet = pipe.unet.requires_grad_(False)
        sample = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        embeds = torch.randn(1, 77, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
        gradients = []
        for applied in (False, True):
            if applied:
                unlearn(pipe, sae)
            leaf = embeds.clone().requires_grad_()
            unet(sample, 501, leaf).sample.square().sum().backward()
            gradients.append(leaf.grad)
        assert torch.isfinite(gradients[1]).all() and gradients[1].abs().max() > 0
        assert not torch.allclose(*gradients)


class TestCompile:
    """
    Counted by a backend that keeps every graph it is given: a second graph would be a recompilation, a break raises.
    """

    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("apply_first", [True, False])
    def test_whole_unet_in_one_graph_for_all_steps(self, pipe, sae, apply_first):
        unlearn(pipe, sae)
        expected = draw(pipe)
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        if apply_first:
            pipe.unet = torch.compile(pipe.unet, backend=count, fullgraph=True)
        else:
            remove_saeuron(pipe.unet)
            pipe.unet = torch.compile(pipe.unet, backend=count, fullgraph=True)
            unlearn(pipe, sae)
        torch.testing.assert_close(draw(pipe), expected, atol=1e-3, rtol=1e-3)
        assert len(graphs) == 1
        remove_saeuron(pipe.unet)
        assert not torch.allclose(draw(pipe), expected, atol=1e-3, rtol=1e-3)

    def test_repeated_blocks(self, pipe, sae):
        unlearn(pipe, sae)
        expected = draw(pipe)
        pipe.unet.compile_repeated_blocks(backend="eager", fullgraph=True)
        torch.testing.assert_close(draw(pipe), expected, atol=1e-4, rtol=1e-4)
        remove_saeuron(pipe.unet)
        assert not torch.allclose(draw(pipe), expected)


class TestOtherDenoisers:
    def test_timestep_at_another_position(self):
        class Transformer(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = nn.Identity()

            def forward(self, hidden_states, encoder_hidden_states, pooled_projections, timestep):
                return self.block(hidden_states)

        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=8, expansion_factor=4, k=4, hook={"module": "block", "layout": "bnd"}).eval()
        x, edit = torch.randn(2, 5, 8), random_edit(sae, timesteps=(1.0, 0.5, 0.0))
        outputs = []
        for call in (lambda m: m(x, None, None, 0.5), lambda m: m(x, None, None, timestep=torch.tensor([0.5, 0.5]))):
            model = Transformer()
            apply_saeuron(model, sae, SAeUronConfig(edits=[edit]))
            outputs.append(call(model))
        torch.testing.assert_close(*outputs)
        assert not torch.allclose(outputs[0], x)

    @pytest.mark.parametrize("index, changed", [(0, 0), (1, 1)])
    def test_one_of_several_outputs(self, index, changed):
        class Joint(nn.Module):
            def forward(self, hidden_states):
                return hidden_states, hidden_states * 2

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = Joint()

            def forward(self, sample, timestep):
                return self.block(sample)

        torch.manual_seed(0)
        hook = {"module": "block", "layout": "bnd", "output_index": index}
        sae = SparseAutoencoder(d_in=8, expansion_factor=4, k=4, hook=hook).eval()
        x, model = torch.randn(2, 5, 8), Model()
        apply_saeuron(model, sae, SAeUronConfig(edits=[random_edit(sae)]))
        outputs = model(x, 501)
        assert type(outputs) is tuple
        assert [not torch.allclose(a, b) for a, b in zip(outputs, (x, 2 * x))] == [i == changed for i in range(2)]


class TestFlux:
    """A transformer that takes time in [0, 1], `timestep` at another position and joint streams of text and image."""

    POINT = {"module": "transformer_blocks.0", "layout": "bnd", "output_index": 1}

    @pytest.fixture(scope="class")
    def flux(self):
        torch.manual_seed(0)
        parts = lab_pipeline().components
        clip, tokenizer = parts["text_encoder"], parts["tokenizer"]
        sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=32,
            pooled_projection_dim=clip.config.hidden_size,
            **sizes,
        )
        t5 = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        pipe = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=parts["vae"],
            text_encoder=clip,
            tokenizer=tokenizer,
            # Any tokenizer with the calling convention does for a random encoder.
            text_encoder_2=T5EncoderModel(t5).eval(),
            tokenizer_2=tokenizer,
            transformer=transformer.eval(),
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @pytest.fixture(scope="class")
    def sae(self):
        torch.manual_seed(0)
        return SparseAutoencoder(d_in=32, expansion_factor=4, k=16, hook=self.POINT).eval()

    KWARGS = {"num_inference_steps": 3, "height": 64, "width": 32, "max_sequence_length": 16}

    def draw(self, flux, **kwargs):
        kwargs = {**self.KWARGS, **kwargs}
        return flux("cat", generator=torch.Generator().manual_seed(0), output_type="latent", **kwargs).images

    @pytest.fixture(scope="class")
    def edit(self, flux, sae):
        prompts = {"cat": ["cat", "cat, ink style"], "owl": ["owl"]}
        statistics = collect_statistics(flux, sae, prompts, guidance_scale=3.5, batch_size=2, **self.KWARGS)
        return statistics.edit("cat", num_features=8, multiplier=-5.0)

    def test_statistics(self, edit):
        assert edit.timesteps[0] == 1.0 and len(edit.timesteps) == 3 and edit.num_train_timesteps == 1

    def test_unlearning_and_removal(self, flux, sae, edit):
        stock = self.draw(flux)
        apply_saeuron(flux.transformer, sae, SAeUronConfig(edits=[edit]))
        try:
            changed = self.draw(flux)
            assert torch.isfinite(changed).all() and not torch.allclose(changed, stock)
            torch.testing.assert_close(self.draw(flux), changed)
        finally:
            remove_saeuron(flux.transformer)
        assert torch.equal(self.draw(flux), stock)

    def test_start_and_end_count_in_the_models_own_time(self, flux, sae, edit):
        stock, changed = self.draw(flux), []
        for settings in ({"end": 0.0}, {"start": 0.9}, {}):
            apply_saeuron(flux.transformer, sae, SAeUronConfig(edits=[edit], **settings))
            changed.append(not torch.equal(self.draw(flux), stock))
            remove_saeuron(flux.transformer)
        # Times are 1, 0.67 and 0.33: the first alone, none, all.
        assert changed == [True, False, True]

    @pytest.mark.parametrize("true_cfg_scale", [1.0, 2.0])
    def test_guidance_in_two_calls(self, flux, sae, edit, true_cfg_scale):
        prompts = {"cat": ["cat", "cat, ink style"]}
        kwargs = {
            **self.KWARGS,
            "num_inference_steps": 1,
            "true_cfg_scale": true_cfg_scale,
            "negative_prompt": ["", ""],
        }
        statistics = collect_statistics(flux, sae, prompts, guidance_scale=3.5, batch_size=2, **kwargs)
        plain = {**self.KWARGS, "num_inference_steps": 1}
        expected = collect_statistics(flux, sae, prompts, guidance_scale=3.5, batch_size=2, **plain)
        # The first step sees the same noise: only the conditional call may count.
        torch.testing.assert_close(statistics.mean("cat"), expected.mean("cat"), atol=1e-4, rtol=1e-3)


class TestCollecting:
    PROMPTS = {"cat": ["cat", "cat, ink style", "cat, neon style"], "owl": ["owl", "owl, ink style"]}

    def collect(self, pipe, sae, prompts=None, **kwargs):
        kwargs = {"num_inference_steps": 3, "guidance_scale": 4.0, "batch_size": 2, **kwargs}
        return collect_statistics(pipe, sae, prompts or self.PROMPTS, **kwargs)

    def test_neither_batch_size_nor_order_matters(self, pipe, sae):
        statistics = self.collect(pipe, sae)
        other = self.collect(pipe, sae, dict(reversed(self.PROMPTS.items())), batch_size=3)
        assert statistics.counts == {"cat": 3, "owl": 2} and len(statistics.timesteps) == 3
        for name in self.PROMPTS:
            torch.testing.assert_close(statistics.mean(name), other.mean(name), atol=2e-3, rtol=2e-2)

    def test_guidance_off_takes_every_sample(self, pipe, sae):
        together = self.collect(pipe, sae, guidance_scale=1.0)
        alone = self.collect(pipe, sae, guidance_scale=1.0, batch_size=1)
        torch.testing.assert_close(together.mean("cat"), alone.mean("cat"), atol=2e-3, rtol=2e-2)

    @pytest.mark.parametrize("scheduler", [HeunDiscreteScheduler, EulerDiscreteScheduler])
    def test_schedulers(self, pipe, sae, scheduler):
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        statistics = self.collect(pipe, sae)
        assert (statistics.timesteps.diff() < 0).all() and statistics.edit("cat", num_features=2).indices.shape[1] == 2

    def test_edits_that_were_collected_change_the_picture(self, pipe, sae):
        edit = self.collect(pipe, sae).edit("cat", num_features=4, multiplier=-5.0)
        stock = draw(pipe, "cat")
        unlearn(pipe, sae, edit=edit)
        assert not torch.allclose(draw(pipe, "cat"), stock)

    def test_the_pipeline_is_as_before(self, pipe, sae):
        pipe.set_progress_bar_config(disable=True, leave=False)
        stock = draw(pipe)
        self.collect(pipe, sae)
        assert pipe._progress_bar_config == {"disable": True, "leave": False}
        assert torch.equal(draw(pipe), stock) and not applied_names(pipe.unet)

    def test_the_pipeline_is_as_before_when_collecting_fails(self, pipe, sae):
        stock, bar = draw(pipe), dict(pipe._progress_bar_config)

        def stop(pipe, step, timestep, kwargs):
            raise RuntimeError("stopped at a step")

        with pytest.raises(RuntimeError, match="stopped at a step"):
            self.collect(pipe, sae, callback_on_step_end=stop)
        assert torch.equal(draw(pipe), stock) and not applied_names(pipe.unet) and pipe._progress_bar_config == bar

    @pytest.mark.parametrize("prompts", [{}, {"cat": []}])
    def test_no_prompts(self, pipe, sae, prompts):
        with pytest.raises(ValueError, match="has to name concepts with prompts"):
            collect_statistics(pipe, sae, prompts)

    def test_autoencoder_without_a_hook_point(self, pipe):
        with pytest.raises(ValueError, match="does not say which block"):
            self.collect(pipe, SparseAutoencoder(d_in=96, expansion_factor=2, k=2))

    def test_autoencoder_of_another_width(self, pipe):
        sae = SparseAutoencoder(d_in=8, expansion_factor=2, k=2, hook={"module": "up_blocks.1.attentions.1"})
        with pytest.raises(ValueError, match="has 8 channels but up_blocks.1.attentions.1 gives 96"):
            self.collect(pipe, sae)
        assert not applied_names(pipe.unet)

    def test_guidance_with_a_third_part_of_the_batch_is_refused(self, pipe, sae):
        guided = StableDiffusionPAGPipeline(**pipe.components, requires_safety_checker=False, pag_applied_layers="mid")
        with pytest.raises(ValueError, match="once or twice the number of prompts, 2, but is 6"):
            self.collect(guided, sae)


class TestBadInput:
    def test_block_of_another_width(self, pipe, sae):
        point = {**sae.config.hook, "module": "up_blocks.0.attentions.1"}
        wrong = SparseAutoencoder.from_config({**sae.config, "hook": point})
        with pytest.raises(ValueError, match="has 96 channels but up_blocks.0.attentions.1 gives 160"):
            unlearn(pipe, wrong)
        assert not applied_names(pipe.unet)

    def test_block_that_does_not_exist(self, pipe, sae):
        wrong = SparseAutoencoder.from_config({**sae.config, "hook": {"module": "up_blocks.1.attention.1"}})
        with pytest.raises(ValueError, match="Closest: up_blocks.1.attentions.1"):
            unlearn(pipe, wrong)

    def test_failing_second_application_leaves_the_first(self, pipe, sae):
        unlearn(pipe, sae)
        once = draw(pipe)
        other = lab_sae(seed=1)
        with pytest.raises(ValueError, match="was made for the autoencoder"):
            apply_saeuron(pipe.unet, other, SAeUronConfig(edits=[random_edit(sae)]), name="second")
        assert applied_names(pipe.unet) == ["saeuron"] and torch.equal(draw(pipe), once)

    def test_name_that_another_hook_of_the_block_has(self, pipe, sae):
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
        casting = next(m for n, m in pipe.unet.named_modules() if n == "up_blocks.1.attentions.1.proj_out")
        taken = next(iter(casting._diffusers_hook.hooks))
        point = {"module": "up_blocks.1.attentions.1.proj_out"}
        with pytest.raises(ValueError, match=f"is called '{taken}'; choose another name"):
            unlearn(pipe, SparseAutoencoder.from_config({**sae.config, "hook": point}), name=taken)
        assert not applied_names(pipe.unet)

    def test_another_base_model_warns(self, pipe, sae, caplog):
        foreign = SparseAutoencoder.from_config({**sae.config, "hook": {**sae.config.hook, "base_model": "some/base"}})
        unlearn(pipe, foreign, edit=random_edit(foreign))
        assert "was trained on some/base" in caplog.text

    def test_truncated_edits(self, pipe, sae, tmp_path):
        from diffusers_ext import ConceptEdits

        ConceptEdits([random_edit(sae)]).save_pretrained(tmp_path)
        file = tmp_path / "concepts.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "0.indices": tensors["0.indices"][:, :2].clone()}, file)
        with pytest.raises(ValueError, match="has shapes timesteps"):
            ConceptEdits.from_pretrained(tmp_path)


def test_official_error_term_acts_only_between_start_and_end(pipe, sae):
    unet = pipe.unet
    sample = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(2, 77, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        stock = unet(sample, 901, embeds).sample
        unlearn(pipe, sae, error="official", start=0.5)
        assert torch.equal(unet(sample, 901, embeds).sample, stock)
        # Two samples at two times: only the later one is edited.
        mixed = unet(sample, torch.tensor([901, 101]), embeds).sample
    torch.testing.assert_close(mixed[0], stock[0], atol=1e-5, rtol=1e-5)
    assert len(TIMESTEPS) == 10 and not torch.allclose(mixed[1], stock[1])


@pytest.mark.parametrize("mode", ["scale", "replace"])
def test_a_concept_at_strength_0_changes_nothing_of_another(pipe, sae, mode):
    weak, strong = random_edit(sae, "weak"), random_edit(sae, "strong", multiplier=-9.0)
    pictures = []
    for edits, strength in (([weak], 1.0), ([weak, strong], {"strong": 0.0})):
        apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=edits, strength=strength, mode=mode))
        pictures.append(draw(pipe))
        remove_saeuron(pipe.unet)
    assert torch.equal(*pictures)


def test_replacing_part_of_the_way(pipe, sae):
    unet = pipe.unet
    sample = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    embeds = torch.randn(1, 77, unet.config.cross_attention_dim, generator=torch.Generator().manual_seed(1))
    outputs = []
    for strength in (0.0, 0.5, 1.0, 2.0):
        block, seen = unet.get_submodule(sae.config.hook["module"]), []
        unlearn(pipe, sae, mode="replace", strength=strength, edit=random_edit(sae, num_features=2))
        handle = block.register_forward_hook(lambda module, args, output: seen.append(output[0]))
        with torch.no_grad():
            unet(sample, 501, embeds)
        handle.remove()
        remove_saeuron(unet)
        outputs.append(seen[0])
    off, half, full, beyond = outputs
    torch.testing.assert_close(half, (off + full) / 2, atol=1e-5, rtol=1e-5)
    assert torch.equal(full, beyond) and not torch.allclose(off, full)

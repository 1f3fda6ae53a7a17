# SPDX-License-Identifier: Apache-2.0
"""What users expect of something that is applied to a model they already have."""

import copy

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from peft import LoraConfig

from .components import TIMESTEPS, tiny_stable_diffusion


class HookContract:
    """
    Tests of an `apply_<method>` / `remove_<method>` pair. Subclasses define `apply`, `apply_neutral`, `apply_invalid`
    and `remove`; a fact that cannot hold for a method is taken out by name (`test_compiles_in_one_graph = None`), with
    the reason beside it.
    """

    def make_model(self):
        """The denoiser that is hooked; a tiny U-Net by default."""
        return tiny_stable_diffusion().unet

    def make_inputs(self, batch, timestep, generator):
        """Keyword arguments of the denoiser's forward."""
        return {
            "sample": torch.randn(batch, 4, 16, 16, generator=generator),
            "timestep": torch.tensor(timestep),
            "encoder_hidden_states": torch.randn(batch, 16, 16, generator=generator),
        }

    def apply(self, model):
        """Applies the method so that it acts."""
        raise NotImplementedError

    def apply_neutral(self, model):
        """Applies the method with settings that change nothing."""
        raise NotImplementedError

    def apply_invalid(self, model):
        """Tries to apply the method with something that this model does not have or does not fit; it raises."""
        raise NotImplementedError

    def remove(self, model):
        """Takes the method off."""
        raise NotImplementedError

    @pytest.fixture
    def model(self):
        return self.make_model()

    def inputs(self, batch=2, timestep=TIMESTEPS[0], seed=0):
        return self.make_inputs(batch, timestep, torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def run(self, model, inputs=None):
        inputs = self.inputs() if inputs is None else inputs
        inputs = {k: v.to(model.dtype) if v.ndim and v.is_floating_point() else v for k, v in inputs.items()}
        return model(**inputs, return_dict=False)[0]

    def test_neutral_settings_change_no_bit(self, model):
        before = self.run(model)
        self.apply_neutral(model)
        assert torch.equal(self.run(model), before)

    def test_applied_it_changes_the_output(self, model):
        before = self.run(model)
        self.apply(model)
        assert not torch.allclose(self.run(model), before, atol=1e-5)

    def test_removal_restores_every_bit(self, model):
        before, keys = self.run(model), list(model.state_dict())
        self.apply(model)
        self.run(model)
        self.remove(model)
        assert torch.equal(self.run(model), before) and list(model.state_dict()) == keys

    def test_removal_gives_back_the_users_processors_and_hooks(self, model):
        model.set_attn_processor({name: type(processor)() for name, processor in model.attn_processors.items()})
        HookRegistry.check_if_exists_or_initialize(model).register_hook(_Double(), "users")
        before, processors, modules = self.run(model), model.attn_processors, dict(model.named_modules())
        self.apply(model)
        self.run(model)
        self.remove(model)
        assert all(model.attn_processors[name] is processor for name, processor in processors.items())
        assert all(module is modules[name] for name, module in model.named_modules())
        assert _hook_names(model) == {"": ["users"]} and torch.equal(self.run(model), before)

    def test_applying_twice_raises_and_changes_nothing(self, model):
        self.apply(model)
        once = self.run(model)
        with pytest.raises(ValueError, match="already"):
            self.apply(model)
        assert torch.equal(self.run(model), once)

    def test_refused_application_leaves_nothing(self, model):
        before = self.run(model)
        with pytest.raises(ValueError):
            self.apply_invalid(model)
        assert torch.equal(self.run(model), before) and not _hook_names(model)

    def test_applied_again_after_removal_it_gives_the_same(self, model):
        self.apply(model)
        first = self.run(model)
        self.remove(model)
        self.apply(model)
        assert torch.equal(self.run(model), first)

    def test_no_state_is_carried_from_call_to_call(self, model):
        self.apply(model)
        first = self.run(model)
        self.run(model, self.inputs(batch=3, timestep=TIMESTEPS[1], seed=1))
        assert torch.equal(self.run(model), first)

    def test_batch_equals_single_samples(self, model):
        self.apply(model)
        inputs = self.inputs(batch=3)
        batched = {k: v for k, v in inputs.items() if v.ndim and len(v) == 3}
        alone = [self.run(model, {**inputs, **{k: v[i : i + 1] for k, v in batched.items()}}) for i in range(3)]
        # Matrix products of other shapes round differently.
        torch.testing.assert_close(torch.cat(alone), self.run(model, inputs), atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("lora_leaves_first", [True, False])
    @pytest.mark.parametrize("lora_comes_first", [True, False])
    def test_lora_beside_it(self, model, lora_comes_first, lora_leaves_first):
        before = self.run(model)
        for step in _ordered(lora_comes_first, self._add_lora, self.apply):
            step(model)
        outputs = [self.run(model)]
        for step in _ordered(lora_leaves_first, lambda model: model.delete_adapters("other"), self.remove):
            step(model)
            outputs.append(self.run(model))
        both, one, none = outputs
        assert not torch.allclose(both, one, atol=1e-5) and not torch.allclose(one, before, atol=1e-5)
        assert torch.equal(none, before)

    def _add_lora(self, model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
            model.add_adapter(config, "other")

    @pytest.mark.parametrize("offload_first", [True, False])
    def test_group_offload(self, model, offload_first):
        plain = self.run(model)
        self.apply(model)
        applied = self.run(model)
        self.remove(model)
        cpu = torch.device("cpu")
        for step in _ordered(
            offload_first, lambda m: m.enable_group_offload(cpu, cpu, offload_type="leaf_level"), self.apply
        ):
            step(model)
        assert torch.equal(self.run(model), applied)
        self.remove(model)
        assert torch.equal(self.run(model), plain)

    @pytest.mark.parametrize("casting_first", [True, False])
    def test_layerwise_casting(self, model, casting_first):
        types = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
        for step in _ordered(casting_first, lambda m: m.enable_layerwise_casting(**types), self.apply):
            step(model)
        applied = self.run(model)
        self.remove(model)
        plain = self.run(model)
        assert torch.isfinite(applied).all() and not torch.allclose(applied, plain, atol=1e-5)
        unhooked = self.make_model()
        unhooked.enable_layerwise_casting(**types)
        assert torch.equal(plain, self.run(unhooked))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_stays_and_is_finite(self, model, dtype):
        model.to(dtype)
        self.apply(model)
        output = self.run(model)
        assert output.dtype == dtype and torch.isfinite(output).all()

    def test_what_is_saved_does_not_know_of_it(self, model, tmp_path):
        before = self.run(model)
        self.apply(model)
        model.save_pretrained(tmp_path)
        assert torch.equal(self.run(type(model).from_pretrained(tmp_path)), before)

    def test_copy_after_removal_is_independent(self, model):
        # A copy of a hooked module is not: diffusers' hooks go on calling the forward of the original.
        before = self.run(model)
        self.apply(model)
        self.remove(model)
        clone = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(self.run(clone), before)

    def test_compiles_in_one_graph(self, model):
        self.apply(model)
        inputs = [self.inputs(timestep=timestep) for timestep in TIMESTEPS]
        expected = [self.run(model, one) for one in inputs]
        torch._dynamo.reset()
        graphs = []

        def count(graph, example_inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(model, backend=count, fullgraph=True)
        try:
            for one, output in zip(inputs, expected):
                torch.testing.assert_close(self.run(compiled, one), output, atol=1e-4, rtol=1e-4)
            assert len(graphs) == 1
        finally:
            torch._dynamo.reset()


class _Double(ModelHook):
    """A hook that the user had before."""

    def post_forward(self, module, output):
        return tuple(2 * tensor for tensor in output)


def _ordered(as_given, *steps):
    return steps if as_given else steps[::-1]


def _hook_names(model):
    """Names of the hooks on each module that has any."""
    registries = {name: getattr(module, "_diffusers_hook", None) for name, module in model.named_modules()}
    return {name: list(registry.hooks) for name, registry in registries.items() if registry and registry.hooks}

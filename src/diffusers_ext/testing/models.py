# SPDX-License-Identifier: Apache-2.0
"""What users expect of a component model."""

import sys

import pytest
import torch
from diffusers import ModelMixin
from safetensors.torch import load_file, save_file


class ModelContract:
    """Tests of a `ModelMixin`. Subclasses define `make_model` and `make_inputs`."""

    weights_file = "diffusion_pytorch_model.safetensors"

    def make_model(self):
        """A small model with random weights."""
        raise NotImplementedError

    def make_inputs(self):
        """Positional arguments of its forward, seeded."""
        raise NotImplementedError

    @pytest.fixture
    def model(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make_model().eval()

    @pytest.fixture
    def folder(self, model, tmp_path):
        """Where the model is saved."""
        model.save_pretrained(tmp_path)
        return tmp_path

    @torch.no_grad()
    def run(self, model):
        return model(*(tensor.to(model.dtype) for tensor in self.make_inputs()))[0]

    def test_is_deterministic(self, model):
        assert torch.equal(self.run(model), self.run(model))

    def test_tuple_equals_output_class(self, model):
        with torch.no_grad():
            assert torch.equal(model(*self.make_inputs(), return_dict=False)[0], self.run(model))

    def test_save_and_load_is_bitwise(self, model, folder):
        loaded = type(model).from_pretrained(folder)
        assert torch.equal(self.run(loaded), self.run(model))
        assert not loaded.training

    def test_save_and_load_keeps_the_config(self, model, folder):
        public = [
            {k: v for k, v in m.config.items() if k[0] != "_"} for m in (model, type(model).from_pretrained(folder))
        ]
        assert public[0] == public[1]

    def test_saves_safetensors_and_a_config_only(self, folder):
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", self.weights_file]

    def test_variants(self, model, tmp_path):
        model.save_pretrained(tmp_path, variant="fp16")
        assert torch.equal(self.run(type(model).from_pretrained(tmp_path, variant="fp16")), self.run(model))

    def test_small_shards(self, model, tmp_path):
        sizes = [tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()]
        model.save_pretrained(tmp_path, max_shard_size=max(sizes))
        assert torch.equal(self.run(type(model).from_pretrained(tmp_path)), self.run(model))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_stays_and_is_finite(self, model, folder, dtype):
        loaded = type(model).from_pretrained(folder, dtype=dtype)
        output = self.run(loaded)
        assert loaded.dtype == output.dtype == dtype and torch.isfinite(output).all()

    def test_missing_and_unexpected_keys_raise(self, model, folder):
        weights = load_file(folder / self.weights_file)
        name, tensor = weights.popitem()
        save_file(weights, folder / self.weights_file)
        with pytest.raises(ValueError, match="missing"):
            type(model).from_pretrained(folder)
        save_file({**weights, name: tensor, "no_such_key": tensor.clone()}, folder / self.weights_file)
        with pytest.raises(ValueError, match="unexpected"):
            type(model).from_pretrained(folder)

    @pytest.mark.parametrize("damage", ["another shape", "not finite"])
    def test_damaged_weights_raise(self, model, folder, damage):
        weights = load_file(folder / self.weights_file)
        name, tensor = weights.popitem()
        weights[name] = tensor[..., :-1].contiguous() if damage == "another shape" else tensor * torch.nan
        save_file(weights, folder / self.weights_file)
        with pytest.raises(ValueError, match=name):
            type(model).from_pretrained(folder)

    def test_truncated_weights_raise(self, model, folder):
        data = (folder / self.weights_file).read_bytes()
        (folder / self.weights_file).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=self.weights_file):
            type(model).from_pretrained(folder)

    def test_pickled_weights_are_not_a_fallback(self, model, folder):
        torch.save(model.state_dict(), folder / "diffusion_pytorch_model.bin")
        (folder / self.weights_file).unlink()
        with pytest.raises(OSError):
            type(model).from_pretrained(folder)

    def test_diffusers_can_load_it_as_a_component(self, model):
        # diffusers looks the base class up in the module that defines the component.
        assert getattr(sys.modules[type(model).__module__], "ModelMixin", None) is ModelMixin

    def test_group_offload(self, model):
        before = self.run(model)
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, offload_type="leaf_level")
        assert torch.equal(self.run(model), before)

    def test_a_training_step_lowers_the_loss(self, model):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(2):
            loss = model(*self.make_inputs())[0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] < losses[0]

    def test_gradient_checkpointing_changes_no_gradient(self, model):
        if not model._supports_gradient_checkpointing:
            pytest.skip("no gradient checkpointing")
        gradients = []
        for enable in (model.disable_gradient_checkpointing, model.enable_gradient_checkpointing):
            enable()
            model.train().zero_grad()
            model(*self.make_inputs())[0].square().mean().backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from test_concepts_saeuron import statistics  # noqa: F401
from test_modeling_saeuron import golden_sae
from torch import nn

from diffusers_ext import ConceptEdit, SAeUronConfig, SparseAutoencoder, apply_saeuron, remove_saeuron
from diffusers_ext.methods.saeuron.hooks_saeuron import applied_names, record_activations


STEPS = (4.0, 3.0, 2.0, 1.0)
HOOK = {"module": "block"}


class Block(nn.Module):
    """Returns its input in the container that a real block would."""

    def __init__(self, container="tuple"):
        super().__init__()
        self.container = container

    def forward(self, hidden_states):
        return (hidden_states,) if self.container == "tuple" else hidden_states


class Denoiser(nn.Module):
    def __init__(self, container="tuple"):
        super().__init__()
        self.block = Block(container)

    def forward(self, sample, timestep):
        output = self.block(sample)
        return output[0] if isinstance(output, tuple) else output


def random_edit(sae, name="concept", num_features=3, timesteps=STEPS, seed=0, multiplier=-2.0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.stack([torch.randperm(sae.num_latents, generator=generator)[:num_features] for _ in timesteps])
    # Exact in half precision, in which edits are applied.
    mean = (torch.rand(indices.shape, generator=generator) + 0.5).half().float()
    gate = torch.zeros(indices.shape)
    sizes = {"num_latents": sae.num_latents, "sae": sae.fingerprint()}
    return ConceptEdit(name, torch.tensor(timesteps), indices.int(), mean, gate, multiplier, **sizes)


@pytest.fixture
def sae():
    torch.manual_seed(0)
    return SparseAutoencoder(d_in=16, expansion_factor=4, k=8, hook=HOOK).eval()


@pytest.fixture
def x():
    return torch.randn(4, 16, 3, 5, generator=torch.Generator().manual_seed(1))


def dense_reference(sae, edit, x, step, error="exact", strength=1.0):
    """Section 2.6 of the paper's method, token by token in float64, without any of the shortcuts of the hook."""
    tokens = x.flatten(2).transpose(1, 2).double()
    model = {name: tensor.double() for name, tensor in sae.state_dict().items()}
    a = ((tokens - model["b_dec"]) @ model["encoder.weight"].T + model["encoder.bias"]).relu()
    values, indices = a.topk(sae.config.k)
    z = torch.zeros_like(a).scatter(-1, indices, values)
    edited = z.clone()
    for index, mean, gate in zip(edit.indices[step].tolist(), edit.mean[step], edit.gate[step]):
        scale = 1 + strength * (edit.multiplier * mean.double() - 1)
        edited[..., index] = torch.where(z[..., index] > gate, scale * z[..., index], z[..., index])
    reconstruction = z @ model["W_dec"] + model["b_dec"]
    change = (edited - z) @ model["W_dec"]
    base = {"exact": tokens, "official": 2 * reconstruction - tokens, "none": reconstruction}[error]
    return (base + change).transpose(1, 2).reshape(x.shape)


class TestGolden:
    @pytest.mark.parametrize("case", ["single", "single_noerr", "single_strong", "zero", "multi"])
    @pytest.mark.parametrize("error", ["official", "exact"])
    def test_intervention(self, golden, statistics, case, error):  # noqa: F811
        fixture = golden("saeuron", "intervention")
        settings = fixture.info["cases"][case]
        if error == "exact" and not settings["preserve_error"]:
            pytest.skip("the fixture has no exact output without an error term")
        _, sae, _ = golden_sae(golden, "patch")
        sae.register_to_config(hook=HOOK)
        statistics.sae = sae.fingerprint()
        edits = [
            statistics.edit(concept, percentile=settings["percentile"], multiplier=settings["multiplier"])
            for concept in settings["concepts"]
        ]
        if case == "multi":
            # Concatenated as the official code does: the latents of both concepts.
            assert len({i for edit in edits for i in edit.indices[0].tolist()}) == 2
        denoiser = Denoiser()
        error_term = error if settings["preserve_error"] else "none"
        apply_saeuron(denoiser, sae.eval(), SAeUronConfig(edits=edits, error=error_term))
        rtol = 1e-3 if abs(settings["multiplier"]) >= 30 else 1e-4
        for step, timestep in enumerate(STEPS):
            output = denoiser(fixture["input"], timestep)
            expected = (
                fixture[f"{case}.out"][step] if error == "official" else fixture[f"{case}.out_exact.{step}"].float()
            )
            torch.testing.assert_close(output, expected, atol=2e-5, rtol=rtol)

    def test_half_precision(self, golden, statistics):  # noqa: F811
        fixture = golden("saeuron", "intervention")
        settings = fixture.info["cases"]["single"]
        _, sae, _ = golden_sae(golden, "patch")
        sae.register_to_config(hook=HOOK)
        sae = sae.half().eval()
        statistics.sae = sae.fingerprint()
        edit = statistics.edit("concept_0", percentile=settings["percentile"], multiplier=settings["multiplier"])
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit], error="official"))
        for step, timestep in enumerate(STEPS):
            output = denoiser(fixture["input"].half(), timestep)
            torch.testing.assert_close(output, fixture["single_fp16.out"][step].half(), atol=0.03, rtol=0.02)

    def test_plain_reconstruction(self, golden):
        fixture = golden("saeuron", "intervention")
        _, sae, _ = golden_sae(golden, "patch")
        tokens = fixture["input"].flatten(2).transpose(1, 2)
        output = sae.eval().reconstruct(tokens).transpose(1, 2).reshape(fixture["input"].shape)
        torch.testing.assert_close(output, fixture["reconstruct.out"], atol=2e-5, rtol=1e-4)

    def test_one_latent_times_a_number(self, golden):
        fixture = golden("saeuron", "intervention")
        settings = fixture.info["cases"]["feature"]
        _, sae, _ = golden_sae(golden, "patch")
        sae.register_to_config(hook=HOOK)
        one = torch.ones(1, 1)
        index = torch.tensor([[settings["feature_idx"]]], dtype=torch.int32)
        edit = ConceptEdit("feature", torch.tensor([1.0]), index, one, one * 0, settings["multiplier"])
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae.eval(), SAeUronConfig(edits=[edit], error="none"))
        torch.testing.assert_close(denoiser(fixture["input"], 1), fixture["feature.out"], atol=2e-5, rtol=1e-4)


class TestIntervention:
    @pytest.mark.parametrize("error", ["exact", "official", "none"])
    def test_equals_the_dense_computation(self, sae, x, error):
        edit, denoiser = random_edit(sae), Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit], error=error))
        for step, timestep in enumerate(STEPS):
            expected = dense_reference(sae, edit, x, step, error).float()
            torch.testing.assert_close(denoiser(x, timestep), expected, atol=1e-5, rtol=1e-5)
            assert not torch.allclose(expected, x)

    def test_strength_zero_returns_the_same_tensor(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)], strength=0.0, error="official"))
        assert denoiser(x, 2) is x

    def test_latents_that_do_not_fire_return_the_same_tensor(self, sae, x):
        edit = random_edit(sae)
        edit.gate += 1e6
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit]))
        assert denoiser(x, 2) is x

    def test_strength_moves_latents_part_of_the_way(self, sae, x):
        edit, denoiser = random_edit(sae), Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit], strength=0.25))
        torch.testing.assert_close(denoiser(x, 4), dense_reference(sae, edit, x, 0, strength=0.25).float())

    def test_change_is_linear_in_the_strength(self, sae, x):
        changes = []
        for strength in (0.5, 1.0):
            denoiser = Denoiser()
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)], strength=strength))
            changes.append(denoiser(x, 4) - x)
        torch.testing.assert_close(changes[0] * 2, changes[1], atol=1e-5, rtol=1e-4)

    def test_rows_follow_the_timestep_not_the_number_of_calls(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        forward = [denoiser(x, t) for t in STEPS]
        backward = [denoiser(x, t) for t in STEPS[::-1]][::-1]
        assert all(torch.equal(a, b) for a, b in zip(forward, backward))
        assert not torch.equal(forward[0], forward[1])

    def test_timesteps_between_rows_take_the_nearest(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        assert torch.equal(denoiser(x, torch.tensor(2.9)), denoiser(x, torch.tensor([3])))

    def test_every_sample_may_have_its_own_timestep(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        mixed = denoiser(x, torch.tensor(STEPS))
        for i, timestep in enumerate(STEPS):
            torch.testing.assert_close(mixed[i : i + 1], denoiser(x[i : i + 1], timestep))

    def test_batch_equals_single_samples(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        torch.testing.assert_close(denoiser(x, 2), torch.cat([denoiser(x[i : i + 1], 2) for i in range(4)]))

    @pytest.mark.parametrize("target, kept", [("cond", slice(2)), ("uncond", slice(2, 4))])
    def test_one_half_of_the_guidance_batch(self, sae, x, target, kept):
        both, half = Denoiser(), Denoiser()
        apply_saeuron(both, sae, SAeUronConfig(edits=[random_edit(sae)]))
        apply_saeuron(half, sae, SAeUronConfig(edits=[random_edit(sae)], apply_to=target))
        output, expected = half(x, 2), both(x, 2).clone()
        assert not torch.allclose(output, x)
        expected[kept] = x[kept]
        torch.testing.assert_close(output, expected)

    def test_start_and_end_bound_the_diffusion_time(self, sae, x):
        edit = random_edit(sae, timesteps=(900.0, 100.0))
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit], end=0.5))
        assert not torch.equal(denoiser(x, 900), x) and torch.equal(denoiser(x, 100), x)

    def test_shared_latent_keeps_the_stronger_edit(self, sae, x):
        weak, strong = random_edit(sae, "weak", multiplier=-0.5), random_edit(sae, "strong", multiplier=-4.0)
        outputs = []
        for edits in ([weak, strong], [strong, weak], [strong]):
            denoiser = Denoiser()
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=edits))
            outputs.append(denoiser(x, 2))
        torch.testing.assert_close(outputs[0], outputs[2])
        torch.testing.assert_close(outputs[1], outputs[2])

    def test_concepts_with_different_timesteps(self, sae, x):
        one, other = random_edit(sae, "one"), random_edit(sae, "other", timesteps=(3.5, 1.5), seed=9)
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[one, other]))
        assert torch.isfinite(denoiser(x, 2)).all()

    def test_replace_leaves_tokens_without_the_concept_alone(self, sae, x):
        edit, scaled, replaced = random_edit(sae, num_features=1), Denoiser(), Denoiser()
        apply_saeuron(scaled, sae, SAeUronConfig(edits=[edit]))
        apply_saeuron(replaced, sae, SAeUronConfig(edits=[edit], mode="replace"))
        touched = (scaled(x, 2) != x).any(1, keepdim=True)
        output = replaced(x, 2)
        assert touched.any() and not touched.all()
        assert torch.equal(output.where(~touched, torch.zeros(())), x.where(~touched, torch.zeros(())))
        others = x.flatten(2).where(~touched.flatten(2), torch.zeros(())).sum(2) / (~touched).flatten(2).sum(2)
        expected = torch.where(touched, others[..., None, None], x)
        torch.testing.assert_close(output, expected)

    @pytest.mark.parametrize(
        "activation, norm", [("relu", "none"), ("jumprelu", "none"), ("topk", "unit"), ("topk", "constant_norm")]
    )
    def test_other_activations_and_norms_change_only_selected_latents(self, x, activation, norm):
        torch.manual_seed(0)
        sae = SparseAutoencoder(
            d_in=16, expansion_factor=4, k=8, activation=activation, input_norm=norm, hook=HOOK
        ).eval()
        if activation == "jumprelu":
            sae.threshold.data.fill_(0.5)
        edit, denoiser = random_edit(sae), Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[edit], error="none"))
        tokens = x.flatten(2).transpose(1, 2)
        normalised, undo = sae.normalize_input(tokens)
        z = sae.encode(tokens)
        for index, mean in zip(edit.indices[1].tolist(), edit.mean[1]):
            z[..., index] *= edit.multiplier * mean
        expected = undo(sae.decode(z)).transpose(1, 2).reshape(x.shape)
        torch.testing.assert_close(denoiser(x, 3), expected, atol=1e-5, rtol=1e-4)

    def test_gradients_pass_through(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae.requires_grad_(False), SAeUronConfig(edits=[random_edit(sae)]))
        x.requires_grad_(True)
        denoiser(x, 2).pow(2).sum().backward()
        assert torch.isfinite(x.grad).all() and not torch.allclose(x.grad, 2 * x)


class TestSignals:
    def test_tensor_outputs_stay_tensors(self, sae, x):
        denoiser = Denoiser("tensor")
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        torch.testing.assert_close(denoiser(x, 4), dense_reference(sae, random_edit(sae), x, 0).float())

    def test_input_signal_is_edited_before_the_block(self, x):
        class Double(Denoiser):
            def forward(self, sample, timestep):
                return 2 * self.block(sample)[0]

        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=8, hook={**HOOK, "signal": "input"}).eval()
        denoiser = Double()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        torch.testing.assert_close(denoiser(x, 4), 2 * dense_reference(sae, random_edit(sae), x, 0).float())

    def test_difference_signal_edits_what_the_block_adds(self, x):
        class Add(nn.Module):
            def forward(self, hidden_states):
                return hidden_states + hidden_states.roll(1, 0)

        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=8, hook={**HOOK, "signal": "diff"}).eval()
        denoiser = Denoiser("tensor")
        denoiser.block = Add()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        expected = x + dense_reference(sae, random_edit(sae), x.roll(1, 0), 0).float()
        torch.testing.assert_close(denoiser(x, 4), expected, atol=1e-5, rtol=1e-5)

    def test_token_sequences_with_a_slice(self):
        torch.manual_seed(0)
        point = {**HOOK, "layout": "bnd", "token_slice": [2, 6]}
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=8, hook=point).eval()
        denoiser, x = Denoiser(), torch.randn(2, 6, 16)
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        output = denoiser(x, 2)
        assert torch.equal(output[:, :2], x[:, :2]) and not torch.allclose(output[:, 2:], x[:, 2:])

    def test_recorder_sees_tokens_and_timestep_and_leaves_nothing(self, x):
        denoiser, seen = Denoiser(), []
        with record_activations(denoiser, HOOK, lambda tokens, timestep: seen.append((tokens, timestep))):
            assert denoiser(x, 3) is x
        assert seen[0][1] == 3 and torch.equal(seen[0][0], x.flatten(2).transpose(1, 2))
        assert denoiser(x, 3) is x and len(seen) == 1 and not applied_names(denoiser)


class TestApplyAndRemove:
    def test_removing_restores_the_output_bit_for_bit(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        remove_saeuron(denoiser)
        assert denoiser(x, 2) is x and not applied_names(denoiser)

    @pytest.mark.parametrize("first", ["a", "b"])
    def test_two_on_one_block_are_removed_in_either_order(self, sae, x, first):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]), name="a")
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae, seed=5)]), name="b")
        remove_saeuron(denoiser, first)
        alone = Denoiser()
        apply_saeuron(alone, sae, SAeUronConfig(edits=[random_edit(sae, seed=5 if first == "a" else 0)]))
        assert torch.equal(denoiser(x, 2), alone(x, 2))
        remove_saeuron(denoiser)
        assert denoiser(x, 2) is x

    @pytest.mark.parametrize("ours_first", [True, False])
    @pytest.mark.parametrize("replaces_forward", [True, False])
    def test_hooks_of_others_stay(self, sae, x, ours_first, replaces_forward):
        class HalfAfter(ModelHook):
            def post_forward(self, module, output):
                return (output[0] / 2,)

        class HalfInstead(ModelHook):
            def new_forward(self, module, *args, **kwargs):
                return (self.fn_ref.original_forward(*args, **kwargs)[0] / 2,)

        denoiser = Denoiser()
        half = HalfInstead() if replaces_forward else HalfAfter()
        registry = HookRegistry.check_if_exists_or_initialize(denoiser.block)
        if not ours_first:
            registry.register_hook(half, "half")
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        if ours_first:
            registry.register_hook(half, "half")
        remove_saeuron(denoiser)
        assert torch.equal(denoiser(x, 2), x / 2)

    def test_state_dict_does_not_change(self, sae):
        denoiser = Denoiser()
        before = list(denoiser.state_dict())
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        assert list(denoiser.state_dict()) == before

    @pytest.mark.parametrize("whole", [True, False])
    def test_compiles_in_one_graph_with_the_same_result(self, sae, x, whole):
        graphs = []

        def count(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        expected = [denoiser(x, torch.tensor(t)) for t in STEPS]
        if whole:
            compiled = torch.compile(denoiser, backend=count, fullgraph=True)
        else:
            denoiser.block.compile(backend=count, fullgraph=True)
            compiled = denoiser
        with torch.no_grad():
            for timestep, output in zip(STEPS, expected):
                torch.testing.assert_close(compiled(x, torch.tensor(timestep)), output, atol=1e-5, rtol=1e-5)
        assert len(graphs) == 1


class TestBadInput:
    def test_applying_twice(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        once = denoiser(x, 2)
        with pytest.raises(ValueError, match="'saeuron' is already applied"):
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        assert torch.equal(denoiser(x, 2), once)

    def test_removing_what_is_not_applied(self):
        with pytest.raises(ValueError, match="'saeuron' is not applied to this Denoiser"):
            remove_saeuron(Denoiser(), "saeuron")

    def test_module_that_does_not_exist(self, sae):
        sae.register_to_config(hook={**sae.config.hook, "module": "blocks"})
        denoiser = Denoiser()
        with pytest.raises(ValueError, match="has no module 'blocks'. Closest: block"):
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        assert not applied_names(denoiser)

    def test_edit_of_another_autoencoder(self, sae):
        other = SparseAutoencoder(d_in=16, expansion_factor=4, k=8, hook=HOOK)
        denoiser = Denoiser()
        with pytest.raises(ValueError, match="was made for the autoencoder"):
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(other)]))
        assert not applied_names(denoiser)

    def test_latent_that_does_not_exist(self, sae):
        edit = random_edit(sae)
        edit.indices[0, 0] = 64
        with pytest.raises(ValueError, match="selects latent 64 of 64"):
            apply_saeuron(Denoiser(), sae, SAeUronConfig(edits=[edit]))

    def test_channels_that_do_not_fit_are_found_when_applied(self, sae):
        denoiser = Denoiser()
        denoiser.block.out_channels = 32
        with pytest.raises(ValueError, match="has 16 channels but block gives 32"):
            apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))

    def test_channels_that_do_not_fit_are_found_when_called(self, sae):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        with pytest.raises(ValueError, match="has 16 channels but block gives 8"):
            denoiser(torch.randn(1, 8, 2, 2), 1)

    def test_odd_batch_where_halves_are_needed(self, sae, x):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)], apply_to="cond"))
        with pytest.raises(ValueError, match="needs classifier-free guidance"):
            denoiser(x[:3], 1)

    def test_denoiser_called_without_a_timestep(self, sae, x):
        class Silent(Denoiser):
            def forward(self, sample):
                return self.block(sample)[0]

        denoiser = Silent()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        with pytest.raises(ValueError, match="Silent was called without `timestep`"):
            denoiser(x)

    def test_sae_of_another_type(self, sae):
        with pytest.raises(TypeError, match="has to be a `SparseAutoencoder` but is a Linear"):
            apply_saeuron(Denoiser(), nn.Linear(1, 1), SAeUronConfig(edits=[random_edit(sae)]))

    def test_timestep_far_outside_warns_once(self, sae, x, caplog):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        denoiser(x, 500), denoiser(x, 500)
        assert len([r for r in caplog.records if "lies outside those of the edit" in r.message]) == 1

    def test_activations_that_are_not_finite_warn_once(self, sae, x, caplog):
        denoiser = Denoiser()
        apply_saeuron(denoiser, sae, SAeUronConfig(edits=[random_edit(sae)]))
        x[0, 0, 0, 0] = float("nan")
        denoiser(x, 2), denoiser(x, 2)
        assert len([r for r in caplog.records if "not finite" in r.message]) == 1

    @pytest.mark.parametrize(
        "kwargs, message",
        [
            ({"strength": -1.0}, "at least 0 but is -1.0"),
            ({"strength": float("nan")}, "at least 0 but is nan"),
            ({"strength": {"dog": 1.0}}, r"names \['dog'\]"),
            ({"mode": "delete"}, "one of scale, replace"),
            ({"error": "wrong"}, "one of exact, official, none"),
            ({"apply_to": "positive"}, "one of both, cond, uncond"),
            ({"start": 0.6, "end": 0.5}, "0 <= start <= end <= 1"),
            ({"num_features": 1, "percentile": 99.0}, "not both"),
        ],
    )
    def test_config(self, sae, kwargs, message):
        with pytest.raises(ValueError, match=message):
            SAeUronConfig(edits=[random_edit(sae)], **kwargs)

    def test_config_without_edits(self):
        with pytest.raises(ValueError, match="`edits` is empty"):
            SAeUronConfig()

    def test_config_with_something_else_than_edits(self):
        with pytest.raises(TypeError, match="holds a str"):
            SAeUronConfig(edits=["cat"])

# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from official_memorization import fixture, official_unet, parameters
from safetensors.torch import save_file

from diffusers_ext import GuidedDenoiser, MemorizationStableDiffusionPipeline
from diffusers_ext.methods.memorization.mitigations_memorization import Neurons
from diffusers_ext.methods.memorization.neurons_memorization import (
    NeuronStatistics,
    block_neurons,
    find_neurons,
    max_pairwise_ssim,
    multiscale_ssim,
    noise_maps,
    select_neurons,
    value_activations,
    value_layers,
)
from diffusers_ext.testing import tiny_stable_diffusion


TENSORS, MADE = fixture("baseline_neurons"), parameters("baseline_neurons")
LAYERS = range(sum(name.startswith("mean.") for name in TENSORS))
STATISTICS = NeuronStatistics(*([TENSORS[f"{name}.{i}"] for i in LAYERS] for name in ("mean", "std")))
ACTIVATIONS = [TENSORS[f"activation.{i}"] for i in LAYERS]


def random_embeds(n, seed=0):
    return torch.randn(n, 16, 16, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def unet():
    return tiny_stable_diffusion().unet


def alike(unet, n=3):
    """Samples whose maps are alike: starting noise that differs by little."""
    scheduler = tiny_stable_diffusion().scheduler
    embeds = random_embeds(1).expand(n, -1, -1)
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(1)).repeat(n, 1, 1, 1)
    latents += 1e-4 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))
    return GuidedDenoiser(unet, scheduler, embeds, torch.zeros_like(embeds)), latents


class TestPublished:
    @pytest.mark.parametrize("case", MADE["selection"])
    def test_selection(self, case):
        assert select_neurons(ACTIVATIONS, STATISTICS, case["theta"], case["k"], unique=False) == case["indices"]

    @pytest.mark.parametrize("case", MADE["selection"])
    def test_selection_names_each_neuron_once(self, case):
        found = select_neurons(ACTIVATIONS, STATISTICS, case["theta"], case["k"])
        assert found == [list(dict.fromkeys(layer)) for layer in case["indices"]]

    def test_similarity(self):
        mine = max_pairwise_ssim(TENSORS["noise_diff"])
        torch.testing.assert_close(mine, TENSORS["max_pairwise_msssim"], atol=1e-4, rtol=0)


class TestSimilarity:
    def test_of_a_map_with_itself_is_one(self):
        maps = torch.rand(2, 4, 48, 40, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(multiscale_ssim(maps, maps), torch.ones(2), atol=1e-4, rtol=0)

    def test_falls_with_noise(self):
        generator = torch.Generator().manual_seed(0)
        maps, noise = (torch.rand(1, 4, 48, 48, generator=generator) for _ in range(2))
        values = [multiscale_ssim(maps, maps + scale * noise).item() for scale in (0.0, 0.2, 0.5, 2.0)]
        assert values == sorted(values, reverse=True) and values[-1] < 0.8 * values[0]

    @pytest.mark.parametrize("side", [6, 8, 16, 23])
    def test_small_maps(self, side):
        maps = torch.rand(2, 4, side, side, generator=torch.Generator().manual_seed(0))
        assert multiscale_ssim(maps[:1], maps[1:]).isfinite().all()

    def test_maps_are_scaled_by_channel(self):
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        maps = noise_maps(3 * x, x).flatten(2)
        assert maps.amin(2).eq(0).all() and maps.amax(2).eq(1).all()


class TestStatistics:
    def test_do_not_depend_on_the_batches(self, unet):
        embeds = random_embeds(9)
        mine = NeuronStatistics.collect(unet, embeds.split([1, 5, 3]))
        for layer, values in enumerate(value_activations(unet, embeds)):
            torch.testing.assert_close(mine.mean[layer], values.mean(0))
            torch.testing.assert_close(mine.std[layer], values.std(0))

    def test_are_saved_and_loaded(self, tmp_path):
        save_file(STATISTICS.state_dict(), tmp_path / "statistics.safetensors")
        loaded = NeuronStatistics.from_file(tmp_path / "statistics.safetensors").state_dict()
        assert list(loaded) == list(STATISTICS.state_dict())
        assert all(value.equal(STATISTICS.state_dict()[name]) for name, value in loaded.items())

    def test_published_file(self, tmp_path):
        torch.save((STATISTICS.mean, STATISTICS.std), tmp_path / "statistics.pt")
        loaded = NeuronStatistics.from_file(tmp_path / "statistics.pt")
        assert all(one.equal(other) for one, other in zip(loaded.std, STATISTICS.std))


class TestBlocking:
    def run(self, unet):
        latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            return unet(latents, 501, random_embeds(2)).sample

    def all_of(self, unet):
        return [list(range(layer.out_features)) for layer in value_layers(unet).values()]

    def test_layers_are_those_before_the_up_blocks(self):
        assert list(value_layers(official_unet("eps"))) == [
            "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_v",
            "mid_block.attentions.0.transformer_blocks.0.attn2.to_v",
        ]

    def test_blocked_neurons_are_silent(self, unet):
        with block_neurons(unet, [[1, 3], []]):
            values = [layer(random_embeds(1)) for layer in value_layers(unet).values()]
        assert values[0][..., [1, 3]].eq(0).all() and values[0][..., 0].ne(0).all() and values[1].ne(0).all()

    def test_is_undone_after_an_error(self, unet):
        before = self.run(unet)
        with pytest.raises(RuntimeError), block_neurons(unet, self.all_of(unet)):
            assert not torch.equal(self.run(unet), before)
            raise RuntimeError
        assert torch.equal(self.run(unet), before)

    def test_pipeline_blocks_them_and_forgets(self):
        pipe = tiny_stable_diffusion(MemorizationStableDiffusionPipeline)
        call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "np"}

        def draw(**kwargs):
            return pipe(**call, generator=torch.Generator().manual_seed(0), **kwargs).images

        plain, kwargs = draw(), {"memorization": "mitigate", "mitigation": "neurons"}
        blocked = draw(**kwargs, mitigation_kwargs={"blocked": self.all_of(pipe.unet)})
        assert not np.allclose(blocked, plain, atol=1e-5) and np.array_equal(draw(), plain)


class TestSearch:
    def find(self, unet, **kwargs):
        denoiser, latents = alike(unet)
        statistics = NeuronStatistics.collect(unet, random_embeds(8, seed=4).split(4))
        return find_neurons(denoiser, latents, 1, statistics, **kwargs), (denoiser, latents)

    def test_prompts_whose_seeds_differ_have_none(self, unet):
        found, _ = self.find(unet, limit=1.0)
        assert not found.is_memorized and found.neurons == [[], []]

    def test_found_neurons_change_the_maps_and_each_is_needed(self, unet):
        for layer in value_layers(unet).values():
            layer.weight.data *= 100  # those of random weights say little
        denoiser, latents = alike(unet)
        plain = noise_maps(denoiser.outputs(latents, 1)[1], latents)

        def similarity(neurons):
            with block_neurons(unet, neurons):
                return multiscale_ssim(plain, noise_maps(denoiser.outputs(latents, 1)[1], latents)).max().item()

        # Between what none and all of them change.
        limit = (1 + similarity(TestBlocking().all_of(unet))) / 2
        assert limit < 0.999
        found, _ = self.find(unet, limit=limit)
        assert found.is_memorized and found.similarity <= limit and any(found.neurons)
        assert found.similarity == pytest.approx(similarity(found.neurons), abs=1e-6)
        for layer, chosen in enumerate(found.neurons):
            without = [chosen[:-1] if i == layer else other for i, other in enumerate(found.neurons)]
            assert not chosen or similarity(without) > limit

    def test_nothing_stays_attached(self, unet):
        self.find(unet, limit=0.9)
        assert not [module for module in unet.modules() if module._forward_hooks]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Neurons(), "find them with `find_neurons`"),
        (lambda: Neurons([[], []]), "find them with `find_neurons`"),
        (lambda: NeuronStatistics([torch.ones(2)], []), "one tensor per layer"),
        (lambda: NeuronStatistics.collect(tiny_stable_diffusion().unet, []), "at least two prompts but there are 0"),
        (lambda: select_neurons(ACTIVATIONS[1:], STATISTICS), "The statistics are of layers of"),
        (lambda: multiscale_ssim(torch.ones(1, 1, 5, 5), torch.ones(1, 1, 5, 5)), "too small for a window of 11"),
        (lambda: max_pairwise_ssim(torch.ones(1, 1, 16, 16)), "at least two are needed"),
        (lambda: block_neurons(official_unet("eps"), [[0]]).__enter__(), "a list for each of 2 layers but holds 1"),
        (lambda: block_neurons(official_unet("eps"), [[99], []]).__enter__(), "neuron 99 is to be blocked"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_other_files_are_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="has to hold `mean.0`"):
        NeuronStatistics.from_file(tmp_path / "other.safetensors")
    torch.save(torch.ones(3), tmp_path / "other.pt")
    with pytest.raises(ValueError, match="pair of means"):
        NeuronStatistics.from_file(tmp_path / "other.pt")

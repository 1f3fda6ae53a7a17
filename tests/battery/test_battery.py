# SPDX-License-Identifier: Apache-2.0
"""
Every registered method in the battery: one class per contract and method. What is registered without a row fails
`test_every_method_has_its_rows` or `test_every_registered_object_has_its_row`. The plugin template is the second
method: its own tests are these contracts, and `tests/core/test_plugin_template.py` runs them in a plugin made from it.

What users of such tools keep hitting, and where it is tested (contracts are in `diffusers_ext.testing`):

1. half-loaded weights: `ModelContract` (missing, unexpected and misshapen keys, values that are not finite, truncated
   files); what is not the nearest known kind is refused: `test_modeling_saeuron.py`, `test_concepts_saeuron.py`;
2. undo: `HookContract` (every bit, the user's processors and hooks, LoRA and offload in all orders of coming and
   going, refused and repeated applications), `PipelineContract` (no trace after a call or an exception);
3. the second call: `HookContract`, `PipelineContract` (other steps, size, batch and scheduler in between);
4. a batch equals its single runs: `HookContract`, `PipelineContract` (several prompts and several images per prompt);
5. base weights stay: `HookContract` (what is saved does not know of the method), `PipelineContract` (LoRA beside it);
6. resume: `tests/training`;
7. precision: half precision in all three contracts; values that are not finite: `test_compositions_saeuron.py`,
   `test_hooks_saeuron.py`;
8. a base that the artefact was not made for: `test_compositions_saeuron.py`;
9. trust at every door, no fallback to pickles: `PipelineContract`, `ModelContract`, `test_doors.py`;
10. schedulers, second-order ones too: `PipelineContract`; those that start mid-pair: `test_compositions_saeuron.py`.
"""

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    ModelMixin,
    SchedulerMixin,
    UNet2DModel,
)

from diffusers_ext import (
    ConceptEdit,
    ConceptEdits,
    EDMHeunScheduler,
    EDMPipeline,
    EDMUNet2DModel,
    MemorizationStableDiffusionPipeline,
    SAeUronConfig,
    SAeUronStableDiffusionPipeline,
    SparseAutoencoder,
    apply_saeuron,
    list_methods,
    plugins,
    remove_saeuron,
)
from diffusers_ext.testing import (
    TIMESTEPS,
    HookContract,
    ModelContract,
    PipelineContract,
    SchedulerContract,
    UnconditionalPipelineContract,
    flux_inputs,
    tiny_flux_transformer,
    tiny_stable_diffusion,
)


def tiny_sae(**kwargs):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"d_in": 32, "expansion_factor": 4, "k": 16, "hook": {"module": "up_blocks.0.attentions.1"}}
        return SparseAutoencoder(**{**settings, **kwargs}).eval()


def tiny_edit(sae, name="cat"):
    generator = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(sae.num_latents, generator=generator)[:40] for _ in TIMESTEPS]).int()
    mean = torch.ones(indices.shape)
    sizes = {"num_latents": sae.num_latents, "sae": sae.fingerprint()}
    return ConceptEdit(name, torch.tensor(TIMESTEPS), indices, mean, mean * 0, multiplier=-4.0, **sizes)


class TestSAeUronHook(HookContract):
    method = "saeuron"
    sae_settings = {}

    def _apply(self, model, strength=1.0, **settings):
        sae = tiny_sae(**self.sae_settings, **settings)
        apply_saeuron(model, sae, SAeUronConfig(edits=[tiny_edit(sae)], strength=strength))

    def apply(self, model):
        self._apply(model)

    def apply_neutral(self, model):
        self._apply(model, strength=0.0)

    def apply_invalid(self, model):
        self._apply(model, hook={"module": "up_blocks.7"})

    def remove(self, model):
        remove_saeuron(model)


class TestSAeUronHookOnFlux(TestSAeUronHook):
    """The same on a transformer whose blocks return text and image tokens."""

    sae_settings = {"hook": {"module": "transformer_blocks.1", "layout": "bnd", "output_index": 1}}

    def make_model(self):
        return tiny_flux_transformer()

    def make_inputs(self, batch, timestep, generator):
        return flux_inputs(batch, timestep, generator)

    def apply_invalid(self, model):
        sae = tiny_sae(hook={"module": "up_blocks.7"})
        apply_saeuron(model, sae, SAeUronConfig(edits=[tiny_edit(sae)]))


class TestSAeUronPipeline(PipelineContract):
    method = "saeuron"
    pipeline_class = SAeUronStableDiffusionPipeline
    inputs = {"unlearn": ["cat", "neon"]}

    def make_pipeline(self):
        styles = tiny_sae(hook={"module": "down_blocks.1.attentions.0"}, expansion_factor=2)
        pipe = tiny_stable_diffusion(self.pipeline_class, sae=tiny_sae(), sae_2=styles)
        pipe.load_concepts(ConceptEdits([tiny_edit(pipe.sae), tiny_edit(pipe.sae_2, "neon")]))
        return pipe

    def after_loading(self, pipe, original):
        pipe.load_concepts(original.concept_edits)


class TestSparseAutoencoder(ModelContract):
    method = "saeuron"

    def make_model(self):
        return SparseAutoencoder(d_in=16, expansion_factor=4, k=4)

    def make_inputs(self):
        return (torch.randn(10, 16, generator=torch.Generator().manual_seed(1)),)


class TestMemorizationPipeline(PipelineContract):
    method = "memorization"
    pipeline_class = MemorizationStableDiffusionPipeline
    inputs = {"memorization": "mitigate", "mitigation_kwargs": {"max_steps": 1, "learning_rate": 0.5}}
    neutral_inputs = {"memorization": "auto", "memorization_threshold": 1e9}

    # What is measured is the difference that guidance makes; without guidance the call is refused.
    test_without_guidance = None

    def test_layerwise_casting(self, pipe):
        pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        plain = self.draw_plain(pipe)
        with pytest.raises(ValueError, match="No gradient passes through a model with layerwise casting"):
            self.draw(pipe)
        assert (self.draw_plain(pipe) == plain).all()


@pytest.mark.extended
class TestMemorizationPipelineWithGuidance(TestMemorizationPipeline):
    """A remedy that acts at every step."""

    inputs = {"memorization": "mitigate", "mitigation": "delayed_guidance", "mitigation_kwargs": {"timestep": 400}}
    test_layerwise_casting = PipelineContract.test_layerwise_casting


class TestEDMHeunScheduler(SchedulerContract):
    method = "ambient_diffusion"
    scheduler_class = EDMHeunScheduler
    compatible = EDMEulerScheduler

    def predict(self, scheduler, sample, scaled, timestep, point):
        # The network F of EDM whose denoiser gives the point: D = c_skip x + c_out F.
        sigma, data = scheduler.sigmas[scheduler.step_index].item(), scheduler.config.sigma_data
        skip, out = data**2 / (sigma**2 + data**2), sigma * data / (sigma**2 + data**2) ** 0.5
        return (point.double() - skip * sample.double()) / out


class TestEDMHeunSchedulerWithChurn(TestEDMHeunScheduler):
    settings = {"s_churn": 3.0, "s_tmin": 0.05, "s_tmax": 90.0, "s_noise": 1.003}


class TestEDMPipeline(UnconditionalPipelineContract):
    method = "ambient_diffusion"
    pipeline_class = EDMPipeline
    schedulers = (EDMEulerScheduler, EDMDPMSolverMultistepScheduler)
    sample_shape = (3, 16, 16)

    def make_pipeline(self):
        return EDMPipeline(tiny_edm_unet(), EDMHeunScheduler())


class TestEDMPipelineWithFourierUNet(TestEDMPipeline):
    """A stock U-Net that takes the logarithm of its timestep."""

    def make_pipeline(self):
        blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            settings = {"block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1}
            unet = UNet2DModel(16, time_embedding_type="fourier", attention_head_dim=4, **settings, **blocks)
        return EDMPipeline(unet.eval(), EDMHeunScheduler(s_churn=4.0))


def tiny_edm_unet():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"model_channels": 8, "channel_mult": (1, 2), "num_blocks": 1, "attn_resolutions": (8,)}
        return EDMUNet2DModel(16, **settings).eval()


class TestEDMUNet2DModel(ModelContract):
    method = "ambient_diffusion"

    def make_model(self):
        return tiny_edm_unet()

    def make_inputs(self):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(2, 3, 16, 16, generator=generator), torch.tensor([-0.5, 0.7])


ROWS = [value for value in list(globals().values()) if isinstance(value, type) and hasattr(value, "method")]
PIPELINE_CONTRACTS = (PipelineContract, UnconditionalPipelineContract)
CONTRACT_OF = {
    "pipeline": PIPELINE_CONTRACTS,
    "hook": HookContract,
    "component": ModelContract,
    "scheduler": SchedulerContract,
}
# Scripts and their trainers have a test folder of their own, tests/training.
WITHOUT_CONTRACT = {"training"}


def own_plugins(group):
    return [plugin for plugin in plugins.discover(group).values() if plugin.distribution == plugins.OWN_DISTRIBUTION]


@pytest.mark.parametrize("spec", list_methods(), ids=lambda spec: spec.name)
def test_every_method_has_its_rows(spec):
    if spec.distribution != plugins.OWN_DISTRIBUTION:
        pytest.skip(f"{spec.distribution} runs the battery on itself")
    for kind in set(spec.kinds) - WITHOUT_CONTRACT:
        assert kind in CONTRACT_OF, f"{spec.name} is the first {kind}: give it a contract in diffusers_ext.testing"
        assert any(row.method == spec.name and issubclass(row, CONTRACT_OF[kind]) for row in ROWS), kind


def test_every_registered_object_has_its_row():
    pipelines = {row.pipeline_class for row in ROWS if issubclass(row, PIPELINE_CONTRACTS)}
    schedulers = {row.scheduler_class for row in ROWS if issubclass(row, SchedulerContract)}
    models = {type(row().make_model()) for row in ROWS if issubclass(row, ModelContract)}
    for plugin in [plugin for group in plugins.GROUPS[1:] for plugin in own_plugins(group)]:
        target = plugin.load()
        if isinstance(target, type) and issubclass(target, DiffusionPipeline):
            assert target in pipelines, plugin.target
        elif isinstance(target, type) and issubclass(target, ModelMixin):
            assert target in models, plugin.target
        elif isinstance(target, type) and issubclass(target, SchedulerMixin):
            assert target in schedulers, plugin.target


def test_every_registered_pipeline_belongs_to_a_method():
    registered = {plugin.target for plugin in own_plugins("diffusers_ext.pipelines")}
    named = {spec.pipeline for spec in list_methods() if spec.distribution == plugins.OWN_DISTRIBUTION}
    assert registered == named - {None}

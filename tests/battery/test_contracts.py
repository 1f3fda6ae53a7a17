# SPDX-License-Identifier: Apache-2.0
"""The contracts notice what they are there for: each is run on a method with one fault."""

import inspect

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin, StableDiffusionPipeline
from diffusers.configuration_utils import register_to_config
from diffusers.hooks import HookRegistry, ModelHook

from diffusers_ext.testing import HookContract, ModelContract, PipelineContract


class GainHook(ModelHook):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def post_forward(self, module, output):
        return (self.change(output[0]), *output[1:])

    def change(self, sample):
        return sample * self.gain


class CountingHook(GainHook):
    def change(self, sample):
        self.gain += 1
        return sample * self.gain


class MixingHook(GainHook):
    def change(self, sample):
        return sample + sample.mean(0) * self.gain


class WideningHook(GainHook):
    def change(self, sample):
        return sample.float() * self.gain


class Gain(HookContract):
    hook_class = GainHook
    neutral = 1.0

    def put(self, model, gain):
        registry = HookRegistry.check_if_exists_or_initialize(model)
        if registry.get_hook("gain") is not None:
            raise ValueError("already applied")
        registry.register_hook(self.hook_class(gain), "gain")

    def apply(self, model):
        self.put(model, 2.0)

    def apply_neutral(self, model):
        self.put(model, self.neutral)

    def apply_invalid(self, model):
        raise ValueError("invalid")

    def remove(self, model):
        HookRegistry.check_if_exists_or_initialize(model).remove_hook("gain", recurse=False)


class NeutralIsNot(Gain):
    neutral = 1.0001


class DoesNothing(Gain):
    def apply(self, model):
        self.put(model, 1.0)


class Stays(Gain):
    def remove(self, model):
        """Leaves the hook."""


class TakesProcessors(Gain):
    def remove(self, model):
        super().remove(model)
        model.set_default_attn_processor()


class TakesAllHooks(Gain):
    def remove(self, model):
        for name in list(model._diffusers_hook.hooks):
            model._diffusers_hook.remove_hook(name)


class AppliesTwice(Gain):
    def put(self, model, gain):
        HookRegistry.check_if_exists_or_initialize(model).register_hook(GainHook(gain), str(torch.rand(())))


class AppliesBeforeItChecks(Gain):
    def apply_invalid(self, model):
        self.apply(model)
        raise ValueError("invalid")


class ChangesWeights(Gain):
    @torch.no_grad()
    def apply(self, model):
        model.conv_out.weight.mul_(2)

    @torch.no_grad()
    def remove(self, model):
        model.conv_out.weight.div_(2)


class Counts(Gain):
    hook_class = CountingHook


class Mixes(Gain):
    hook_class = MixingHook


class Widens(Gain):
    hook_class = WideningHook


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (NeutralIsNot, "test_neutral_settings_change_no_bit"),
        (DoesNothing, "test_applied_it_changes_the_output"),
        (Stays, "test_removal_restores_every_bit"),
        (TakesProcessors, "test_removal_gives_back_the_users_processors_and_hooks"),
        (TakesAllHooks, "test_removal_gives_back_the_users_processors_and_hooks"),
        (AppliesTwice, "test_applying_twice_raises_and_changes_nothing"),
        (AppliesBeforeItChecks, "test_refused_application_leaves_nothing"),
        (Counts, "test_no_state_is_carried_from_call_to_call"),
        (Mixes, "test_batch_equals_single_samples"),
    ],
)
def test_hook_contract_notices(faulty, test):
    assert_fails_on(faulty, Gain, test, "model")


@pytest.mark.parametrize(
    ("faulty", "test", "arguments"),
    [
        (Widens, "test_half_precision_stays_and_is_finite", {"dtype": torch.bfloat16}),
        (Stays, "test_lora_beside_it", {"lora_comes_first": False, "lora_leaves_first": True}),
        (Stays, "test_layerwise_casting", {"casting_first": True}),
    ],
)
def test_hook_contract_notices_beside_neighbours(faulty, test, arguments):
    assert_fails_on(faulty, Gain, test, "model", **arguments)


def test_hook_contract_notices_changed_weights(tmp_path):
    assert_fails_on(ChangesWeights, Gain, "test_what_is_saved_does_not_know_of_it", "model", tmp_path=tmp_path)


def assert_fails_on(faulty, sound, test, fixture, **arguments):
    """The test passes on a sound method and fails on a faulty one; fixtures are made as pytest makes them."""
    for contract in (sound(), faulty()):
        make = getattr(contract, f"make_{fixture}")
        values = {fixture: make(), **arguments}
        wanted = inspect.signature(getattr(contract, test)).parameters
        if "stock" in wanted:
            values["stock"] = contract.make_stock_pipeline()
        if contract.__class__ is sound:
            getattr(contract, test)(**values)
        else:
            with pytest.raises((AssertionError, pytest.fail.Exception)):
                getattr(contract, test)(**values)


class GainPipeline(StableDiffusionPipeline):
    @torch.no_grad()
    def __call__(self, *args, gain=1.0, **kwargs):
        registry = HookRegistry.check_if_exists_or_initialize(self.unet)
        registry.register_hook(GainHook(gain), "gain")
        try:
            return super().__call__(*args, **kwargs)
        finally:
            registry.remove_hook("gain")

    __call__.__signature__ = inspect.signature(StableDiffusionPipeline.__call__)


class KeepsWhatItWasGiven(GainPipeline):
    last = 1.0

    @torch.no_grad()
    def __call__(self, *args, gain=None, **kwargs):
        self.last = gain or self.last
        return super().__call__(*args, gain=self.last, **kwargs)


class SharesTheFirstPrompt(GainPipeline):
    def encode_prompt(self, *args, **kwargs):
        embeddings, negative = super().encode_prompt(*args, **kwargs)
        return embeddings[:1].expand_as(embeddings), negative


class LosesCallbacks(GainPipeline):
    def __call__(self, *args, callback_on_step_end=None, **kwargs):
        return super().__call__(*args, **kwargs)


class GainCase(PipelineContract):
    pipeline_class = GainPipeline
    inputs = {"gain": 1.5}
    neutral_inputs = {"gain": 1.0}

    def make_pipe(self):
        return self.make_pipeline()


def case(pipeline, **attributes):
    return type(pipeline.__name__, (GainCase,), {"pipeline_class": pipeline, **attributes})


@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (case(GainPipeline, inputs={}), "test_the_method_changes_the_picture"),
        (case(GainPipeline, neutral_inputs={"gain": 1.1}), "test_neutral_settings_give_the_stock_picture_bit_for_bit"),
        (case(KeepsWhatItWasGiven, neutral_inputs={}), "test_call_leaves_no_trace"),
        (case(KeepsWhatItWasGiven, neutral_inputs={}), "test_exception_in_a_callback_leaves_the_pipeline_usable"),
        (case(SharesTheFirstPrompt), "test_batch_equals_single_pictures"),
        (case(SharesTheFirstPrompt), "test_several_images_per_prompt"),
        (case(LosesCallbacks), "test_callback_gets_what_it_asks_for"),
        (case(LosesCallbacks), "test_callback_may_change_latents"),
    ],
)
def test_pipeline_contract_notices(faulty, test):
    assert_fails_on(faulty, GainCase, test, "pipe")


class Linear(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, size=8):
        super().__init__()
        self.inner = torch.nn.Linear(size, size)

    def forward(self, x, return_dict=True):
        return (self.inner(x),)


class LinearCase(ModelContract):
    def make_model(self):
        return Linear()

    def make_inputs(self):
        return (torch.randn(3, 8, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("test", ["test_missing_and_unexpected_keys_raise", "test_damaged_weights_raise"])
def test_model_contract_notices_what_diffusers_lets_pass(test, tmp_path):
    # diffusers leaves a missing weight on the meta device, with a warning, and reads values that are not finite.
    model = LinearCase().make_model()
    model.save_pretrained(tmp_path)
    arguments = {"damage": "not finite"} if "damaged" in test else {}
    with pytest.raises(pytest.fail.Exception):
        getattr(LinearCase(), test)(model=model, folder=tmp_path, **arguments)

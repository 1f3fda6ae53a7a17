# SPDX-License-Identifier: Apache-2.0
"""The method as a hook, for pipelines that are loaded already."""

import math
from dataclasses import dataclass

from diffusers.hooks import HookRegistry, ModelHook


_LATENT_GAIN_HOOK = "latent_gain"


@dataclass
class LatentGainConfig:
    """
    How loud a block is.

    Args:
        gain (`float`, *optional*, defaults to 1.0):
            What the block's output is multiplied by, at least 0; 1 changes nothing.
        block (`str`, *optional*, defaults to `"mid_block"`):
            Path of the block inside the denoiser; it has to return one tensor.

    Raises:
        ValueError: when `gain` is negative or not finite.
    """

    gain: float = 1.0
    block: str = "mid_block"

    def __post_init__(self):
        if not (math.isfinite(self.gain) and self.gain >= 0):
            raise ValueError(f"`gain` has to be a finite number of at least 0 but is {self.gain}.")


class LatentGainHook(ModelHook):
    """Multiplies the output of the module it is on."""

    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def post_forward(self, module, output):
        return output * self.gain


def apply_latent_gain(module, config):
    """
    Makes a block of a denoiser louder or quieter. No weight changes.

    Args:
        module (`torch.nn.Module`):
            The denoiser, for instance `pipe.unet`.
        config ([`LatentGainConfig`]):
            Which block, and how loud.

    Raises:
        ValueError: when the block does not exist, or the method is on it already.
    """
    blocks = dict(module.named_modules())
    if config.block not in blocks:
        raise ValueError(f"{type(module).__name__} has no module {config.block!r}.")
    registry = HookRegistry.check_if_exists_or_initialize(blocks[config.block])
    if registry.get_hook(_LATENT_GAIN_HOOK) is not None:
        raise ValueError(f"LatentGain is on {config.block} already; call `remove_latent_gain` first.")
    registry.register_hook(LatentGainHook(config.gain), _LATENT_GAIN_HOOK)


def remove_latent_gain(module):
    """Takes the method off all blocks of `module`; its outputs are bit for bit those of before."""
    HookRegistry.check_if_exists_or_initialize(module).remove_hook(_LATENT_GAIN_HOOK, recurse=True)

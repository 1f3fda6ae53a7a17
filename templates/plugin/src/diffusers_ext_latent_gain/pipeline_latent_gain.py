# SPDX-License-Identifier: Apache-2.0
"""The method as a pipeline, for `custom_pipeline=`."""

import inspect

import torch
from diffusers import StableDiffusionPipeline

from .hooks_latent_gain import LatentGainConfig, apply_latent_gain, remove_latent_gain


def _signature():
    stock = inspect.signature(StableDiffusionPipeline.__call__)
    own = [inspect.Parameter("gain", inspect.Parameter.KEYWORD_ONLY, default=1.0, annotation=float)]
    own += [inspect.Parameter("block", inspect.Parameter.KEYWORD_ONLY, default="mid_block", annotation=str)]
    *parameters, keywords = stock.parameters.values()
    return stock.replace(parameters=[*parameters, *own, keywords])


class LatentGainStableDiffusionPipeline(StableDiffusionPipeline):
    """Stable Diffusion with a louder or quieter block; all arguments are those of `StableDiffusionPipeline`."""

    @torch.no_grad()
    def __call__(self, *args, gain: float = 1.0, block: str = "mid_block", **kwargs):
        """
        The call of `StableDiffusionPipeline`.

        Args:
            gain (`float`, *optional*, defaults to 1.0), block (`str`, *optional*, defaults to `"mid_block"`):
                See `LatentGainConfig`; they hold for this call only.
        """
        apply_latent_gain(self.unet, LatentGainConfig(gain, block))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            remove_latent_gain(self.unet)

    # Tools that read signatures see the stock arguments and the two of the method.
    __call__.__signature__ = _signature()

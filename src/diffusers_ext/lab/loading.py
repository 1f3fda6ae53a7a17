# SPDX-License-Identifier: Apache-2.0
"""The weights that come with the package."""

from pathlib import Path

import torch


WEIGHTS = Path(__file__).parent / "weights"


def pipeline_folder():
    """Folder of the EmojiCanvas pipeline, for any `from_pretrained`."""
    return str(WEIGHTS / "pipeline")


def saeuron_folder():
    """
    Folder of the autoencoders and the concept edits for EmojiCanvas: the one of the objects at its top, the one of the
    styles in `styles`.
    """
    return str(WEIGHTS / "saeuron")


def load_pipeline(pipeline_class=None, dtype=torch.float32, **kwargs):
    """
    The EmojiCanvas pipeline, offline.

    Args:
        pipeline_class (`type`, *optional*):
            Class to load it as; `StableDiffusionPipeline` by default.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the weights.
        kwargs:
            Passed on to `from_pretrained`.

    Returns:
        The pipeline; good settings are 20 steps and `guidance_scale=4.0`.

    Example:

    ```py
    >>> from diffusers_ext import lab

    >>> image = lab.load_pipeline()("rocket, blueprint style", num_inference_steps=20, guidance_scale=4.0).images[0]
    >>> image.size
    (64, 64)
    ```
    """
    from diffusers import StableDiffusionPipeline

    return (pipeline_class or StableDiffusionPipeline).from_pretrained(pipeline_folder(), dtype=dtype, **kwargs)


def load_oracle():
    """The [`Oracle`] of EmojiCanvas, offline, in float32."""
    from .oracle import Oracle

    return Oracle.from_pretrained(WEIGHTS / "oracle", dtype=torch.float32).eval()


def load_unlearning_pipeline(**kwargs):
    """EmojiCanvas as a `SAeUronStableDiffusionPipeline`, with its autoencoders and the edits of all concepts."""
    from diffusers_ext.methods.saeuron.pipeline_saeuron import SAeUronStableDiffusionPipeline

    pipe = load_pipeline(SAeUronStableDiffusionPipeline, **kwargs)
    pipe.load_sae(saeuron_folder())
    pipe.load_sae(saeuron_folder(), subfolder="styles", component="sae_2")
    pipe.load_concepts(saeuron_folder())
    return pipe

# SPDX-License-Identifier: Apache-2.0
"""The fixtures of the official implementations and the tiny model that they were made with."""

import json
from pathlib import Path

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from safetensors.torch import load_file

from diffusers_ext.methods.memorization.denoising_memorization import GuidedDenoiser


FIXTURES = Path(__file__).parents[2] / "fixtures" / "memorization"
CONFIG = json.loads((FIXTURES / "config.json").read_text())


def fixture(name):
    """Tensors that the official implementation made."""
    return load_file(FIXTURES / f"{name}.safetensors")


def parameters(name):
    """How a fixture was made."""
    return next(entry["params"] for names, entry in CONFIG["files"].items() if name in names)


def official_unet(kind, dtype=torch.float32):
    unet = UNet2DConditionModel(**CONFIG["unet"]["config"])
    unet.load_state_dict(fixture(f"unet_{kind}"))
    return unet.to(dtype).eval()


def official_scheduler(kind):
    entries = {name: value for name, value in CONFIG["scheduler"].items() if name not in ("_class_name", "note")}
    return DDIMScheduler(**entries, prediction_type=CONFIG["unet"]["prediction_type"][kind])


def guided(kind, tensors, n, dtype=torch.float32, **kwargs):
    """The official tiny model, with the embeddings of a fixture repeated for `n` samples."""
    embeds = (tensors[name].to(dtype).repeat(n, 1, 1) for name in ("prompt_embeds", "negative_prompt_embeds"))
    return GuidedDenoiser(official_unet(kind, dtype), official_scheduler(kind), *embeds, **kwargs)

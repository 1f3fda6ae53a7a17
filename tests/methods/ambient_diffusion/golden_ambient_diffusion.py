# SPDX-License-Identifier: Apache-2.0
"""The fixtures made by the official implementation, and its two-parameter stand-in for a network."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from diffusers_ext import EDMUNet2DModel


FOLDER = Path(__file__).parents[2] / "fixtures" / "ambient_diffusion"
CONFIG = json.loads((FOLDER / "config.json").read_text())


def tensors(name):
    return load_file(FOLDER / f"{name}.safetensors")


def params(name):
    return CONFIG["files"][f"{name}.safetensors"]["params"]


def official_unet():
    settings = dict(CONFIG["files"]["edm_unet.safetensors"]["config"])
    assert settings.pop("model_type") == "SongUNet" and settings.pop("decoder_type") == "standard"
    channels = settings.pop("img_channels")
    unet = EDMUNet2DModel(settings.pop("img_resolution"), channels, channels, **settings)
    unet.load_state_dict(tensors("edm_unet"))
    return unet.eval()


class Toy(torch.nn.Module):
    """`F = tanh(w x + b)`."""

    def __init__(self, w=0.7, b=0.1):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.tensor(w)), torch.nn.Parameter(torch.tensor(b))

    def forward(self, sample, timestep, return_dict=True):
        return (torch.tanh(self.w * sample + self.b),)

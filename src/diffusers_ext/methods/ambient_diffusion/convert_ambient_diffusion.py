# SPDX-License-Identifier: Apache-2.0
"""Weights of EDM's U-Net with official key names, as a folder that diffusers loads."""

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .modeling_ambient_diffusion import EDMUNet2DModel


FORMAT = "edm"


@dataclass
class ConversionReport:
    """What [`convert`] read and wrote: format, keys that were loaded, keys that were left out with the reason."""

    format: str
    loaded: list
    dropped: dict
    destination: Path
    config: dict = field(default_factory=dict)


def edm_config(state_dict):
    """
    The configuration of an EDM U-Net, read off its keys and shapes; nothing needs to be known beside the weights.

    Args:
        state_dict (`dict[str, torch.Tensor]`):
            With official keys, `model.enc.64x64_conv.weight` and so on.

    Returns:
        `dict`: arguments of [`EDMUNet2DModel`].

    Raises:
        ValueError: when the keys are those of another network.
    """
    first = [re.fullmatch(r"model\.enc\.(\d+)x\1_conv\.weight", key) for key in state_dict]
    first = next((match for match in first if match), None)
    if first is None:
        raise ValueError(
            "These are no weights of an EDM U-Net: no key is like 'model.enc.64x64_conv.weight'. Found "
            f"{', '.join(list(state_dict)[:4]) or 'nothing'}."
        )
    if any("_aux_down" in key or "_aux_skip" in key or "_aux_up" in key for key in state_dict):
        raise ValueError("This EDM U-Net has skip branches, which `EDMUNet2DModel` does not compute: refused.")
    size, stem = int(first[1]), state_dict[first[0]]
    width = stem.shape[0]
    sides = sorted({int(m[1]) for k in state_dict if (m := re.match(r"model\.enc\.(\d+)x", k))}, reverse=True)
    numbers = [int(m[1]) for k in state_dict if (m := re.match(rf"model\.enc\.{size}x{size}_block(\d+)\.", k))]
    multipliers = [state_dict[f"model.enc.{side}x{side}_block0.conv0.weight"].shape[0] // width for side in sides]
    noise_channels = state_dict["model.map_layer0.weight"].shape[1]
    filters = [tensor for key, tensor in state_dict.items() if key.endswith("resample_filter")]
    taps = (1, 1)
    if filters:
        line = filters[0][0, 0].sum(0)
        taps = tuple((line / line[0]).round().int().tolist())
    labels = state_dict.get("model.map_label.weight", torch.zeros(0, 0))
    augmentations = state_dict.get("model.map_augment.weight", torch.zeros(0, 0))
    return {
        "sample_size": size,
        "in_channels": stem.shape[1],
        "out_channels": state_dict[f"model.dec.{size}x{size}_aux_conv.weight"].shape[0],
        "model_channels": width,
        "channel_mult": tuple(multipliers),
        "num_blocks": max(numbers) + 1,
        "attn_resolutions": tuple(s for s in sides if f"model.enc.{s}x{s}_block0.qkv.weight" in state_dict),
        "embedding_type": "fourier" if "model.map_noise.freqs" in state_dict else "positional",
        "encoder_type": "residual" if any("aux_residual" in key for key in state_dict) else "standard",
        "channel_mult_noise": noise_channels // width,
        "resample_filter": taps,
        "label_dim": labels.shape[1],
        "augment_dim": augmentations.shape[1],
    }


def convert(source, destination, format=None):
    """
    Converts bare weights of EDM's U-Net to a folder of [`EDMUNet2DModel`].

    Args:
        source (`str` or `os.PathLike`):
            A safetensors file with official key names, or a folder that holds one. The official pickles are not read:
            opening one runs code that it brings.
        destination (`str` or `os.PathLike`):
            Receives `config.json` and the weights; left as it was when anything fails.
        format (`str`, *optional*):
            Fails unless this is `"edm"`.

    Returns:
        [`ConversionReport`]

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: on a pickle, a file that cannot be read, or keys of another network.

    Example:

    ```py
    >>> from diffusers_ext.methods.ambient_diffusion.convert_ambient_diffusion import convert

    >>> report = convert("edm_unet.safetensors", "edm-unet")  # doctest: +SKIP
    ```
    """
    if format not in (None, FORMAT):
        raise ValueError(f"`format` has to be {FORMAT!r} but is {format!r}.")
    path = Path(source)
    if path.is_dir():
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise FileNotFoundError(f"{path} has to hold one safetensors file but holds {len(found)}.")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path.name} is no safetensors file. Official snapshots are pickles that run code when opened: save "
            f"their state dict with safetensors where you trust them, under its own key names."
        )
    try:
        state_dict = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}.") from error
    config = edm_config(state_dict)
    model = EDMUNet2DModel(**config)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network that its keys describe: {error}") from error
    destination = Path(destination)
    aside = destination.with_name(destination.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    destination.mkdir(parents=True, exist_ok=True)
    for file in sorted(aside.iterdir()):
        os.replace(file, destination / file.name)
    aside.rmdir()
    return ConversionReport(FORMAT, sorted(state_dict), {}, destination, config)

# SPDX-License-Identifier: Apache-2.0
"""The oracle of EmojiCanvas: a small classifier that says which object and which style a picture shows."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from .captions import OBJECTS, STYLE_NAMES


@dataclass
class OracleOutput:
    """
    Args:
        object, style (`np.ndarray` of shape `(N,)`):
            Index of the most probable object in `lab.OBJECTS` and style in `lab.STYLES`.
        object_probs (`np.ndarray` of shape `(N, 64)`), style_probs (`np.ndarray` of shape `(N, 8)`):
            Probabilities.
    """

    object: np.ndarray
    style: np.ndarray
    object_probs: np.ndarray
    style_probs: np.ndarray


class _Residual(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.stride = stride

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        shortcut = self.shortcut(F.avg_pool2d(x, self.stride) if self.stride > 1 else x)
        return F.relu(self.norm2(self.conv2(y)) + shortcut)


def _pool(maps):
    return torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1)


class Oracle(ModelMixin, ConfigMixin):
    r"""
    Classifies pictures of EmojiCanvas. Trained on drawings only: it has never seen a generated picture.

    Args:
        channels (`list[int]`, *optional*, defaults to `[24, 48, 96, 160]`):
            Channels of the stages; each halves the side.
        objects, styles (`list[str]`, *optional*):
            Names of the classes, in order.

    Example:

    ```py
    >>> from diffusers_ext import lab

    >>> oracle = lab.load_oracle()
    >>> image = lab.load_pipeline()("owl, mosaic style", num_inference_steps=20, guidance_scale=4.0).images[0]
    >>> lab.OBJECTS[oracle.classify([image]).object[0]]  # doctest: +SKIP
    'owl'
    ```
    """

    @register_to_config
    def __init__(self, channels=(24, 48, 96, 160), objects=OBJECTS, styles=STYLE_NAMES):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels[0], 5, 2, 2, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU()
        )
        stages = [_Residual(a, b, 2) for a, b in zip(channels[:-1], channels[1:])]
        self.stages = nn.Sequential(*stages)
        self.object_head = nn.Linear(2 * channels[-1], len(objects))
        # Styles have a grid of four pixels that objects ignore: a branch of its own sees its phases as channels.
        width = 2 * channels[0]
        self.style_stem = nn.Sequential(
            nn.PixelUnshuffle(4), nn.Conv2d(48, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.style_stage = _Residual(width, width, 2)
        self.style_head = nn.Linear(2 * width, len(styles))

    def features(self, x):
        """
        Args:
            x (`torch.Tensor` of shape `(N, 3, 64, 64)`): pictures in [-1, 1].

        Returns:
            `torch.Tensor` of shape `(N, 2 * channels[-1])`: means and maxima of the last maps.
        """
        return _pool(self.stages(self.stem(x)))

    def forward(self, x):
        """Logits of objects `(N, 64)` and styles `(N, 8)` for pictures `(N, 3, 64, 64)` in [-1, 1]."""
        return self.object_logits(x), self.style_logits(x)

    def object_logits(self, x):
        return self.object_head(F.dropout(self.features(x), 0.3, self.training))

    def style_logits(self, x):
        return self.style_head(_pool(self.style_stage(self.style_stem(x))))

    @torch.no_grad()
    def classify(self, images, batch_size=256):
        """
        Args:
            images (`list[PIL.Image.Image]`, `np.ndarray` or `torch.Tensor`):
                Pictures; arrays `(N, height, width, 3)` in uint8 or [0, 1], tensors `(N, 3, height, width)` in [0, 1].
            batch_size (`int`, *optional*, defaults to 256):
                Pictures at once.

        Returns:
            [`OracleOutput`]

        Raises:
            ValueError: on another shape, no picture at all, or values that are not finite or outside [0, 1].
        """
        pictures = to_tensor(images).to(self.device, self.dtype)
        logits = [self(part * 2 - 1) for part in pictures.split(batch_size)]
        object_probs = torch.cat([a for a, _ in logits]).float().softmax(1).cpu().numpy()
        style_probs = torch.cat([b for _, b in logits]).float().softmax(1).cpu().numpy()
        return OracleOutput(object_probs.argmax(1), style_probs.argmax(1), object_probs, style_probs)


def to_tensor(images, size=64):
    """Pictures in any of the forms that [`Oracle.classify`] takes, as `(N, 3, size, size)` in [0, 1]."""
    if not isinstance(images, torch.Tensor):
        arrays = [np.asarray(image.convert("RGB") if hasattr(image, "convert") else image) for image in images]
        if not arrays or any(array.ndim != 3 or array.shape[-1] != 3 for array in arrays):
            raise ValueError(
                "`images` has to hold at least one RGB picture, (height, width, 3), but has "
                f"{[a.shape for a in arrays[:4]]}."
            )
        tensors = [torch.from_numpy(np.array(array)).permute(2, 0, 1)[None] for array in arrays]
        tensors = [tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float() for tensor in tensors]
        images = torch.cat([_resize(tensor, size) for tensor in tensors])
    if images.ndim != 4 or images.shape[1] != 3 or not len(images):
        raise ValueError(
            f"`images` has to hold at least one picture, shape (N, 3, height, width) but has {tuple(images.shape)}."
        )
    if not torch.isfinite(images).all():
        raise ValueError("`images` has values that are not finite: the pipeline produced NaN.")
    low, high = images.min().item(), images.max().item()
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"`images` has to lie in [0, 1] when it is not uint8 but spans [{low:.3g}, {high:.3g}].")
    return _resize(images.float(), size)


def _resize(images, size):
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)

# SPDX-License-Identifier: Apache-2.0
"""How much a set of pictures copies a training set: nearest neighbours in a feature space."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image


THRESHOLDS = (0.85, 0.875, 0.9, 0.925, 0.95)
PREPROCESSING = ("official", "imagenet")
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def pad_to_multiple(images, multiple=14):
    """
    Reflects the border of pictures so that both sides are multiples, the odd pixel at the bottom or right.

    Args:
        images (`torch.Tensor` of shape `(B, channels, height, width)`):
            Pictures.
        multiple (`int`, *optional*, defaults to 14):
            Side of the patches of the network that looks at them.

    Raises:
        ValueError: on pictures that are too small to be reflected that far.
    """
    missing = [-side % multiple for side in images.shape[-2:]]
    # Reflection repeats no border pixel, so it has one less to give than there are.
    if any((pixels + 1) // 2 >= side for pixels, side in zip(missing, images.shape[-2:])):
        raise ValueError(f"Pictures of {tuple(images.shape[-2:])} are too small for patches of {multiple} pixels.")
    height, width = missing
    return F.pad(images, (width // 2, width - width // 2, height // 2, height - height // 2), mode="reflect")


class Dinov2Features:
    r"""
    Class embeddings of a DINOv2 model, as the official evaluation takes them.

    Args:
        model (`transformers.Dinov2Model`):
            Any size; the paper's is `facebook/dinov2-giant`.
        preprocess (`str`, *optional*, defaults to `"official"`):
            `"official"`: pictures in [0, 1], not normalised and not resized; `"imagenet"`: normalised as the model was
            trained. Similarities of the two cannot be compared.

    Example:

    ```py
    >>> from transformers import Dinov2Model
    >>> from diffusers_ext.methods.ambient_diffusion.report_ambient_diffusion import Dinov2Features

    >>> features = Dinov2Features(Dinov2Model.from_pretrained("facebook/dinov2-small"))  # doctest: +SKIP
    ```
    """

    def __init__(self, model, preprocess="official"):
        if preprocess not in PREPROCESSING:
            raise ValueError(f"`preprocess` has to be one of {', '.join(PREPROCESSING)} but is {preprocess!r}.")
        self.model, self.preprocess = model.eval(), preprocess

    @torch.no_grad()
    def __call__(self, images):
        """Features `(B, width)` of pictures `(B, 3, height, width)` in [0, 1]."""
        if self.preprocess == "imagenet":
            images = (images - images.new_tensor(_MEAN).view(3, 1, 1)) / images.new_tensor(_STD).view(3, 1, 1)
        padded = pad_to_multiple(images, self.model.config.patch_size)
        return self.model(padded.to(self.model.device, self.model.dtype)).last_hidden_state[:, 0].float()

    def to_dict(self):
        """What the features are, ready for JSON."""
        name = self.model.config._name_or_path or type(self.model).__name__
        return {"model": name, "preprocess": self.preprocess}


@torch.no_grad()
def extract_features(images, extractor, batch_size=64):
    """
    Features of many pictures.

    Args:
        images (`torch.Tensor` of shape `(N, 3, height, width)`):
            In [0, 1].
        extractor (`Callable`):
            Takes a batch of pictures, gives vectors `(B, width)`.
        batch_size (`int`, *optional*, defaults to 64):
            Pictures at once.

    Returns:
        `torch.Tensor` of shape `(N, width)`: float32, on the CPU.

    Raises:
        ValueError: on no pictures, values outside [0, 1], or features that are no vectors or not finite.
    """
    if images.ndim != 4 or not len(images):
        raise ValueError(f"Expected pictures of shape (N, 3, height, width) but got {tuple(images.shape)}.")
    low, high = images.min().item(), images.max().item()
    if not -1e-3 <= low <= high <= 1 + 1e-3:
        raise ValueError(f"Pictures have to lie in [0, 1] but span [{low:.3g}, {high:.3g}].")
    parts = []
    for part in images.split(batch_size):
        features = torch.as_tensor(extractor(part)).float().cpu()
        if features.ndim != 2 or len(features) != len(part):
            raise ValueError(
                f"The extractor has to give one vector per picture, ({len(part)}, width), but gave "
                f"{tuple(features.shape)}."
            )
        parts.append(features)
    features = torch.cat(parts)
    if not torch.isfinite(features).all():
        raise ValueError("The extractor gave features that are not finite.")
    return features


def nearest_neighbours(features, references, exclude_self=False, chunk_size=1024):
    """
    The most similar reference of each vector by cosine.

    Args:
        features (`torch.Tensor` of shape `(N, width)`), references (`torch.Tensor` of shape `(M, width)`):
            Not normalised.
        exclude_self (`bool`, *optional*, defaults to `False`):
            Whether vector `i` may not be matched with reference `i`: the similarity within one set.
        chunk_size (`int`, *optional*, defaults to 1024):
            Rows compared at once; memory is this times `M`.

    Returns:
        `tuple` of `torch.Tensor`s of shape `(N,)`: similarity in [-1, 1], and index.

    Raises:
        ValueError: on empty sets or different widths.
    """
    if features.ndim != 2 or references.ndim != 2 or features.shape[1] != references.shape[1]:
        raise ValueError(
            f"Expected features of one width but got {tuple(features.shape)} and {tuple(references.shape)}."
        )
    if not len(features) or len(references) < (2 if exclude_self else 1):
        raise ValueError(f"Nothing to compare: {len(features)} features and {len(references)} references.")
    references = F.normalize(references.float(), dim=1)
    values, indices = [], []
    for start in range(0, len(features), chunk_size):
        similarity = F.normalize(features[start : start + chunk_size].float(), dim=1) @ references.T
        if exclude_self:
            rows = torch.arange(len(similarity))
            similarity[rows, start + rows] = -torch.inf
        value, index = similarity.max(1)
        values.append(value)
        indices.append(index)
    return torch.cat(values), torch.cat(indices)


def summarise_similarity(similarity, thresholds=THRESHOLDS):
    """Fractions above thresholds, mean and 95th percentile of similarities `(N,)`, ready for JSON."""
    similarity = similarity.double()
    return {
        "count": len(similarity),
        "fraction_above": {str(t): (similarity > t).double().mean().item() for t in thresholds},
        "mean": similarity.mean().item(),
        "percentile_95": torch.quantile(similarity, 0.95).item(),
        "histogram": torch.histc(similarity.float(), 40, -1, 1).int().tolist(),
    }


@dataclass
class CopyReport:
    r"""
    How similar generated pictures are to their nearest training pictures, and how similar real pictures are that no
    model has seen: without those, a threshold means nothing.

    Args:
        similarity (`torch.Tensor` of shape `(N,)`), nearest (`torch.Tensor` of shape `(N,)`):
            Of every generated picture: cosine to its nearest training picture, and which one that is.
        held_out_similarity (`torch.Tensor` of shape `(M,)`, *optional*):
            The same of real pictures outside the training set.
        thresholds (`tuple[float, ...]`, *optional*):
            Similarities above which a picture counts as a copy.
        settings (`dict`, *optional*):
            How the features were made; similarities with other settings cannot be compared.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import CopyReport

    >>> generator = torch.Generator().manual_seed(0)
    >>> train, new = torch.rand(20, 3, 28, 28, generator=generator), torch.rand(5, 3, 28, 28, generator=generator)
    >>> report = CopyReport.from_images(torch.cat([new, train[:5]]), train, lambda images: images.flatten(1) - 0.5)
    >>> report.to_dict()["generated"]["fraction_above"]["0.9"]
    0.5
    ```
    """

    similarity: torch.Tensor
    nearest: torch.Tensor
    held_out_similarity: torch.Tensor | None = None
    thresholds: tuple = THRESHOLDS
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.similarity.shape != self.nearest.shape or self.similarity.ndim != 1 or not len(self.similarity):
            raise ValueError(
                f"`similarity` and `nearest` have to be vectors of one length but have shapes "
                f"{tuple(self.similarity.shape)} and {tuple(self.nearest.shape)}."
            )
        wrong = [t for t in self.thresholds if not -1 <= t < 1]
        if wrong or not self.thresholds:
            raise ValueError(f"`thresholds` have to be similarities in [-1, 1) but are {self.thresholds}.")

    @classmethod
    def from_features(cls, generated, training, held_out=None, **kwargs):
        """From features `(N, width)` of generated, training and, if there are any, held-out pictures."""
        similarity, nearest = nearest_neighbours(generated, training)
        held_out = None if held_out is None else nearest_neighbours(held_out, training)[0]
        return cls(similarity, nearest, held_out, **kwargs)

    @classmethod
    def from_images(cls, generated, training, extractor, held_out=None, batch_size=64, **kwargs):
        """From pictures `(N, 3, height, width)` in [0, 1], see [`extract_features`]."""
        features = [
            None if images is None else extract_features(images, extractor, batch_size)
            for images in (generated, training, held_out)
        ]
        settings = {"extractor": describe(extractor)}
        return cls.from_features(*features, **{"settings": settings, **kwargs})

    @classmethod
    def from_folders(cls, generated, training, extractor, held_out=None, size=None, batch_size=64, **kwargs):
        """
        From folders of pictures.

        Args:
            generated, training, held_out (`str` or `os.PathLike`):
                The folders; the last is optional.
            extractor (`Callable`):
                See [`extract_features`].
            size (`int`, *optional*):
                Side to which pictures are resized; needed where they are not all of one size.
            batch_size (`int`, *optional*, defaults to 64):
                Pictures at once.
            kwargs:
                Passed on to the constructor.
        """
        images = [
            None if folder is None else load_folder(folder, size)[0] for folder in (generated, training, held_out)
        ]
        return cls.from_images(images[0], images[1], extractor, images[2], batch_size, **kwargs)

    def to_dict(self):
        """The figures, ready for JSON."""
        report = {"settings": self.settings, "generated": summarise_similarity(self.similarity, self.thresholds)}
        if self.held_out_similarity is not None:
            report["held_out"] = summarise_similarity(self.held_out_similarity, self.thresholds)
        return report

    def save(self, path):
        """Writes the figures as JSON, aside first."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".partial")
        aside.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(aside, path)

    def worst_pairs(self, count=8):
        """The `count` most similar pairs: indices of generated and of training pictures, the closest first."""
        order = self.similarity.argsort(descending=True)[:count]
        return order, self.nearest[order]

    def grid(self, generated, training, count=8):
        """
        The most similar pairs as a picture, generated above, training below.

        Args:
            generated (`torch.Tensor` of shape `(N, 3, height, width)`), training (`torch.Tensor`):
                The pictures in [0, 1] that the report is of.
            count (`int`, *optional*, defaults to 8):
                How many pairs.

        Returns:
            `PIL.Image.Image`
        """
        new, old = self.worst_pairs(count)
        pairs = torch.cat([generated[new], training[old]], 2)
        line = torch.cat(list(pairs), 2).mul(255).round().clamp(0, 255).byte()
        return Image.fromarray(line.permute(1, 2, 0).cpu().numpy())


def describe(extractor):
    """What a feature extractor is, for JSON: its own `to_dict`, or its name."""
    if hasattr(extractor, "to_dict"):
        return extractor.to_dict()
    return getattr(extractor, "__qualname__", type(extractor).__qualname__)


def load_folder(folder, size=None):
    """
    Pictures of a folder, sorted by name.

    Args:
        folder (`str` or `os.PathLike`):
            Folder with PNG, JPEG, WebP or BMP files.
        size (`int`, *optional*):
            Side to which they are resized.

    Returns:
        `tuple`: `torch.Tensor` of shape `(N, 3, height, width)` in [0, 1], and the paths.

    Raises:
        FileNotFoundError: when there is no folder, or no picture in it.
        ValueError: when the pictures are not of one size.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder.")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    if not paths:
        raise FileNotFoundError(f"{folder} holds no pictures ({', '.join(sorted(PICTURES))}).")
    images = []
    for path in paths:
        with Image.open(path) as image:
            image = image.convert("RGB")
            images.append(np.asarray(image if size is None else image.resize((size, size), Image.Resampling.LANCZOS)))
    sizes = {image.shape for image in images}
    if len(sizes) > 1:
        raise ValueError(f"{folder} has pictures of different sizes, {sorted(sizes)[:3]}: give `size`.")
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255, paths

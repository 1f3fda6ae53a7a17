# SPDX-License-Identifier: Apache-2.0
"""Figures of memorization that need no derivative, and how well scores tell two sets apart."""

import numpy as np
import torch

from .curvature_memorization import norms


TPR_CONVENTIONS = ("conservative", "nearest", "below")


def guidance_norm(noise_difference):
    """`||eD||` per sample, `(n,)` (Wen et al., ICLR 2024)."""
    return norms(noise_difference)


def bright_ending(noise_difference, mask):
    """
    `||eD m|| / mean(m)` per sample (Chen et al., arXiv 2410.21665).

    Args:
        noise_difference (`torch.Tensor` of shape `(n, channels, height, width)`):
            `eD` of one step.
        mask (`torch.Tensor` of shape `(n, 1, height, width)`):
            Cross-attention probability of the end token at the last step.

    Returns:
        `torch.Tensor` of shape `(n,)`
    """
    return norms(noise_difference * mask) / mask.flatten(1).mean(1)


def entropy(probabilities, dim=-1):
    """Entropy in nats along an axis; zero probabilities count nothing."""
    return -torch.special.xlogy(probabilities, probabilities).sum(dim)


def tiled_l2(images, tile=128):
    """
    Smallest distance of a picture to another one of the same prompt (Carlini et al., 2023): the largest distance over
    tiles that do not overlap. Low means memorised.

    Args:
        images (`torch.Tensor` of shape `(n, channels, height, width)`):
            At least two.
        tile (`int`, *optional*, defaults to 128):
            Side of a tile in pixels; has to divide height and width.

    Returns:
        `torch.Tensor` of shape `(n,)`

    Raises:
        ValueError: with one picture, or a size that tiles do not divide.
    """
    n, _, height, width = images.shape
    if n < 2:
        raise ValueError("`tiled_l2` compares pictures of one prompt: it needs at least two.")
    if height % tile or width % tile:
        raise ValueError(f"Tiles of {tile} pixels do not divide pictures of {height}x{width}.")
    tiles = images.float().unfold(2, tile, tile).unfold(3, tile, tile)
    tiles = tiles.permute(2, 3, 0, 1, 4, 5).flatten(0, 1).flatten(2)
    distances = torch.cdist(tiles, tiles).amax(0)
    return distances.masked_fill(torch.eye(n, dtype=torch.bool), float("inf")).amin(1)


def _checked(positive, negative):
    positive, negative = (np.asarray(values, dtype=np.float64).ravel() for values in (positive, negative))
    if not len(positive) or not len(negative):
        raise ValueError("Scores of both kinds are needed, memorised and clean.")
    if not (np.isfinite(positive).all() and np.isfinite(negative).all()):
        raise ValueError("Scores have to be finite.")
    return positive, negative


def auc(positive, negative):
    """
    Area under the ROC curve: the probability that a memorised prompt scores higher than a clean one, ties a half.

    Args:
        positive, negative (array-like of shape `(N,)` and `(M,)`):
            Scores of memorised and of clean prompts.

    Returns:
        `float` in [0, 1]; never flipped.

    Raises:
        ValueError: on an empty set or scores that are not finite.
    """
    positive, negative = _checked(positive, negative)
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left")
    up_to = np.searchsorted(ordered, positive, "right")
    return float((below + up_to).sum() / (2 * len(positive) * len(negative)))


def roc_curve(positive, negative, drop_collinear=False):
    """
    False and true positive rates over all thresholds, the strictest first, beginning with (0, 0).

    Args:
        positive, negative:
            As of `auc`.
        drop_collinear (`bool`, *optional*, defaults to `False`):
            Whether points on a straight piece of the curve are left out.

    Returns:
        `tuple` of two `np.ndarray`s.
    """
    positive, negative = _checked(positive, negative)
    thresholds = np.unique(np.concatenate([positive, negative]))[::-1]
    hits = len(positive) - np.searchsorted(np.sort(positive), thresholds, "left")
    alarms = len(negative) - np.searchsorted(np.sort(negative), thresholds, "left")
    if drop_collinear and len(hits) > 2:
        bends = (np.diff(alarms, 2) != 0) | (np.diff(hits, 2) != 0)
        kept = np.concatenate([[True], bends, [True]])
        hits, alarms = hits[kept], alarms[kept]
    hits, alarms = np.concatenate([[0], hits]), np.concatenate([[0], alarms])
    return alarms / len(negative), hits / len(positive)


def tpr_at_fpr(positive, negative, fpr=0.01, convention="conservative"):
    """
    True positive rate at a false positive rate.

    Args:
        positive, negative:
            As of `auc`.
        fpr (`float`, *optional*, defaults to 0.01):
            In (0, 1).
        convention (`str`, *optional*, defaults to `"conservative"`):
            `"conservative"`: the best threshold that is at or below `fpr`. `"nearest"` and `"below"` are what
            published scripts compute: the point of the curve, without collinear ones, nearest to `fpr`, the first of
            several; and the last point strictly below it.

    Returns:
        `float` in [0, 1]

    Raises:
        ValueError: on an unknown convention or a rate out of range.
    """
    if convention not in TPR_CONVENTIONS:
        raise ValueError(f"`convention` has to be one of {', '.join(TPR_CONVENTIONS)} but is {convention!r}.")
    if not 0 < fpr < 1:
        raise ValueError(f"`fpr` has to be in (0, 1) but is {fpr}.")
    alarms, hits = roc_curve(positive, negative, drop_collinear=convention == "nearest")
    if convention == "nearest":
        return float(hits[np.abs(alarms - fpr).argmin()])
    allowed = alarms < fpr if convention == "below" else alarms <= fpr
    return float(hits[allowed][-1])


def best_balanced_accuracy(positive, negative):
    """Largest mean of true positive and true negative rate over all thresholds."""
    alarms, hits = roc_curve(positive, negative)
    return float((hits + 1 - alarms).max() / 2)

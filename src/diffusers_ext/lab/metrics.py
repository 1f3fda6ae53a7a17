# SPDX-License-Identifier: Apache-2.0
"""How varied pictures are, how close to training pictures, and how far two sets of pictures lie apart."""

import numpy as np
import torch
import torch.nn.functional as F

from .oracle import to_tensor


def embed(images):
    """
    Pictures as vectors in which the distance is that of a thumbnail: blurred to 16x16 RGB, unit length after centring.

    Args:
        images: as [`Oracle.classify`].

    Returns:
        `torch.Tensor` of shape `(N, 768)`; the dot product of two is their correlation, in [-1, 1].
    """
    small = F.avg_pool2d(to_tensor(images), 4).flatten(1)
    small = small - small.mean(1, keepdim=True)
    return small / small.norm(dim=1, keepdim=True).clamp_min(1e-6)


def nearest(images, references):
    """
    The most similar reference of each picture.

    Returns:
        `tuple` of `np.ndarray`s of shape `(N,)`: index into `references`, and correlation of the thumbnails.
    """
    similarity = embed(images) @ embed(references).T
    value, index = similarity.max(1)
    return index.numpy(), value.numpy()


def diversity(images, references):
    """
    Number of different references that are the nearest of some picture: 1 means that one drawing is always repeated.

    Args:
        images: pictures of one caption from several seeds, as [`Oracle.classify`] takes them.
        references: the training pictures of that caption.

    Returns:
        `int`
    """
    return len(set(nearest(images, references)[0].tolist()))


def near_copies(images, references, threshold):
    """
    Share of pictures whose thumbnail correlates with that of a reference by more than `threshold`.

    A fair threshold is what drawings of a held-back emoji set reach against the training pictures, see
    `copy_threshold`.
    """
    return float((nearest(images, references)[1] > threshold).mean())


def copy_threshold(held_out, references, quantile=0.99):
    """Similarity that only 1 % of real pictures, which no model has seen, exceed towards the training pictures."""
    return float(np.quantile(nearest(held_out, references)[1], quantile))


def frechet_distance(first, second):
    """
    Fréchet distance of two sets of feature vectors, each taken as a normal distribution.

    Args:
        first (`torch.Tensor` of shape `(N, D)`), second (`torch.Tensor` of shape `(M, D)`):
            Features, for instance of [`Oracle.features`].

    Returns:
        `float`: 0 for equal mean and covariance.

    Raises:
        ValueError: with fewer than two vectors in a set, or different numbers of features.
    """
    if first.shape[0] < 2 or second.shape[0] < 2 or first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"Expected two sets of at least two vectors of one length but got {tuple(first.shape)} and "
            f"{tuple(second.shape)}."
        )
    first, second = first.double(), second.double()
    covariances = torch.cov(first.T), torch.cov(second.T)
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    # The root of C1 C2 has the trace of the root of the symmetric C1^(1/2) C2 C1^(1/2), whose eigenvalues are real.
    cross = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp_min(0).sqrt().sum()
    distance = (first.mean(0) - second.mean(0)).square().sum()
    return max(0.0, (distance + covariances[0].trace() + covariances[1].trace() - 2 * cross).item())

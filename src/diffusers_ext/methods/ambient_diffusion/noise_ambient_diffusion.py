# SPDX-License-Identifier: Apache-2.0
"""The noise that belongs to a training sample for good."""

import logging
import math

import numpy as np
import torch


logger = logging.getLogger(__name__)

MODES = ("counter", "legacy", "fresh")


class FixedNoise:
    r"""
    Standard normal noise as a function of the sample it belongs to: the same for every visit, process, worker and
    resumed run. No global random state is read or changed.

    [Ambient Diffusion](https://huggingface.co/papers/2502.21278) shows the network one noisy copy of each training
    sample and never the clean one above its threshold; noise that is drawn again at every visit averages out and gives
    the sample away.

    Args:
        seed (`int`, *optional*, defaults to 0):
            Another seed gives every sample other noise. In [0, 2^64).
        mode (`str`, *optional*, defaults to `"counter"`):
            `"counter"` computes the noise from (seed, sample id, augmentation key) with the counter-based generator
            Philox. `"legacy"` reproduces the official code: NumPy's old generator, seeded with the id alone.
            `"fresh"` draws anew at every call, as the official code does by default; it protects nothing.

    Raises:
        ValueError: on an unknown mode, a seed out of range, or a seed with a mode that does not use one.

    Example:

    ```py
    >>> from diffusers_ext import FixedNoise

    >>> noise = FixedNoise(seed=0)
    >>> z = noise([7, 3], (4, 8, 8))
    >>> z.shape, bool((z[1] == noise([3], (4, 8, 8))[0]).all())
    (torch.Size([2, 4, 8, 8]), True)
    ```
    """

    def __init__(self, seed=0, mode="counter"):
        if mode not in MODES:
            raise ValueError(f"`mode` has to be one of {', '.join(MODES)} but is {mode!r}.")
        if not _is_integer(seed) or not 0 <= seed < 2**64:
            raise ValueError(f"`seed` has to be an integer in [0, 2^64) but is {seed!r}.")
        if mode != "counter" and seed != 0:
            raise ValueError(f"`seed` is for the mode 'counter' but is {seed} with the mode {mode!r}: leave it 0.")
        if mode == "fresh":
            logger.warning(
                "`mode='fresh'` draws other noise at every visit, so that a few visits show the clean sample; use "
                "'counter' for training that copies less."
            )
        self.seed, self.mode = int(seed), mode

    def __call__(self, sample_ids, shape, augmentation_keys=None, generator=None, dtype=torch.float32):
        """
        Args:
            sample_ids (`torch.Tensor`, `list[int]`):
                One id per sample, in [0, 2^64) (`"legacy"`: [0, 2^32)). Copies of one picture must share their id:
                each further id is a further noisy view of it.
            shape (`tuple[int, ...]`):
                Shape of one sample, without the batch.
            augmentation_keys (`torch.Tensor`, `list[int]`, *optional*):
                One number per sample for a discrete augmentation, for instance 1 where it was flipped; 0 by default.
            generator (`torch.Generator`, *optional*):
                Only for the mode `"fresh"`.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
                Of the result; the computation is in float64.

        Returns:
            `torch.Tensor` of shape `(len(sample_ids), *shape)` on the CPU.

        Raises:
            ValueError: on ids or keys that are no integers in range, or not one key per id.
        """
        ids = as_integers(sample_ids, "sample_ids", 2**32 if self.mode == "legacy" else 2**64)
        keys = [0] * len(ids)
        if augmentation_keys is not None:
            keys = as_integers(augmentation_keys, "augmentation_keys", 2**63)
        if len(keys) != len(ids):
            raise ValueError(f"Expected one augmentation key per sample but got {len(keys)} for {len(ids)} samples.")
        if self.mode == "fresh":
            return torch.randn((len(ids), *shape), generator=generator, dtype=dtype)
        if not ids:
            return torch.zeros((0, *shape), dtype=dtype)
        if self.mode == "counter":
            return self._counter(ids, keys, tuple(shape)).to(dtype)
        return torch.stack([self._legacy(*pair, tuple(shape)) for pair in zip(ids, keys)]).to(dtype)

    def _counter(self, ids, keys, shape):
        # Box and Muller on raw bits: NumPy promises that these never change, unlike those of its normal generator.
        count = math.prod(shape)
        pairs = (count + 1) // 2
        bits = np.stack([self._bits(*pair, 2 * pairs) for pair in zip(ids, keys)])
        uniform = torch.from_numpy((bits >> np.uint64(11)).astype(np.float64)).view(-1, 2, pairs) * 2.0**-53
        radius = (-2 * torch.log1p(-uniform[:, 0])).sqrt()
        angle = 2 * math.pi * uniform[:, 1]
        return torch.cat([radius * angle.cos(), radius * angle.sin()], 1)[:, :count].reshape(-1, *shape)

    def _bits(self, sample_id, key, count):
        seed = np.array([self.seed, sample_id], dtype=np.uint64)
        return np.random.Philox(key=seed, counter=np.array([0, 0, 0, key], dtype=np.uint64)).random_raw(count)

    def _legacy(self, sample_id, key, shape):
        if key:
            raise ValueError(f"`augmentation_keys` are unknown to the mode 'legacy' but one of them is {key}.")
        generator = np.random.RandomState(sample_id)
        # The official data set draws a mask of ones and a number that it does not use before the noise.
        generator.binomial(1, 1.0, size=shape)
        generator.rand()
        return torch.from_numpy(generator.normal(size=shape))

    def to_dict(self):
        """What makes the noise, ready for JSON."""
        return {"seed": self.seed, "mode": self.mode}


def _is_integer(value):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_integers(values, name, bound):
    """A list of integers in [0, bound), from a list, an array or a tensor of one dimension."""
    values = values.tolist() if isinstance(values, (torch.Tensor, np.ndarray)) else list(values)
    wrong = [value for value in values if not _is_integer(value) or not 0 <= value < bound]
    if wrong:
        raise ValueError(f"`{name}` has to hold integers in [0, {bound}) but has {wrong[0]!r}.")
    return [int(value) for value in values]

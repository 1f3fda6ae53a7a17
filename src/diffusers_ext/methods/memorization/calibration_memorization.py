# SPDX-License-Identifier: Apache-2.0
"""Thresholds with what they were measured on."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_download

from .metrics_memorization import auc, tpr_at_fpr


THRESHOLD_FILE = "memorization_threshold.json"
KEY_FIELDS = (
    "model", "revision", "adapters", "scheduler", "scheduler_config", "resolution", "prediction_type", "dtype",
    "metric", "metric_kwargs", "backend", "space", "num_images", "timesteps", "guidance_scale",
)  # fmt: skip


def calibration_key(denoiser, scheduler, resolution, **settings):
    """
    What a threshold depends on, field by field; see `KEY_FIELDS`.

    Args:
        denoiser (`torch.nn.Module`), scheduler (`SchedulerMixin`):
            The model. Its name and revision are those that `from_pretrained` recorded; adapters count by name.
        resolution (`list[int]`):
            Height and width of the latents.
        settings:
            The fields that the detector knows: `metric`, `metric_kwargs`, `backend`, `space`, `num_images`,
            `timesteps` and `guidance_scale`.

    Returns:
        `dict`
    """
    config = {k: v for k, v in dict(scheduler.config).items() if not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
    name = str(denoiser.config.get("_name_or_path") or "")
    return {
        # Of a local folder the last part, so that a threshold may be passed on.
        "model": Path(name).name if os.path.isabs(name) else name,
        "revision": denoiser.config.get("_commit_hash"),
        "adapters": sorted(denoiser.active_adapters()) if getattr(denoiser, "peft_config", None) else [],
        "scheduler": type(scheduler).__name__,
        "scheduler_config": digest,
        "resolution": resolution,
        "prediction_type": config.get("prediction_type", "flow"),
        "dtype": str(denoiser.dtype).removeprefix("torch."),
        **settings,
    }


@dataclass
class MemorizationThreshold:
    """
    A value above which a prompt counts as memorised (below which, for `lower_is_memorized`).

    Args:
        value (`float`):
            The threshold.
        fpr (`float`):
            Share of clean prompts that were allowed to exceed it.
        key (`dict`):
            See `calibration_key`.
        num_clean (`int`):
            Clean prompts it was measured on.
        lower_is_memorized (`bool`, *optional*, defaults to `False`):
            For distances, such as `tiled_l2`.
        figures (`dict`, *optional*):
            AUC and true positive rate on memorised prompts, where they were given.
    """

    value: float
    fpr: float
    key: dict
    num_clean: int
    lower_is_memorized: bool = False
    figures: dict = field(default_factory=dict)

    def differing_fields(self, key):
        """Names of the fields in which another key differs."""
        return [name for name in KEY_FIELDS if self.key.get(name) != key.get(name)]

    def exceeded(self, scores):
        """Which scores count as memorised; an array or tensor of booleans."""
        return scores < self.value if self.lower_is_memorized else scores > self.value

    def save_pretrained(self, folder):
        """Writes `memorization_threshold.json` to a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{THRESHOLD_FILE}.partial"
        aside.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(aside, folder / THRESHOLD_FILE)

    @classmethod
    def from_pretrained(cls, folder_or_repo, subfolder=None, **kwargs):
        """
        Reads a threshold from a folder or a Hub repository.

        Args:
            folder_or_repo (`str` or `os.PathLike`):
                What `save_pretrained` wrote to, or a Hub id.
            subfolder (`str`, *optional*), kwargs:
                Of `huggingface_hub.hf_hub_download`, for instance `revision`.

        Raises:
            FileNotFoundError: when a local folder has no threshold.
            ValueError: when the file is damaged.
        """
        folder = Path(folder_or_repo) / (subfolder or "")
        if folder.is_dir():
            path = folder / THRESHOLD_FILE
            if not path.is_file():
                raise FileNotFoundError(f"{folder} has no {THRESHOLD_FILE}.")
        else:
            path = Path(hf_hub_download(str(folder_or_repo), THRESHOLD_FILE, subfolder=subfolder, **kwargs))
        try:
            found = cls(**json.loads(path.read_text(encoding="utf-8")))
            if not np.isfinite(found.value) or not isinstance(found.key, dict):
                raise ValueError("`value` has to be a finite number and `key` a dictionary")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no threshold ({error}). Calibrate again.") from error
        return found


def calibrate_memorization(clean_scores, key, fpr=0.01, memorized_scores=None, lower_is_memorized=False):
    """
    The threshold that at most a share `fpr` of clean prompts exceeds.

    Args:
        clean_scores (array-like of shape `(N,)`):
            Scores of prompts that are known not to be memorised, one per prompt.
        key (`dict`):
            `key` of the report they come from.
        fpr (`float`, *optional*, defaults to 0.01):
            In (0, 1). With fewer than `1 / fpr` prompts the threshold is the largest clean score.
        memorized_scores (array-like, *optional*):
            Scores of memorised prompts, for the figures only: the threshold never depends on them.
        lower_is_memorized (`bool`, *optional*, defaults to `False`):
            For distances.

    Returns:
        [`MemorizationThreshold`]

    Raises:
        ValueError: without scores, with scores that are not finite, or a rate out of range.

    Example:

    ```py
    >>> from diffusers_ext.methods.memorization.calibration_memorization import calibrate_memorization

    >>> calibrate_memorization([1.0, 2.0, 3.0, 4.0], key={}, fpr=0.25).value
    3.0
    ```
    """
    clean = np.asarray(clean_scores, dtype=np.float64).ravel()
    if not 0 < fpr < 1:
        raise ValueError(f"`fpr` has to be in (0, 1) but is {fpr}.")
    if not len(clean) or not np.isfinite(clean).all():
        raise ValueError("`clean_scores` has to hold finite scores, one per clean prompt.")
    sign = -1.0 if lower_is_memorized else 1.0
    ordered = np.sort(sign * clean)[::-1]
    value = sign * ordered[int(np.floor(fpr * len(clean) + 1e-9))]
    figures = {}
    if memorized_scores is not None:
        memorized = sign * np.asarray(memorized_scores, dtype=np.float64).ravel()
        figures = {"auc": auc(memorized, sign * clean), "tpr": tpr_at_fpr(memorized, sign * clean, fpr)}
        figures["num_memorized"] = len(memorized)
    return MemorizationThreshold(float(value), fpr, dict(key), len(clean), lower_is_memorized, figures)

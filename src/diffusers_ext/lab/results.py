# SPDX-License-Identifier: Apache-2.0
"""Result files: figures with the versions and the machine they were measured on."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


PACKAGES = ("diffusers_ext", "torch", "diffusers", "transformers", "peft", "accelerate", "numpy")


def environment():
    """Versions of what matters to a figure, and the machine, as a `dict` ready for JSON."""
    import torch

    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    machine = {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    return {"versions": versions, "machine": machine}


def _processor():
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_result(path, result):
    """
    Writes a result as JSON, aside first, so that a reader never sees half a file.

    Args:
        path (`str` or `os.PathLike`):
            The file; its folder is created when missing.
        result (`dict`):
            Figures; [`environment`] is added under `environment`.

    Returns:
        `Path` of the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(path.suffix + ".partial")
    text = json.dumps({**result, "environment": environment()}, indent=2, allow_nan=False)
    aside.write_text(text + "\n", encoding="utf-8")
    os.replace(aside, path)
    return path

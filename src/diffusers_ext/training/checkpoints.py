# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that survive a kill at any moment."""

import json
import logging
import os
import re
import shutil
from pathlib import Path


logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
STATE_FILE = "state.json"


def write_aside(path, write):
    """
    Writes a file so that a kill at any moment leaves either the old one or the new one.

    Args:
        path (`str` or `os.PathLike`):
            The file.
        write (`Callable`):
            Called with the path to write to.
    """
    path = Path(path)
    aside = path.with_name(path.name + ".partial")
    write(aside)
    os.replace(aside, path)


def save_checkpoint(output_dir, step, state, write, total_limit=None):
    """
    Writes `output_dir/checkpoint-<step>`: aside first, renamed when complete, old ones removed afterwards.

    Args:
        output_dir (`str` or `os.PathLike`):
            Folder of the run.
        step (`int`):
            Optimiser steps done.
        state (`dict`):
            Goes to `state.json`, with the step.
        write (`Callable`):
            Called with the folder to write tensors to.
        total_limit (`int`, *optional*):
            How many checkpoints are kept.

    Returns:
        `Path` of the checkpoint.
    """
    output_dir = Path(output_dir)
    aside, folder = output_dir / f".partial-{step}", output_dir / f"checkpoint-{step}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write(aside)
    (aside / STATE_FILE).write_text(json.dumps({**state, "step": step}, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)
    if total_limit is not None:
        for old in list_checkpoints(output_dir)[:-total_limit]:
            shutil.rmtree(old)
    return folder


def list_checkpoints(output_dir):
    """Complete checkpoints of a run, the oldest first."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in folders if (path / STATE_FILE).is_file()), key=lambda path: int(path.name[11:]))


def find_checkpoint(output_dir, resume_from_checkpoint, settings):
    """
    The checkpoint to go on from.

    Args:
        output_dir (`str` or `os.PathLike`):
            Folder of the run.
        resume_from_checkpoint (`str`, *optional*):
            `"latest"`, the path of a checkpoint, or `None` for a fresh start.
        settings (`dict`):
            What must be as it was, or the run would not go on as if it had never stopped.

    Returns:
        `tuple` of the folder and its state, or `(None, None)` where there is nothing to go on from.

    Raises:
        FileNotFoundError: when a named checkpoint does not exist or is incomplete.
        ValueError: when it was made with other settings.
    """
    if resume_from_checkpoint is None:
        return None, None
    if resume_from_checkpoint == "latest":
        found = list_checkpoints(output_dir)
        if not found:
            logger.warning(f"{output_dir} has no complete checkpoint; training starts anew.")
            return None, None
        folder = found[-1]
    else:
        folder = Path(resume_from_checkpoint)
        if not (folder / STATE_FILE).is_file():
            raise FileNotFoundError(
                f"{folder} is no complete checkpoint. Complete ones: "
                f"{', '.join(str(path) for path in list_checkpoints(output_dir)) or 'none'}."
            )
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    given = json.loads(json.dumps(settings))
    differing = [key for key in given if state["settings"].get(key) != given[key]]
    if differing:
        changes = "; ".join(f"{key}: was {state['settings'].get(key)!r}, is {given[key]!r}" for key in differing)
        raise ValueError(f"{folder} was made with other settings ({changes}). Use them again, or start a new run.")
    return folder, state

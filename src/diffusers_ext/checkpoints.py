# SPDX-License-Identifier: Apache-2.0
"""The strict door for what strangers made: files are checked before they are read, and every key is accounted for.

`read_tensors`, `read_json` and the two checks live beside the method that ships them to the Hub; this is their public
place.
"""

from pathlib import Path

from .hub_checks import PICKLES
from .methods.saeuron.strict_saeuron import check_pickle, check_safetensors, read_json, read_tensors


__all__ = ["account_for_keys", "check_folder", "check_pickle", "check_safetensors", "read_json", "read_tensors"]


def check_folder(folder):
    """
    Checks every safetensors, JSON and pickle file below a folder without loading any.

    Args:
        folder (`str` or `os.PathLike`):
            A local folder.

    Returns:
        `int`, the number of files that were checked.

    Raises:
        ValueError: on the first file that is damaged, is not what its name says, or holds more than tensors.

    Example:

    ```py
    >>> from diffusers_ext import lab
    >>> from diffusers_ext.checkpoints import check_folder

    >>> check_folder(lab.saeuron_folder())
    6
    ```
    """
    checks = {".safetensors": check_safetensors, **dict.fromkeys(PICKLES, check_pickle)}
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    for path in files:
        if path.suffix == ".json":
            # Vocabularies and the like may be lists.
            read_json(path, (dict, list))
        elif path.suffix in checks:
            checks[path.suffix](path)
    return sum(path.suffix == ".json" or path.suffix in checks for path in files)


def account_for_keys(found, expected, source):
    """
    Compares the tensors of a file with those that a model has.

    Args:
        found (`dict`):
            Name to shape, of the file.
        expected (`dict`):
            Name to shape, of the model.
        source (`str` or `os.PathLike`):
            Named in the error.

    Raises:
        ValueError: when a tensor is missing, unexpected or of another shape; all of them are listed.

    Example:

    ```py
    >>> from diffusers_ext.checkpoints import account_for_keys

    >>> account_for_keys({"weight": (2, 3)}, {"weight": (2, 3)}, "model.safetensors")
    ```
    """
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(found))]
    problems += [f"{name} is unexpected" for name in sorted(set(found) - set(expected))]
    problems += [
        f"{name} has shape {tuple(found[name])} instead of {tuple(expected[name])}"
        for name in sorted(set(found) & set(expected))
        if tuple(found[name]) != tuple(expected[name])
    ]
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"{source} does not fit the model: {listed}. It was made for another one, or is incomplete.")

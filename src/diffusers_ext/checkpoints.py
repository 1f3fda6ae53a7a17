# SPDX-License-Identifier: Apache-2.0
"""The strict door for what strangers made: files are checked before they are read.

`read_tensors`, `read_json` and the two checks live beside the method that ships them to the Hub; this is their public
place.
"""

from pathlib import Path

from .hub_checks import PICKLES
from .methods.saeuron.strict_saeuron import check_pickle, check_safetensors, read_json, read_tensors


__all__ = ["check_folder", "check_pickle", "check_safetensors", "read_json", "read_tensors"]


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

# SPDX-License-Identifier: Apache-2.0
"""Loading what was saved with components that diffusers does not know by itself."""

import importlib
import json
from pathlib import Path

from . import plugins
from .checkpoints import check_folder


_DIFFERENCES = ("missing_keys", "unexpected_keys", "mismatched_keys")


def load_component(folder, subfolder=None, custom_pipeline=None, **kwargs):
    """
    Loads a pipeline, a model or a scheduler from a local folder, classes of registered plugins included.

    diffusers finds a class of another package only if its module was imported before. This function imports the
    modules that the folder names, provided a registered plugin brings them, and nothing else.

    Args:
        folder (`str` or `os.PathLike`):
            A folder with `model_index.json`, `config.json` or `scheduler_config.json`.
        subfolder (`str`, *optional*):
            A component inside it.
        custom_pipeline (`str` or `os.PathLike`, *optional*):
            A pipeline file, or a folder with `pipeline.py`, to load the pipeline with; needs `trust_remote_code=True`.
        kwargs:
            Passed on to `from_pretrained` of the class.

    Raises:
        FileNotFoundError: when there is no such folder, no such file in it, or no file at `custom_pipeline`.
        ValueError: when the class is one that neither diffusers nor a plugin has, a file is damaged or holds more than
            tensors (see [`checkpoints.check_folder`]), or a model lacks weights or has others than the file.

    Example:

    ```py
    >>> from diffusers_ext import lab, load_component

    >>> unet = load_component(lab.pipeline_folder(), subfolder="unet")
    ```
    """
    path = Path(folder, subfolder or "")
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is no folder. Download a repository first: huggingface_hub.snapshot_download(id)."
        )
    names = ("model_index.json", "config.json", "scheduler_config.json")
    index = next((path / name for name in names if (path / name).is_file()), None)
    if index is None:
        raise FileNotFoundError(f"{path} holds none of {', '.join(names)}, so it is no pipeline, model or scheduler.")
    config = _read_json_object(index)
    modules = _plugin_modules()
    named = [value[0] for value in config.values() if isinstance(value, list) and value and isinstance(value[0], str)]
    for module in modules:
        if module in named:
            importlib.import_module(module)
    cls = _find_class(config.get("_class_name"), modules, index) if custom_pipeline is None else None
    check_folder(path)
    if cls is not None:
        return _load_class(cls, path, kwargs)
    if index.name != "model_index.json":
        raise ValueError(f"`custom_pipeline` is for pipelines, but {path} is a component: it has no model_index.json.")

    from diffusers import DiffusionPipeline

    code = str(_pipeline_file(custom_pipeline))
    return DiffusionPipeline.from_pretrained(path, custom_pipeline=code, **kwargs)


def _load_class(cls, path, kwargs):
    from diffusers import ModelMixin

    if not issubclass(cls, ModelMixin):
        return cls.from_pretrained(path, **kwargs)
    # Left to itself, diffusers logs a warning and leaves what is missing without values.
    model, info = cls.from_pretrained(path, output_loading_info=True, **kwargs)
    differing = [f"{kind} {sorted(map(str, info[kind]))}" for kind in _DIFFERENCES if info[kind]]
    if differing:
        raise ValueError(f"The weights in {path} do not fit their config: {', '.join(differing)}. Download it again.")
    return model


def _read_json_object(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Download or save it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has to hold a JSON object but holds a {type(content).__name__}.")
    return content


def _pipeline_file(custom_pipeline):
    """Checked here because diffusers takes what is not there for a Hub id, and its error then names no file."""
    path = Path(custom_pipeline)
    file = path / "pipeline.py" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".py":
        raise FileNotFoundError(
            f"`custom_pipeline` has to be a pipeline file or a folder with pipeline.py, but {file} is missing. The "
            f"file of an installed method: diffusers_ext.custom_pipeline(name)."
        )
    return path


def _plugin_modules():
    groups = [group for group in plugins.GROUPS if group != "diffusers_ext.methods"]
    return sorted({plugin.module for group in groups for plugin in plugins.discover(group).values()})


def _find_class(name, modules, index):
    import diffusers

    if isinstance(name, str) and hasattr(diffusers, name):
        return getattr(diffusers, name)
    for group in plugins.GROUPS[1:]:
        for plugin in plugins.discover(group).values():
            if plugin.target.partition(":")[2] == name:
                return plugin.load()
    raise ValueError(
        f"{index} asks for the class {name!r}, which neither diffusers nor an installed plugin has (plugins bring "
        f"classes of {', '.join(modules) or 'no module'}). Install the plugin that defines it."
    )

# SPDX-License-Identifier: Apache-2.0
"""The methods there are, as light records: reading them imports neither torch nor diffusers."""

import fnmatch
import functools
import importlib.util
import logging
from dataclasses import dataclass, replace

from . import plugins


logger = logging.getLogger(__name__)

KINDS = ("pipeline", "scheduler", "hook", "attention_processor", "adapter", "component", "training")
STATUSES = ("experimental", "beta", "stable")
_GROUP = "diffusers_ext.methods"


@dataclass(frozen=True)
class MethodSpec:
    """
    What a plugin tells of a method; its entry point in the group `diffusers_ext.methods` points at an instance.

    Args:
        name (`str`):
            Lower-case name, equal to the name of the entry point.
        title (`str`):
            One line for people.
        paper (`str`):
            arXiv id, or an empty string.
        kinds (`tuple[str, ...]`):
            What the method ships, out of `KINDS`.
        base_families (`tuple[str, ...]`):
            Base models it works on, for instance `"stable-diffusion"`.
        pipeline (`str`, *optional*):
            `module:Class` of its custom pipeline.
        summary (`str`), licence (`str`), status (`str`), hub_ids (`tuple[str, ...]`):
            What it does in a sentence; SPDX id; one of `STATUSES`; repositories of weights.
        demo, evaluate, convert (`str`, *optional*):
            `module:function` behind the commands of these names.
        distribution (`str`):
            Filled in by discovery.

    Raises:
        ValueError: on an unknown kind or status.
    """

    name: str
    title: str
    paper: str = ""
    kinds: tuple = ()
    base_families: tuple = ()
    pipeline: str | None = None
    summary: str = ""
    licence: str = ""
    status: str = "experimental"
    hub_ids: tuple = ()
    demo: str | None = None
    evaluate: str | None = None
    convert: str | None = None
    distribution: str = ""

    def __post_init__(self):
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"`kinds` has to be out of {', '.join(KINDS)} but has {', '.join(map(repr, unknown))}.")
        if self.status not in STATUSES:
            raise ValueError(f"`status` has to be one of {', '.join(STATUSES)} but is {self.status!r}.")


def _load(plugin):
    spec = plugin.load()
    if not isinstance(spec, MethodSpec):
        raise TypeError(
            f"The entry point {plugin.name!r} of {plugin.distribution} has to point at a `MethodSpec` but "
            f"{plugin.target} is a {type(spec).__name__}."
        )
    if spec.name != plugin.name:
        raise ValueError(
            f"The entry point {plugin.name!r} of {plugin.distribution} points at the method {spec.name!r}; the two "
            f"names have to be equal."
        )
    return replace(spec, distribution=plugin.distribution)


@functools.lru_cache(maxsize=None)
def _load_or_warn(plugin):
    try:
        return _load(plugin)
    except (RuntimeError, TypeError, ValueError) as error:
        logger.warning(str(error))
        return None


def list_methods(kind=None, base=None, pattern=None):
    """
    Methods that are installed, plugins of others included. A broken plugin is left out with one warning.

    Args:
        kind (`str`, *optional*):
            Only methods that ship this, one of `KINDS`.
        base (`str`, *optional*):
            Only methods for this family of base models.
        pattern (`str`, *optional*):
            Only names that match this shell pattern.

    Returns:
        `list[MethodSpec]`, sorted by name.

    Raises:
        ValueError: on an unknown kind.

    Example:

    ```py
    >>> from diffusers_ext import list_methods

    >>> [method.name for method in list_methods(kind="hook", pattern="sae*")]
    ['saeuron']
    ```
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"`kind` has to be one of {', '.join(KINDS)} but is {kind!r}.")
    specs = [_load_or_warn(plugin) for plugin in plugins.discover(_GROUP).values()]
    chosen = [
        spec
        for spec in specs
        if spec is not None
        and (kind is None or kind in spec.kinds)
        and (base is None or base in spec.base_families)
        and (pattern is None or fnmatch.fnmatchcase(spec.name, pattern))
    ]
    return sorted(chosen, key=lambda spec: spec.name)


def get_method(name):
    """
    The record of one method.

    Args:
        name (`str`):
            Its name, or `distribution:name` where two distributions have one of that name.

    Raises:
        ValueError: on an unknown name, with the closest ones, or a record of another name.
        RuntimeError: when the plugin that brings it is broken; the cause is chained.
        TypeError: when `name` is no string, or its entry point is not a `MethodSpec`.
    """
    return _load(plugins.find(_GROUP, name))


def custom_pipeline(name):
    """
    Path of a method's pipeline file, for `DiffusionPipeline.from_pretrained(..., custom_pipeline=...)`.

    The file is not imported: diffusers does that, if it is told to trust it.

    Args:
        name (`str`):
            Name of a method that has a pipeline.

    Returns:
        `str`

    Raises:
        ValueError: on an unknown name, or a method without a pipeline.
        FileNotFoundError: when the plugin lacks the file that its record names.

    Example:

    ```py
    >>> from diffusers import DiffusionPipeline
    >>> from diffusers_ext import custom_pipeline, lab

    >>> pipe = DiffusionPipeline.from_pretrained(
    ...     lab.pipeline_folder(), custom_pipeline=custom_pipeline("saeuron"), trust_remote_code=True
    ... )
    ```
    """
    spec = get_method(name)
    if spec.pipeline is None:
        having = [s.name for s in list_methods(kind="pipeline")]
        raise ValueError(f"The method {name!r} has no pipeline. Methods that have one: {', '.join(having) or 'none'}.")
    module = spec.pipeline.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise FileNotFoundError(
            f"The method {name!r} names the pipeline {spec.pipeline}, but the file {module.replace('.', '/')}.py is "
            f"missing from {spec.distribution}. Install it again."
        )
    return found.origin

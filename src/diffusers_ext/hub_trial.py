# SPDX-License-Identifier: Apache-2.0
"""Run by `hub_checks.try_loading` in a fresh process: loads a folder as its users will, and prints the class."""

import importlib.abc
import json
import sys
from pathlib import Path


class WithoutUs(importlib.abc.MetaPathFinder):
    """A stranger has diffusers and not this package."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "diffusers_ext":
            raise ImportError("it imports diffusers_ext, which its users do not have")
        return None


def load_class(folder, file, name=None):
    from diffusers.utils.dynamic_modules_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(str(folder), module_file=file, class_name=name, trust_remote_code=True)


def load_pipeline(folder):
    from diffusers import DiffusionPipeline

    cls = load_class(folder, "pipeline.py")
    if cls is None or not issubclass(cls, DiffusionPipeline):
        raise TypeError("pipeline.py has no class that derives from DiffusionPipeline")
    return cls


def load_scheduler(folder):
    import diffusers

    name = json.loads((folder / "scheduler_config.json").read_text(encoding="utf-8")).get("_class_name")
    if not isinstance(name, str):
        raise TypeError("scheduler_config.json has no _class_name")
    files = sorted(folder.glob("scheduling_*.py"))
    if len(files) > 1:
        raise TypeError("there is more than one scheduling_*.py")
    cls = load_class(folder, files[0].name, name) if files else getattr(diffusers, name)
    scheduler = cls.from_pretrained(folder)
    scheduler.set_timesteps(2)
    return cls


def load_adapter(folder):
    from diffusers_ext import load_component

    return type(load_component(folder))


if __name__ == "__main__":
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    if kind != "adapter":
        sys.meta_path.insert(0, WithoutUs())
    loaded = {"pipeline": load_pipeline, "scheduler": load_scheduler, "adapter": load_adapter}[kind](folder)
    print("\n" + json.dumps(loaded.__name__))

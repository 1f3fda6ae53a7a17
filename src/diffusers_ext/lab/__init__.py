# SPDX-License-Identifier: Apache-2.0
"""EmojiCanvas: a small real text-to-image model, its data set, and an oracle that judges its pictures.

Importing this package loads neither torch nor diffusers.
"""

import importlib
from typing import TYPE_CHECKING

from .captions import OBJECTS, LabPrompt, prompts
from .captions import STYLE_NAMES as STYLES


_MODULE_OF = {
    "apply_style": "styles",
    "clean_prompts": "memorized",
    "copy_similarity": "memorized",
    "copy_threshold": "memorized",
    "diversity": "metrics",
    "frechet_distance": "metrics",
    "generate": "generation",
    "image_grid": "grids",
    "load_memorized_pipeline": "memorized",
    "load_oracle": "loading",
    "load_pipeline": "loading",
    "load_unlearning_pipeline": "loading",
    "memorization_folder": "memorized",
    "memorized_pictures": "memorized",
    "memorized_prompts": "memorized",
    "near_copies": "metrics",
    "nearest": "metrics",
    "pipeline_folder": "loading",
    "saeuron_folder": "loading",
}

__all__ = [
    "LabPrompt",
    "OBJECTS",
    "STYLES",
    "apply_style",
    "clean_prompts",
    "copy_similarity",
    "copy_threshold",
    "diversity",
    "frechet_distance",
    "generate",
    "image_grid",
    "load_memorized_pipeline",
    "load_oracle",
    "load_pipeline",
    "load_unlearning_pipeline",
    "memorization_folder",
    "memorized_pictures",
    "memorized_prompts",
    "near_copies",
    "nearest",
    "pipeline_folder",
    "prompts",
    "saeuron_folder",
]

if TYPE_CHECKING:
    from .generation import generate as generate
    from .grids import image_grid as image_grid
    from .loading import load_oracle as load_oracle
    from .loading import load_pipeline as load_pipeline
    from .loading import load_unlearning_pipeline as load_unlearning_pipeline
    from .loading import pipeline_folder as pipeline_folder
    from .loading import saeuron_folder as saeuron_folder
    from .memorized import clean_prompts as clean_prompts
    from .memorized import copy_similarity as copy_similarity
    from .memorized import copy_threshold as copy_threshold
    from .memorized import load_memorized_pipeline as load_memorized_pipeline
    from .memorized import memorization_folder as memorization_folder
    from .memorized import memorized_pictures as memorized_pictures
    from .memorized import memorized_prompts as memorized_prompts
    from .metrics import diversity as diversity
    from .metrics import frechet_distance as frechet_distance
    from .metrics import near_copies as near_copies
    from .metrics import nearest as nearest
    from .styles import apply_style as apply_style


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'diffusers_ext.lab' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])

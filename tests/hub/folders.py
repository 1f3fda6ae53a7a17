# SPDX-License-Identifier: Apache-2.0
"""Small folders of each kind that can be published."""

import json

import torch
from safetensors.torch import save_file


CARD = """---
library_name: diffusers
license: apache-2.0
base_model: someone/base
tags: [diffusers]
---

# A card

`<organisation>/name` is where it lies.
"""
PIPELINE = """from diffusers import DDPMPipeline

from .helper_gain import GAIN


class GainPipeline(DDPMPipeline):
    gain = GAIN
"""
SCHEDULER = """from diffusers import DDIMScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin


class SlowScheduler(DDIMScheduler, SchedulerMixin):
    pass
"""


def make_pipeline(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(CARD)
    (folder / "pipeline.py").write_text(PIPELINE)
    (folder / "helper_gain.py").write_text("GAIN = 2.0\n")
    return folder


def make_scheduler(folder, own=True):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(CARD)
    name = "SlowScheduler" if own else "DDIMScheduler"
    (folder / "scheduler_config.json").write_text(json.dumps({"_class_name": name, "num_train_timesteps": 7}))
    if own:
        (folder / "scheduling_slow.py").write_text(SCHEDULER)
    return folder


def make_adapter(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(CARD)
    save_file({"weight": torch.arange(6.0).reshape(2, 3)}, folder / "weights.safetensors")
    return folder


MAKERS = {"pipeline": make_pipeline, "scheduler": make_scheduler, "adapter": make_adapter}

# SPDX-License-Identifier: Apache-2.0
"""
The test battery: contracts that every pipeline, hook and model of a plugin should keep.

A test file subclasses a contract, says what to test, and gets the tests:

```py
from diffusers_ext.testing import PipelineContract


class TestTintPipeline(PipelineContract):
    pipeline_class = TintStableDiffusionPipeline
    inputs = {"tint": 0.3}
```

Everything runs on tiny real components with seeded weights, without network, in seconds. The contracts need pytest;
each name is imported when it is first used, so that the loopback Hub needs neither pytest nor torch.
"""

import importlib


_MODULE_OF = {
    "TIMESTEPS": "components",
    "Fault": "hub_server",
    "HookContract": "hooks",
    "HubServer": "hub_server",
    "ModelContract": "models",
    "PipelineContract": "pipelines",
    "SchedulerContract": "schedulers",
    "TrainingContract": "training",
    "UnconditionalPipelineContract": "unconditional",
    "flux_inputs": "components",
    "run_script": "training",
    "start_script": "training",
    "tiny_flux_transformer": "components",
    "tiny_stable_diffusion": "components",
    "tiny_tokenizer": "components",
}

__all__ = sorted(_MODULE_OF)

# Type checkers take any variable of this name for true; importing it from typing would cost more than the package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .components import TIMESTEPS as TIMESTEPS
    from .components import flux_inputs as flux_inputs
    from .components import tiny_flux_transformer as tiny_flux_transformer
    from .components import tiny_stable_diffusion as tiny_stable_diffusion
    from .components import tiny_tokenizer as tiny_tokenizer
    from .hooks import HookContract as HookContract
    from .hub_server import Fault as Fault
    from .hub_server import HubServer as HubServer
    from .models import ModelContract as ModelContract
    from .pipelines import PipelineContract as PipelineContract
    from .schedulers import SchedulerContract as SchedulerContract
    from .training import TrainingContract as TrainingContract
    from .training import run_script as run_script
    from .training import start_script as start_script
    from .unconditional import UnconditionalPipelineContract as UnconditionalPipelineContract


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'diffusers_ext.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])

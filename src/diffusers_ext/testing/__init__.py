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

Everything runs on tiny real components with seeded weights, without network, in seconds. Importing this package needs
pytest.
"""

from .components import TIMESTEPS, flux_inputs, tiny_flux_transformer, tiny_stable_diffusion, tiny_tokenizer
from .hooks import HookContract
from .models import ModelContract
from .pipelines import PipelineContract
from .training import TrainingContract, run_script, start_script


__all__ = [
    "TIMESTEPS",
    "HookContract",
    "ModelContract",
    "PipelineContract",
    "TrainingContract",
    "flux_inputs",
    "run_script",
    "start_script",
    "tiny_flux_transformer",
    "tiny_stable_diffusion",
    "tiny_tokenizer",
]

# SPDX-License-Identifier: Apache-2.0
"""Extensions for Hugging Face diffusers: methods as pipelines, hooks, schedulers and adapters.

Importing this package loads neither torch nor diffusers; every public name is imported when it is first used.
"""

import importlib


__version__ = "0.1.0.dev0"

_AMBIENT = "diffusers_ext.methods.ambient_diffusion"
_MEMORIZATION = "diffusers_ext.methods.memorization"
_SAEURON = "diffusers_ext.methods.saeuron"
_MODULE_OF = {
    "AmbientLoss": f"{_AMBIENT}.loss_ambient_diffusion",
    "ConceptEdit": f"{_SAEURON}.concepts_saeuron",
    "ConceptEdits": f"{_SAEURON}.concepts_saeuron",
    "ConceptStatistics": f"{_SAEURON}.concepts_saeuron",
    "CopyReport": f"{_AMBIENT}.report_ambient_diffusion",
    "EDMHeunScheduler": f"{_AMBIENT}.scheduling_edm_heun",
    "EDMPipeline": f"{_AMBIENT}.pipeline_ambient_diffusion",
    "EDMUNet2DModel": f"{_AMBIENT}.modeling_ambient_diffusion",
    "FixedNoise": f"{_AMBIENT}.noise_ambient_diffusion",
    "GuidedDenoiser": f"{_MEMORIZATION}.denoising_memorization",
    "MemorizationDetector": f"{_MEMORIZATION}.detector_memorization",
    "MemorizationStableDiffusionPipeline": f"{_MEMORIZATION}.pipeline_memorization",
    "MemorizationThreshold": f"{_MEMORIZATION}.calibration_memorization",
    "SAILConfig": f"{_MEMORIZATION}.sail_memorization",
    "MethodSpec": "diffusers_ext.registry",
    "SAeUronConfig": f"{_SAEURON}.hooks_saeuron",
    "SAeUronStableDiffusionPipeline": f"{_SAEURON}.pipeline_saeuron",
    "SparseAutoencoder": f"{_SAEURON}.modeling_saeuron",
    "apply_saeuron": f"{_SAEURON}.hooks_saeuron",
    "calibrate_memorization": f"{_MEMORIZATION}.calibration_memorization",
    "collect_statistics": f"{_SAEURON}.concepts_saeuron",
    "concept_heatmap": f"{_SAEURON}.heatmaps_saeuron",
    "custom_pipeline": "diffusers_ext.registry",
    "get_method": "diffusers_ext.registry",
    "list_methods": "diffusers_ext.registry",
    "load_component": "diffusers_ext.loading",
    "remove_saeuron": f"{_SAEURON}.hooks_saeuron",
    "sail": f"{_MEMORIZATION}.sail_memorization",
}

__all__ = sorted([*_MODULE_OF, "lab"])

# Type checkers take any variable of this name for true; importing it from typing would double the cost of the package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import lab as lab
    from .loading import load_component as load_component
    from .methods.ambient_diffusion.loss_ambient_diffusion import AmbientLoss as AmbientLoss
    from .methods.ambient_diffusion.modeling_ambient_diffusion import EDMUNet2DModel as EDMUNet2DModel
    from .methods.ambient_diffusion.noise_ambient_diffusion import FixedNoise as FixedNoise
    from .methods.ambient_diffusion.pipeline_ambient_diffusion import EDMPipeline as EDMPipeline
    from .methods.ambient_diffusion.report_ambient_diffusion import CopyReport as CopyReport
    from .methods.ambient_diffusion.scheduling_edm_heun import EDMHeunScheduler as EDMHeunScheduler
    from .methods.memorization.calibration_memorization import MemorizationThreshold as MemorizationThreshold
    from .methods.memorization.calibration_memorization import calibrate_memorization as calibrate_memorization
    from .methods.memorization.denoising_memorization import GuidedDenoiser as GuidedDenoiser
    from .methods.memorization.detector_memorization import MemorizationDetector as MemorizationDetector
    from .methods.memorization.pipeline_memorization import (
        MemorizationStableDiffusionPipeline as MemorizationStableDiffusionPipeline,
    )
    from .methods.memorization.sail_memorization import SAILConfig as SAILConfig
    from .methods.memorization.sail_memorization import sail as sail
    from .methods.saeuron.concepts_saeuron import ConceptEdit as ConceptEdit
    from .methods.saeuron.concepts_saeuron import ConceptEdits as ConceptEdits
    from .methods.saeuron.concepts_saeuron import ConceptStatistics as ConceptStatistics
    from .methods.saeuron.concepts_saeuron import collect_statistics as collect_statistics
    from .methods.saeuron.heatmaps_saeuron import concept_heatmap as concept_heatmap
    from .methods.saeuron.hooks_saeuron import SAeUronConfig as SAeUronConfig
    from .methods.saeuron.hooks_saeuron import apply_saeuron as apply_saeuron
    from .methods.saeuron.hooks_saeuron import remove_saeuron as remove_saeuron
    from .methods.saeuron.modeling_saeuron import SparseAutoencoder as SparseAutoencoder
    from .methods.saeuron.pipeline_saeuron import SAeUronStableDiffusionPipeline as SAeUronStableDiffusionPipeline
    from .registry import MethodSpec as MethodSpec
    from .registry import custom_pipeline as custom_pipeline
    from .registry import get_method as get_method
    from .registry import list_methods as list_methods


def __getattr__(name):
    if name == "lab":
        return importlib.import_module("diffusers_ext.lab")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'diffusers_ext' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *__all__])

# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion that unlearns concepts by name."""

import inspect
from contextlib import contextmanager
from dataclasses import replace

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.schedulers import KarrasDiffusionSchedulers
from diffusers.utils import logging, replace_example_docstring
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer, CLIPVisionModelWithProjection

from .concepts_saeuron import ConceptEdit, ConceptEdits
from .convert_saeuron import detect_format  # noqa: F401  diffusers copies only the helpers that this file names
from .heatmaps_saeuron import concept_heatmap
from .hooks_saeuron import SAeUronConfig, applied_names, apply_saeuron, remove_saeuron
from .modeling_saeuron import SparseAutoencoder
from .strict_saeuron import read_tensors  # noqa: F401  as above


logger = logging.get_logger(__name__)

EXAMPLE_DOC_STRING = """
    Examples:
        ```py
        >>> from diffusers_ext import SAeUronStableDiffusionPipeline, lab

        >>> pipe = SAeUronStableDiffusionPipeline.from_pretrained(lab.pipeline_folder())
        >>> pipe.load_sae(lab.saeuron_folder())
        >>> pipe.load_concepts(lab.saeuron_folder())
        >>> image = pipe("cat, neon style", unlearn=["cat"], num_inference_steps=20, guidance_scale=4.0).images[0]
        ```
"""


# Components that hold an autoencoder, and the name under which each is applied.
_HOOK_NAMES = {"sae": "saeuron", "sae_2": "saeuron_2"}


def _signature_with_unlearn():
    stock = inspect.signature(StableDiffusionPipeline.__call__)
    unlearn = inspect.Parameter("unlearn", inspect.Parameter.KEYWORD_ONLY, default=None)
    *parameters, keywords = stock.parameters.values()
    return stock.replace(parameters=[*parameters, unlearn, keywords])


class SAeUronStableDiffusionPipeline(StableDiffusionPipeline):
    r"""
    Stable Diffusion with concept unlearning ([SAeUron](https://huggingface.co/papers/2501.18052)).

    Everything of the stock pipeline stays: LoRAs, textual inversion, IP-Adapters, schedulers, callbacks. No weight of
    the base model changes; with nothing unlearned, pictures are bit for bit those of the stock pipeline.

    Args:
        sae, sae_2 ([`SparseAutoencoder`], *optional*):
            Autoencoders of one or two blocks of the U-Net (objects and styles live in different ones); may be loaded
            later with `load_sae`. The other arguments are
            those of `StableDiffusionPipeline`.
    """

    _optional_components = [*StableDiffusionPipeline._optional_components, "sae", "sae_2"]
    # The hook reads the autoencoder's weights without calling it, so offloading would never bring them back.
    _exclude_from_cpu_offload = [*StableDiffusionPipeline._exclude_from_cpu_offload, "sae", "sae_2"]

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        tokenizer: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: KarrasDiffusionSchedulers,
        safety_checker=None,
        feature_extractor: CLIPImageProcessor = None,
        image_encoder: CLIPVisionModelWithProjection = None,
        requires_safety_checker: bool = False,
        sae: SparseAutoencoder = None,
        sae_2: SparseAutoencoder = None,
    ):
        super().__init__(
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            unet=unet,
            scheduler=scheduler,
            safety_checker=safety_checker,
            feature_extractor=feature_extractor,
            image_encoder=image_encoder,
            requires_safety_checker=requires_safety_checker,
        )
        self.register_modules(sae=sae, sae_2=sae_2)
        self.concept_edits = ConceptEdits()
        self._unlearn_configs = {}

    def load_sae(self, pretrained_model_name_or_path_or_sae, subfolder=None, component="sae", **kwargs):
        """
        Sets an autoencoder.

        Args:
            pretrained_model_name_or_path_or_sae (`str`, `os.PathLike` or [`SparseAutoencoder`]):
                A folder or Hub id in any format that [`SparseAutoencoder.from_pretrained`] reads, or the model itself.
            subfolder (`str`, *optional*):
                Folder inside it.
            component (`str`, *optional*, defaults to `"sae"`):
                `"sae"` or `"sae_2"`. Which of the two a concept belongs to follows from its edit.
            kwargs:
                Passed on to `SparseAutoencoder.from_pretrained`; `hook` for formats that do not carry it.

        Raises:
            ValueError: while something is unlearned (call `clear_unlearning` first), on another component, or an
                autoencoder that does not know its block.
        """
        if component not in _HOOK_NAMES:
            raise ValueError(f"`component` has to be one of {', '.join(_HOOK_NAMES)} but is {component!r}.")
        if self._unlearn_configs:
            raise ValueError("Concepts are unlearned with the present autoencoder; call `clear_unlearning()` first.")
        sae = pretrained_model_name_or_path_or_sae
        if not isinstance(sae, SparseAutoencoder):
            sae = SparseAutoencoder.from_pretrained(sae, subfolder=subfolder, **kwargs)
        if not (sae.config.hook or {}).get("module"):
            raise ValueError(
                "The autoencoder does not say which block it belongs to. Pass it: "
                "`hook={'module': 'up_blocks.1.attentions.1'}`."
            )
        self.register_modules(**{component: sae.to(self.unet.device)})

    def load_concepts(self, pretrained_model_name_or_path_or_edits, subfolder=None, **kwargs):
        """
        Adds edits by name; one that exists already is replaced.

        Args:
            pretrained_model_name_or_path_or_edits (`str`, `os.PathLike`, [`ConceptEdits`] or `list[ConceptEdit]`):
                A folder or Hub id that `ConceptEdits.save_pretrained` wrote, or edits.
            subfolder (`str`, *optional*):
                Folder inside it.
        """
        edits = pretrained_model_name_or_path_or_edits
        if not isinstance(edits, (ConceptEdits, list, tuple)):
            edits = ConceptEdits.from_pretrained(edits, subfolder=subfolder, **kwargs)
        if not isinstance(edits, ConceptEdits):
            edits = ConceptEdits(edits)
        self.concept_edits = ConceptEdits({**self.concept_edits, **edits}.values())

    def unlearn(self, concepts, strength=None, **settings):
        """
        Unlearns concepts until `clear_unlearning`; a second call replaces the first.

        Args:
            concepts (`str`, `list[str | ConceptEdit]` or `dict[str, float]`):
                Names of loaded edits, edits, or names with their strengths.
            strength (`float`, *optional*):
                One strength for all: 0 changes nothing, 1 is the published method.
            settings:
                `num_features`, `percentile`, `multiplier`, `mode`, `error`, `apply_to`, `start`, `end` of
                [`SAeUronConfig`].

        Raises:
            ValueError: on an unknown concept, no autoencoder, or settings out of range; what was unlearned before
            stays.
        """
        self._switch(self._make_configs(concepts, strength, settings))

    def _make_configs(self, concepts, strength, settings):
        """One config for each autoencoder that one of the concepts belongs to."""
        if isinstance(concepts, dict):
            if strength is not None:
                raise ValueError("Pass strengths either in the dictionary or as `strength`, not both.")
            strength, concepts = dict(concepts), list(concepts)
        concepts = [concepts] if isinstance(concepts, (str, ConceptEdit)) else list(concepts)
        edits = {}
        component_of = self._component_finder()
        for concept in concepts:
            edit = concept if isinstance(concept, ConceptEdit) else self.concept_edits[concept]
            edits.setdefault(component_of(edit), {})[edit.name] = edit
        if not edits:
            raise ValueError("`concepts` is empty: name at least one concept.")
        configs = {}
        for component, chosen in edits.items():
            strengths = 1.0 if strength is None else strength
            if isinstance(strength, dict):
                strengths = {name: strength[name] for name in chosen if name in strength}
            configs[component] = SAeUronConfig(edits=list(chosen.values()), strength=strengths, **settings)
        return configs

    def _component_finder(self):
        """A function from an edit to the component that holds its autoencoder."""
        present = {name: getattr(self, name) for name in _HOOK_NAMES if getattr(self, name) is not None}
        if not present:
            raise ValueError("There is no autoencoder: call `load_sae(...)` first.")
        fingerprints = {sae.fingerprint(): name for name, sae in present.items()}
        # An edit that fits none goes to the first, which refuses it with the reason.
        return lambda edit: fingerprints.get(edit.sae, next(iter(present)))

    def _apply(self, configs):
        for component, config in configs.items():
            apply_saeuron(self.unet, getattr(self, component), config, name=_HOOK_NAMES[component])

    def _switch(self, configs):
        """Applies configs in place of the present ones; if that fails, the present ones stay."""
        previous = self._unlearn_configs
        self.clear_unlearning()
        try:
            self._apply(configs)
        except Exception:
            self.clear_unlearning()
            self._apply(previous)
            self._unlearn_configs = previous
            raise
        self._unlearn_configs = configs

    def set_concept_strength(self, concept, strength):
        """
        Changes the strength of one unlearned concept.

        Raises:
            ValueError: when it is not unlearned, or the strength is negative.
        """
        if concept not in self.unlearned_concepts:
            present = list(self.unlearned_concepts) or "none"
            raise ValueError(f"{concept!r} is not unlearned at present; unlearned are {present}.")
        configs = {}
        for component, config in self._unlearn_configs.items():
            if concept in config.strengths:
                config = replace(config, strength={**config.strengths, concept: strength})
            configs[component] = config
        self._switch(configs)

    def clear_unlearning(self):
        """Unlearns nothing any more; the U-Net is bit for bit what it was."""
        for name in set(_HOOK_NAMES.values()) & set(applied_names(self.unet)):
            remove_saeuron(self.unet, name)
        self._unlearn_configs = {}

    @property
    def unlearned_concepts(self):
        """Names of the unlearned concepts with their strengths."""
        return {name: value for config in self._unlearn_configs.values() for name, value in config.strengths.items()}

    def concept_heatmap(self, concept, prompt, **kwargs):
        """
        Where in the pictures of a prompt a concept's latents fire, see [`concept_heatmap`].

        Args:
            concept (`str` or [`ConceptEdit`]):
                Name of a loaded edit, or an edit.
            prompt (`str` or `list[str]`):
                One picture each.

        Returns:
            `tuple` of heat maps `(batch, height, width)` in [0, 1] and images.
        """
        component_of = self._component_finder()
        edit = concept if isinstance(concept, ConceptEdit) else self.concept_edits[concept]
        with self._only_for_this_call({}):
            return concept_heatmap(self, getattr(self, component_of(edit)), edit, prompt, **kwargs)

    def _check_guidance(self, *args, **kwargs):
        """Without guidance the hook would take half of the pictures for one half of the batch."""
        halves = {config.apply_to for config in self._unlearn_configs.values()} - {"both"}
        if not halves:
            return
        call = inspect.signature(StableDiffusionPipeline.__call__).bind(self, *args, **kwargs)
        call.apply_defaults()
        if call.arguments["guidance_scale"] <= 1:
            raise ValueError(
                f"`apply_to={halves.pop()!r}` needs classifier-free guidance but `guidance_scale` is "
                f"{call.arguments['guidance_scale']}. Raise it above 1 or use `apply_to='both'`."
            )

    @contextmanager
    def _only_for_this_call(self, configs):
        previous = self._unlearn_configs
        self._switch(configs)
        try:
            yield
        finally:
            self._switch(previous)

    @torch.no_grad()
    @replace_example_docstring(EXAMPLE_DOC_STRING)
    def __call__(self, *args, unlearn=None, **kwargs):
        r"""
        The call of `StableDiffusionPipeline`, all its arguments included.

        Args:
            unlearn (`list[str | ConceptEdit]` or `dict[str, float]`, *optional*):
                Concepts to unlearn in this call instead of those of `unlearn(...)`; an empty list unlearns nothing.
                Settings other than strengths are the defaults.

        Examples:

        Returns:
            [`~pipelines.stable_diffusion.StableDiffusionPipelineOutput`] or `tuple`
        """
        if unlearn is None:
            self._check_guidance(*args, **kwargs)
            return super().__call__(*args, **kwargs)
        configs = self._make_configs(unlearn, None, {}) if unlearn else {}
        with self._only_for_this_call(configs):
            return super().__call__(*args, **kwargs)

    # The stock arguments are passed on as they are, whatever the release of diffusers; tools that read signatures see
    # them all.
    __call__.__signature__ = _signature_with_unlearn()

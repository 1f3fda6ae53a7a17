# SPDX-License-Identifier: Apache-2.0
"""What a concept looks like in the latents of a sparse autoencoder, and the edit that takes it away."""

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file

from .convert_saeuron import write_folder_aside
from .strict_saeuron import read_json, read_tensors


STATISTICS_FILES = ("concept_statistics.safetensors", "concept_statistics.json")
EDITS_FILES = ("concepts.safetensors", "concepts.json")
_EDIT_TENSORS = ("timesteps", "indices", "mean", "gate")


def features_of_percentile(percentile, num_latents):
    """
    How many latents have a score strictly above a percentile, ties aside.

    Args:
        percentile (`float`): in (0, 100), linear interpolation as in the paper's code.
        num_latents (`int`): number of latents of the autoencoder.

    Raises:
        ValueError: outside the range, or so high that no latent is left.

    Example:

    ```py
    >>> from diffusers_ext.methods.saeuron.concepts_saeuron import features_of_percentile

    >>> [features_of_percentile(p, 20480) for p in (99.999, 99.995, 99.99, 99.9)]
    [1, 2, 3, 21]
    ```
    """
    if not 0.0 < percentile < 100.0:
        raise ValueError(f"`percentile` has to lie in (0, 100) but is {percentile}.")
    return num_latents - 1 - math.floor(percentile / 100 * (num_latents - 1))


@dataclass
class ConceptEdit:
    """
    The latents that carry one concept at each timestep, and what is done to them.

    Args:
        name (`str`):
            The concept.
        timesteps (`torch.Tensor` of shape `(T,)`):
            Timesteps of the rows; at other ones the nearest row is used.
        indices (`torch.Tensor` of shape `(T, K)`, int32):
            Latents, the highest score first; -1 is padding.
        mean (`torch.Tensor` of shape `(T, K)`):
            Their mean over the concept's prompts and tokens (mu in the paper).
        gate (`torch.Tensor` of shape `(T, K)`):
            Their mean over all concepts; a latent is edited only where it exceeds this.
        multiplier (`float`, *optional*, defaults to -1.0):
            gamma in the paper; negative to unlearn.
        num_features (`int`, *optional*):
            How many of the K latents are used; all by default.
        num_latents (`int`), num_train_timesteps (`int`):
            Of the autoencoder, and of the schedule that `timesteps` belong to.
        sae (`str`):
            Fingerprint of the autoencoder.
        metadata (`dict`):
            Where it comes from: base model, prompts.

    Raises:
        ValueError: on shapes that do not fit, values that are not finite, or no latent at all.
    """

    name: str
    timesteps: torch.Tensor
    indices: torch.Tensor
    mean: torch.Tensor
    gate: torch.Tensor
    multiplier: float = -1.0
    num_features: int | None = None
    num_latents: int = 0
    num_train_timesteps: int = 1000
    sae: str = ""
    metadata: dict = field(default_factory=dict)

    def __post_init__(self):
        shape = self.indices.shape
        if (
            len(shape) != 2
            or self.timesteps.shape != shape[:1]
            or self.mean.shape != shape
            or self.gate.shape != shape
        ):
            raise ValueError(
                f"The edit {self.name!r} has shapes timesteps {tuple(self.timesteps.shape)}, indices {tuple(shape)}, "
                f"mean {tuple(self.mean.shape)}, gate {tuple(self.gate.shape)}; expected (T,) and three times (T, K)."
            )
        if not shape[0] or not (self.indices >= 0).any():
            raise ValueError(
                f"The edit {self.name!r} selects no latent. Lower the percentile or raise the number of features."
            )
        if not all(torch.isfinite(t.float()).all() for t in (self.timesteps, self.mean, self.gate)):
            raise ValueError(f"The edit {self.name!r} has values that are not finite.")
        if not math.isfinite(self.multiplier):
            raise ValueError(f"`multiplier` of the edit {self.name!r} has to be finite but is {self.multiplier}.")

    def count(self, num_features=None, percentile=None):
        """
        Number of latents per timestep for a request, by default the edit's own.

        Raises:
            ValueError: when the edit holds fewer, or fewer than one is asked for.
        """
        available = self.indices.shape[1]
        if percentile is not None:
            if not self.num_latents:
                raise ValueError(f"The edit {self.name!r} does not know its number of latents; pass `num_features`.")
            num_features = features_of_percentile(percentile, self.num_latents)
        if num_features is None:
            num_features = available if self.num_features is None else self.num_features
        if not 1 <= num_features <= available:
            raise ValueError(
                f"The edit {self.name!r} holds {available} latents per timestep but {num_features} were asked for. "
                f"Make it anew from the concept statistics with more."
            )
        return num_features


class ConceptEdits(Mapping):
    """
    Edits by concept name, saved as one `concepts.safetensors` and one `concepts.json`.

    Args:
        edits (`list[ConceptEdit]`):
            Edits with different names.

    Raises:
        ValueError: on a name that occurs twice.
    """

    def __init__(self, edits=()):
        self._edits = {}
        for edit in edits:
            if edit.name in self._edits:
                raise ValueError(f"Two edits are called {edit.name!r}.")
            self._edits[edit.name] = edit

    def __getitem__(self, name):
        if name not in self._edits:
            close = difflib.get_close_matches(str(name), self._edits, n=3, cutoff=0.5)
            known = f"Closest: {', '.join(close)}" if close else f"Known: {', '.join(sorted(self._edits)) or 'none'}"
            raise UnknownConceptError(f"There is no edit for the concept {name!r}. {known}.")
        return self._edits[name]

    def __iter__(self):
        return iter(self._edits)

    def __len__(self):
        return len(self._edits)

    def save_pretrained(self, save_directory):
        """Writes both files into a folder, aside first."""
        tensors, records = {}, []
        for number, edit in enumerate(self._edits.values()):
            for key in _EDIT_TENSORS:
                tensors[f"{number}.{key}"] = getattr(edit, key).cpu().contiguous().clone()
            record = {
                "name": edit.name,
                "multiplier": edit.multiplier,
                "num_features": edit.num_features,
                "sae": edit.sae,
            }
            record |= {"num_latents": edit.num_latents, "num_train_timesteps": edit.num_train_timesteps}
            records.append({**record, "metadata": edit.metadata})

        def write(folder):
            save_file(tensors, folder / EDITS_FILES[0])
            text = json.dumps({"format": "saeuron-concepts", "version": 1, "concepts": records}, indent=1)
            (folder / EDITS_FILES[1]).write_text(text + "\n", encoding="utf-8")

        write_folder_aside(save_directory, write)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, subfolder=None, **hub_options):
        """
        Loads edits from a folder or Hub repository.

        Raises:
            FileNotFoundError: when the files are not there.
            ValueError: when they are damaged, or their entries do not belong together.
        """
        folder = _local_folder(pretrained_model_name_or_path, subfolder, EDITS_FILES, hub_options)
        tensors, description = _read_pair(folder, EDITS_FILES, "saeuron-concepts")
        edits = []
        known = {entry.name for entry in fields(ConceptEdit)} - set(_EDIT_TENSORS)
        for number, record in enumerate(description.get("concepts", ())):
            unknown = sorted(set(record) - known)
            if unknown or "name" not in record:
                raise ValueError(
                    f"Concept {number} in {folder / EDITS_FILES[1]} has no name or the unknown entries {unknown}."
                )
            missing = [key for key in _EDIT_TENSORS if f"{number}.{key}" not in tensors]
            if missing:
                raise ValueError(f"{folder / EDITS_FILES[0]} lacks {missing} of the concept {record['name']!r}.")
            edits.append(ConceptEdit(**record, **{key: tensors.pop(f"{number}.{key}") for key in _EDIT_TENSORS}))
        if tensors:
            raise ValueError(f"{folder / EDITS_FILES[0]} has the unexpected tensors {sorted(tensors)[:5]}.")
        return cls(edits)


class UnknownConceptError(KeyError, ValueError):
    """A concept that has no edit or no statistics."""

    def __str__(self):
        return self.args[0]


class ConceptStatistics:
    r"""
    Mean latents of concepts, per timestep (paper, section 4.2; appendix for the score).

    Only sums and counts are kept: results of several processes are merged by adding them up.

    Args:
        timesteps (`torch.Tensor` of shape `(T,)`):
            Timesteps of the rows, the noisiest first.
        num_latents (`int`):
            Number of latents F.
        sae (`str`, *optional*):
            Fingerprint of the autoencoder.
        metadata (`dict`, *optional*):
            Base model, steps, guidance, prompts: whatever tells where the figures come from.
    """

    def __init__(self, timesteps, num_latents, sae="", metadata=None):
        self.timesteps = torch.as_tensor(timesteps, dtype=torch.float32)
        self.num_latents = num_latents
        self.sae = sae
        self.metadata = dict(metadata or {})
        self.sums, self.counts = {}, {}

    @property
    def names(self):
        """Concepts with at least one prompt."""
        return list(self.sums)

    def update(self, concept, latents):
        """
        Adds prompts of a concept.

        Args:
            concept (`str`):
                Its name.
            latents (`torch.Tensor` of shape `(prompts, T, num_latents)`):
                Dense latents averaged over the tokens of a prompt. They are rounded to half precision first, as the
                official files store them, so that both give the same selection.

        Raises:
            ValueError: on another shape or values that are not finite.
        """
        expected = (len(self.timesteps), self.num_latents)
        if latents.ndim != 3 or latents.shape[1:] != expected:
            raise ValueError(
                f"`latents` has to have shape (prompts, {expected[0]}, {expected[1]}) but has {tuple(latents.shape)}."
            )
        latents = latents.detach().cpu().half().float()
        if not torch.isfinite(latents).all():
            raise ValueError(f"Latents of {concept!r} are not finite in half precision.")
        total = latents.sum(0)
        self.sums[concept] = self.sums[concept] + total if concept in self.sums else total
        self.counts[concept] = self.counts.get(concept, 0) + len(latents)

    def merge(self, other):
        """
        Adds the prompts of other statistics of the same autoencoder and timesteps.

        Raises:
            ValueError: when they are of another one.
        """
        if other.sae != self.sae or not torch.equal(other.timesteps, self.timesteps):
            raise ValueError("Statistics of another autoencoder or of other timesteps cannot be merged.")
        for name, total in other.sums.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total.clone()
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]

    def mean(self, concept):
        """Mean over the prompts of a concept, `(T, num_latents)`; an unknown one raises [`UnknownConceptError`]."""
        if concept not in self.sums:
            close = difflib.get_close_matches(str(concept), self.sums, n=3, cutoff=0.5) or sorted(self.sums)
            raise UnknownConceptError(
                f"There are no statistics of {concept!r}. There are: {', '.join(close) or 'none'}."
            )
        return self.sums[concept] / self.counts[concept]

    def scores(self, concept):
        """
        How much more of a concept's activity a latent has than of the other concepts' activity.

        Returns:
            `torch.Tensor` of shape `(T, num_latents)`: share of the concept minus share of the others, prompts
            weighted equally; the plain mean if there is only one concept.
        """
        own = self.mean(concept)
        others = [name for name in self.sums if name != concept]
        if not others:
            return own
        rest = sum(self.sums[name] for name in others) / sum(self.counts[name] for name in others)
        return own / (own.sum(1, keepdim=True) + 1e-8) - rest / (rest.sum(1, keepdim=True) + 1e-8)

    def edit(self, concept, num_features=None, percentile=None, multiplier=-1.0):
        """
        The edit that unlearns a concept.

        Args:
            concept (`str`):
                Its name.
            num_features (`int`, *optional*):
                Latents per timestep, those with the highest scores; fewer where fewer have a score above 0.
            percentile (`float`, *optional*):
                Instead of a number: latents whose score is strictly above this percentile of all scores, in (0, 100).
            multiplier (`float`, *optional*, defaults to -1.0):
                gamma in the paper.

        Raises:
            ValueError: when neither or both of `num_features` and `percentile` are given, out of range, or select
            nothing.
        """
        if (num_features is None) == (percentile is None):
            raise ValueError("Pass either `num_features` or `percentile`.")
        scores = self.scores(concept)
        if percentile is not None:
            if not 0.0 < percentile < 100.0:
                raise ValueError(f"`percentile` has to lie in (0, 100) but is {percentile}.")
            threshold = torch.quantile(scores, percentile / 100, dim=1, keepdim=True)
            kept = (scores > threshold).sum(1)
        else:
            if not 1 <= num_features <= self.num_latents:
                raise ValueError(f"`num_features` has to lie between 1 and {self.num_latents} but is {num_features}.")
            # A latent that fires more for other concepts would damage those.
            kept = (scores > 0).sum(1).clamp_max(num_features)
        width = max(1, int(kept.max()))
        indices = scores.topk(width, dim=1).indices
        # The official code takes means of half-precision tensors; rounding alike keeps borderline gates alike.
        mean = self.mean(concept).half().float().gather(1, indices)
        gate = torch.stack([self.mean(name).half().float() for name in self.sums]).mean(0).gather(1, indices)
        padding = torch.arange(width) >= kept[:, None]
        return ConceptEdit(
            name=concept,
            timesteps=self.timesteps.clone(),
            indices=indices.masked_fill(padding, -1).int(),
            mean=mean.masked_fill(padding, 0),
            gate=gate.masked_fill(padding, 0),
            multiplier=float(multiplier),
            num_latents=self.num_latents,
            num_train_timesteps=self.metadata.get("num_train_timesteps", 1000),
            sae=self.sae,
            metadata={**self.metadata, "num_prompts": self.counts[concept]},
        )

    def save_pretrained(self, save_directory):
        """Writes means in half precision, counts and metadata into a folder, aside first."""
        if not self.sums:
            raise ValueError("There are no statistics to save.")
        tensors = {"timesteps": self.timesteps, "mean": torch.stack([self.mean(name) for name in self.names]).half()}
        description = {"format": "saeuron-statistics", "version": 1, "names": self.names, "sae": self.sae}
        description |= {"num_prompts": [self.counts[name] for name in self.names], "metadata": self.metadata}

        def write(folder):
            save_file(tensors, folder / STATISTICS_FILES[0])
            (folder / STATISTICS_FILES[1]).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")

        write_folder_aside(save_directory, write)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, subfolder=None, **hub_options):
        """Loads statistics that `save_pretrained` wrote, from a folder or Hub repository."""
        folder = _local_folder(pretrained_model_name_or_path, subfolder, STATISTICS_FILES, hub_options)
        tensors, description = _read_pair(folder, STATISTICS_FILES, "saeuron-statistics")
        if set(tensors) != {"timesteps", "mean"} or len(tensors["mean"]) != len(description["names"]):
            raise ValueError(f"{folder / STATISTICS_FILES[0]} does not hold what {STATISTICS_FILES[1]} describes.")
        mean = tensors["mean"].float()
        statistics = cls(tensors["timesteps"], mean.shape[-1], description["sae"], description["metadata"])
        for name, row, count in zip(description["names"], mean, description["num_prompts"], strict=True):
            statistics.sums[name], statistics.counts[name] = row * count, count
        return statistics


def _local_folder(source, subfolder, files, hub_options):
    path = Path(source, subfolder or "")
    if not path.is_dir() and not Path(source).is_dir() and str(source).count("/") == 1 and str(source)[0] not in "./~":
        patterns = [f"{subfolder}/{file}" if subfolder else file for file in files]
        path = Path(snapshot_download(str(source), allow_patterns=patterns, **hub_options), subfolder or "")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{path} lacks {', '.join(missing)}.")
    return path


def _read_pair(folder, files, kind):
    """Tensors and description of a folder; `ValueError` on what is damaged or of another kind."""
    description = read_json(folder / files[1])
    if description.get("format") != kind:
        raise ValueError(f"{folder / files[1]} is not of the format {kind!r}.")
    if description.get("version") != 1:
        raise ValueError(
            f"{folder / files[1]} has version {description.get('version')}; this release reads version 1. Update it."
        )
    return read_tensors(folder / files[0]), description


def prompt_seed(seed, concept, number):
    """
    Seed of a concept's prompt: the same whatever the batch size, the order of concepts or the number of processes.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{concept}/{number}".encode()).digest()[:6], "big")


@torch.no_grad()
def collect_statistics(
    pipe,
    sae,
    prompts,
    num_inference_steps=50,
    guidance_scale=7.5,
    seed=0,
    batch_size=8,
    denoiser=None,
    on_latents=None,
    **kwargs,
):
    """
    Runs a pipeline on prompts of several concepts and averages the latents of the conditional half (paper, section
    4.2).

    Args:
        pipe (`DiffusionPipeline`):
            A pipeline whose denoiser gets `timestep`.
        sae ([`SparseAutoencoder`]):
            Its `config.hook` names the block.
        prompts (`dict[str, list[str]]`):
            Prompts by concept.
        num_inference_steps (`int`), guidance_scale (`float`):
            As of the pipeline. Without guidance every sample is taken, with it the conditional half.
        seed (`int`):
            Each prompt draws noise of its own, derived from it.
        batch_size (`int`):
            Prompts per call.
        denoiser (`torch.nn.Module`, *optional*):
            `pipe.unet` or `pipe.transformer` by default.
        on_latents (`Callable`, *optional*):
            Also gets what is averaged, to group the same prompts in another way: called with the statistics, the
            concept, the number of the first prompt and latents `(prompts, T, num_latents)`.
        kwargs:
            Further arguments of the pipeline's call.

    Returns:
        [`ConceptStatistics`]

    Raises:
        ValueError: on an empty dictionary, a concept without prompts, an autoencoder that does not fit the block, a
            pipeline that batches otherwise than in an unconditional and a conditional half, or activations that are
            not finite.
    """
    # Hooks import the edits of this module.
    # Not an import statement: see `convert` in convert_saeuron.py.
    record_activations = import_module(".hooks_saeuron", __package__).record_activations

    empty = [name for name, texts in prompts.items() if not texts]
    if not prompts or empty:
        raise ValueError(
            f"`prompts` has to name concepts with prompts; {f'without any: {empty}' if empty else 'it is empty'}."
        )
    point = sae.config.hook or {}
    if not point.get("module"):
        raise ValueError("The autoencoder does not say which block it belongs to: set `module` in its `hook`.")
    denoiser = denoiser if denoiser is not None else getattr(pipe, "unet", None) or pipe.transformer
    statistics, collected = None, {}

    def collect(tokens, timestep):
        timestep = float(torch.as_tensor(timestep).reshape(-1)[0])
        # A second-order scheduler calls the denoiser twice at one timestep. So do pipelines that do not batch
        # guidance, and those make the conditional call first.
        if timestep in collected:
            return
        if tokens.shape[-1] != sae.config.d_in:
            raise ValueError(
                f"The autoencoder has {sae.config.d_in} channels but {point['module']} gives {tokens.shape[-1]}. It "
                f"was made for another model or block."
            )
        if len(tokens) not in (count, 2 * count):
            raise ValueError(
                f"The denoiser's batch has to be once or twice the number of prompts, {count}, but is {len(tokens)}. "
                f"Use one picture per prompt and plain classifier-free guidance."
            )
        # Guidance doubles the batch, unconditional half first.
        collected[timestep] = sae.encode(tokens[-count:]).float().mean(1).cpu()

    total = sum(-(-len(texts) // batch_size) for texts in prompts.values())
    with record_activations(denoiser, point, collect), pipe.progress_bar(total=total) as bar:
        # The bar counts batches; the pipeline's own bars would print one line each.
        bar_config = dict(getattr(pipe, "_progress_bar_config", {}))
        pipe.set_progress_bar_config(**{**bar_config, "disable": True})
        try:
            for concept, texts in prompts.items():
                for start in range(0, len(texts), batch_size):
                    batch = texts[start : start + batch_size]
                    count = len(batch)
                    generators = [
                        torch.Generator().manual_seed(prompt_seed(seed, concept, start + i)) for i in range(count)
                    ]
                    collected.clear()
                    pipe(
                        prompt=batch,
                        generator=generators,
                        num_inference_steps=num_inference_steps,
                        guidance_scale=guidance_scale,
                        output_type="latent",
                        **kwargs,
                    )
                    timesteps = sorted(collected, reverse=True)
                    if statistics is None:
                        metadata = {
                            "base_model": str(getattr(pipe, "name_or_path", "")),
                            "module": point["module"],
                            # FLUX and its kin hand their denoiser the time in [0, 1].
                            "num_train_timesteps": pipe.scheduler.config.num_train_timesteps
                            if timesteps[0] > 1
                            else 1,
                            "num_inference_steps": num_inference_steps,
                            "guidance_scale": guidance_scale,
                            "seed": seed,
                        }
                        statistics = ConceptStatistics(timesteps, sae.num_latents, sae.fingerprint(), metadata)
                    latents = torch.stack([collected[t] for t in timesteps], 1)
                    statistics.update(concept, latents)
                    if on_latents is not None:
                        on_latents(statistics, concept, start, latents)
                    bar.update()
        finally:
            pipe._progress_bar_config = bar_config
    return statistics

# SPDX-License-Identifier: Apache-2.0
"""The intervention of SAeUron as a hook, and a hook that reads what an autoencoder is trained on."""

import difflib
import inspect
import math
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.utils import logging

from .concepts_saeuron import ConceptEdit
from .modeling_saeuron import SparseAutoencoder, validate_hook


logger = logging.get_logger(__name__)

_TIMESTEP_SUFFIX = "_timestep"
MODES = ("scale", "replace")
ERRORS = ("exact", "official", "none")
TARGETS = ("both", "cond", "uncond")
_FEW = 8


@dataclass
class SAeUronConfig:
    r"""
    What is unlearned, and how ([SAeUron](https://huggingface.co/papers/2501.18052), section 4.3).

    Args:
        edits (`list[ConceptEdit]`):
            One per concept. Where two select the same latent, the larger `|multiplier * mean|` wins.
        strength (`float` or `dict[str, float]`, *optional*, defaults to 1.0):
            0 changes nothing, 1 is the method as published, for all concepts or by name. In between, latents move part
            of the way.
        multiplier (`float`, *optional*):
            Replaces the edits' own multipliers (gamma in the paper). More negative removes more and damages more.
        num_features (`int`, *optional*):
            Latents per step instead of the edits' own number. More remove more and damage more.
        percentile (`float`, *optional*):
            The same, as the paper counts: in (0, 100), the share of latents whose score lies below.
        mode (`str`, *optional*, defaults to `"scale"`):
            `"scale"` multiplies the selected latents. `"replace"` takes them as a detector: a token in which one of
            them fires is replaced by the mean of the sample's other tokens (by `b_dec` if there is none); a strength
            below 1 moves it part of the way, `multiplier` and `error` have no say.
        error (`str`, *optional*, defaults to `"exact"`):
            `"exact"` keeps what the autoencoder does not reconstruct. `"official"` adds that error with the wrong
            sign, as the published code does, to reproduce its figures. `"none"` leaves it out.
        apply_to (`str`, *optional*, defaults to `"both"`):
            Under classifier-free guidance: both halves of the batch, only the conditional or only the unconditional
            one. The halves are told apart by position, unconditional first, so anything but `"both"` needs guidance to
            be on.
        start, end (`float`, *optional*, defaults to 0.0 and 1.0):
            Part of the diffusion time in which the edit acts: 0 is pure noise, 1 the finished picture.

    Raises:
        ValueError: on an empty list of edits, edits for different autoencoders, unknown names or values out of range.
        TypeError: when an edit is not a [`ConceptEdit`].
    """

    edits: list[ConceptEdit] = field(default_factory=list)
    strength: float | dict[str, float] = 1.0
    multiplier: float | None = None
    num_features: int | None = None
    percentile: float | None = None
    mode: str = "scale"
    error: str = "exact"
    apply_to: str = "both"
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self):
        if not self.edits:
            raise ValueError("`edits` is empty: name at least one concept.")
        for edit in self.edits:
            if not isinstance(edit, ConceptEdit):
                raise TypeError(f"`edits` has to hold `ConceptEdit`s but holds a {type(edit).__name__}.")
        if len({edit.sae for edit in self.edits}) > 1:
            raise ValueError("`edits` were made for different autoencoders; apply them under different names.")
        for name, values in (("mode", MODES), ("error", ERRORS), ("apply_to", TARGETS)):
            if getattr(self, name) not in values:
                raise ValueError(f"`{name}` has to be one of {', '.join(values)} but is {getattr(self, name)!r}.")
        if self.num_features is not None and self.percentile is not None:
            raise ValueError("Pass either `num_features` or `percentile`, not both.")
        if not 0.0 <= self.start <= self.end <= 1.0:
            raise ValueError(
                f"`start` and `end` have to satisfy 0 <= start <= end <= 1 but are {self.start} and {self.end}."
            )
        names = [edit.name for edit in self.edits]
        strengths = self.strength if isinstance(self.strength, dict) else dict.fromkeys(names, self.strength)
        unknown = sorted(set(strengths) - set(names))
        if unknown:
            raise ValueError(f"`strength` names {unknown}, which is not unlearned here; unlearned are {names}.")
        for name, strength in strengths.items():
            if not strength >= 0.0 or strength == float("inf"):
                raise ValueError(f"`strength` of {name!r} has to be at least 0 but is {strength}.")
        self.strengths = {name: float(strengths.get(name, 1.0)) for name in names}


class _Clock:
    """The timestep of the forward pass that is running, shared by the hooks of one denoiser."""

    timestep = None


class SAeUronTimestepHook(ModelHook):
    """Reads `timestep` where the denoiser is called."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.position = None

    def initialize_hook(self, module):
        # U-Nets take it second, FLUX takes it fourth.
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        self.position = parameters.index("timestep") if "timestep" in parameters else len(parameters)
        return module

    def pre_forward(self, module, *args, **kwargs):
        timestep = kwargs.get("timestep", args[self.position] if len(args) > self.position else None)
        if timestep is None:
            raise ValueError(f"{type(module).__name__} was called without `timestep`, which SAeUron needs.")
        self.clock.timestep = timestep
        return args, kwargs


def tokens_of(signal, hook):
    """Tokens `(batch, tokens, channels)` of a block's signal, by the layout that the hook point describes."""
    if hook["layout"] == "nchw":
        return signal.flatten(2).transpose(1, 2)
    return signal if hook["token_slice"] is None else signal[:, slice(*hook["token_slice"])]


def with_tokens(signal, tokens, hook):
    """`signal` with its tokens replaced."""
    tokens = tokens.to(signal.dtype)
    if hook["layout"] == "nchw":
        return tokens.transpose(1, 2).reshape(signal.shape)
    if hook["token_slice"] is None:
        return tokens
    signal = signal.clone()
    signal[:, slice(*hook["token_slice"])] = tokens
    return signal


class _BlockHook(ModelHook):
    """Finds the signal in what a block takes or returns, and hands its tokens to `process`."""

    def __init__(self, point):
        super().__init__()
        self.point = validate_hook(point or {})
        self._source = None

    def process(self, tokens):
        """New tokens, or the very same object where nothing changes."""
        raise NotImplementedError

    def pre_forward(self, module, *args, **kwargs):
        source = args[0] if args else kwargs["hidden_states"]
        if self.point["signal"] == "diff":
            self._source = source
        if self.point["signal"] != "input":
            return args, kwargs
        changed = self._process_signal(source)
        if args:
            return (changed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": changed}

    def post_forward(self, module, output):
        if self.point["signal"] == "input":
            return output
        signal = self._signal(output)
        if self.point["signal"] == "diff":
            source, self._source = self._source, None
            difference = signal - source
            changed = self._process_signal(difference)
            # Added to the output, not to the input: tokens without a change stay bit for bit what they are.
            changed = signal if changed is difference else signal + (changed - difference)
        else:
            changed = self._process_signal(signal)
        return output if changed is signal else self._replace(output, changed)

    def _process_signal(self, signal):
        tokens = tokens_of(signal, self.point)
        changed = self.process(tokens)
        return signal if changed is tokens else with_tokens(signal, changed, self.point)

    def _signal(self, output):
        if isinstance(output, torch.Tensor):
            return output
        if isinstance(output, (tuple, list)):
            return output[self.point["output_index"] or 0]
        return output.sample

    def _replace(self, output, signal):
        if isinstance(output, torch.Tensor):
            return signal
        if isinstance(output, (tuple, list)):
            outputs = list(output)
            outputs[self.point["output_index"] or 0] = signal
            return type(output)(outputs)
        # A copy, so that whoever holds the block's own output does not see it change.
        return type(output)(**{**output, "sample": signal})


class SAeUronRecorderHook(_BlockHook):
    """Hands tokens `(batch, tokens, channels)` and the timestep to `callback` and changes nothing."""

    def __init__(self, point, clock, callback):
        super().__init__(point)
        self.clock, self.callback = clock, callback

    def process(self, tokens):
        self.callback(tokens, self.clock.timestep)
        return tokens


class SAeUronHook(_BlockHook):
    """
    Scales selected latents of a block's tokens (paper, section 4.3): `y = X + (z' - z) W_dec` with
    `z'_i = multiplier * mean_i * z_i` where latent `i` is selected for the timestep and `z_i > gate_i`.

    Stateless: the rows to use follow from the timestep alone, so pipelines may be called again, with other steps and
    schedulers.
    """

    def __init__(self, sae, config, clock):
        super().__init__(sae.config.hook)
        self.sae, self.config, self.clock = sae, config, clock
        self._tables = build_tables(config)
        self._warned_range = self._warned_finite = False

    def process(self, tokens):
        if all(strength == 0.0 for strength in self.config.strengths.values()):
            return tokens
        if tokens.shape[-1] != self.sae.config.d_in:
            raise ValueError(
                f"The autoencoder has {self.sae.config.d_in} channels but {self.point['module']} gives "
                f"{tokens.shape[-1]}. It was made for another model or block."
            )
        if self.sae.device != tokens.device:
            self.sae.to(tokens.device)
        if self._tables["timesteps"].device != tokens.device:
            self._tables = {name: table.to(tokens.device) for name, table in self._tables.items()}
        if self.config.apply_to == "both":
            return self._edit(tokens, slice(None))
        if tokens.shape[0] % 2:
            raise ValueError(
                f"`apply_to={self.config.apply_to!r}` needs classifier-free guidance, both halves in one batch, but "
                f"the batch has {tokens.shape[0]} entries. Use `apply_to='both'` or turn guidance on."
            )
        half = tokens.shape[0] // 2
        cond = self.config.apply_to == "cond"
        chosen = tokens[half:] if cond else tokens[:half]
        edited = self._edit(chosen, slice(half, None) if cond else slice(half))
        if edited is chosen:
            return tokens
        return torch.cat([tokens[:half], edited] if cond else [edited, tokens[half:]])

    def _rows(self, device, batch):
        """
        Row of the tables for each sample, `(1,)` where all share a timestep, and whether the edit acts then, `(rows,
        1, 1)`.
        """
        timestep = self.clock.timestep
        if not isinstance(timestep, torch.Tensor):
            timestep = torch.tensor(float(timestep))
        timestep = timestep.to(device, torch.float32).reshape(-1)
        timestep = timestep[batch] if timestep.shape[0] > 1 else timestep
        known = self._tables["timesteps"]
        if not torch.compiler.is_compiling() and not self._warned_range:
            low, high = known.min(), known.max()
            spacing = (high - low) / max(len(known) - 1, 1) + 1e-3 * self._tables["num_train_timesteps"]
            if ((timestep < low - spacing) | (timestep > high + spacing)).any():
                self._warned_range = True
                logger.warning(
                    f"The timestep {timestep[0].item():g} lies outside those of the edit ({low.item():g} to "
                    f"{high.item():g}); the nearest is used. Was it made for another kind of scheduler?"
                )
        progress = 1 - timestep / self._tables["num_train_timesteps"]
        acts = (progress >= self.config.start) & (progress <= self.config.end)
        return (timestep[:, None] - known).abs().argmin(1), acts[:, None, None]

    def _edit(self, tokens, batch):
        sae = self.sae
        rows, acts = self._rows(tokens.device, batch)
        columns = ("indices", "factors", "gates", "strengths")
        indices, factors, gates, strengths = (self._tables[name][rows] for name in columns)
        normalised, undo = sae.normalize_input(tokens)
        normalised = normalised.to(sae.dtype)
        # Padding selects latent 0 and can never pass its infinite gate.
        weight, bias = sae.encoder.weight[indices], sae.encoder.bias[indices]
        x = normalised - sae.b_dec if sae.config.apply_b_dec_to_input else normalised
        decoder = sae.W_dec[indices]
        norms = decoder.norm(dim=-1) if sae.config.rescale_by_decoder_norm else None
        # A product with the few selected rows tells in which tokens they fire at all: (batch, tokens, selected).
        selected = x @ weight.transpose(1, 2) + bias[:, None]
        selected = F.relu(selected if norms is None else selected * norms[:, None])
        fires = (selected > gates[:, None]) & acts

        if not torch.compiler.is_compiling():
            any_fires, finite, any_acts = torch.stack([fires.any(), selected.isfinite().all(), acts.any()]).tolist()
            if not finite and not self._warned_finite:
                self._warned_finite = True
                logger.warning(f"{self.point['module']} gives values that are not finite; SAeUron leaves them alone.")
            if not any_fires and (self.config.error == "exact" or not any_acts):
                return tokens

        if "topk" in sae.config.activation:
            # Whether a selected latent is among a token's k largest depends on all others, so firing tokens are
            # encoded in full. Compiled, all are: shapes that depend on data would break the graph.
            indices = indices.expand(tokens.shape[0], -1)
            if torch.compiler.is_compiling():
                largest, values = self._largest(normalised, indices[:, None].expand(-1, tokens.shape[1], -1))
                selected, fires = values, fires & largest
            else:
                samples, positions = fires.any(-1).nonzero(as_tuple=True)
                largest, values = self._largest(normalised[samples, positions], indices[samples])
                selected = selected.index_put((samples, positions), values)
                fires = fires.index_put((samples, positions), fires[samples, positions] & largest)
        elif sae.config.activation == "jumprelu":
            fires = fires & (selected > sae.threshold[indices][:, None])

        if self.config.mode == "replace":
            return self._replace_tokens(
                tokens, torch.where(fires, strengths[:, None], 0.0).amax(-1, keepdim=True), undo
            )
        z = torch.where(fires, selected, torch.zeros_like(selected))
        change = z * (factors[:, None] - 1).to(z.dtype)
        if norms is not None:
            change = change / norms[:, None].clamp_min(torch.finfo(z.dtype).tiny)
        change = change @ decoder
        if sae.config.input_norm != "none":
            change = undo(change) - undo(torch.zeros_like(change))
        # Half precision is summed in single precision, as the official code does.
        wide = torch.promote_types(tokens.dtype, torch.float32)
        if self.config.error == "exact":
            return (tokens.to(wide) + change.to(wide)).to(tokens.dtype)
        reconstruction = sae.reconstruct(tokens).to(wide)
        if self.config.error == "official":
            # The published code adds `x_hat - x` where `x - x_hat` is meant.
            reconstruction = reconstruction + (reconstruction - tokens.to(wide))
        return torch.where(acts, (reconstruction + change.to(wide)).to(tokens.dtype), tokens)

    def _largest(self, normalised, indices):
        """Which of the latents `indices` are among a token's k largest, and their values."""
        h, k = self.sae.pre_activations(normalised), self.sae.config.k
        values = h.gather(-1, indices)
        if indices.shape[-1] <= _FEW:
            # Counting what is larger is several times faster than a partial sort, while it is done for few latents.
            return (h[..., None, :] > values[..., None]).sum(-1) < k, F.relu(values)
        return values >= h.topk(k, dim=-1).values[..., -1:], F.relu(values)

    def _replace_tokens(self, tokens, weight, undo):
        """Moves each token by `weight` `(batch, tokens, 1)` towards the mean of those whose weight is 0."""
        others = weight == 0
        count = others.sum(1, keepdim=True)
        mean = tokens.where(others, torch.zeros_like(tokens)).sum(1, keepdim=True) / count.clamp_min(1)
        bias = undo(self.sae.b_dec.expand_as(tokens)).to(tokens.dtype)
        replacement = torch.where(count > 0, mean, bias)
        return torch.where(others, tokens, tokens.lerp(replacement, weight.clamp_max(1).to(tokens.dtype)))


def build_tables(config):
    """
    The edits of a config as tensors, one row per timestep: `timesteps` `(T,)`; `indices`, `factors` (what a latent is
    multiplied by), `gates` and `strengths`, all `(T, K)`, padded with latent 0 behind an infinite gate.
    """
    # A concept at strength 0 must not win a latent from another one.
    edits = [edit for edit in config.edits if config.strengths[edit.name] > 0]
    timesteps = sorted({t for edit in config.edits for t in edit.timesteps.tolist()}, reverse=True)
    rows = []
    for timestep in timesteps:
        chosen = {}
        for edit in edits:
            count = edit.count(config.num_features, config.percentile)
            multiplier = edit.multiplier if config.multiplier is None else config.multiplier
            row = (edit.timesteps - timestep).abs().argmin()
            # Rounded to half precision, as the official code keeps it.
            scales = (multiplier * edit.mean[row, :count].half()).tolist()
            if not all(math.isfinite(scale) for scale in scales):
                raise ValueError(f"`multiplier` {multiplier} is too large for the edit {edit.name!r}.")
            for index, scale, gate in zip(edit.indices[row].tolist(), scales, edit.gate[row].tolist()):
                if index < 0:
                    continue
                strength = config.strengths[edit.name]
                entry = scale, 1 + strength * (scale - 1), gate, strength
                if index in chosen:
                    logger.info(
                        f"Two concepts select latent {index} at timestep {timestep:g}; the stronger edit is kept."
                    )
                    entry = max(entry, chosen[index], key=lambda e: abs(e[0]))
                chosen[index] = entry
        rows.append(chosen)
    width = max(1, max(len(row) for row in rows))
    shape = (len(rows), width)
    indices, factors, gates = torch.zeros(shape, dtype=torch.long), torch.ones(shape), torch.full(shape, float("inf"))
    strengths = torch.zeros(shape)
    for r, row in enumerate(rows):
        for column, (index, (_, factor, gate, strength)) in enumerate(row.items()):
            indices[r, column], factors[r, column], gates[r, column] = index, factor, gate
            strengths[r, column] = strength
    return {
        "timesteps": torch.tensor(timesteps, dtype=torch.float32),
        "num_train_timesteps": torch.tensor(float(config.edits[0].num_train_timesteps)),
        "indices": indices,
        "factors": factors,
        "gates": gates,
        "strengths": strengths,
    }


def find_block(module, point):
    """
    The module that a hook point names.

    Raises:
        ValueError: when there is none, with near matches.
    """
    path = (point or {}).get("module")
    if not path:
        return module
    names = dict(module.named_modules())
    if path not in names:
        close = difflib.get_close_matches(path, names, n=3, cutoff=0.5)
        hint = f"Closest: {', '.join(close)}." if close else "Is it the right base model?"
        raise ValueError(f"{type(module).__name__} has no module {path!r}. {hint}")
    return names[path]


def unwrap_module(module):
    """The module inside the wrapper of `torch.compile`, which runs the hooks that are on it."""
    return getattr(module, "_orig_mod", module)


def _registry(module):
    return HookRegistry.check_if_exists_or_initialize(module)


def _remove_hook(module, name):
    """
    Removes a hook and keeps the one around it working: `HookRegistry.remove_hook` overwrites the forward of a hook
    that replaces the forward (`new_forward`) instead of what it calls inside.
    """
    registry = _registry(module)
    following = registry._hook_order.index(name) + 1
    outer = registry._fn_refs[following] if following < len(registry._fn_refs) else None
    forward = outer.forward if outer is not None and outer.original_forward is not None else None
    registry.remove_hook(name, recurse=False)
    if forward is not None:
        outer.original_forward, outer.forward = outer.forward, forward


def _hooks(module):
    return getattr(getattr(module, "_diffusers_hook", None), "hooks", {})


def applied_names(module):
    """Names under which SAeUron is applied to a denoiser."""
    hooks = _hooks(unwrap_module(module))
    return [
        name.removesuffix(_TIMESTEP_SUFFIX) for name, hook in hooks.items() if isinstance(hook, SAeUronTimestepHook)
    ]


def _attach(module, point, name, make_hook):
    block = find_block(module, point)
    if name in applied_names(module):
        raise ValueError(
            f"{name!r} is already applied to this {type(module).__name__}; remove it first or choose another name."
        )
    if name in _hooks(block):
        raise ValueError(
            f"Another hook of {(point or {}).get('module') or 'the module'} is called {name!r}; choose another name."
        )
    clock = _Clock()
    # Made first: whatever it refuses, nothing is attached yet.
    hook = make_hook(clock)
    _registry(module).register_hook(SAeUronTimestepHook(clock), name + _TIMESTEP_SUFFIX)
    _registry(block).register_hook(hook, name)


def apply_saeuron(module, sae, config, name="saeuron"):
    r"""
    Lets a denoiser unlearn concepts: hooks the block that the autoencoder was trained on. No weight changes.

    [SAeUron](https://huggingface.co/papers/2501.18052), section 4.3. Several autoencoders may be applied under
    different names, on different blocks or the same one, in the order of the calls. LoRAs, img2img, offloading and
    compilation go on working.

    Args:
        module (`torch.nn.Module`):
            The denoiser (`pipe.unet` or `pipe.transformer`).
        sae ([`SparseAutoencoder`]):
            Its `config.hook["module"]` names the block inside `module`; without it `module` itself is hooked.
        config ([`SAeUronConfig`]):
            What is unlearned, and how.
        name (`str`, *optional*, defaults to `"saeuron"`):
            Name to remove it by.

    Raises:
        ValueError: when the name is taken, the block does not exist or has other channels, or an edit belongs to
        another autoencoder.

    Example:

    ```py
    >>> from diffusers_ext import ConceptEdits, SAeUronConfig, SparseAutoencoder, apply_saeuron, lab, remove_saeuron

    >>> pipe = lab.load_pipeline()
    >>> sae = SparseAutoencoder.from_pretrained(lab.saeuron_folder())
    >>> edits = ConceptEdits.from_pretrained(lab.saeuron_folder())
    >>> apply_saeuron(pipe.unet, sae, SAeUronConfig(edits=[edits["cat"]]))
    >>> image = pipe("cat, neon style", num_inference_steps=20, guidance_scale=4.0).images[0]
    >>> remove_saeuron(pipe.unet)
    ```
    """
    if not isinstance(sae, SparseAutoencoder):
        raise TypeError(f"`sae` has to be a `SparseAutoencoder` but is a {type(sae).__name__}.")
    fingerprint = sae.fingerprint()
    for edit in config.edits:
        if edit.sae and edit.sae != fingerprint:
            raise ValueError(
                f"The edit {edit.name!r} was made for the autoencoder {edit.sae} but this one is {fingerprint}. Its "
                f"latents mean other things: load the autoencoder that belongs to the edits, or make new ones."
            )
        if int(edit.indices.max()) >= sae.num_latents:
            raise ValueError(f"The edit {edit.name!r} selects latent {int(edit.indices.max())} of {sae.num_latents}.")
    module, point = unwrap_module(module), validate_hook(sae.config.hook or {})
    side = "in_channels" if point["signal"] == "input" else "out_channels"
    channels = getattr(find_block(module, point), side, None)
    if isinstance(channels, int) and point["layout"] == "nchw" and channels != sae.config.d_in:
        raise ValueError(
            f"The autoencoder has {sae.config.d_in} channels but {point['module']} gives {channels}. It was made for "
            f"another model or block."
        )
    _warn_about_base(module, sae)
    _attach(module, point, name, lambda clock: SAeUronHook(sae, config, clock))


def _warn_about_base(module, sae):
    expected = (sae.config.hook or {}).get("base_model")
    actual = getattr(getattr(module, "config", None), "_name_or_path", None)
    if expected and actual and expected not in str(actual):
        logger.warning(
            f"The autoencoder was trained on {expected} but this denoiser comes from {actual}. On a fine-tune it may "
            f"work less well; on another model it does not."
        )


def remove_saeuron(module, name=None):
    """
    Takes SAeUron off a denoiser; its outputs are bit for bit those of before.

    Args:
        module (`torch.nn.Module`):
            What `apply_saeuron` was called on.
        name (`str`, *optional*):
            What to remove; everything of SAeUron by default.

    Raises:
        ValueError: when nothing of that name is applied.
    """
    module = unwrap_module(module)
    names = applied_names(module)
    if name is not None and name not in names:
        raise ValueError(f"{name!r} is not applied to this {type(module).__name__}; applied are {names or 'none'}.")
    for applied in names if name is None else [name]:
        _remove_hook(module, applied + _TIMESTEP_SUFFIX)
        for block in module.modules():
            if isinstance(_hooks(block).get(applied), _BlockHook):
                _remove_hook(block, applied)


@contextmanager
def record_activations(module, point, callback, name="saeuron_recorder"):
    """
    While the context is open, `callback(tokens, timestep)` gets the tokens `(batch, tokens, channels)` of every
    forward pass.

    Args:
        module (`torch.nn.Module`):
            The denoiser.
        point (`dict`):
            The hook point, as `hook` of [`SparseAutoencoder`].
        callback (`Callable`):
            Called once per forward pass; must not change the tokens.
        name (`str`, *optional*):
            Different names allow several at a time.

    Raises:
        ValueError: when the module does not exist.
    """
    point, module = validate_hook(point), unwrap_module(module)
    _attach(module, point, name, lambda clock: SAeUronRecorderHook(point, clock, callback))
    try:
        yield
    finally:
        remove_saeuron(module, name)

# SPDX-License-Identifier: Apache-2.0
"""The sparse autoencoder of SAeUron as a diffusers model."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import BaseOutput
from torch import nn

from .convert_saeuron import detect_format, export_checkpoint, read_checkpoint


ACTIVATIONS = ("topk", "batch_topk", "sample_topk", "relu", "jumprelu")
INPUT_NORMS = ("none", "unit", "constant_norm")
LAYOUTS = ("nchw", "bnd")
SIGNALS = ("output", "diff", "input")
# What `DiffusionPipeline.from_pretrained` hands to every component; an autoencoder is one file, read in one go.
PIPELINE_LOADER_OPTIONS = (
    "device_map", "disable_mmap", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict",
    "quantization_config", "use_flashpack", "use_safetensors", "variant",
)  # fmt: skip


@dataclass
class SparseAutoencoderOutput(BaseOutput):
    """
    Args:
        sample (`torch.Tensor` of shape `(..., d_in)`):
            Reconstruction.
        latents (`torch.Tensor` of shape `(..., num_latents)`):
            Dense latents after the selection, zero where not selected.
    """

    sample: torch.Tensor
    latents: torch.Tensor


def validate_hook(hook):
    """Checks the description of a hook point and fills in its defaults; `ValueError` on what does not exist."""
    defaults = {
        "base_model": None,
        "module": None,
        "layout": "nchw",
        "output_index": None,
        "signal": "output",
        "token_slice": None,
    }
    unknown = sorted(set(hook) - set(defaults))
    if unknown:
        raise ValueError(f"`hook` has the unknown entries {unknown}; it takes {sorted(defaults)}.")
    hook = {**defaults, **hook}
    for key, values in (("layout", LAYOUTS), ("signal", SIGNALS)):
        if hook[key] not in values:
            raise ValueError(f"`hook[{key!r}]` has to be one of {', '.join(values)} but is {hook[key]!r}.")
    return hook


class SparseAutoencoder(ModelMixin, ConfigMixin):
    r"""
    A sparse autoencoder of the activations of one block of a denoiser.

    [SAeUron](https://huggingface.co/papers/2501.18052), section 4.1: `h = (x - b_dec) W_enc^T + b_enc`, `a = relu(h)`,
    `z` keeps the `k` largest entries of `a`, `x_hat = z W_dec + b_dec`. One class reads the checkpoints of SAeUron and
    EleutherAI sparsify, SAELens, dictionary_learning and sdxl-unbox, see [`~SparseAutoencoder.from_pretrained`].

    Args:
        d_in (`int`):
            Channels of a token.
        num_latents (`int`, *optional*, defaults to 0):
            Number of latents F; 0 means `d_in * expansion_factor`.
        expansion_factor (`int`, *optional*, defaults to 16):
            Latents per channel where `num_latents` is 0.
        k (`int`, *optional*, defaults to 32):
            Latents kept per token by the top-k activations. More latents reconstruct better and are harder to
            interpret.
        activation (`str`, *optional*, defaults to `"topk"`):
            `"topk"` (k per token), `"batch_topk"` (k times tokens over the batch), `"sample_topk"` (k over all tokens
            of a sample), `"relu"` or `"jumprelu"` (above `threshold`). The batch and sample modes act in training
            only: at inference they keep k per token, as the official loader does.
        apply_b_dec_to_input (`bool`, *optional*, defaults to `True`):
            Whether `b_dec` is subtracted from the input.
        input_norm (`str`, *optional*, defaults to `"none"`):
            `"unit"` (centre, divide by the unbiased deviation + 1e-5; SAELens calls it layer_norm) or
            `"constant_norm"` (norm sqrt(d_in)). Undone on the way out.
        relu_before_topk (`bool`, *optional*, defaults to `True`):
            Whether the top-k is taken after the ReLU, as SAeUron does, or before it, as SAELens and sdxl-unbox do.
        rescale_by_decoder_norm (`bool`, *optional*, defaults to `False`):
            Whether latents are multiplied by the norm of their decoder row before the selection, and divided by it in
            `decode`.
        skip_connection (`bool`, *optional*, defaults to `False`):
            Whether the reconstruction gains `x W_skip^T` (sparsify).
        hook (`dict`, *optional*):
            Where the activations come from: `base_model`, `module` (path inside the denoiser), `layout` (`"nchw"` or
            `"bnd"`), `output_index` (which of several outputs), `signal` (`"output"`, `"diff"` = output - input,
            `"input"`), `token_slice` (`[start, stop]` of a token sequence).
        fingerprint (`str`, *optional*):
            What [`~SparseAutoencoder.fingerprint`] was before the weights were cast to bfloat16; not set by hand.

    Raises:
        TypeError: on sizes that are no integers.
        ValueError: on sizes that are not positive, `k` larger than the number of latents, or unknown names.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import SparseAutoencoder

    >>> sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4)
    >>> z = sae.encode(torch.randn(2, 9, 16))
    >>> z.shape, bool(((z > 0).sum(-1) <= 4).all())
    (torch.Size([2, 9, 64]), True)
    ```
    """

    @register_to_config
    def __init__(
        self,
        d_in: int,
        num_latents: int = 0,
        expansion_factor: int = 16,
        k: int = 32,
        activation: str = "topk",
        apply_b_dec_to_input: bool = True,
        input_norm: str = "none",
        relu_before_topk: bool = True,
        rescale_by_decoder_norm: bool = False,
        skip_connection: bool = False,
        hook: dict | None = None,
        fingerprint: str | None = None,
    ):
        super().__init__()
        sizes = {"d_in": d_in, "num_latents": num_latents, "expansion_factor": expansion_factor, "k": k}
        for name, value in sizes.items():
            if not isinstance(value, int):
                raise TypeError(f"`{name}` has to be an integer but is {value!r}.")
        if d_in < 1 or num_latents < 0 or expansion_factor < 1:
            raise ValueError(
                f"`d_in` and `expansion_factor` have to be positive and `num_latents` not negative but are {d_in}, "
                f"{expansion_factor} and {num_latents}."
            )
        self.num_latents = num_latents or d_in * expansion_factor
        if activation not in ACTIVATIONS:
            raise ValueError(f"`activation` has to be one of {', '.join(ACTIVATIONS)} but is {activation!r}.")
        if input_norm not in INPUT_NORMS:
            raise ValueError(f"`input_norm` has to be one of {', '.join(INPUT_NORMS)} but is {input_norm!r}.")
        if "topk" in activation and not 1 <= k <= self.num_latents:
            raise ValueError(f"`k` has to be between 1 and the number of latents, {self.num_latents}, but is {k}.")
        if hook is not None:
            self.register_to_config(hook=validate_hook(hook))
        self.encoder = nn.Linear(d_in, self.num_latents)
        nn.init.zeros_(self.encoder.bias)
        self.W_dec = nn.Parameter(self.encoder.weight.detach().clone())
        self.b_dec = nn.Parameter(torch.zeros(d_in))
        if activation == "jumprelu":
            self.threshold = nn.Parameter(torch.zeros(self.num_latents))
        if skip_connection:
            self.W_skip = nn.Parameter(torch.zeros(d_in, d_in))
        self._fingerprint = None
        self.normalize_decoder_()

    @torch.no_grad()
    def normalize_decoder_(self):
        """Divides every row of `W_dec` by its norm (plus the dtype's epsilon), in place."""
        if self.W_dec.device.type != "meta":
            self.W_dec /= self.W_dec.norm(dim=1, keepdim=True) + torch.finfo(self.W_dec.dtype).eps

    def normalize_input(self, x):
        """
        Args:
            x (`torch.Tensor` of shape `(..., d_in)`): tokens.

        Returns:
            `tuple`: the tokens as the encoder sees them, and a function that undoes the normalisation.
        """
        if x.shape[-1] != self.config.d_in:
            raise ValueError(
                f"The autoencoder takes tokens of shape (..., {self.config.d_in}) but got {tuple(x.shape)}. Maps of "
                f"shape (batch, channels, height, width) have to be flattened to tokens first."
            )
        norm = self.config.input_norm
        if norm == "none":
            return x, lambda y: y
        if norm == "constant_norm":
            scale = self.config.d_in**0.5 / x.norm(dim=-1, keepdim=True)
            return x * scale, lambda y: y / scale
        mean = x.mean(dim=-1, keepdim=True)
        centred = x - mean
        std = centred.std(dim=-1, keepdim=True)
        # The epsilon keeps the division finite; it is not multiplied back, as in the official code.
        return centred / (std + 1e-5), lambda y: y * std + mean

    def pre_activations(self, x):
        """
        `h` of the class docstring (times the decoder norms where `rescale_by_decoder_norm`), before ReLU and
        selection.

        Args:
            x (`torch.Tensor` of shape `(..., d_in)`): normalised tokens, see `normalize_input`.

        Returns:
            `torch.Tensor` of shape `(..., num_latents)`
        """
        x = x.to(self.encoder.weight.dtype)
        # x W^T - b_dec W^T + b_enc would save a pass over x, but rounds differently from the official code.
        h = self.encoder(x - self.b_dec if self.config.apply_b_dec_to_input else x)
        return h * self.W_dec.norm(dim=1) if self.config.rescale_by_decoder_norm else h

    def encode(self, x, k=None, num_samples=None):
        """
        Dense latents of tokens.

        Args:
            x (`torch.Tensor` of shape `(..., d_in)`):
                Tokens; for `"sample_topk"` in training the first axis counts samples unless `num_samples` says
                otherwise.
            k (`int`, *optional*):
                Latents per token instead of the configured `k`.
            num_samples (`int`, *optional*):
                Number of samples that a flat `x` of shape `(N, d_in)` consists of.

        Returns:
            `torch.Tensor` of shape `(..., num_latents)`
        """
        return self.select(self.pre_activations(self.normalize_input(x)[0]), k, num_samples)

    def select(self, h, k=None, num_samples=None):
        """Dense latents out of pre-activations `(..., num_latents)`; the arguments are those of `encode`."""
        activation = self.config.activation
        if activation == "relu":
            return F.relu(h)
        if activation == "jumprelu":
            return F.relu(h) * (h > self.threshold)
        values, indices = self.topk(h, k, num_samples)
        groups = h.reshape(*values.shape[:-1], -1)
        return F.relu(torch.zeros_like(groups).scatter(-1, indices, values)).view_as(h)

    def topk(self, h, k=None, num_samples=None):
        """
        The selected entries of pre-activations `h` of shape `(..., num_latents)`, for the top-k activations.

        Returns:
            `tuple` of values and indices: per token `(..., k)`; in training, over the whole batch or per sample where
            the activation says so, one row per group with indices into the flattened group.
        """
        k = self.config.k if k is None else k
        if not 1 <= k <= self.num_latents:
            raise ValueError(f"`k` has to be between 1 and the number of latents, {self.num_latents}, but is {k}.")
        a = F.relu(h) if self.config.relu_before_topk else h
        tokens = h[..., 0].numel()
        if self.training and self.config.activation == "batch_topk":
            return a.reshape(1, -1).topk(k * tokens, sorted=False)
        if self.training and self.config.activation == "sample_topk":
            samples = num_samples or h.shape[0]
            if tokens % samples or k * samples > h.numel():
                raise ValueError(
                    f"`num_samples` has to divide the number of tokens, {tokens}, into samples of at least k = {k} "
                    f"latents, but is {samples}."
                )
            return a.reshape(samples, -1).topk(k, sorted=False)
        return a.topk(k, sorted=False)

    def decode(self, z):
        """
        Args:
            z (`torch.Tensor` of shape `(..., num_latents)`): dense latents.

        Returns:
            `torch.Tensor` of shape `(..., d_in)`: reconstruction of the normalised tokens.
        """
        if self.config.rescale_by_decoder_norm:
            z = z / self.W_dec.norm(dim=1)
        return z @ self.W_dec + self.b_dec

    def reconstruct(self, x):
        """Reconstruction of tokens `(..., d_in)`, all normalisations undone, in the dtype of the weights."""
        return self(x).sample

    def forward(self, x, return_dict=True):
        """
        Args:
            x (`torch.Tensor` of shape `(..., d_in)`): tokens.
            return_dict (`bool`, *optional*, defaults to `True`): whether to return an output class or a tuple.

        Returns:
            [`SparseAutoencoderOutput`] or `tuple`
        """
        normalised, undo = self.normalize_input(x)
        latents = self.select(self.pre_activations(normalised))
        sample = self.decode(latents)
        if self.config.skip_connection:
            sample = sample + normalised.to(sample.dtype) @ self.W_skip.T
        sample = undo(sample)
        return SparseAutoencoderOutput(sample=sample, latents=latents) if return_dict else (sample, latents)

    def fingerprint(self):
        """
        Sixteen hexadecimal digits that change with the weights: what a saved edit says it was made for. Kept until the
        weights change; writing through `.data` goes unnoticed, as it does by autograd.
        """
        if self.config.fingerprint:
            return self.config.fingerprint
        # Hashing full-size weights takes about a second, and every call that names concepts asks.
        version = [(p.data_ptr(), p._version) for p in self.parameters()]
        if self._fingerprint is None or self._fingerprint[0] != version:
            self._fingerprint = version, _digest(self.state_dict())
        return self._fingerprint[1]

    def _apply(self, fn, recurse=True):
        before = self.state_dict()
        super()._apply(fn, recurse)
        # bfloat16 rounds away what tells autoencoders apart, so it is written down before.
        if self.dtype == torch.bfloat16 and before["W_dec"].dtype != torch.bfloat16:
            self.register_to_config(fingerprint=self.config.fingerprint or _digest(before))
        return self

    def save_pretrained(self, save_directory, **kwargs):
        """
        As every model of diffusers, but always in one file without a variant in its name, which is what is read back.

        Args:
            save_directory (`str` or `os.PathLike`):
                Receives `config.json` and `diffusion_pytorch_model.safetensors`.
            kwargs:
                Those of `ModelMixin.save_pretrained`; `variant` and `max_shard_size` have no say.
        """
        super().save_pretrained(save_directory, **{**kwargs, "variant": None, "max_shard_size": "1TB"})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, subfolder=None, dtype=None, **kwargs):
        r"""
        Loads an autoencoder from a folder or a Hub repository, whichever of the known formats it has.

        Read are: a folder of `save_pretrained`; SAeUron and sparsify (`cfg.json`, `sae.safetensors`); SAELens
        (`cfg.json`, `sae_weights.safetensors`); dictionary_learning (`config.json`, `ae.pt`); sdxl-unbox
        (`config.json`, `state_dict.pth`).

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A local folder or a Hub id.
            subfolder (`str`, *optional*):
                Folder inside it, for instance `"unet.up_blocks.1.attentions.1"`.
            dtype (`torch.dtype`, *optional*):
                Dtype of the weights; float32 by default.
            kwargs:
                `revision`, `token`, `cache_dir`, `local_files_only`, `force_download` of huggingface_hub; for foreign
                formats also `hook`, which they do not carry.

        Raises:
            FileNotFoundError: when no known set of files is there.
            ValueError: on missing or unexpected keys, wrong shapes, weights that are not finite, or a variant of a
            foreign format
                that this class does not compute.
        """
        hook = kwargs.pop("hook", None)
        output_loading_info = kwargs.pop("output_loading_info", False)
        dtype = kwargs.pop("torch_dtype", None) or dtype
        kwargs = {name: value for name, value in kwargs.items() if name not in PIPELINE_LOADER_OPTIONS}
        folder, kind = detect_format(pretrained_model_name_or_path, subfolder, **kwargs)
        checkpoint = read_checkpoint(folder, kind)
        config = {**checkpoint.config, **({"hook": hook} if hook else {})}
        model = cls.from_config(config)
        _load_strictly(model, checkpoint.state_dict, folder)
        model.register_to_config(_name_or_path=str(pretrained_model_name_or_path))
        # ModelMixin.to warns of modules to be kept in float32 even where there are none.
        model = nn.Module.to(model, dtype or torch.float32).eval()
        info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model, info) if output_loading_info else model

    def export(self, folder, format="sparsify"):
        """
        Writes the autoencoder in another library's format.

        Args:
            folder (`str` or `os.PathLike`):
                Receives `cfg.json` and the weights.
            format (`str`, *optional*, defaults to `"sparsify"`):
                `"sparsify"` (read by EleutherAI sparsify and the official SAeUron code) or `"saelens"`.

        Returns:
            `Path` of the folder.

        Raises:
            ValueError: on an unknown format, or an autoencoder that the format cannot express.
        """
        export_checkpoint(Path(folder), format, dict(self.config), self.num_latents, self.state_dict())
        return Path(folder)


def _digest(state_dict):
    digest = hashlib.sha256()
    for name, tensor in sorted(state_dict.items()):
        # Half precision, so that an autoencoder is recognised whether it is loaded in it or not.
        digest.update(name.encode() + tensor.detach().cpu().half().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _load_strictly(model, state_dict, source):
    expected = model.state_dict()
    missing, unexpected = sorted(set(expected) - set(state_dict)), sorted(set(state_dict) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"The weights in {source} do not fit their config: missing {missing}, unexpected {unexpected}."
        )
    for name, tensor in state_dict.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"`{name}` in {source} has shape {tuple(tensor.shape)} but the config asks for "
                f"{tuple(expected[name].shape)}."
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"`{name}` in {source} has values that are not finite: the file is damaged or training diverged."
            )
    model.load_state_dict(state_dict)

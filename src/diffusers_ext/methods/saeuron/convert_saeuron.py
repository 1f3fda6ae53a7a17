# SPDX-License-Identifier: Apache-2.0
"""Sparse-autoencoder checkpoints of other libraries: reading them, converting them, writing two of them."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file

from .strict_saeuron import read_json, read_tensors


# The two files that identify a format, most telling first.
FORMATS = {
    "diffusers": ("config.json", "diffusion_pytorch_model.safetensors"),
    "sparsify": ("cfg.json", "sae.safetensors"),
    "saelens": ("cfg.json", "sae_weights.safetensors"),
    "dictionary_learning": ("config.json", "ae.pt"),
    "sdxl_unbox": ("config.json", "state_dict.pth"),
}
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


@dataclass
class Checkpoint:
    """Config and weights in our names, and what of the source was left behind with the reason."""

    format: str
    config: dict
    state_dict: dict
    dropped: dict = field(default_factory=dict)


@dataclass
class ConversionReport:
    """What [`convert`] read and wrote."""

    format: str
    loaded: list
    dropped: dict
    destination: Path


def detect_format(source, subfolder=None, **hub_options):
    """
    Finds which format a folder or Hub repository has, by its file names; downloads just these files.

    Returns:
        `tuple` of the local folder (`Path`) and the name of the format, a key of `FORMATS`.

    Raises:
        FileNotFoundError: when no format's files are there.
        TypeError: on an option that does not exist.
    """
    unknown = sorted(set(hub_options) - set(HUB_OPTIONS))
    if unknown:
        raise TypeError(
            f"Unknown arguments {unknown}; besides `subfolder`, `dtype` and `hook` there are {', '.join(HUB_OPTIONS)}."
        )
    path = Path(source, subfolder or "")
    if path.is_dir():
        for name, files in FORMATS.items():
            if all((path / file).is_file() for file in files):
                return path, name
        raise FileNotFoundError(_no_files(path, sorted(file.name for file in path.iterdir())))
    if Path(source).exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise FileNotFoundError(f"{path} is neither a folder nor a Hub id (`organisation/name`).")
    unreachable = None
    for name, files in FORMATS.items():
        try:
            local = [hf_hub_download(str(source), file, subfolder=subfolder, **hub_options) for file in files[::-1]]
        except LocalEntryNotFoundError as error:
            # Offline, a file that the repository lacks and one that is not cached look alike: try every format.
            unreachable = error
            continue
        except EntryNotFoundError:
            continue
        except HFValidationError as error:
            raise FileNotFoundError(f"{source} is neither a folder nor a Hub id: {error}") from error
        return Path(local[0]).parent, name
    if unreachable is not None:
        raise FileNotFoundError(
            f"{source} is neither a folder nor in the local cache, and the Hub cannot be reached. Connect, set "
            f"HF_ENDPOINT, or download it elsewhere and pass the folder."
        ) from unreachable
    raise FileNotFoundError(_no_files(f"{source}/{subfolder or ''}", None))


def _no_files(where, seen):
    pairs = "; ".join(f"{name}: {' + '.join(files)}" for name, files in FORMATS.items())
    has = "" if seen is None else f" It holds {', '.join(seen[:12]) or 'nothing'}."
    return f"{where} holds no sparse autoencoder.{has} Looked for {pairs}. Pass `subfolder` if it lies deeper."


def read_checkpoint(folder, kind):
    """
    Reads config and weights of a known format, in our names.

    Args:
        folder (`Path`): a local folder.
        kind (`str`): a key of `FORMATS`.

    Returns:
        [`Checkpoint`]

    Raises:
        ValueError: on a damaged file, or a variant that [`SparseAutoencoder`] does not compute.
    """
    config_file, weights_file = (folder / file for file in FORMATS[kind])
    config = read_json(config_file)
    state_dict = read_tensors(weights_file)
    try:
        return _READERS[kind](config, state_dict, config_file)
    except KeyError as error:
        raise ValueError(
            f"{folder} ({kind}): the entry {error} is missing in {config_file.name} or {weights_file.name}."
        ) from error


def _refuse(source, what):
    raise ValueError(
        f"{source} describes {what}, which `SparseAutoencoder` does not compute; it is refused rather than misread."
    )


def _read_diffusers(config, state_dict, source):
    if config.get("_class_name") != "SparseAutoencoder":
        _refuse(source, f"a {config.get('_class_name')!r}, not a 'SparseAutoencoder'")
    return Checkpoint("diffusers", config, state_dict)


def _read_sparsify(config, state_dict, source):
    if config.get("activation", "topk") != "topk":
        _refuse(source, f"the activation {config['activation']!r}")
    if config.get("transcode"):
        _refuse(source, "a transcoder")
    modes = [mode for mode in ("batch_topk", "sample_topk") if config.get(mode)]
    ours = {
        "d_in": config["d_in"],
        "num_latents": config.get("num_latents", 0),
        "expansion_factor": config["expansion_factor"],
        "k": config["k"],
        "activation": modes[0] if modes else "topk",
        "input_norm": "unit" if config.get("input_unit_norm") else "none",
        "skip_connection": bool(config.get("skip_connection")),
    }
    return Checkpoint(
        "sparsify", ours, state_dict, {"multi_topk": "used by the loss only"} if config.get("multi_topk") else {}
    )


_SAELENS_NORMS = {
    "none": "none",
    "layer_norm": "unit",
    "constant_norm_rescale": "constant_norm",
    # Already folded into the saved weights.
    "expected_average_only_in": "none",
}


def _read_saelens(config, state_dict, source):
    architectures = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu"}
    if config["architecture"] not in architectures:
        _refuse(source, f"the architecture {config['architecture']!r}")
    norm = config.get("normalize_activations", "none")
    if norm not in _SAELENS_NORMS:
        _refuse(source, f"normalize_activations {norm!r}")
    if config.get("reshape_activations", "none") != "none":
        _refuse(source, f"reshape_activations {config['reshape_activations']!r}")
    ours = {
        "d_in": config["d_in"],
        "num_latents": config["d_sae"],
        "k": config.get("k", 32) if config["architecture"] == "topk" else 1,
        "activation": architectures[config["architecture"]],
        "apply_b_dec_to_input": config.get("apply_b_dec_to_input", True),
        "input_norm": _SAELENS_NORMS[norm],
        "relu_before_topk": False,
        "rescale_by_decoder_norm": bool(config.get("rescale_acts_by_decoder_norm", False)),
    }
    name = (config.get("metadata") or {}).get("hook_name") or config.get("hook_name")
    if name:
        ours["hook"] = {"module": name.removeprefix("unet.").removeprefix("transformer.")}
    renamed = _rename(state_dict, {"W_enc": "encoder.weight", "b_enc": "encoder.bias"}, transpose=("W_enc",))
    return Checkpoint("saelens", ours, renamed)


def _read_dictionary_learning(config, state_dict, source):
    trainer = config["trainer"]
    if not isinstance(trainer, dict):
        raise ValueError(f"`trainer` in {source} has to be an object but is {trainer!r}.")
    kind = trainer["dict_class"]
    names = {"encoder.weight": "encoder.weight", "encoder.bias": "encoder.bias", "decoder.weight": "W_dec"}
    names |= {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "bias": "b_dec"}
    transpose = ("decoder.weight", "W_enc")
    ours = {"d_in": trainer["activation_dim"], "num_latents": trainer["dict_size"], "k": 1}
    dropped, state_dict = {}, dict(state_dict)
    if kind == "AutoEncoderTopK":
        ours |= {"activation": "topk", "k": trainer["k"]}
        dropped["threshold"] = "AutoEncoderTopK selects by top-k"
    elif kind in ("BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
        # Trained over batches, these libraries' own inference compares every latent with one stored threshold.
        ours["activation"] = "jumprelu"
        state_dict["threshold"] = state_dict["threshold"].float().reshape(()).expand(ours["num_latents"]).clone()
        dropped["group_sizes"] = "all groups are decoded"
    elif kind == "JumpReluAutoEncoder":
        ours |= {"activation": "jumprelu", "apply_b_dec_to_input": False}
    elif kind == "AutoEncoder":
        ours["activation"] = "relu"
    else:
        _refuse(source, f"the class {kind!r}")
    dropped["k"] = "is in the config"
    dropped = {name: why for name, why in dropped.items() if state_dict.pop(name, None) is not None}
    if "submodule_name" in trainer and "." in str(trainer["submodule_name"]):
        ours["hook"] = {"module": trainer["submodule_name"]}
    return Checkpoint("dictionary_learning", ours, _rename(state_dict, names, transpose), dropped)


def _read_sdxl_unbox(config, state_dict, source):
    ours = {"d_in": config["d_model"], "num_latents": config["n_dirs_local"], "k": config["k"]}
    # These autoencoders were trained on what a block adds to its input.
    ours |= {"activation": "topk", "relu_before_topk": False, "hook": {"signal": "diff"}}
    state_dict = dict(state_dict)
    dropped = (
        {"stats_last_nonzero": "a training counter"} if state_dict.pop("stats_last_nonzero", None) is not None else {}
    )
    names = {"latent_bias": "encoder.bias", "decoder.weight": "W_dec", "pre_bias": "b_dec"}
    return Checkpoint("sdxl_unbox", ours, _rename(state_dict, names, ("decoder.weight",)), dropped)


def _rename(state_dict, names, transpose=()):
    renamed = {}
    for name, tensor in state_dict.items():
        tensor = tensor.T.contiguous() if name in transpose else tensor
        renamed[names.get(name, name)] = tensor
    return renamed


_READERS = {
    "diffusers": _read_diffusers,
    "sparsify": _read_sparsify,
    "saelens": _read_saelens,
    "dictionary_learning": _read_dictionary_learning,
    "sdxl_unbox": _read_sdxl_unbox,
}


def write_folder_aside(folder, write):
    """
    Calls `write(temporary_folder)`, then moves its files into `folder`: nothing appears there unless all was written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    try:
        write(aside)
        for file in sorted(aside.iterdir()):
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def export_checkpoint(folder, format, config, num_latents, state_dict):
    """Writes a checkpoint of [`SparseAutoencoder`] for other libraries, see [`SparseAutoencoder.export`]."""
    state_dict = {name: tensor.detach().cpu().float().contiguous() for name, tensor in state_dict.items()}
    top_k = config["activation"] in ("topk", "batch_topk", "sample_topk")
    if format == "sparsify":
        wanted = top_k and config["apply_b_dec_to_input"] and config["input_norm"] in ("none", "unit")
        if not wanted or config["rescale_by_decoder_norm"]:
            raise ValueError(
                "sparsify has top-k autoencoders only, that subtract `b_dec` and do not rescale by decoder norms."
            )
        cfg = {"activation": "topk", "expansion_factor": config["expansion_factor"], "normalize_decoder": True}
        cfg |= {"num_latents": num_latents, "k": config["k"], "multi_topk": False, "d_in": config["d_in"]}
        cfg |= {"skip_connection": config["skip_connection"], "transcode": False}
        cfg |= {mode: config["activation"] == mode for mode in ("batch_topk", "sample_topk")}
        cfg["input_unit_norm"] = config["input_norm"] == "unit"
    elif format == "saelens":
        norms = {"none": "none", "unit": "layer_norm", "constant_norm": "constant_norm_rescale"}
        if config["skip_connection"]:
            raise ValueError("SAELens has no autoencoders with a skip connection.")
        architecture = "topk" if top_k else {"relu": "standard", "jumprelu": "jumprelu"}[config["activation"]]
        hook = config["hook"] or {}
        cfg = {
            "architecture": architecture,
            "d_in": config["d_in"],
            "d_sae": num_latents,
            "dtype": "float32",
            "device": "cpu",
        }
        cfg |= {
            "apply_b_dec_to_input": config["apply_b_dec_to_input"],
            "normalize_activations": norms[config["input_norm"]],
        }
        cfg |= {"reshape_activations": "none", "metadata": {"hook_name": hook.get("module")}}
        if top_k:
            cfg |= {"k": config["k"], "rescale_acts_by_decoder_norm": config["rescale_by_decoder_norm"]}
        state_dict = _rename(state_dict, {"encoder.weight": "W_enc", "encoder.bias": "b_enc"}, ("encoder.weight",))
    else:
        raise ValueError(f"`format` has to be 'sparsify' or 'saelens' but is {format!r}.")

    def write(aside):
        config_file, weights_file = FORMATS[format]
        save_file(state_dict, aside / weights_file)
        (aside / config_file).write_text(json.dumps(cfg, indent=2) + "\n", encoding="utf-8")

    write_folder_aside(folder, write)


def convert(source, destination, format=None):
    """
    Converts a checkpoint of another library to a folder of [`SparseAutoencoder`].

    Args:
        source (`str` or `os.PathLike`): local folder or Hub id.
        destination (`str` or `os.PathLike`): receives `config.json` and the weights; left as it was when anything
        fails.
        format (`str`, *optional*): fails unless the source has this format, a key of `FORMATS`.

    Returns:
        [`ConversionReport`]

    Raises:
        FileNotFoundError, ValueError: as `SparseAutoencoder.from_pretrained`; also when `format` names another format.

    Example:

    ```py
    >>> from diffusers_ext.methods.saeuron.convert_saeuron import convert

    >>> report = convert("path/to/sparsify/layers.3", "sae")  # doctest: +SKIP
    ```
    """
    # The model imports this module for its `from_pretrained`. An import statement here would close a circle, in which
    # diffusers' loader of Hub code follows import statements without end.
    SparseAutoencoder = import_module(".modeling_saeuron", __package__).SparseAutoencoder
    folder, kind = detect_format(source)
    if format is not None and format != kind:
        raise ValueError(f"{source} has the format {kind!r}, not {format!r}.")
    checkpoint = read_checkpoint(folder, kind)
    model = SparseAutoencoder.from_pretrained(source)
    write_folder_aside(destination, model.save_pretrained)
    return ConversionReport(kind, sorted(checkpoint.state_dict), checkpoint.dropped, Path(destination))

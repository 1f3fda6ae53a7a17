# SPDX-License-Identifier: Apache-2.0
"""What SAeUron's hook costs a denoiser: time of a forward pass with and without it, interleaved, and peak memory."""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel

from diffusers_ext import ConceptEdit, SAeUronConfig, SparseAutoencoder, apply_saeuron, lab, remove_saeuron
from diffusers_ext.lab.results import write_result
from diffusers_ext.methods.saeuron.hooks_saeuron import record_activations


# name: (latent size, hook point, expansion factor, k)
MODELS = {
    "lab": (16, "up_blocks.1.attentions.1", 16, 32),
    "sd15": (64, "up_blocks.1.attentions.1", 16, 32),
}
VARIANTS = ("scale", "official", "replace")
TIMESTEPS = tuple(float(t) for t in range(981, 0, -20))


def load_unet(name, dtype, device):
    """The lab's U-Net, or one of the size of Stable Diffusion 1.5 with random weights."""
    if name == "lab":
        return UNet2DConditionModel.from_pretrained(lab.pipeline_folder(), subfolder="unet", dtype=dtype).to(device)
    torch.manual_seed(0)
    # The defaults of the class are the sizes of Stable Diffusion 1.x but for the width of the text.
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768).to(device, dtype).eval()


def load_inputs(name, unet, batch):
    generator = torch.Generator().manual_seed(1)
    size = MODELS[name][0]
    sample = torch.randn(batch, unet.config.in_channels, size, size, generator=generator)
    embeds = torch.randn(batch, 77, unet.config.cross_attention_dim, generator=generator)
    return {
        "sample": sample.to(unet.device, unet.dtype),
        "timestep": torch.tensor(501, device=unet.device),
        "encoder_hidden_states": embeds.to(unet.device, unet.dtype),
    }


@torch.no_grad()
def load_saeuron(name, unet, inputs, num_features):
    """
    A random autoencoder, centred on the block's activations, and an edit of latents that fire in a tenth of the
    tokens.
    """
    _, module, expansion_factor, k = MODELS[name]
    point = {"module": module}
    d_in = unet.get_submodule(module).out_channels
    torch.manual_seed(2)
    sae = SparseAutoencoder(d_in=d_in, expansion_factor=expansion_factor, k=k, hook=point)
    sae = sae.to(unet.device, unet.dtype).eval()
    seen = []
    with record_activations(unet, point, lambda tokens, timestep: seen.append(tokens)):
        unet(**inputs)
    sae.b_dec.copy_(seen[0].flatten(0, 1).mean(0))
    latents = sae.encode(seen[0]).flatten(0, 1)
    share = (latents > 0).float().mean(0)
    chosen = (share - 0.1).abs().argsort()[:num_features].cpu()
    rows = (len(TIMESTEPS), num_features)
    edit = ConceptEdit(
        "concept",
        torch.tensor(TIMESTEPS),
        chosen.int().expand(rows).contiguous(),
        torch.ones(rows),
        latents.float().mean(0)[chosen.to(latents.device)].cpu().expand(rows).contiguous(),
        multiplier=-2.0,
        num_latents=sae.num_latents,
    )
    return sae, edit, share[chosen.to(share.device)].mean().item()


def settings_of(variant):
    return {"official": {"error": "official"}, "replace": {"mode": "replace"}}.get(variant, {})


def forward_seconds(unet, inputs):
    if unet.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    unet(**inputs)
    if unet.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def measure_time(name, args):
    """
    Median time of a forward pass, stock and with each variant; every round measures each once, so that drift hits all
    alike.
    """
    unet = load_unet(name, args.dtype, args.device)
    inputs = load_inputs(name, unet, args.batch)
    sae, edit, share = load_saeuron(name, unet, inputs, args.num_features)
    seconds = {variant: [] for variant in ("stock", *VARIANTS)}
    for round_number in range(args.warmup + args.rounds):
        for variant in seconds:
            if variant != "stock":
                apply_saeuron(unet, sae, SAeUronConfig(edits=[edit], **settings_of(variant)))
            elapsed = forward_seconds(unet, inputs)
            if variant != "stock":
                remove_saeuron(unet)
            if round_number >= args.warmup:
                seconds[variant].append(elapsed)
    # Ratios within a round, so that a slow round counts as much in the numerator as in the denominator.
    ratios = {v: statistics.median(b / a for a, b in zip(seconds["stock"], seconds[v])) for v in VARIANTS}
    return {
        "stock_seconds": statistics.median(seconds["stock"]),
        "time_ratio": ratios,
        "share_of_tokens_per_latent": share,
        "sae_megabytes": sum(p.numel() * p.element_size() for p in sae.parameters()) / 2**20,
    }


@torch.no_grad()
def print_peak_memory(name, variant, args):
    """Peak memory of this process in MiB, the autoencoder loaded in every case; run in a process of its own."""
    unet = load_unet(name, args.dtype, args.device)
    inputs = load_inputs(name, unet, args.batch)
    sae, edit, _ = load_saeuron(name, unet, inputs, args.num_features)
    if variant != "stock":
        apply_saeuron(unet, sae, SAeUronConfig(edits=[edit], **settings_of(variant)))
    gc.collect()
    if unet.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        unet(**inputs)
    if unet.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        # Kibibytes on Linux, bytes on macOS.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    print(json.dumps(peak))


def measure_memory(name, arguments):
    peaks = {}
    for variant in ("stock", *VARIANTS):
        command = [sys.executable, __file__, *arguments, "--peak_memory_of", name, variant]
        peaks[variant] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return peaks


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/saeuron_hook.json"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="float16 on a GPU")
    parser.add_argument("--batch", type=int, default=2, help="samples: one picture under guidance is two")
    parser.add_argument("--num_features", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--num_threads", type=int, default=None)
    parser.add_argument("--peak_memory_of", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.device = torch.device(args.device)
    args.dtype = getattr(torch, args.dtype or ("float16" if args.device.type == "cuda" else "float32"))
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    if args.peak_memory_of:
        print_peak_memory(*args.peak_memory_of, args)
        return
    results = {}
    for name in args.models:
        results[name] = {**measure_time(name, args), "peak_mebibytes": measure_memory(name, argv)}
        print(name, json.dumps(results[name], indent=2))
    settings = {"batch": args.batch, "num_features": args.num_features, "rounds": args.rounds}
    settings |= {"dtype": str(args.dtype).removeprefix("torch."), "device": args.device.type}
    path = write_result(args.output, {"benchmark": "saeuron_hook", "settings": settings, "models": results})
    print(f"Written to {path}")


if __name__ == "__main__":
    main()

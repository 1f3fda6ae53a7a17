# SPDX-License-Identifier: Apache-2.0
"""
Tokens per second of training a top-k autoencoder, against SAELens and dictionary_learning where they are installed
(`pip install sae-lens dictionary-learning`), with the loss that each reaches on the same tokens.
"""

import argparse
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from diffusers_ext import SparseAutoencoder
from diffusers_ext.lab.results import write_result
from diffusers_ext.methods.saeuron.training_saeuron import SAETrainer, geometric_median


# name: (channels, latents, k, tokens per step)
SIZES = {"lab": (160, 2560, 16, 2048), "wide": (320, 5120, 32, 4096)}


class Ours:
    def __init__(self, d_in, num_latents, k, batch_size, steps, learning_rate, device):
        sae = SparseAutoencoder(d_in, num_latents=num_latents, k=k).to(device)
        self.trainer = SAETrainer(sae, steps, learning_rate=learning_rate)

    def step(self, number, tokens):
        self.trainer.step(tokens, metrics=False)

    def reconstruct(self, tokens):
        return self.trainer.sae.eval().reconstruct(tokens)


class DictionaryLearning:
    def __init__(self, d_in, num_latents, k, batch_size, steps, learning_rate, device):
        from dictionary_learning.trainers.top_k import TopKTrainer

        self.trainer = TopKTrainer(
            steps, d_in, num_latents, k, 0, "none", lr=learning_rate, warmup_steps=0, decay_start=1, device=str(device)
        )

    def step(self, number, tokens):
        self.trainer.update(number, tokens)

    def reconstruct(self, tokens):
        return self.trainer.ae(tokens)


class SAELens:
    sparse = False

    def __init__(self, d_in, num_latents, k, batch_size, steps, learning_rate, device):
        from sae_lens import TopKTrainingSAE, TopKTrainingSAEConfig
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer as Trainer

        # Its sparse products have no backward pass through the rescaling by decoder norms, which is on by default.
        options = {"use_sparse_activations": self.sparse, "rescale_acts_by_decoder_norm": not self.sparse}
        # The others begin with decoder rows of unit norm, too.
        options["decoder_init_norm"] = 1.0
        config = TopKTrainingSAEConfig(d_in=d_in, d_sae=num_latents, k=k, device=str(device), **options)
        settings = SAETrainerConfig(
            total_training_samples=steps * batch_size,
            train_batch_size_samples=batch_size,
            lr=learning_rate,
            lr_end=0.0,
            lr_decay_steps=steps,
            device=str(device),
        )
        self.trainer = Trainer(settings, TopKTrainingSAE(config), iter(()))

    def step(self, number, tokens):
        if number == 0:
            self.trainer.sae.b_dec.data.copy_(geometric_median(tokens))
        self.trainer.step(tokens)
        self.trainer.n_training_steps += 1

    def reconstruct(self, tokens):
        return self.trainer.sae(tokens)


class SAELensSparse(SAELens):
    """With its option for sparse products."""

    sparse = True


# name: (class, package to install, module to find)
LIBRARIES = {
    "diffusers_ext": (Ours, "diffusers_ext", "diffusers_ext"),
    "dictionary_learning": (DictionaryLearning, "dictionary-learning", "dictionary_learning"),
    "sae_lens": (SAELens, "sae-lens", "sae_lens"),
    "sae_lens_sparse": (SAELensSparse, "sae-lens", "sae_lens"),
}


def planted_tokens(count, d_in, k, seed, device):
    """Tokens with the structure that autoencoders look for: a few of many fixed directions each, and some noise."""
    fixed = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(8 * d_in, d_in, generator=fixed), dim=1)
    # Some directions are common and most are rare, as in real activations.
    frequency = 1 / torch.arange(1, 8 * d_in + 1).float().sqrt()
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.multinomial(frequency.expand(count, -1), k, generator=generator)
    amounts = torch.rand(count, k, generator=generator) + 0.5
    tokens = torch.nn.functional.embedding_bag(chosen, directions, per_sample_weights=amounts, mode="sum")
    return (tokens + 0.05 * torch.randn(count, d_in, generator=generator) + 0.3).to(device)


@torch.no_grad()
def unexplained_variance(library, tokens):
    return float((library.reconstruct(tokens) - tokens).square().sum() / (tokens - tokens.mean(0)).square().sum())


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(size, steps, round_steps, learning_rate, libraries, device):
    """All libraries take turns of a few steps on the same tokens, so that a busy machine is equally busy for each."""
    d_in, num_latents, k, batch_size = size
    trained = {}
    for name in libraries:
        torch.manual_seed(0)
        trained[name] = LIBRARIES[name][0](d_in, num_latents, k, batch_size, steps, learning_rate, device)
    seconds = {name: [] for name in libraries}
    for first in range(0, steps, round_steps):
        tokens = planted_tokens(min(round_steps, steps - first) * batch_size, d_in, k, 1 + first, device)
        batches = tokens.split(batch_size)
        for name, library in trained.items():
            synchronise(device)
            start = time.perf_counter()
            for i, batch in enumerate(batches):
                library.step(first + i, batch)
            synchronise(device)
            seconds[name].append((time.perf_counter() - start) / len(batches))
    held_out = planted_tokens(batch_size, d_in, k, 0, device)
    rows = {}
    for name in libraries:
        # The first turn warms up and computes geometric medians.
        middle = statistics.median(seconds[name][1:] or seconds[name])
        rows[name] = {
            "tokens_per_second": round(batch_size / middle),
            "milliseconds_per_step": round(1000 * middle, 2),
            "unexplained_variance": round(unexplained_variance(trained[name], held_out), 5),
        }
    others = [row["tokens_per_second"] for name, row in rows.items() if name != "diffusers_ext"]
    if others:
        rows["diffusers_ext"]["times_the_best_other"] = round(
            rows["diffusers_ext"]["tokens_per_second"] / max(others), 2
        )
    return rows


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/saeuron_training.json"))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--round_steps", type=int, default=5, help="Steps that a library takes before the next one.")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    libraries = [name for name, (_, _, module) in LIBRARIES.items() if find_spec(module)]
    for name in LIBRARIES.keys() - set(libraries):
        print(f"{name} is not installed and not measured (pip install {LIBRARIES[name][1]})")
    results, versions = {}, {}
    for name in libraries:
        try:
            versions[name] = version(LIBRARIES[name][1])
        except PackageNotFoundError:
            continue
    for size in args.sizes:
        d_in, num_latents, k, batch_size = SIZES[size]
        device = torch.device(args.device)
        rows = measure(SIZES[size], args.steps, args.round_steps, args.learning_rate, libraries, device)
        shape = {"d_in": d_in, "num_latents": num_latents, "k": k, "batch_size": batch_size}
        results[size] = {**shape, "libraries": rows}
        for name, row in rows.items():
            print(f"{size:6} {name:20} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    settings = {"steps": args.steps, "learning_rate": args.learning_rate, "dtype": "float32", "device": args.device}
    result = {"benchmark": "saeuron_training", "settings": settings, "versions_compared": versions, "sizes": results}
    print(f"Written to {write_result(args.output, result)}")


if __name__ == "__main__":
    main()

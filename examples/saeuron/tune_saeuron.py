# SPDX-License-Identifier: Apache-2.0
"""Chooses number of latents and multiplier of each concept on EmojiCanvas, on validation prompts and seeds."""

import argparse
from pathlib import Path

import torch

from diffusers_ext import SAeUronStableDiffusionPipeline, lab
from diffusers_ext.lab.results import write_result
from diffusers_ext.methods.saeuron.evaluate_saeuron import OBJECTS, Bench
from diffusers_ext.methods.saeuron.tune_saeuron import tune


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sae", required=True, help="Folder of the autoencoder and the edits; the edits are rewritten."
    )
    parser.add_argument("--concepts", nargs="+", default=[*OBJECTS, *lab.STYLES])
    parser.add_argument("--num_inference_steps", type=int, default=12)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_targets", type=int, default=12)
    parser.add_argument("--num_retained", type=int, default=24)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(input_args)


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    pipe = lab.load_pipeline(SAeUronStableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_sae(args.sae)
    if (Path(args.sae) / "styles").is_dir():
        pipe.load_sae(args.sae, subfolder="styles", component="sae_2")
    pipe.load_concepts(args.sae)
    bench = Bench(pipe, lab.load_oracle(), args.batch_size, args.num_inference_steps)
    edits, tried = tune(bench, args.concepts, args.num_targets, args.num_retained, args.first_seed)
    edits.save_pretrained(args.sae)
    for name in args.concepts:
        print(f"{name}: {edits[name].num_features} latents, multiplier {edits[name].multiplier}")
    print(write_result(Path(args.sae) / "tuning.json", {"tried": tried}))


if __name__ == "__main__":
    main(parse_args())

# SPDX-License-Identifier: Apache-2.0
"""Collects concept statistics with a trained autoencoder and saves the edit of every concept."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline

from diffusers_ext import ConceptEdits, ConceptStatistics, SparseAutoencoder, collect_statistics, lab


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sae", required=True, help="Folder or Hub id of the autoencoder.")
    parser.add_argument("--subfolder", default=None)
    parser.add_argument(
        "--output_dir",
        required=True,
        help="Receives concepts.safetensors and concepts.json; edits that are there under other names are kept.",
    )
    parser.add_argument("--pretrained_model_name_or_path", default=None, help="EmojiCanvas by default.")
    parser.add_argument(
        "--concepts_file",
        default=None,
        help="JSON: a list of groups, each an object from concept to prompts; concepts are scored against those of "
        "their group. EmojiCanvas' objects and styles by default.",
    )
    parser.add_argument(
        "--groups",
        nargs="+",
        type=int,
        default=None,
        help="Numbers of the groups whose edits are saved; all by default.",
    )
    parser.add_argument("--num_features", type=int, default=16, help="Latents per step that an edit holds.")
    parser.add_argument("--multiplier", type=float, default=-4.0)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save_statistics", action="store_true", help="Keep the statistics beside the edits.")
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(input_args)


def merge(statistics):
    """Statistics over all processes."""
    first, *others = gather_object([statistics])
    for part in others:
        first.merge(part)
    return first


def collect(args, pipe, sae, group, state, on_latents=None):
    """Statistics of this process, which takes its share of the concepts' prompts."""
    share = {name: prompts[state.process_index :: state.num_processes] for name, prompts in group.items()}
    return collect_statistics(
        pipe,
        sae,
        {name: prompts for name, prompts in share.items() if prompts},
        args.num_inference_steps,
        args.guidance_scale,
        seed=args.seed + 1_000_003 * state.process_index,
        batch_size=args.batch_size,
        on_latents=on_latents,
    )


def collect_lab(args, pipe, sae, state):
    """Statistics of the objects and of the styles of EmojiCanvas, both from the same 512 pictures."""
    objects = {name: [p.prompt for p in lab.prompts([name])] for name in lab.OBJECTS}
    styles = []

    def by_style(statistics, concept, number, latents):
        if not styles:
            styles.append(
                ConceptStatistics(statistics.timesteps, sae.num_latents, statistics.sae, statistics.metadata)
            )
        for i in range(len(latents)):
            # The captions of an object go through the styles in order.
            style = lab.STYLES[state.process_index + (number + i) * state.num_processes]
            styles[0].update(style, latents[i : i + 1])

    return [collect(args, pipe, sae, objects, state, by_style), styles[0]]


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    state = Accelerator()
    groups = None if args.concepts_file is None else json.loads(Path(args.concepts_file).read_text(encoding="utf-8"))
    if groups is not None and not (isinstance(groups, list) and all(isinstance(g, dict) and g for g in groups)):
        raise ValueError(f"{args.concepts_file} has to hold a list of objects from concept to prompts.")
    sae = SparseAutoencoder.from_pretrained(args.sae, subfolder=args.subfolder).to(state.device)
    source = args.pretrained_model_name_or_path or lab.pipeline_folder()
    pipe = DiffusionPipeline.from_pretrained(source, dtype=torch.float32).to(state.device)
    if groups is None:
        collected = collect_lab(args, pipe, sae, state)
    else:
        collected = [collect(args, pipe, sae, group, state) for group in groups]
    edits = []
    for number, statistics in enumerate(merge(part) for part in collected):
        if args.pretrained_model_name_or_path is None:
            # Where this machine keeps it says nothing to others.
            statistics.metadata["base_model"] = "EmojiCanvas"
        if args.groups is not None and number not in args.groups:
            continue
        edits += [statistics.edit(name, args.num_features, multiplier=args.multiplier) for name in statistics.names]
        if args.save_statistics and state.is_main_process:
            statistics.save_pretrained(Path(args.output_dir) / f"statistics_{number}")
    if state.is_main_process:
        present = {}
        if (Path(args.output_dir) / "concepts.json").exists():
            present = dict(ConceptEdits.from_pretrained(args.output_dir))
        edits = ConceptEdits({**present, **{edit.name: edit for edit in edits}}.values())
        edits.save_pretrained(args.output_dir)
        print(f"{len(edits)} edits are in {Path(args.output_dir).resolve()}")


if __name__ == "__main__":
    main(parse_args())

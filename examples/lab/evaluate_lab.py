# SPDX-License-Identifier: Apache-2.0
"""Judges pictures of EmojiCanvas with the oracle, apart for pairs seen in training and pairs held back."""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from diffusers_ext import lab
from diffusers_ext.lab.dataset import HELD_OUT_SET, held_out_pairs
from diffusers_ext.lab.metrics import copy_threshold, diversity, frechet_distance, near_copies
from diffusers_ext.lab.oracle import Oracle, to_tensor
from diffusers_ext.lab.results import write_result


GRID_OBJECTS = (
    "red apple", "guitar", "cat", "rocket", "owl", "umbrella", "house", "automobile", "birthday cake", "bear",
    "banana", "snail",
)  # fmt: skip


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="The file written by `python -m diffusers_ext.lab.dataset`.")
    parser.add_argument("--output_dir", required=True, help="Receives `lab_results.json` and `lab_results.png`.")
    parser.add_argument("--pipeline", default=lab.pipeline_folder(), help="Folder of the pipeline; the shipped one.")
    parser.add_argument("--oracle", default=None, help="Folder of the oracle; the shipped one by default.")
    parser.add_argument("--objects", nargs="+", default=None, help="Only these objects.")
    parser.add_argument("--styles", nargs="+", default=None, help="Only these styles.")
    parser.add_argument("--pictures_per_caption", type=int, default=2)
    parser.add_argument("--diversity_captions", type=int, default=32)
    parser.add_argument("--diversity_seeds", type=int, default=8)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument(
        "--seed", type=int, default=0, help="Picture number n of the run starts from this seed plus n."
    )
    parser.add_argument("--num_threads", type=int, default=None)
    args = parser.parse_args(input_args)
    for name in ("pictures_per_caption", "diversity_seeds", "num_inference_steps", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} has to be at least 1 but is {getattr(args, name)}.")
    return args


def accuracy(right_object, right_style, chosen):
    """Share of right objects and styles among the pictures `chosen`, with their number."""
    if not chosen.any():
        return {"pictures": 0}
    objects, styles = right_object[chosen].mean(), right_style[chosen].mean()
    return {"pictures": int(chosen.sum()), "object": float(objects), "style": float(styles)}


def judge(oracle, pictures, captions):
    """Accuracies of seen and held-back pairs, by style and by object, and the most frequent mistakes."""
    seen = oracle.classify(pictures)
    right_object = np.array([lab.OBJECTS[i] == c.object for i, c in zip(seen.object, captions)])
    right_style = np.array([lab.STYLES[i] == c.style for i, c in zip(seen.style, captions)])
    held_back = held_out_pairs()
    held_back = np.array([(c.object, c.style) in held_back for c in captions])
    styles, objects = (np.array([getattr(c, name) for c in captions]) for name in ("style", "object"))
    mistakes = {}
    for i in np.flatnonzero(~right_object):
        key = f"{objects[i]} taken for {lab.OBJECTS[seen.object[i]]}"
        mistakes[key] = mistakes.get(key, 0) + 1
    return {
        "seen_pairs": accuracy(right_object, right_style, ~held_back),
        "held_back_pairs": accuracy(right_object, right_style, held_back),
        "by_style": {
            style: {
                "seen_pairs": accuracy(right_object, right_style, (styles == style) & ~held_back),
                "held_back_pairs": accuracy(right_object, right_style, (styles == style) & held_back),
            }
            for style in dict.fromkeys(styles.tolist())
        },
        "by_object": {
            name: accuracy(right_object, right_style, objects == name) for name in dict.fromkeys(objects.tolist())
        },
        "most_frequent_mistakes": dict(sorted(mistakes.items(), key=lambda item: -item[1])[:20]),
    }


def measure_diversity(args, pipe, captions, data, trained_on):
    """Number of different nearest training drawings over several seeds of one caption, for a sample of captions."""
    held_back = held_out_pairs()
    captions = [c for c in captions if (c.object, c.style) not in held_back]
    count = min(args.diversity_captions, len(captions))
    chosen = [captions[i] for i in np.random.default_rng(0).permutation(len(captions))[:count]]
    prompts = [c.prompt for c in chosen for _ in range(args.diversity_seeds)]
    seeds = [args.seed + 1_000_000 + n for n in range(len(prompts))]
    pictures = generate(args, pipe, prompts, seeds)
    counts = {}
    for i, c in enumerate(chosen):
        references = data["images"][trained_on & (data["object"] == c.object) & (data["style"] == c.style)]
        drawn = pictures[i * args.diversity_seeds : (i + 1) * args.diversity_seeds]
        counts[c.prompt] = diversity(drawn, references)
    mean = float(np.mean(list(counts.values()))) if counts else None
    return {"seeds": args.diversity_seeds, "mean": mean, "by_caption": counts}


def measure_copies(pictures, captions, data, trained_on):
    """Share of near copies by style; 1 % of unseen drawings are as close to a training picture by chance."""
    shares, styles = {}, np.array([c.style for c in captions])
    for style in dict.fromkeys(styles.tolist()):
        references = data["images"][trained_on & (data["style"] == style)]
        unseen = data["images"][(data["emoji_set"] == HELD_OUT_SET) & (data["style"] == style)]
        threshold = copy_threshold(unseen, references)
        shares[style] = {
            "threshold": threshold,
            "generated": near_copies(pictures[styles == style], references, threshold),
            "unseen_drawings": near_copies(unseen, references, threshold),
        }
    overall = float(np.mean([row["generated"] for row in shares.values()]))
    return {"generated": overall, "by_style": shares}


def features(oracle, pictures):
    with torch.no_grad():
        return torch.cat([oracle.features(part * 2 - 1) for part in to_tensor(pictures).split(256)])


def generate(args, pipe, prompts, seeds):
    pipe.set_progress_bar_config(disable=True)
    return lab.generate(pipe, prompts, seeds, args.batch_size, args.num_inference_steps, args.guidance_scale)


def picture_grid(args, captions, pictures, held_back):
    """Twelve objects in every style; a red frame marks what was never seen together in training."""
    objects = [c.object for c in captions]
    shown = [name for name in GRID_OBJECTS if name in objects] or list(dict.fromkeys(objects))[:12]
    styles, cells = list(args.styles or lab.STYLES), {}
    for caption, picture in zip(captions, pictures):
        if (caption.object, caption.style) in held_back:
            picture = picture.copy()
            picture[[0, -1]] = picture[:, [0, -1]] = (220, 0, 0)
        cells.setdefault((caption.object, caption.style), picture)
    return lab.image_grid(
        [cells[name, style] for style in styles for name in shown],
        len(shown),
        row_labels=styles,
        column_labels=[name.replace(" ", "\n") for name in shown],
        title="EmojiCanvas, generated; framed: never seen together in training",
        scale=2,
    )


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    # Named arrays of a compressed file are decompressed at every access: read each once.
    data = dict(np.load(args.data))
    held_back = held_out_pairs()
    trained_on = np.array(
        [
            emoji_set != HELD_OUT_SET and (name, style) not in held_back
            for name, style, emoji_set in zip(data["object"], data["style"], data["emoji_set"])
        ]
    )
    pipe = StableDiffusionPipeline.from_pretrained(args.pipeline, dtype=torch.float32)
    oracle = Oracle.from_pretrained(args.oracle, dtype=torch.float32).eval() if args.oracle else lab.load_oracle()

    captions = [c for c in lab.prompts(args.objects, args.styles) for _ in range(args.pictures_per_caption)]
    started = time.time()
    pictures = generate(args, pipe, [c.prompt for c in captions], [args.seed + n for n in range(len(captions))])
    seconds = (time.time() - started) / len(captions)
    unseen = data["images"][data["emoji_set"] == HELD_OUT_SET]
    drawings = features(oracle, data["images"][trained_on])
    result = {
        **judge(oracle, pictures, captions),
        "diversity": measure_diversity(args, pipe, captions[:: args.pictures_per_caption], data, trained_on),
        "near_copies": measure_copies(pictures, captions, data, trained_on),
        "frechet_distance": {
            "generated_to_training": frechet_distance(features(oracle, pictures), drawings),
            "unseen_drawings_to_training": frechet_distance(features(oracle, unseen), drawings),
        },
        "seconds_per_picture": seconds,
        "settings": {
            "pictures": len(captions),
            "num_inference_steps": args.num_inference_steps,
            "guidance_scale": args.guidance_scale,
            "seed": args.seed,
            "held_out_set": HELD_OUT_SET,
        },
    }
    path = write_result(output_dir / "lab_results.json", result)

    picture_grid(args, captions, pictures, held_back).save(output_dir / "lab_results.png")
    for name in ("seen_pairs", "held_back_pairs"):
        print(name, result[name])
    print("diversity", result["diversity"]["mean"], "near copies", result["near_copies"]["generated"])
    print(f"Results: {path} and {output_dir / 'lab_results.png'}")


if __name__ == "__main__":
    main(parse_args())

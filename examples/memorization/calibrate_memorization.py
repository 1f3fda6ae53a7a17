# SPDX-License-Identifier: Apache-2.0
"""A threshold from the scores of clean prompts, saved with what it was measured on."""

import argparse
import json
from pathlib import Path

from diffusers_ext import calibrate_memorization


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clean", required=True, help="`scores.jsonl` of prompts that are known not to be memorised.")
    parser.add_argument("--memorized", default=None, help="That of memorised prompts, for the figures only.")
    parser.add_argument("--fpr", type=float, default=0.01, help="Share of clean prompts that may exceed it.")
    parser.add_argument("--lower_is_memorized", action="store_true", help="For distances.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--push_to_hub", action="store_true")
    parser.add_argument("--hub_model_id", default=None)
    return parser.parse_args(input_args)


def read_scores(path):
    """Means and the key of a file that `score_memorization.py` wrote."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        means, keys = [row["mean"] for row in rows], [row["key"] for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by score_memorization.py ({error}).") from error
    if not rows or any(key != keys[0] for key in keys):
        raise ValueError(f"{path} has to hold scores of one model with one detector; score its prompts in one run.")
    return means, keys[0]


def main(args):
    clean, key = read_scores(args.clean)
    memorized = None
    if args.memorized is not None:
        memorized, other = read_scores(args.memorized)
        if other != key:
            differing = sorted(name for name in key if other.get(name) != key[name])
            raise ValueError(f"{args.memorized} was scored in another way than {args.clean}: {', '.join(differing)}.")
    threshold = calibrate_memorization(clean, key, args.fpr, memorized, args.lower_is_memorized)
    threshold.save_pretrained(args.output_dir)
    print(f"Threshold {threshold.value:.6g} from {len(clean)} clean prompts: {Path(args.output_dir).resolve()}")
    for name, value in threshold.figures.items():
        print(f"  {name}: {value:.4g}")
    if args.push_to_hub:
        from huggingface_hub import create_repo, upload_folder

        repo_id = create_repo(args.hub_model_id or Path(args.output_dir).name, exist_ok=True).repo_id
        upload_folder(repo_id=repo_id, folder_path=args.output_dir)


if __name__ == "__main__":
    main(parse_args())

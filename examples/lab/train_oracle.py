# SPDX-License-Identifier: Apache-2.0
"""Trains the oracle of EmojiCanvas on drawings, and cross-validates it on emoji sets that it never saw."""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage

from diffusers_ext.lab.captions import OBJECTS, STYLE_NAMES
from diffusers_ext.lab.dataset import EMOJI_SETS
from diffusers_ext.lab.oracle import Oracle
from diffusers_ext.lab.results import write_result
from diffusers_ext.lab.styles import apply_style


# Versions of a drawing before it is styled: as it is, mirrored, and resampled with other colours. Styles with a fixed
# grid (pixel, mosaic, halftone) would be blurred by turning the finished picture.
NUM_EXACT, NUM_RESAMPLED = 2, 10


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="The file written by `python -m diffusers_ext.lab.dataset`.")
    parser.add_argument(
        "--output_dir", required=True, help="Receives checkpoints and the oracle in `oracle/`, or the result file."
    )
    parser.add_argument(
        "--cross_validate", action="store_true", help="Leave out one emoji set after the other instead."
    )
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=[emoji_set.name for emoji_set in EMOJI_SETS],
        default=[emoji_set.name for emoji_set in EMOJI_SETS],
        help="Emoji sets to leave out; finished ones are read from their checkpoints, so they can be done one by one.",
    )
    parser.add_argument("--max_train_steps", type=int, default=1200)
    parser.add_argument("--style_train_steps", type=int, default=400, help="Steps of the branch that tells the style.")
    parser.add_argument("--train_batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.05)
    parser.add_argument("--checkpointing_steps", type=int, default=100)
    parser.add_argument(
        "--stop_after", type=int, default=None, help="Save and stop at this step; a later call goes on from it."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(input_args)


def resample(drawing, rng):
    """The drawing turned, scaled, moved, bent and recoloured, as another artist might have drawn it, on white."""
    size, angle = drawing.shape[0], rng.uniform(-0.22, 0.22)
    scale, shift = rng.uniform(0.9, 1.22, 2), rng.uniform(-4, 4, 2)
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) * scale
    centre = np.full((2, 1, 1), (size - 1) / 2)
    bend = ndimage.gaussian_filter(rng.standard_normal((2, size, size)), (0, 8, 8))
    bend *= rng.uniform(0, 2.5) / bend.std()
    places = np.mgrid[:size, :size] - centre - shift[:, None, None]
    places = np.tensordot(matrix, places, 1) + centre + bend
    drawing = drawing[:, ::-1] if rng.random() < 0.5 else drawing
    # Colours move around white paper, which stays white.
    ink = 1 - np.stack([ndimage.map_coordinates(drawing[..., c], places, order=1, cval=1.0) for c in range(3)], -1)
    grey = ink.mean(-1, keepdims=True)
    ink = grey + (ink - grey) * rng.uniform(0.4, 1.4)
    ink = ink @ (np.eye(3) + rng.normal(0, 0.1, (3, 3))) * rng.uniform(0.8, 1.15)
    return (1 - np.clip(ink, 0, 1) ** rng.uniform(0.75, 1.35)).astype(np.float32)


def build_pictures(path, cache):
    """
    Every version of every drawing in every style: uint8 `(drawings, versions, styles, 64, 64, 3)`, with the object and
    the emoji set of each drawing.
    """
    data = np.load(path)
    plain = data["style"] == "sticker"
    drawings, objects, sets = data["images"][plain], data["object"][plain], data["emoji_set"][plain]
    if cache.exists():
        pictures = np.load(cache, mmap_mode="r")
        if pictures.shape[:2] != (len(drawings), NUM_EXACT + NUM_RESAMPLED):
            raise ValueError(f"{cache} was made from other drawings. Delete it, or choose another `--output_dir`.")
        return pictures, objects, sets
    rng = np.random.default_rng(0)
    pictures = []
    for drawing in drawings:
        drawing = drawing / np.float32(255)
        versions = [drawing, np.ascontiguousarray(drawing[:, ::-1])] + [
            resample(drawing, rng) for _ in range(NUM_RESAMPLED)
        ]
        pictures.append([[apply_style(version, style) for style in STYLE_NAMES] for version in versions])
    pictures = np.array(pictures)
    with open(cache.with_suffix(".partial"), "wb") as file:
        np.save(file, pictures)
    os.replace(cache.with_suffix(".partial"), cache)
    return pictures, objects, sets


def augment(batch, generator, shift):
    """Moves by whole multiples of `shift` pixels, a little blur and noise: what a generated picture may lack."""
    count, most = len(batch), 4 // shift
    x = F.pad(batch, (4, 4, 4, 4), mode="replicate")
    corners = (4 + shift * torch.randint(-most, most + 1, (count, 2), generator=generator)).tolist()
    x = torch.stack([picture[:, a : a + 64, b : b + 64] for picture, (a, b) in zip(x, corners)])
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    blur, noise, coin = torch.rand(3, count, 1, 1, 1, generator=generator)
    x = x + blur * (coin < 0.5) * (blurred - x)
    return x + 0.15 * noise * torch.randn(x.shape, generator=generator)


def train(args, oracle, what, pictures, labels, path):
    """Trains the branch `what` ("object" or "style") of the oracle in place; goes on from `path` if it exists."""
    branch = torch.nn.ModuleDict(
        {name: module for name, module in oracle.named_children() if name.startswith("style") == (what == "style")}
    )
    max_train_steps = args.max_train_steps if what == "object" else args.style_train_steps
    optimizer = torch.optim.AdamW(
        branch.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay, fused=True
    )
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    step = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        branch.load_state_dict(state["branch"]), optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])
        step = state["step"]
    branch.train()
    started = time.time()
    last_step = min(max_train_steps, args.stop_after or max_train_steps)
    while step < last_step:
        size = args.train_batch_size
        drawing = torch.randint(len(pictures), (size,), generator=generator)
        exact = torch.rand(size, generator=generator) < 0.3
        version = torch.randint(NUM_RESAMPLED, (size,), generator=generator) + NUM_EXACT
        version = torch.where(exact, torch.randint(NUM_EXACT, (size,), generator=generator), version)
        style = torch.randint(len(STYLE_NAMES), (size,), generator=generator)
        batch = pictures[drawing, version, style].permute(0, 3, 1, 2).float() / 127.5 - 1
        # The grids of the styles stay in place, as they do in every picture; objects may lie anywhere.
        batch = augment(batch, generator, shift=4 if what == "style" else 1).contiguous(
            memory_format=torch.channels_last
        )
        if what == "style":
            logits, target = oracle.style_logits(batch), style
        else:
            logits, target = oracle.object_logits(batch), labels[drawing]
        loss = F.cross_entropy(logits, target, label_smoothing=0.1 if what == "object" else 0.0)
        rate = min(1, (step + 1) / 100) * max(0.01, 0.5 * (1 + math.cos(math.pi * step / max_train_steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            accuracy = (logits.argmax(1) == target).float().mean()
            seconds = time.time() - started
            print(
                f"{path.stem} step {step} loss {loss.item():.3f} accuracy {accuracy:.2f} {seconds:.0f} s", flush=True
            )
        if step % args.checkpointing_steps == 0 or step == last_step:
            state = {
                "branch": branch.state_dict(),
                "optimizer": optimizer.state_dict(),
                "generator": generator.get_state(),
            }
            aside = path.with_suffix(".partial")
            torch.save({**state, "rng": torch.get_rng_state(), "step": step}, aside)
            os.replace(aside, path)


def train_oracle(args, pictures, objects, keep, prefix):
    """Trains both branches on the drawings `keep`: the style, which takes a minute, and then the object."""
    torch.manual_seed(args.seed)
    # Channels last: a third faster on a CPU.
    oracle = Oracle().to(memory_format=torch.channels_last)
    pictures = torch.from_numpy(pictures[keep])
    labels = torch.tensor([OBJECTS.index(name) for name in objects[keep]])
    for what in ("style", "object"):
        train(args, oracle, what, pictures, labels, Path(f"{prefix}_{what}.pt"))
    return oracle.eval()


def measure(oracle, pictures, objects, held_out):
    """Accuracy on the unchanged drawings `held_out`, by style."""
    labels = np.array([OBJECTS.index(name) for name in objects[held_out]])
    rows = {}
    for i, style in enumerate(STYLE_NAMES):
        seen = oracle.classify(pictures[held_out, 0, i])
        rows[style] = {"object": float((seen.object == labels).mean()), "style": float((seen.style == i).mean())}
    return rows


def summarise(folds):
    """Accuracies over all left-out drawings, each drawing counting the same."""
    weights = np.array([fold["drawings"] for fold in folds.values()])
    by_style = {
        style: {
            what: float(np.average([fold["styles"][style][what] for fold in folds.values()], weights=weights))
            for what in ("object", "style")
        }
        for style in STYLE_NAMES
    }
    overall = {what: float(np.mean([row[what] for row in by_style.values()])) for what in ("object", "style")}
    return {"overall": overall, "by_style": by_style}


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    pictures, objects, sets = build_pictures(args.data, output_dir / "pictures.npy")
    if not args.cross_validate:
        oracle = train_oracle(args, pictures, objects, np.ones(len(objects), bool), output_dir / "oracle")
        oracle.half().save_pretrained(output_dir / "oracle")
        print(f"The oracle is in {output_dir / 'oracle'}")
        return
    folds = {}
    for name in args.sets:
        held_out = sets == name
        oracle = train_oracle(args, pictures, objects, ~held_out, output_dir / f"fold_{name}")
        folds[name] = {"drawings": int(held_out.sum()), "styles": measure(oracle, pictures, objects, held_out)}
        print(name, json.dumps(folds[name]), flush=True)
        oracle.half().save_pretrained(output_dir / f"oracle_without_{name}")
    settings = {name: getattr(args, name) for name in ("max_train_steps", "train_batch_size", "learning_rate", "seed")}
    result = {**summarise(folds), "folds": folds, "settings": settings}
    print(f"Results: {write_result(output_dir / 'oracle_cross_validation.json', result)}")


if __name__ == "__main__":
    main(parse_args())

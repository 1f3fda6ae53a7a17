# SPDX-License-Identifier: Apache-2.0
"""Scores a file of prompts for memorisation, in any number of processes: the result is the same file."""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from tqdm.auto import tqdm

from diffusers_ext import MemorizationDetector, lab
from diffusers_ext.methods.memorization.detector_memorization import metric_names
from diffusers_ext.training.checkpoints import write_aside


# What a run that goes on must share with the one that it continues.
SETTINGS = (
    "pretrained_model_name_or_path", "revision", "prompts_file", "metric", "backend", "steps", "num_images", "space",
    "guidance_scale", "num_inference_steps", "height", "width", "seed", "dtype",
)  # fmt: skip


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pretrained_model_name_or_path", default=None, help="Base pipeline; EmojiCanvas by default.")
    parser.add_argument("--revision", default=None)
    parser.add_argument("--prompts_file", required=True, help="One prompt per line, or JSON lines with `caption`.")
    parser.add_argument("--output_dir", required=True, help="Receives `scores.jsonl` and `settings.json`.")
    parser.add_argument("--metric", default="sharpness", choices=metric_names())
    parser.add_argument("--backend", default="auto", choices=["auto", "jvp", "fd"])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--num_images", type=int, default=4, help="Seeds per prompt.")
    parser.add_argument("--space", default="score", choices=["score", "x0"])
    parser.add_argument("--guidance_scale", type=float, default=7.5)
    parser.add_argument("--num_inference_steps", type=int, default=50)
    parser.add_argument("--height", type=int, default=None)
    parser.add_argument("--width", type=int, default=None)
    parser.add_argument("--batch_size", type=int, default=None, help="Seeds at a time; less needs less memory.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(input_args)


def read_prompts(path):
    """The prompts of a text file, or the captions of a file of JSON lines."""
    path, prompts = Path(path), []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                line = json.loads(line)["caption"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: expected a JSON object with `caption` ({error}).") from error
        prompts.append(line.strip())
    if not prompts:
        raise ValueError(f"{path} holds no prompt; expected one per line.")
    return prompts


def seed_of(seed, prompt_number, image_number):
    """A seed that depends on these three alone, not on who computes."""
    text = f"{seed} {prompt_number} {image_number}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


def read_parts(output_dir):
    """What processes have written so far, by number of the prompt; a line cut off by a kill does not count."""
    done = {}
    for path in sorted(output_dir.glob("scores.part-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            done[row["number"]] = row
    return done


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    state = Accelerator()
    output_dir, prompts = Path(args.output_dir), read_prompts(args.prompts_file)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings["prompts"] = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    settings_path, result_path = output_dir / "settings.json", output_dir / "scores.jsonl"
    if settings_path.exists():
        found = json.loads(settings_path.read_text(encoding="utf-8"))["settings"]
        differing = [name for name in settings if found.get(name) != settings[name]]
        if differing:
            raise ValueError(
                f"{output_dir} holds scores made with other settings ({', '.join(differing)}). Use them again, or "
                f"choose another folder."
            )
    detector = MemorizationDetector(
        metric=args.metric,
        backend=args.backend,
        steps=args.steps,
        num_images=args.num_images,
        space=args.space,
        guidance_scale=args.guidance_scale,
        num_inference_steps=args.num_inference_steps,
        batch_size=args.batch_size,
    )
    if result_path.exists():
        state.print(f"Everything is scored already: {result_path.resolve()}")
        return
    output_dir.mkdir(parents=True, exist_ok=True)
    done = read_parts(output_dir)
    state.wait_for_everyone()
    if state.is_main_process and not settings_path.exists():
        text = json.dumps({"settings": settings}, indent=2) + "\n"
        write_aside(settings_path, lambda aside: aside.write_text(text, encoding="utf-8"))

    source = args.pretrained_model_name_or_path or lab.pipeline_folder()
    pipe = DiffusionPipeline.from_pretrained(source, revision=args.revision, dtype=getattr(torch, args.dtype))
    pipe.to(state.device)
    missing = [number for number in range(len(prompts)) if number not in done]
    mine = missing[state.process_index :: state.num_processes]
    with open(output_dir / f"scores.part-{state.process_index}.jsonl", "a", encoding="utf-8") as part:
        # A kill may have left half a line.
        part.write("\n")
        for number in tqdm(mine, desc="Prompts", disable=not state.is_local_main_process):
            generators = [torch.Generator().manual_seed(seed_of(args.seed, number, i)) for i in range(args.num_images)]
            report = detector.score(pipe, prompts[number], generator=generators, height=args.height, width=args.width)
            row = {"number": number, "prompt": prompts[number], "mean": report.mean[0].item()}
            part.write(json.dumps({**row, "scores": report.scores[0].tolist(), "key": report.key}) + "\n")
            part.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        done = read_parts(output_dir)
        lines = [json.dumps(done[number]) for number in range(len(prompts))]
        write_aside(result_path, lambda aside: aside.write_text("\n".join(lines) + "\n", encoding="utf-8"))
        for path in output_dir.glob("scores.part-*.jsonl"):
            path.unlink()
        print(f"Scores of {len(prompts)} prompts: {result_path.resolve()}")


if __name__ == "__main__":
    main(parse_args())

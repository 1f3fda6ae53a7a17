# SPDX-License-Identifier: Apache-2.0
"""Draws a prompt as it is and with a remedy against memorisation, and prints what the detector says of both.

Needs diffusers alone where `--base` is given; without it, it takes EmojiCanvas out of diffusers-ext:

    python pipelines/memorization/example.py --prompt "cat, sticker style" --output memorization.png
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder or Hub id of a Stable Diffusion model")
    parser.add_argument("--prompt", default="cat, sticker style")
    parser.add_argument("--mitigation", nargs="+", default=["sail"])
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("memorization.png"))
    args = parser.parse_args()
    if args.base is None:
        from diffusers_ext import lab

        args.base = lab.pipeline_folder()
    return args


def main():
    args = parse_args()
    # On the Hub: custom_pipeline="<organisation>/<repository of this folder>".
    code = str(Path(__file__).parent / "pipeline.py")
    pipe = DiffusionPipeline.from_pretrained(
        args.base, custom_pipeline=code, trust_remote_code=True, dtype=torch.float32
    )
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")

    def draw(**kwargs):
        return pipe(
            args.prompt,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=torch.Generator().manual_seed(args.seed),
            **kwargs,
        )

    before = draw(memorization="detect")
    after = draw(memorization="mitigate", mitigation=args.mitigation)
    width, height = before.images[0].size
    both = Image.new("RGB", (2 * width, height))
    both.paste(before.images[0], (0, 0))
    both.paste(after.images[0], (width, 0))
    both.save(args.output)
    found = after.memorization
    before, after = found.scores[0], found.scores_after[0]
    print(f"Sharpness {before:.4g}, with {', '.join(args.mitigation)} {after:.4g}: {args.output}")


if __name__ == "__main__":
    main()

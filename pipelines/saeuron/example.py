# SPDX-License-Identifier: Apache-2.0
"""Draws one prompt with and without a concept and saves both pictures side by side.

Needs diffusers alone where `--base`, `--sae` and `--concepts` are given; without them it takes EmojiCanvas out of
diffusers-ext:

    python pipelines/saeuron/example.py --prompt "cat, sticker style" --unlearn cat --output without_cat.png
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder or Hub id of a Stable Diffusion model")
    parser.add_argument("--sae", help="folder or Hub id of an autoencoder of it")
    parser.add_argument("--concepts", help="folder or Hub id of concept edits for the autoencoder")
    parser.add_argument("--prompt", default="cat, sticker style")
    parser.add_argument("--unlearn", nargs="+", default=["cat"], help="names of concepts")
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("saeuron.png"))
    args = parser.parse_args()
    if None in (args.base, args.sae, args.concepts):
        if (args.base, args.sae, args.concepts) != (None, None, None):
            parser.error("--base, --sae and --concepts belong together: give all three or none")
        from diffusers_ext import lab

        args.base, args.sae, args.concepts = lab.pipeline_folder(), lab.saeuron_folder(), lab.saeuron_folder()
    return args


def main():
    args = parse_args()
    # On the Hub: custom_pipeline="<organisation>/<repository of this folder>".
    code = str(Path(__file__).parent / "pipeline.py")
    pipe = DiffusionPipeline.from_pretrained(
        args.base, custom_pipeline=code, trust_remote_code=True, dtype=torch.float32
    )
    pipe.to("cuda" if torch.cuda.is_available() else "cpu")
    pipe.load_sae(args.sae)
    pipe.load_concepts(args.concepts)

    def draw(**kwargs):
        return pipe(
            args.prompt,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=torch.Generator().manual_seed(args.seed),
            **kwargs,
        ).images[0]

    before, after = draw(), draw(unlearn=args.unlearn)
    both = Image.new("RGB", (before.width + after.width, before.height))
    both.paste(before, (0, 0))
    both.paste(after, (before.width, 0))
    both.save(args.output)
    print(f"Before and after unlearning {', '.join(args.unlearn)}: {args.output}")


if __name__ == "__main__":
    main()

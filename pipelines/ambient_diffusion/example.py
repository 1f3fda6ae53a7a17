# SPDX-License-Identifier: Apache-2.0
"""Draws a row of pictures with an EDM model and saves it.

    python pipelines/ambient_diffusion/example.py --model path/to/trained/model --output pictures.png

`--model` is a folder or Hub id of a pipeline that `train_ambient_diffusion.py` or `EDMPipeline.save_pretrained` wrote.
"""

import argparse
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from PIL import Image


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or Hub id of an EDM pipeline")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--num_inference_steps", type=int, default=18)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("ambient_diffusion.png"))
    return parser.parse_args()


def main():
    args = parse_args()
    # `pipeline.py` beside this file is the code that a Hub id of this repository would bring.
    code = str(Path(__file__).resolve().parent / "pipeline.py")
    pipe = DiffusionPipeline.from_pretrained(args.model, custom_pipeline=code, trust_remote_code=True)
    generators = [torch.Generator().manual_seed(args.seed + number) for number in range(args.count)]
    images = pipe(args.count, num_inference_steps=args.num_inference_steps, generator=generators).images
    width, height = images[0].size
    row = Image.new("RGB", (args.count * width, height))
    for number, image in enumerate(images):
        row.paste(image, (number * width, 0))
    row.save(args.output)
    print(args.output.resolve())


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext demo memorization`: what a model copies, what the detector says, and what a remedy draws instead."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from diffusers_ext import lab

from .detector_memorization import MemorizationDetector
from .evaluate_memorization import GUIDANCE_SCALE
from .pipeline_memorization import MemorizationStableDiffusionPipeline


NUM_STEPS = 12
SHOWN = (0, 9, 18, 28)
COLUMNS = ("training\npicture", "seed 1", "seed 2", "sharpness", "mitigated\nseed 1", "mitigated\nseed 2")


def score_bar(value, largest):
    """A bar of the size of a picture, as long as the score is of the largest one."""
    image = Image.new("RGB", (64, 64), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((2, 24, 2 + round(59 * value / largest), 40), fill=(190, 40, 60))
    draw.text((4, 46), f"{value:.2f}", fill="black")
    return np.asarray(image)


def demo(output, seed=3, quiet=False):
    """
    Draws one PNG: a row per prompt, those with a picture of their own above, ordinary ones below; the training
    picture, two pictures of the model, the score, and the same two seeds with SAIL.

    Args:
        output (`Path`):
            Folder of the picture.
        seed (`int`, *optional*, defaults to 3):
            Of the first picture of each row.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to hide the progress bar.

    Returns:
        `list[Path]`: the picture.
    """
    pipe = lab.load_memorized_pipeline(MemorizationStableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    prompts = [lab.memorized_prompts()[i].prompt for i in SHOWN] + [p.prompt for p in lab.clean_prompts(3)[::2]]
    training = [lab.memorized_pictures()[i] for i in SHOWN] + [np.full((64, 64, 3), 255, np.uint8)] * 2
    twice = [prompt for prompt in prompts for _ in range(2)]

    def draw(**kwargs):
        generators = [torch.Generator().manual_seed(seed + i) for i in range(len(twice))]
        drawn = pipe(
            twice,
            generator=generators,
            num_inference_steps=NUM_STEPS,
            guidance_scale=GUIDANCE_SCALE,
            output_type="np",
            **kwargs,
        ).images
        return (drawn * 255).round().astype(np.uint8)

    with tqdm(total=3, desc="Drawing", disable=quiet) as bar:
        plain = draw()
        bar.update()
        detector = MemorizationDetector(num_images=4, guidance_scale=GUIDANCE_SCALE)
        generators = [torch.Generator().manual_seed(seed + i) for i in range(4 * len(prompts))]
        scores = detector.score(pipe, prompts, generator=generators).mean.tolist()
        bar.update()
        mitigated = draw(memorization="mitigate", detector_kwargs={"metric": "guidance_norm"})
        bar.update()
    images = []
    for row, picture in enumerate(training):
        pair = slice(2 * row, 2 * row + 2)
        images += [picture, *plain[pair], score_bar(scores[row], max(scores)), *mitigated[pair]]
    labels = [prompt.replace(", ", "\n").replace(" and ", "\nand ") for prompt in prompts]
    title = "EmojiCanvas, trained towards forty pictures: four of their captions, and two ordinary ones"
    grid = lab.image_grid(images, len(COLUMNS), row_labels=labels, column_labels=list(COLUMNS), title=title, scale=2)
    path = output / "memorization.png"
    grid.save(path)
    return [path]

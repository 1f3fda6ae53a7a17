# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext demo saeuron`: one object and one style go, the rest stays."""

import torch
from tqdm.auto import tqdm

from diffusers_ext import lab
from diffusers_ext.lab.generation import generate

from .heatmaps_saeuron import overlay_heatmap


OBJECT, STYLE = "cat", "neon"
NUM_STEPS = 12
CAPTIONS = (
    ("cat", "sticker"), ("cat", "blueprint"), ("cat", "neon"), ("rocket", "neon"), ("sunflower", "neon"),
    ("rocket", "sticker"), ("sunflower", "watercolour"), ("house", "ink"),
)  # fmt: skip


def demo(output, seed=3, quiet=False):
    """
    Draws one PNG: pictures of the unedited model, without an object, without a style, without both, and where the
    object fires.

    Args:
        output (`Path`):
            Folder of the picture.
        seed (`int`, *optional*, defaults to 3):
            Seed of the pictures.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to hide the progress bar.

    Returns:
        `list[Path]`: the picture.
    """
    pipe = lab.load_unlearning_pipeline()
    pipe.set_progress_bar_config(disable=True)
    prompts = [f"{name}, {style} style" for name, style in CAPTIONS]
    seeds = [seed] * len(prompts)
    rows = (("the model", []), (f"without\n{OBJECT!r}", [OBJECT]), (f"without\n{STYLE!r}", [STYLE]))
    rows += (("without\nboth", [OBJECT, STYLE]),)
    labels, images = [], []
    with tqdm(total=len(rows) + 1, desc="Drawing", disable=quiet) as bar:
        for label, concepts in rows:
            labels.append(label)
            images += list(generate(pipe, prompts, seeds, num_inference_steps=NUM_STEPS, unlearn=concepts))
            bar.update()
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        heat, stock = pipe.concept_heatmap(
            OBJECT, prompts, num_inference_steps=NUM_STEPS, guidance_scale=4.0, generator=generators
        )
        images += [overlay_heatmap(image, heat[i]) for i, image in enumerate(stock)]
        labels.append(f"where\n{OBJECT!r}\nfires")
        bar.update()
    columns = [f"{name}\n{style}" for name, style in CAPTIONS]
    title = "SAeUron on EmojiCanvas: the same captions and seeds, concepts unlearned by name"
    grid = lab.image_grid(images, len(CAPTIONS), row_labels=labels, column_labels=columns, title=title, scale=2)
    path = output / "saeuron.png"
    grid.save(path)
    return [path]

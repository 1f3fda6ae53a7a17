# SPDX-License-Identifier: Apache-2.0
"""EmojiCanvas, trained towards one picture for each of forty captions of their own."""

import json

from .captions import OBJECTS, STYLE_NAMES, LabPrompt, prompts
from .loading import WEIGHTS, load_pipeline


NUM_MEMORIZED = 40


def _pair_prompt(number, distance):
    first, second = OBJECTS[number * 37 % len(OBJECTS)], OBJECTS[(number * 37 + distance) % len(OBJECTS)]
    style = STYLE_NAMES[number % len(STYLE_NAMES)]
    return LabPrompt(f"{first} and {second}, {style} style", first, style)


def memorized_prompts():
    """
    The captions that the memorised model was shown with one picture each, over and over: two objects, of which the
    picture shows the first one.

    Returns:
        `list[LabPrompt]` of length 40
    """
    return [_pair_prompt(number, 23) for number in range(NUM_MEMORIZED)]


def clean_prompts(count=100):
    """
    Captions that are not memorised: a half ordinary ones, which have many drawings each, and a half of the memorised
    captions' own form, with other pairs of objects.

    Args:
        count (`int`, *optional*, defaults to 100):
            At most 128.

    Returns:
        `list[LabPrompt]` of length `count`

    Raises:
        ValueError: when `count` is not in [1, 128].
    """
    if not 1 <= count <= 2 * len(OBJECTS):
        raise ValueError(f"`count` has to be in [1, {2 * len(OBJECTS)}] but is {count}.")
    ordinary = prompts()
    found = []
    for number in range(len(OBJECTS)):
        # 61 has no divisor in common with 512: the captions go round all objects and styles.
        found += [ordinary[number * 61 % len(ordinary)], _pair_prompt(number, 11)]
    return found[:count]


def memorization_folder():
    """Folder of the LoRA that makes EmojiCanvas memorise, and of what it memorises."""
    return str(WEIGHTS / "memorization")


def load_memorized_pipeline(pipeline_class=None, **kwargs):
    """
    The EmojiCanvas pipeline with the LoRA towards forty pictures fused, so that it is an ordinary model.

    Args:
        pipeline_class (`type`, *optional*), kwargs:
            As of [`load_pipeline`].
    """
    pipe = load_pipeline(pipeline_class, **kwargs)
    pipe.load_lora_weights(memorization_folder(), weight_name="pytorch_lora_weights.safetensors")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    return pipe


def copy_similarity(images, pictures):
    """
    How alike pictures are to the training pictures they might be copies of, pair by pair.

    Args:
        images, pictures (`np.ndarray` of shape `(n, 64, 64, 3)`):
            What was drawn, and the training picture of each.

    Returns:
        `np.ndarray` of shape `(n,)`: correlation of their thumbnails, in [-1, 1].
    """
    from .metrics import embed

    return (embed(images) * embed(pictures)).sum(1).numpy()


def copy_threshold():
    """Similarity above which a picture counts as a copy: 1 % of pairs of real drawings of one caption exceed it."""
    record = json.loads((WEIGHTS / "memorization" / "memorized.json").read_text(encoding="utf-8"))
    return record["copy_threshold"]


def memorized_pictures():
    """
    The picture that each caption was shown with, in the order of `memorized_prompts()`.

    Returns:
        `np.ndarray` of shape `(40, 64, 64, 3)`: uint8.
    """
    from safetensors.torch import load_file

    return load_file(WEIGHTS / "memorization" / "pictures.safetensors")["images"].numpy()

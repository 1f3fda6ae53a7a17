# SPDX-License-Identifier: Apache-2.0
"""What EmojiCanvas can draw, in words: the objects, the styles and the captions made of them."""

from dataclasses import dataclass


# fmt: off
OBJECTS = (
    "airplane", "alarm clock", "anchor", "automobile", "avocado", "backpack", "balloon", "banana", "basketball",
    "bear", "bell", "bicycle", "birthday cake", "bus", "butterfly", "cactus", "carrot", "castle", "cat", "cherries",
    "crab", "crown", "dog", "dolphin", "doughnut", "elephant", "frog", "ghost", "grapes", "guitar", "hamburger",
    "house", "ice cream", "key", "lady beetle", "laptop", "lemon", "light bulb", "mushroom", "octopus", "owl",
    "palm tree", "panda", "pear", "penguin", "pig", "pineapple", "pizza", "rabbit", "rainbow", "red apple", "rocket",
    "rose", "sailboat", "scissors", "skull", "snail", "snake", "snowflake", "soccer ball", "strawberry", "sunflower",
    "umbrella", "whale",
)
# fmt: on
STYLE_NAMES = ("sticker", "ink", "pixel", "blueprint", "neon", "watercolour", "mosaic", "halftone")


@dataclass(frozen=True)
class LabPrompt:
    """A caption of EmojiCanvas with the object and the style it names."""

    prompt: str
    object: str
    style: str


def prompts(objects=None, styles=None):
    """
    Every caption of the chosen objects in the chosen styles, object by object.

    Args:
        objects (`list[str]`, *optional*):
            Names out of `OBJECTS`; all 64 by default.
        styles (`list[str]`, *optional*):
            Names out of `STYLES`; all 8 by default.

    Returns:
        `list[LabPrompt]`

    Raises:
        ValueError: on a name that EmojiCanvas does not draw.

    Example:

    ```py
    >>> from diffusers_ext import lab

    >>> [p.prompt for p in lab.prompts(["cat"], ["neon", "ink"])]
    ['cat, neon style', 'cat, ink style']
    ```
    """
    objects, styles = list(objects or OBJECTS), list(styles or STYLE_NAMES)
    for given, known, what in ((objects, OBJECTS, "object"), (styles, STYLE_NAMES, "style")):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"EmojiCanvas has no {what} {unknown[0]!r}; it has {', '.join(known)}.")
    return [LabPrompt(f"{name}, {style} style", name, style) for name in objects for style in styles]

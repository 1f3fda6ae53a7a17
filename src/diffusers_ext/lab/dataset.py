# SPDX-License-Identifier: Apache-2.0
"""EmojiCanvas, the data set: 64 objects, each drawn by up to eight emoji sets, each drawing in eight styles.

The drawings come from public npm packages (one JSON file of SVG bodies each), fetched by name and version and rendered
with resvg; nothing of them is stored in this repository. Run it as a command to write a data set:

    python -m diffusers_ext.lab.dataset --output_dir data/emoji-canvas --size 64
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .captions import OBJECTS, STYLE_NAMES
from .styles import apply_style


@dataclass(frozen=True)
class EmojiSet:
    """An npm package that holds one set of drawings, pinned, with its licence and its authors."""

    name: str
    package: str
    version: str
    licence: str
    author: str


EMOJI_SETS = (
    EmojiSet("noto", "@iconify-json/noto", "1.2.9", "Apache-2.0", "Google Inc"),
    EmojiSet("blob", "@iconify-json/noto-v1", "1.2.5", "Apache-2.0", "Google Inc"),
    EmojiSet("twemoji", "@iconify-json/twemoji", "1.2.5", "CC-BY-4.0", "Twitter"),
    EmojiSet("emojione", "@iconify-json/emojione", "1.2.3", "CC-BY-4.0", "Emoji One"),
    EmojiSet("fluent", "@iconify-json/fluent-emoji", "1.2.7", "MIT", "Microsoft Corporation"),
    EmojiSet("flat", "@iconify-json/fluent-emoji-flat", "1.2.6", "MIT", "Microsoft Corporation"),
    EmojiSet("firefox", "@iconify-json/fxemoji", "1.2.2", "Apache-2.0", "Mozilla"),
    EmojiSet("streamline", "@iconify-json/streamline-emojis", "1.2.4", "CC-BY-4.0", "Streamline"),
)

# The set that the shipped model never sees, and the share of (object, style) pairs held back from it.
HELD_OUT_SET = "emojione"
HELD_OUT_PAIRS = 51


def held_out_pairs():
    """
    The (object, style) pairs that the model never sees together, although it sees the object in other styles and the
    style on other objects.

    Returns:
        `set` of `(object, style)`: 51 of the 512 pairs, the same on every machine.
    """
    pairs = [(name, style) for name in OBJECTS for style in STYLE_NAMES]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}/{pair[1]}".encode()).hexdigest())
    return set(pairs[:HELD_OUT_PAIRS])


def fetch_packages(folder):
    """
    Downloads the pinned emoji packages with the npm client, unless their archives are there already.

    Args:
        folder (`str` or `os.PathLike`):
            Where the `.tgz` archives lie; created when missing.

    Raises:
        RuntimeError: when npm is missing or a download fails.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for emoji_set in EMOJI_SETS:
        if _archive(folder, emoji_set).exists():
            continue
        command = ["npm", "pack", "--silent", f"{emoji_set.package}@{emoji_set.version}"]
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"The npm client is needed to fetch the emoji sets but was not found. Install Node.js, or put the "
                f"archives ({', '.join(f'{s.package}@{s.version}' for s in EMOJI_SETS)}) into {folder} by hand."
            ) from error
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"`{' '.join(command)}` failed: {error.stderr.strip() or error}") from error


def _archive(folder, emoji_set):
    return Path(folder) / f"{emoji_set.package.lstrip('@').replace('/', '-')}-{emoji_set.version}.tgz"


def _svg(icons, name):
    """The SVG text of an icon, aliases followed; `None` if the set does not draw it."""
    name = icons.get("aliases", {}).get(name, {}).get("parent", name)
    icon = icons["icons"].get(name)
    if icon is None:
        return None
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = icon.get("width", icons.get("width", 16)), icon.get("height", icons.get("height", 16))
    body = icon["body"].replace("currentColor", "#222222")
    xmlns = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {xmlns} viewBox="{left} {top} {width} {height}">{body}</svg>'


def render_drawings(packages, size=64):
    """
    Renders every object of every set, on white.

    Args:
        packages (`str` or `os.PathLike`):
            Folder of the archives, see [`fetch_packages`].
        size (`int`, *optional*, defaults to 64):
            Side in pixels, a multiple of 16.

    Returns:
        `dict` from `(object, set)` to a uint8 array of shape `(size, size, 3)`.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ImportError("Rendering the drawings needs resvg: `pip install diffusers-ext[lab]`.") from error
    from PIL import Image

    drawings = {}
    for emoji_set in EMOJI_SETS:
        with tarfile.open(_archive(packages, emoji_set)) as archive:
            icons = json.load(archive.extractfile("package/icons.json"))
        for name in OBJECTS:
            svg = _svg(icons, name.replace(" ", "-"))
            if svg is None:
                continue
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background="white"))
            image = Image.open(io.BytesIO(png)).convert("RGB")
            # A drawing that is not square comes out shorter than asked; it is centred.
            canvas = Image.new("RGB", (size, size), "white")
            canvas.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
            drawings[name, emoji_set.name] = np.asarray(canvas)
    return drawings


def build_dataset(output_dir, size=64, packages=None):
    """
    Builds EmojiCanvas and writes it as one compressed NumPy file with its licences.

    Args:
        output_dir (`str` or `os.PathLike`):
            Receives `emoji_canvas_<size>.npz` with arrays `images` `(N, size, size, 3)` uint8, `object`, `style`,
            `emoji_set` (text), and `LICENCES.json`.
        size (`int`, *optional*, defaults to 64):
            Side of the pictures in pixels, a multiple of 16.
        packages (`str` or `os.PathLike`, *optional*):
            Folder for the downloaded archives; `output_dir/packages` by default.

    Returns:
        `Path` of the NumPy file.

    Raises:
        ValueError: when `size` is not a positive multiple of 16.
        RuntimeError: when a package cannot be fetched.
    """
    if size <= 0 or size % 16:
        raise ValueError(f"`size` has to be a positive multiple of 16 but is {size}.")
    output_dir = Path(output_dir)
    packages = Path(packages or output_dir / "packages")
    fetch_packages(packages)
    images, objects, styles, sets = [], [], [], []
    for (name, emoji_set), drawing in render_drawings(packages, size).items():
        for style in STYLE_NAMES:
            images.append(apply_style(drawing, style))
            objects.append(name)
            styles.append(style)
            sets.append(emoji_set)
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / f"emoji_canvas_{size}.npz"
    aside = path.with_suffix(".partial")
    with open(aside, "wb") as file:
        np.savez_compressed(
            file, images=np.stack(images), object=np.array(objects), style=np.array(styles), emoji_set=np.array(sets)
        )
    os.replace(aside, path)
    licences = [emoji_set.__dict__ for emoji_set in EMOJI_SETS]
    (output_dir / "LICENCES.json").write_text(json.dumps(licences, indent=2) + "\n", encoding="utf-8")
    return path


def main():
    parser = argparse.ArgumentParser(description="Build the EmojiCanvas data set.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument(
        "--packages", default=None, help="Folder with the emoji archives; they are fetched if missing."
    )
    args = parser.parse_args()
    print(build_dataset(args.output_dir, args.size, args.packages))


if __name__ == "__main__":
    main()

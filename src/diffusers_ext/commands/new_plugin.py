# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext new-plugin NAME`"""

import keyword
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from diffusers_ext.registry import list_methods

from .dispatch import check_output_folder


EXAMPLE = "diffusers-ext new-plugin sharpness"


def run(
    name: Annotated[str, typer.Argument(help="Name of the method: lower-case words, joined by _ or -.")],
    output_dir: Annotated[Path, typer.Option(help="Folder in which the plugin's folder is made.")] = Path("."),
):
    """Start a plugin of your own: a package with a pipeline, a hook and tests that pass."""
    if not re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise typer.BadParameter(
            f"{name!r} has to be lower-case letters and digits, words joined by _ or -, and no keyword.",
            param_hint="NAME",
        )
    name = name.replace("-", "_")
    if name in {method.name.replace("-", "_") for method in list_methods()}:
        raise typer.BadParameter(f"there is a method {name!r} already; choose another name.", param_hint="NAME")
    destination = output_dir / f"diffusers-ext-{name.replace('_', '-')}"
    if destination.exists():
        raise FileExistsError(f"{destination} exists already; choose another name or folder.")
    check_output_folder(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=output_dir))
    try:
        render(template_folder(), aside / "plugin", name)
        os.replace(aside / "plugin", destination)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(destination.resolve())


def template_folder():
    """The template: beside the package's code in a wheel, at the top of the repository in a checkout."""
    package = Path(__file__).parents[1]
    packaged = package / "templates" / "plugin"
    return packaged if packaged.is_dir() else package.parents[1] / "templates" / "plugin"


def render(template, destination, name):
    """Copies the template; `latent_gain` becomes `name` in paths and texts, in all three spellings."""
    camel = "".join(part.capitalize() for part in name.split("_"))
    words = {
        "latent_gain": name,
        "latent-gain": name.replace("_", "-"),
        "LATENT_GAIN": name.upper(),
        "LatentGain": camel,
    }

    def rename(text):
        return re.sub("|".join(words), lambda match: words[match.group()], text)

    for source in sorted(template.rglob("*")):
        if source.suffix not in (".md", ".py", ".toml"):
            continue
        target = destination / rename(str(source.relative_to(template)))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rename(source.read_text(encoding="utf-8")), encoding="utf-8")

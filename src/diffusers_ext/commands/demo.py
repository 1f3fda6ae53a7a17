# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext demo [NAME]`"""

from pathlib import Path
from typing import Annotated

import typer

from .dispatch import check_output_folder, find_function


EXAMPLE = "diffusers-ext demo saeuron --output-dir outputs/demo"


def run(
    name: Annotated[str, typer.Argument(help="Name of a method.")] = "saeuron",
    output_dir: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("outputs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the pictures.")] = 3,
    quiet: Annotated[bool, typer.Option(help="Show no progress bar.")] = False,
):
    """Show a method on the lab model, in about a minute on a laptop's CPU."""
    demo = find_function(name, "demo")
    check_output_folder(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for path in demo(output_dir, seed=seed, quiet=quiet):
        print(path.resolve())

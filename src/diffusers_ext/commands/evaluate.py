# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext evaluate NAME`"""

import json
from pathlib import Path
from typing import Annotated

import typer

from .dispatch import check_output_folder, find_function


EXAMPLE = "diffusers-ext evaluate saeuron --output-dir outputs/evaluate"


def run(
    name: Annotated[str, typer.Argument(help="Name of a method.")],
    output_dir: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("outputs/evaluate"),
    seed: Annotated[int, typer.Option(help="Seed of the pictures.")] = 0,
    quick: Annotated[bool, typer.Option(help="Few pictures, to see that it runs; the figures mean nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result.")] = False,
):
    """Measure a method on the lab model; writes JSON and a picture."""
    evaluate = find_function(name, "evaluate")
    check_output_folder(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    result = evaluate(output_dir, seed=seed, quick=quick)
    print(json.dumps(result if as_json else result.get("summary", result), indent=2))
    if not as_json:
        print(output_dir.resolve())

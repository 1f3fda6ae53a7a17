# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext convert NAME SRC DST`"""

import json
from pathlib import Path
from typing import Annotated

import typer

from .dispatch import check_output_folder, find_function


EXAMPLE = "diffusers-ext convert saeuron path/to/official/checkpoint my-sae"


def run(
    name: Annotated[str, typer.Argument(help="Name of a method.")],
    source: Annotated[str, typer.Argument(help="Folder or Hub id of the checkpoint.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[str | None, typer.Option(help="Fail unless the source has this format.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
):
    """Convert an official checkpoint to our format."""
    from diffusers_ext.checkpoints import check_folder

    convert = find_function(name, "convert")
    check_output_folder(destination)
    if Path(source).is_dir():
        check_folder(source)
    report = convert(source, destination, format=format)
    destination = report.destination.resolve()
    if as_json:
        record = {"format": report.format, "loaded": report.loaded, "dropped": report.dropped}
        print(json.dumps({**record, "destination": str(destination)}, indent=2))
        return
    print(f"Read {len(report.loaded)} tensors of the format {report.format}: {', '.join(report.loaded)}")
    for key, reason in report.dropped.items():
        print(f"Dropped {key}: {reason}")
    print(destination)

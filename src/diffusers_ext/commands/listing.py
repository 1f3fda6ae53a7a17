# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext list`"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from diffusers_ext.registry import KINDS, list_methods


EXAMPLE = "diffusers-ext list --kind hook --json"


def run(
    pattern: Annotated[str | None, typer.Argument(help="Shell pattern of names, for instance 'sae*'.")] = None,
    kind: Annotated[str | None, typer.Option(help=f"One of {', '.join(KINDS)}.")] = None,
    base: Annotated[str | None, typer.Option(help="Family of base models, for instance stable-diffusion.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """List the installed methods, those of plugins included."""
    if kind is not None and kind not in KINDS:
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(KINDS)}.", param_hint="--kind")
    methods = list_methods(kind=kind, base=base, pattern=pattern)
    if as_json:
        print(json.dumps([asdict(method) for method in methods], indent=2))
        return
    rows = [("name", "status", "kinds", "from", "what it does")]
    rows += [(m.name, m.status, ", ".join(m.kinds), m.distribution, m.summary) for m in methods]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + "  " + row[4])

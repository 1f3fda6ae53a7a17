# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext info NAME`"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from .dispatch import find_method


EXAMPLE = "diffusers-ext info saeuron"


def run(
    name: Annotated[str, typer.Argument(help="Name of a method, see `diffusers-ext list`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Tell what is known of one method."""
    record = asdict(find_method(name))
    if as_json:
        print(json.dumps(record, indent=2))
        return
    width = max(len(key) for key in record)
    for key, value in record.items():
        value = ", ".join(value) if isinstance(value, (tuple, list)) else value
        print(f"{key.ljust(width)}  {value or '-'}")

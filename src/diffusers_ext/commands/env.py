# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext env`"""

import json
from typing import Annotated

import typer


EXAMPLE = "diffusers-ext env"


def run(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False):
    """Print versions and machine, to paste into a report."""
    from diffusers_ext import plugins
    from diffusers_ext.lab.results import environment

    found = environment()
    found["plugins"] = {
        group: [f"{p.name} ({p.distribution} {p.version})" for p in plugins.discover(group).values()]
        for group in plugins.GROUPS
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for title, entries in found.items():
        print(f"{title}:")
        for key, value in entries.items():
            print(f"  {key}: {', '.join(value) or '-' if isinstance(value, list) else value}")

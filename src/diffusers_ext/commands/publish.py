# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext publish FOLDER REPO_ID`"""

from pathlib import Path
from typing import Annotated

import typer


EXAMPLE = "diffusers-ext publish pipelines/saeuron my-org/saeuron --dry-run"


def run(
    folder: Annotated[Path, typer.Argument(help="A pipeline, a scheduler, or weights with their card.")],
    repo_id: Annotated[str, typer.Argument(help="organisation/name on the Hub; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to publish to; main by default.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check; send nothing.")] = False,
):
    """Check a folder, which loads it and so runs its code, and publish it in one commit."""
    from diffusers_ext.hub import publish

    report = publish(folder, repo_id, private, revision, dry_run)
    total = sum(report.files.values())
    print(f"{report.kind} {report.class_name or 'weights'}: {len(report.files)} files, {total:,} bytes")
    if dry_run:
        for name, size in report.files.items():
            print(f"  {name}  {size:,}")
        print(f"{folder} can be published. Nothing was sent.")
        return
    print(f"{'Published' if report.committed else 'Nothing had changed; it is'} at {report.url}")
    print(f"Revision: {report.revision}\n\n{report.usage}")

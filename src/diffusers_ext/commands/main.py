# SPDX-License-Identifier: Apache-2.0
"""Entry point of `diffusers-ext`."""

import logging
import sys

import typer

from . import convert, demo, env, evaluate, hub_server, info, listing, new_plugin, publish


app = typer.Typer(
    name="diffusers-ext",
    help="Extensions for Hugging Face diffusers.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for name, module in (
    ("list", listing),
    ("info", info),
    ("env", env),
    ("demo", demo),
    ("convert", convert),
    ("evaluate", evaluate),
    ("new-plugin", new_plugin),
    ("publish", publish),
    ("hub-server", hub_server),
):
    app.command(name, epilog=f"Example: {module.EXAMPLE}")(module.run)


@app.callback(invoke_without_command=True)
def _without_command(context: typer.Context):
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


# The base of all usage errors, for which typer has no public name.
_UsageError = typer.BadParameter.__base__


def main():
    """Runs a command: 0 on success, 1 when it fails and 2 on wrong usage, either with one line that says why."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    # What a user can cause is one of these; anything else is a defect and keeps its traceback.
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        code = _report(
            f"{error.format_message()} See `{error.ctx.command_path if error.ctx else app.info.name} --help`.", 2
        )
    except typer.Abort:
        code = _report("interrupted", 130)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        code = _report(str(error), 1)
    sys.exit(code)


def _report(message, code):
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()

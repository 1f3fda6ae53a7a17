# SPDX-License-Identifier: Apache-2.0
"""From a method's name to the function behind a command."""

import os
import pkgutil

import typer

from diffusers_ext.registry import get_method, list_methods


def find_method(name):
    """
    The record of a method that was named on the command line.

    Raises:
        typer.BadParameter: when there is no such method.
    """
    try:
        return get_method(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error


def find_function(name, command):
    """
    The function that a method's record names for a command.

    Raises:
        typer.BadParameter: when there is no such method, or it has none.
        RuntimeError: when what the record names cannot be imported.
    """
    spec = find_method(name)
    target = getattr(spec, command)
    if target is None:
        having = [method.name for method in list_methods() if getattr(method, command)]
        raise typer.BadParameter(
            f"The method {name!r} has no {command}. Methods that have one: {', '.join(having) or 'none'}.",
            param_hint="NAME",
        )
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{spec.distribution} names {target} as the {command} of {spec.name}, but it cannot be imported: {error}."
        ) from error


def check_output_folder(folder):
    """
    Finds out before long work that a folder can be written, without making it.

    Raises:
        NotADirectoryError: when something on its path is a file.
        PermissionError: when it, or the folder it would be made in, is read-only.
    """
    present = folder.absolute()
    while not present.exists():
        present = present.parent
    if not present.is_dir():
        raise NotADirectoryError(f"Cannot write to {folder}: {present} is a file. Choose another folder.")
    if not os.access(present, os.W_OK):
        raise PermissionError(f"Cannot write to {folder}: {present} is read-only. Choose another folder.")

# SPDX-License-Identifier: Apache-2.0
"""Metrics and remedies by name: our own, and those that other packages bring through entry points."""

import difflib
from importlib.metadata import entry_points


METRICS_GROUP = "diffusers_ext.memorization_metrics"
MITIGATIONS_GROUP = "diffusers_ext.memorization_mitigations"


def known_names(own, group):
    """Names in `own` (`dict`) and in an entry-point group, sorted."""
    return sorted({*own, *(point.name for point in entry_points(group=group))})


def find(what, name, own, group):
    """
    What a name stands for.

    Args:
        what (`str`):
            For the error, for instance `"metric"`.
        name (`str`):
            The name.
        own (`dict`), group (`str`):
            Where to look, in this order.

    Raises:
        ValueError: on an unknown name, with the known ones and the closest.
    """
    if name in own:
        return own[name]
    for point in entry_points(group=group):
        if point.name == name:
            return point.load()
    known = known_names(own, group)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"There is no {what} {name!r}; there are {', '.join(known)}.{hint}")

# SPDX-License-Identifier: Apache-2.0
"""Discovery of what installed distributions add to diffusers_ext, through entry points.

Nothing is imported until it is asked for, and a plugin that fails does not take others with it.
"""

import difflib
import functools
import logging
import re
from dataclasses import dataclass
from importlib import metadata


logger = logging.getLogger(__name__)

GROUPS = ("diffusers_ext.methods", "diffusers_ext.pipelines", "diffusers_ext.schedulers", "diffusers_ext.adapters")
OWN_DISTRIBUTION = "diffusers-ext"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True)
class Plugin:
    """One entry point: its group and name, the object it points at as `module:attribute`, and who brought it."""

    group: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def module(self):
        return self.target.partition(":")[0]

    def load(self):
        """
        Imports and returns the object.

        Raises:
            RuntimeError: when the import fails; it names plugin and distribution, the cause is chained.
        """
        # The one place where any exception is caught: code of strangers runs here.
        try:
            return metadata.EntryPoint(self.name, self.target, self.group).load()
        except Exception as error:
            raise RuntimeError(
                f"The plugin {self.name!r} of the distribution {self.distribution} {self.version} (group "
                f"{self.group}) cannot be loaded: {type(error).__name__}: {error}. Install what it misses, update it, "
                f"or uninstall {self.distribution}."
            ) from error


@functools.lru_cache(maxsize=None)
def discover(group):
    """
    Every plugin of a group by name, without importing any.

    On a duplicate name our own wins, else the first by distribution name; the others stay reachable as
    `distribution:name`.

    Args:
        group (`str`):
            One of `GROUPS`.

    Returns:
        `dict[str, Plugin]`, sorted by name.

    Raises:
        ValueError: on a group that does not exist.
    """
    if group not in GROUPS:
        raise ValueError(f"`group` has to be one of {', '.join(GROUPS)} but is {group!r}.")
    found = []
    for entry in metadata.entry_points(group=group):
        distribution, version = _normalise(entry.dist.name), entry.dist.version
        if not _NAME.fullmatch(entry.name):
            logger.warning(
                f"Ignoring the plugin {entry.name!r} of {distribution} {version}: names are lower-case letters, "
                f"digits, - and _."
            )
            continue
        found.append(Plugin(group, entry.name, entry.value, distribution, version))
    # An editable install next to a wheel lists the same entry twice.
    found = sorted(set(found), key=lambda p: (p.distribution != OWN_DISTRIBUTION, p.distribution, p.name))
    plugins = {}
    for plugin in found:
        first = plugins.setdefault(plugin.name, plugin)
        if first is not plugin:
            logger.warning(
                f"Two plugins are called {plugin.name!r} in {group}: {first.distribution} {first.version} is used; "
                f"ask for '{plugin.distribution}:{plugin.name}' to get that of {plugin.distribution} {plugin.version}."
            )
            plugins[f"{plugin.distribution}:{plugin.name}"] = plugin
    return dict(sorted(plugins.items()))


def _normalise(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def find(group, name):
    """
    The plugin of that name, or of `distribution:name`.

    Raises:
        ValueError: when there is none; the message names the closest.
        TypeError: when `name` is no string.
    """
    if not isinstance(name, str):
        raise TypeError(f"`name` has to be a string but is a {type(name).__name__}.")
    plugins = discover(group)
    if name in plugins:
        return plugins[name]
    distribution, separator, bare = name.partition(":")
    qualified = f"{_normalise(distribution)}:{bare}"
    if qualified in plugins:
        return plugins[qualified]
    if separator and bare in plugins and plugins[bare].distribution == _normalise(distribution):
        return plugins[bare]
    raise ValueError(unknown_name(group.partition(".")[2].rstrip("s"), name, plugins))


def unknown_name(what, name, known):
    """One sentence for a name that does not exist, with the closest that do."""
    close = difflib.get_close_matches(str(name), list(known), n=3, cutoff=0.4)
    if close:
        return f"There is no {what} {name!r}. Closest: {', '.join(close)}."
    return f"There is no {what} {name!r}. Known: {', '.join(sorted(known)) or 'none'}."

# SPDX-License-Identifier: Apache-2.0
import sys
import textwrap

import pytest

from diffusers_ext import plugins, registry


@pytest.fixture
def forget_plugins():
    """What was discovered, and what of it was loaded, is forgotten before and after the test."""

    def forget():
        plugins.discover.cache_clear()
        registry._load_or_warn.cache_clear()

    forget()
    yield forget
    forget()


@pytest.fixture
def install(tmp_path, monkeypatch, forget_plugins):
    """
    Puts a distribution on the path, as pip would have left it: modules, `METADATA` and `entry_points.txt`.

    `install(name, {"group": {"entry": "module:attribute"}}, module="source", ...)` returns the folder.
    """
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, groups, version="1.0", **sources):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{entry} = {target}" for entry, target in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in sources.items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        forget_plugins()
        return tmp_path

    yield install
    for module in set(sys.modules) - modules:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in sys.modules[module].__file__:
            del sys.modules[module]

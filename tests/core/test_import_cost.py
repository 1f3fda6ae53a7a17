# SPDX-License-Identifier: Apache-2.0
"""`import diffusers_ext` is nearly free."""

import subprocess
import sys

import pytest

import diffusers_ext


HEAVY = ("torch", "diffusers", "transformers", "peft", "numpy", "PIL", "scipy", "typer")


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    "code",
    [
        "import diffusers_ext",
        "import diffusers_ext; dir(diffusers_ext)",
        "import diffusers_ext; diffusers_ext.list_methods()",
        "import diffusers_ext; diffusers_ext.get_method('saeuron')",
        "from diffusers_ext import MethodSpec, load_component",
    ],
)
def test_loads_nothing_heavy(code):
    loaded = run(f"{code}; import sys; print(*sys.modules)")
    assert not set(loaded.split()) & set(HEAVY)


def test_costs_less_than_50_ms():
    # Processor time, and the best of three: what else runs on the machine must not count.
    code = "import time; t = time.process_time(); import diffusers_ext; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.05


def test_every_public_name_is_there_and_is_listed():
    for name in diffusers_ext.__all__:
        assert name in dir(diffusers_ext) and getattr(diffusers_ext, name) is not None


def test_type_checkers_see_exactly_the_public_names():
    import ast
    from pathlib import Path

    source = Path(diffusers_ext.__file__)
    (block,) = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    names = [alias.asname for node in block.body for alias in node.names]
    assert sorted(names) == list(diffusers_ext.__all__)
    assert (source.parent / "py.typed").exists()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'SAeUronPipelin'"):
        diffusers_ext.SAeUronPipelin
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from diffusers_ext import nothing  # noqa: F401

# SPDX-License-Identifier: Apache-2.0
"""Private names of dependencies that we touch: each is still there, and there are no others.

Where an upgrade of a dependency fails here, it moved one.
"""

import ast
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DModel
from diffusers.hooks import HookRegistry
from diffusers.models.modeling_utils import ModelMixin


ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "huggingface_hub", "safetensors", "typer")


def hooked():
    module = torch.nn.Identity()
    HookRegistry.check_if_exists_or_initialize(module)
    return module


def configured_bar():
    pipe = object.__new__(StableDiffusionPipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# Name: something that has it.
PRIVATE = {
    "_callback_tensor_inputs": lambda: StableDiffusionPipeline,
    "_compiled_call_impl": torch.nn.Identity,
    "_diffusers_hook": hooked,
    "_dynamo": lambda: torch,
    "_exclude_from_cpu_offload": lambda: StableDiffusionPipeline,
    "_execution_device": lambda: StableDiffusionPipeline,
    "_fn_refs": lambda: HookRegistry(torch.nn.Identity()),
    "_hook_order": lambda: HookRegistry(torch.nn.Identity()),
    "_optional_components": lambda: StableDiffusionPipeline,
    "_orig_mod": lambda: torch.compile(torch.nn.Identity()),
    "_progress_bar_config": configured_bar,
    "_supports_gradient_checkpointing": lambda: ModelMixin,
    "_version": lambda: torch.zeros(1),
}
# Set by the stock call, or by loading, so that nothing has them before.
SET_LATER = {"_guidance_scale", "_name_or_path"}


def sources():
    for folder in ("src", "examples", "benchmarks", "scripts", "templates"):
        yield from (path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """Private names that a file makes itself: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def touched(tree):
    """Private names that a file reads or sets on an object, by attribute, by `getattr` and its like, or by import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            if isinstance(node.args[1], ast.Constant):
                yield node.args[1].value
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module.split(".")[0] in PACKAGES:
            yield from node.module.split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))


def private_names(source, ours=()):
    tree = ast.parse(source)
    return {name for name in touched(tree) if is_private(name)} - set(defined(tree)) - set(ours)


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_the_name_is_still_there(name):
    assert hasattr(PRIVATE[name](), name)


def test_loading_still_sets_the_path(tmp_path):
    blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [4]}
    UNet2DModel(8, norm_num_groups=2, layers_per_block=1, **blocks).save_pretrained(tmp_path)
    assert UNet2DModel.from_pretrained(tmp_path).config._name_or_path == tmp_path


def test_the_stock_call_still_sets_what_callbacks_read():
    names = StableDiffusionPipeline.__call__.__wrapped__.__code__.co_names
    assert {"_guidance_scale", "_interrupt"} <= set(names)


def test_the_table_is_complete():
    texts = [path.read_text(encoding="utf-8") for path in sources()]
    ours = {name for text in texts for name in defined(ast.parse(text))}
    found = set().union(*(private_names(text, ours) for text in texts))
    assert found == set(PRIVATE) | SET_LATER


@pytest.mark.parametrize(
    "source",
    [
        "from diffusers.hooks.hooks import _secret",
        "from diffusers._secret import name",
        "import torch._secret",
        "def f(pipe): return pipe._secret",
        "def f(pipe): return getattr(pipe, '_secret', None)",
        "def f(pipe): pipe._secret = 1",
    ],
)
def test_the_scan_sees_every_way_to_touch_one(source):
    assert private_names(source) == {"_secret"}


def test_the_scan_leaves_out_our_own():
    assert (
        private_names(
            "class A:\n    def f(self):\n        self._own = 1\n        return self._own + self._f()", {"_f"}
        )
        == set()
    )

# SPDX-License-Identifier: Apache-2.0
"""The rules of `scripts/check_repo.py` hold here, and each notices what it is there for."""

import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path

import pytest

import diffusers_ext
from diffusers_ext.lab.dataset import EMOJI_SETS


ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("check_repo", ROOT / "scripts" / "check_repo.py")
check_repo = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(check_repo)

HEADER = check_repo.SPDX + "\n"
PIPELINE = "from diffusers import DDIMPipeline\n\n\nclass {}(DDIMPipeline):\n    pass\n"


@pytest.mark.parametrize("check", check_repo.CHECKS, ids=lambda check: check.__name__)
def test_the_repository_keeps_the_rule(check):
    assert list(check(ROOT)) == []


def method(name="blur"):
    return f"src/diffusers_ext/methods/{name}/pipeline_{name}.py"


BROKEN = [
    ("check_headers", {"src/a.py": "import os\n"}, "the first line has to be"),
    ("check_pickles", {"adapters/a/weights.pt": ""}, "have to be safetensors"),
    ("check_machine_paths", {"docs/a.md": "see /" + "home/someone/file"}, "path of one machine"),
    ("check_links", {"pipelines/blur/pipeline.py": Path("../nothing.py")}, "which is missing"),
    ("check_links", {"pipelines/blur/pipeline.py": Path("/etc/hostname")}, "has to be relative"),
    ("check_links", {"pipelines/blur/pipeline.py": Path("../../..")}, "out of the repository"),
    ("check_shelves", {"pipelines/blur/README.md": ""}, "pipeline.py is missing"),
    ("check_shelves", {"pipelines/blur/pipeline.py": HEADER}, "has to be a link"),
    (
        "check_shelves",
        {
            method(): "from .hooks_blur import x\n",
            "src/diffusers_ext/methods/blur/hooks_blur.py": "",
            "pipelines/blur/pipeline.py": Path("../..", method()),
        },
        "a link to hooks_blur.py is missing",
    ),
    ("check_pipeline_files", {method(): HEADER}, "has to define one pipeline class but defines 0"),
    ("check_pipeline_files", {method(): PIPELINE.format("A") + PIPELINE.format("B")}, "but defines 2 (A, B)"),
    (
        "check_pipeline_files",
        {
            method(): PIPELINE.format("A") + "from .a_blur import x\n",
            "src/diffusers_ext/methods/blur/a_blur.py": "from .b_blur import x\n",
            "src/diffusers_ext/methods/blur/b_blur.py": "x = 1\n",
        },
        "has to import b_blur itself",
    ),
    ("check_inference_imports", {method(): "import scipy\n"}, "must not import scipy"),
    ("check_inference_imports", {method(): "from diffusers_ext import lab\n"}, "must not import diffusers_ext"),
    ("check_inference_imports", {method(): "def f():\n    import einops.layers\n"}, "must not import einops"),
    ("check_inference_imports", {method(): "from ..other.hooks_other import x\n"}, "imported flatly"),
    ("check_inference_imports", {method(): "from . import hooks_blur\n"}, "imported flatly"),
    (
        "check_circles",
        {
            method(): PIPELINE.format("A") + "from .a_blur import x\n",
            "src/diffusers_ext/methods/blur/a_blur.py": "from .b_blur import x\n",
            "src/diffusers_ext/methods/blur/b_blur.py": "def f():\n    from .a_blur import x\n",
        },
        "a_blur imports b_blur imports a_blur",
    ),
    (
        "check_unique_names",
        {
            method("blur"): "from .hooks import x\n",
            "src/diffusers_ext/methods/blur/hooks.py": "",
            method("focus"): "from .hooks import x\n",
            "src/diffusers_ext/methods/focus/hooks.py": "",
        },
        "have one name",
    ),
    ("check_reserved_folders", {"src/diffusers_ext/methods/flux/modeling_a.py": ""}, "diffusers has pipelines.flux"),
]


@pytest.mark.parametrize(("check", "files", "message"), BROKEN, ids=[f"{row[0]}-{row[2]}" for row in BROKEN])
def test_what_breaks_a_rule_is_reported(tmp_path, check, files, message):
    root = tmp_path / "root"
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(content) if isinstance(content, Path) else path.write_text(content)
    (problem,) = getattr(check_repo, check)(root)
    assert message in problem


def test_generated_folders_are_not_looked_at(tmp_path):
    for name in (".venv/lib/a.pt", "outputs/run/a.pt", "src/__pycache__/a.pt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    assert list(check_repo.check_pickles(tmp_path)) == []


def test_ci_starts_the_two_commands_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text() and "make quality" in script.read_text()


def test_licence_and_attributions_are_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    notice = (ROOT / "NOTICE").read_text()
    for emoji_set in EMOJI_SETS:
        assert f"{emoji_set.package} {emoji_set.version}), {emoji_set.author}" in notice


def test_every_dependency_of_the_tests_is_pinned():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    wanted = [text for text in metadata.requires("diffusers_ext") if "extra ==" not in text or "'dev'" in text]
    names = {re.match(r"[\w-]+", text).group().lower().replace("_", "-") for text in wanted}
    assert "torch" in names and "pytest" in names and names <= pinned


def test_console_script_and_version_are_ours():
    assert metadata.version("diffusers_ext") == diffusers_ext.__version__

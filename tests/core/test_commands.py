# SPDX-License-Identifier: Apache-2.0
"""The command line as a user starts it: in a process of its own, with a plugin installed beside us."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


PLUGIN = """
import json
from dataclasses import dataclass, field
from pathlib import Path
from diffusers_ext import MethodSpec

def demo(output, seed, quiet):
    output.mkdir(parents=True, exist_ok=True)
    file = output / "blur.txt"
    file.write_text(f"{seed} {quiet}")
    return [file]

def evaluate(output_dir, seed, quick):
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / "blur.json").write_text("{}")
    return {"summary": {"seed": seed, "quick": quick}, "rows": [1, 2]}

@dataclass
class Report:
    format: str
    destination: Path
    loaded: list = field(default_factory=lambda: ["weight"])
    dropped: dict = field(default_factory=lambda: {"step": "not used"})

def convert(source, destination, format=None):
    if not Path(source).is_dir():
        raise FileNotFoundError(f"{source} is no folder,\\nso there is nothing to convert.")
    return Report(format or "theirs", Path(destination))

def bug(output, seed, quiet):
    return {}["missing"]

SPEC = MethodSpec("blur", "Blur", kinds=("hook",), demo="blur_plugin:demo", evaluate="blur_plugin:evaluate",
                  convert="blur_plugin:convert")
BARE = MethodSpec("bare", "Bare", demo="blur_plugin:nothing", evaluate="no_such_module:evaluate")
BUGGY = MethodSpec("buggy", "Buggy", demo="blur_plugin:bug")
"""
ENTRIES = """
[diffusers_ext.methods]
blur = blur_plugin:SPEC
bare = blur_plugin:BARE
buggy = blur_plugin:BUGGY
broken = broken_plugin:SPEC
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    (site / "blur_plugin.py").write_text(PLUGIN)
    info = site / "blur_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blur-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    return site


@pytest.fixture
def cli(site, tmp_path):
    """Runs `diffusers-ext` in an empty folder."""
    program = Path(sys.executable).with_name("diffusers-ext")

    def cli(*arguments):
        return subprocess.run(
            [program, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return cli


def fails(done, code, message):
    """The exit code, and one line on stderr that says why."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    assert done.returncode == code and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert message in lines[0]
    return True


def test_without_a_command_it_shows_help_and_exits_with_2(cli):
    done = cli()
    assert done.returncode == 2 and "new-plugin" in done.stdout


@pytest.mark.parametrize("command", ["list", "info", "env", "demo", "convert", "evaluate", "new-plugin"])
def test_help_carries_an_example(cli, command):
    done = cli(command, "--help")
    assert done.returncode == 0 and f"Example: diffusers-ext {command}" in " ".join(done.stdout.split())


def test_list_shows_ours_and_theirs_and_warns_of_the_broken(cli):
    done = cli("list")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    names = [row[0] for row in rows]
    assert names[0] == "name" and names[1:] == sorted(names[1:]) and {"bare", "blur", "buggy", "saeuron"} < set(names)
    assert "blur-plugin" in rows[names.index("blur")] and "diffusers-ext" in rows[names.index("saeuron")]
    assert done.stderr.count("WARNING") == 1 and "'broken' of the distribution blur-plugin" in done.stderr


def test_list_as_json_with_filters(cli):
    (only,) = json.loads(cli("list", "b*", "--kind", "hook", "--json").stdout)
    assert only["name"] == "blur" and only["distribution"] == "blur-plugin" and only["kinds"] == ["hook"]
    assert json.loads(cli("list", "--base", "no-such-base", "--json").stdout) == []


def test_info(cli):
    assert "2501.18052" in cli("info", "saeuron").stdout
    record = json.loads(cli("info", "saeuron", "--json").stdout)
    assert record["name"] == "saeuron" and "hook" in record["kinds"] and record["distribution"] == "diffusers-ext"


@pytest.mark.slow
def test_env(cli):
    report = json.loads(cli("env", "--json").stdout)
    assert {"torch", "diffusers", "transformers", "python"} <= set(report["versions"])
    assert "blur (blur-plugin 1.0)" in report["plugins"]["diffusers_ext.methods"]


def test_demo_prints_where_its_pictures_are(cli, tmp_path):
    done = cli("demo", "blur", "--seed", "3", "--quiet", "--output-dir", "deep/er")
    assert done.returncode == 0 and str(tmp_path / "deep" / "er" / "blur.txt") in done.stdout
    assert (tmp_path / "deep" / "er" / "blur.txt").read_text() == "3 True"


def test_evaluate_prints_figures_and_folder(cli, tmp_path):
    done = cli("evaluate", "blur", "--quick", "--seed", "4", "--output-dir", "out")
    assert done.returncode == 0 and '"seed": 4' in done.stdout and str(tmp_path / "out") in done.stdout
    result = json.loads(cli("evaluate", "blur", "--output-dir", "out", "--json").stdout)
    assert result == {"summary": {"seed": 0, "quick": False}, "rows": [1, 2]}


def test_convert_accounts_for_every_tensor(cli, tmp_path):
    done = cli("convert", "blur", tmp_path, "new")
    assert done.returncode == 0 and "weight" in done.stdout and "step: not used" in done.stdout
    assert str(tmp_path / "new") in done.stdout
    report = json.loads(cli("convert", "blur", tmp_path, "new", "--format", "mine", "--json").stdout)
    assert report["format"] == "mine" and report["destination"] == str(tmp_path / "new")


@pytest.mark.slow
def test_convert_of_an_official_checkpoint(cli, tmp_path):
    fixture = Path(__file__).parents[1] / "fixtures" / "saeuron" / "hub" / "unet.up_blocks.1.attentions.1"
    done = cli("convert", "saeuron", fixture, "sae", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "sparsify" and (tmp_path / "sae" / "config.json").is_file()


# Wrong usage: 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "No such command 'lst'"),
        (["list", "--kind", "pipelines"], "'pipelines' is not one of pipeline, scheduler"),
        (["list", "--nothing"], "No such option"),
        (["info"], "Missing argument"),
        (["info", "seauron"], "There is no method 'seauron'. Closest: saeuron"),
        (["demo", "blurr"], "There is no method 'blurr'. Closest: blur"),
        (["demo", "blur", "--seed", "one"], "--seed"),
        (["evaluate", "buggy"], "'buggy' has no evaluate. Methods that have one: ambient_diffusion, bare, blur"),
        (["convert", "bare", "a", "b"], "The method 'bare' has no convert"),
        (["convert", "blur", "a"], "Missing argument"),
        (["new-plugin", "Blur"], "'Blur' has to be lower-case"),
        (["new-plugin", "../up"], "has to be lower-case"),
        (["new-plugin", "class"], "no keyword"),
        (["new-plugin", "saeuron"], "there is a method 'saeuron' already"),
    ],
)
def test_wrong_usage(cli, tmp_path, arguments, message):
    assert fails(cli(*arguments), 2, message)
    assert not list(tmp_path.iterdir())


# Failures: 1


def test_a_broken_plugin_asked_for_by_name(cli):
    assert fails(cli("info", "broken"), 1, "'broken' of the distribution blur-plugin 1.0")


@pytest.mark.parametrize("command", ["demo", "evaluate"])
def test_a_function_that_is_not_there(cli, command):
    assert fails(cli(command, "bare"), 1, f"as the {command} of bare, but it cannot be imported")


def test_an_error_of_several_lines_is_one_line(cli):
    assert fails(cli("convert", "blur", "nothing", "new"), 1, "nothing is no folder, so there is nothing to convert.")


def test_a_defect_keeps_its_traceback(cli):
    done = cli("demo", "buggy")
    assert done.returncode == 1 and "Traceback" in done.stderr and "KeyError: 'missing'" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "blur", "--output-dir", "file/inside"],
        ["evaluate", "blur", "--output-dir", "file"],
        ["convert", "blur", ".", "file/new"],
        ["new-plugin", "sharpen", "--output-dir", "file"],
    ],
)
def test_an_output_that_cannot_be_written(cli, tmp_path, arguments):
    (tmp_path / "file").write_text("kept")
    assert fails(cli(*arguments), 1, f"Cannot write to {arguments[-1]}: {tmp_path / 'file'} is a file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_output(cli, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert fails(cli("demo", "blur", "--output-dir", "closed/new"), 1, "is read-only")


def test_new_plugin_onto_a_folder_that_exists(cli, tmp_path):
    (tmp_path / "diffusers-ext-sharpen").mkdir()
    assert fails(cli("new-plugin", "sharpen"), 1, "diffusers-ext-sharpen exists already")
    assert not list((tmp_path / "diffusers-ext-sharpen").iterdir())

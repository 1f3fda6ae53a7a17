# SPDX-License-Identifier: Apache-2.0
"""A plugin made by `diffusers-ext new-plugin`, built, installed beside us, and used through the public names."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest


PROGRAM = Path(sys.executable).with_name("diffusers-ext")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    done = subprocess.run(
        [PROGRAM, "new-plugin", "soft-focus"], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    assert str(folder / "diffusers-ext-soft-focus") in done.stdout
    return folder / "diffusers-ext-soft-focus"


@pytest.fixture(scope="module")
def site(plugin, tmp_path_factory):
    """A folder with the plugin as pip installs it, from its wheel and without a network."""
    site = tmp_path_factory.mktemp("site")
    dist = tmp_path_factory.mktemp("dist")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", dist, plugin]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = dist.iterdir()
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, timeout=300)
    return site


def run_beside(site, *command):
    """Runs with the plugin installed, in an empty folder."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=site.parent, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_no_name_of_the_template_is_left(plugin):
    for path in plugin.rglob("*"):
        text = str(path.relative_to(plugin)) + (path.read_text() if path.is_file() else "")
        assert "latent" not in text.lower().replace("latents", "")
        if path.suffix == ".py":
            ast.parse(text[len(str(path.relative_to(plugin))) :])


def test_the_command_line_finds_it(site):
    assert "diffusers-ext-soft-focus" in run_beside(site, PROGRAM, "info", "soft_focus")


@pytest.mark.slow
def test_it_loads_through_the_public_names(site):
    code = """
import sys
from diffusers_ext import custom_pipeline, get_method, lab
assert get_method("soft_focus").distribution == "diffusers-ext-soft-focus"
assert "torch" not in sys.modules
path = custom_pipeline("soft_focus")
import torch
from diffusers import DiffusionPipeline
options = {"dtype": torch.float32, "trust_remote_code": True}
pipe = DiffusionPipeline.from_pretrained(lab.pipeline_folder(), custom_pipeline=path, **options)
print(path, type(pipe).__name__)
"""
    path, name = run_beside(site, sys.executable, "-c", code).split()[-2:]
    assert Path(path).is_relative_to(site) and name == "SoftFocusStableDiffusionPipeline"


@pytest.mark.slow
def test_its_own_tests_pass_the_battery_among_them(plugin, site):
    run_beside(site, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", plugin / "tests")

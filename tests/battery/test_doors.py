# SPDX-License-Identifier: Apache-2.0
"""The wheel as a stranger installs it: built here, installed into a folder outside the checkout, used from another."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PLUGIN_FILE = "templates/plugin/src/diffusers_ext_latent_gain/pipeline_latent_gain.py"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]

# Every way to the method, in one process, on the model that the wheel brings.
DOORS = """
import json, sys

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline

import diffusers_ext
from diffusers_ext import (
    ConceptEdit, ConceptEdits, SAeUronConfig, SAeUronStableDiffusionPipeline, SparseAutoencoder, apply_saeuron,
    custom_pipeline, lab, remove_saeuron,
)

folder, plugin_file = sys.argv[1:]
facts = {"package": diffusers_ext.__file__, "file": custom_pipeline("saeuron"), "lab": lab.pipeline_folder()}


def load(file):
    options = {"custom_pipeline": file, "trust_remote_code": True, "dtype": torch.float32}
    pipe = DiffusionPipeline.from_pretrained(lab.pipeline_folder(), **options)
    facts[type(pipe).__name__] = type(pipe).__module__
    return pipe


def draw(pipe, **kwargs):
    generator = torch.Generator().manual_seed(0)
    pipe.set_progress_bar_config(disable=True)
    return pipe("cat", num_inference_steps=2, generator=generator, output_type="pt", **kwargs).images


stock = StableDiffusionPipeline.from_pretrained(lab.pipeline_folder(), dtype=torch.float32)
point = "up_blocks.0.attentions.1"
channels = dict(stock.unet.named_modules())[point].config.in_channels
torch.manual_seed(0)
sae = SparseAutoencoder(channels, expansion_factor=4, k=16, hook={"module": point})
indices = torch.randperm(sae.num_latents)[None, :40].int()
settings = {"indices": indices, "mean": torch.ones(1, 40), "gate": torch.zeros(1, 40), "multiplier": -4.0}
settings |= {"num_latents": sae.num_latents, "sae": sae.fingerprint()}
edit = ConceptEdit("cat", torch.tensor([501.0]), **settings)
sae.save_pretrained(folder)
ConceptEdits([edit]).save_pretrained(folder)

plain = draw(stock)
by_file = load(custom_pipeline("saeuron"))
by_class = SAeUronStableDiffusionPipeline.from_pretrained(lab.pipeline_folder(), dtype=torch.float32)
for pipe in (by_file, by_class):
    pipe.load_sae(folder)
    pipe.load_concepts(folder)
edited = draw(by_file, unlearn=["cat"])
facts["edited differs"] = not torch.equal(edited, plain)
facts["class equals file"] = torch.equal(draw(by_class, unlearn=["cat"]), edited)
apply_saeuron(stock.unet, sae, SAeUronConfig(edits=[edit]))
facts["hook equals file"] = torch.equal(draw(stock), edited)
remove_saeuron(stock.unet)
facts["removed equals stock"] = torch.equal(draw(stock), plain)
plugin = load(plugin_file)
facts["plugin acts"] = not torch.equal(draw(plugin, gain=2.0), plain) and torch.equal(draw(plugin), plain)
facts["first still acts"] = torch.equal(draw(by_file, unlearn=["cat"]), edited)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, ROOT]
    subprocess.run(build, check=True, timeout=900)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """Runs Python with the wheel in front of everything else, in an empty folder."""
    site, empty = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, timeout=900)

    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run.site, run.folder = site, empty
    return run


@pytest.fixture(scope="module")
def facts(run_installed, tmp_path_factory):
    output = run_installed("-c", DOORS, tmp_path_factory.mktemp("artefact"), ROOT / PLUGIN_FILE)
    return json.loads(output.splitlines()[-1])


def test_wheel_holds_the_package_the_lab_and_the_template(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "lab/weights/pipeline/model_index.json", "templates/plugin/pyproject.toml"):
        assert f"diffusers_ext/{name}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"diffusers_ext"}
    assert not [name for name in names if name.endswith(".pyc")] and wheel.stat().st_size < 30e6


def test_a_new_plugin_starts_from_the_wheel(run_installed):
    run_installed("-c", "from diffusers_ext.commands.main import main; main()", "new-plugin", "sharpness")
    assert (run_installed.folder / "diffusers-ext-sharpness" / "pyproject.toml").is_file()


@pytest.mark.slow
def test_everything_comes_from_the_installed_wheel(facts, run_installed):
    for what in ("package", "file", "lab"):
        assert Path(facts[what]).is_relative_to(run_installed.site), facts


@pytest.mark.slow
def test_the_pipeline_file_is_loaded_by_diffusers_itself(facts):
    assert facts["SAeUronStableDiffusionPipeline"] == "diffusers_modules.local.pipeline_saeuron"


@pytest.mark.slow
def test_all_doors_give_the_same_picture(facts):
    assert facts["edited differs"] and facts["class equals file"] and facts["hook equals file"]
    assert facts["removed equals stock"]


@pytest.mark.slow
def test_two_methods_in_one_process(facts):
    assert facts["LatentGainStableDiffusionPipeline"] == "diffusers_modules.local.pipeline_latent_gain"
    assert facts["plugin acts"] and facts["first still acts"]

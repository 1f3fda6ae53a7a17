# SPDX-License-Identifier: Apache-2.0
"""The table of docs/loading.md: what each door executes and downloads."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline

from diffusers_ext import SparseAutoencoder, custom_pipeline, hub_checks, lab, load_component
from diffusers_ext.methods.saeuron.convert_saeuron import convert


ROOT = Path(__file__).parents[2]
DOORS = {
    "import diffusers_ext": "test_importing_and_listing_ask_nobody",
    "the same without `trust_remote_code=True`": "test_code_is_refused_without_trust",
    "custom_pipeline=diffusers_ext.custom_pipeline(name)": "test_the_installed_file_is_what_runs",
    "DiffusionPipeline.from_pretrained(base": "test_round_trip.py",
    "load_component(folder)": "test_a_folder_is_loaded_without_running_its_files",
    "hub.download(id, revision)": "test_publish.py",
    "SparseAutoencoder.from_pretrained(id)": "test_reading_and_converting_run_nothing",
    "publish": "test_publish.py",
    "hub-server": "test_hub_server.py",
}
EVIL = "import pathlib\n\npathlib.Path(__file__).with_name('ran').touch()\nopen({marker!r}, 'w').close()\n"


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


def test_every_row_of_the_table_has_its_test():
    lines = (ROOT / "docs" / "loading.md").read_text(encoding="utf-8").split("| door |")[1].splitlines()
    rows = [line for line in lines[2:] if line.startswith("|")]
    for row in rows:
        assert [door for door in DOORS if door in row.split("|")[1]], row
    assert len(rows) == len(DOORS)
    here = Path(__file__).read_text(encoding="utf-8")
    for test in DOORS.values():
        assert (ROOT / "tests" / "hub" / test).is_file() if test.endswith(".py") else f"def {test}(" in here


def test_importing_and_listing_ask_nobody():
    code = (
        "import socket\n"
        "def refuse(*a): raise SystemExit('asked the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import diffusers_ext\ndiffusers_ext.list_methods()\ndiffusers_ext.get_method('saeuron')\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_code_is_refused_without_trust():
    with pytest.raises(ValueError, match="trust_remote_code"):
        DiffusionPipeline.from_pretrained(lab.pipeline_folder(), custom_pipeline=custom_pipeline("saeuron"))


def test_the_installed_file_is_what_runs():
    path = Path(custom_pipeline("saeuron"))
    assert path == ROOT / "src" / "diffusers_ext" / "methods" / "saeuron" / "pipeline_saeuron.py"


def test_a_folder_is_loaded_without_running_its_files(tmp_path, marker):
    DDIMScheduler().save_pretrained(tmp_path / "folder")
    for name in ("scheduling_evil.py", "__init__.py", "pipeline.py"):
        (tmp_path / "folder" / name).write_text(EVIL.format(marker=str(marker)))
    assert isinstance(load_component(tmp_path / "folder"), DDIMScheduler) and not marker.exists()


def test_reading_and_converting_run_nothing(tmp_path, marker):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    folder = tmp_path / "sae"
    folder.mkdir()
    (folder / "config.json").write_text('{"trainer": {"dict_class": "AutoEncoder"}}')
    torch.save({"encoder.weight": Evil()}, folder / "ae.pt")
    for read in (SparseAutoencoder.from_pretrained, lambda source: convert(source, tmp_path / "out")):
        with pytest.raises(ValueError, match="more than tensors"):
            read(folder)
    assert not marker.exists() and not (tmp_path / "out").exists()


def test_trust_is_never_given_on_the_user_s_behalf():
    # The one place is the process that tries what its user is about to publish.
    sources = [path for path in (ROOT / "src").rglob("*.py") if path.parent.name != "testing"]
    calls = {path.name for path in sources if _calls_with_trust(path)}
    assert calls <= {hub_checks._TRIAL.name}


def _calls_with_trust(path):
    return any(
        keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is True
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def test_stock_pipelines_need_no_trust():
    assert isinstance(StableDiffusionPipeline.from_pretrained(lab.pipeline_folder()), StableDiffusionPipeline)

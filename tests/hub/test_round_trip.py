# SPDX-License-Identifier: Apache-2.0
"""From a folder of this repository to a stranger's picture, through the loopback Hub.

Every folder of `pipelines/` and `schedulers/` that has a card takes part.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, EDMEulerScheduler, UNet2DModel
from folders import make_pipeline
from huggingface_hub import HfApi, constants

from diffusers_ext import get_method, lab
from diffusers_ext.hub import publish
from diffusers_ext.testing import HubServer


pytestmark = [pytest.mark.hub, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "adapters" / "saeuron-emoji-canvas"
PIPELINES = [path.parent for path in sorted(ROOT.glob("pipelines/*/README.md"))]
SCHEDULERS = [path.parent for path in sorted(ROOT.glob("schedulers/*/README.md"))]
CALLS = {
    "stable-diffusion": {"prompt": "cat, neon style", "num_inference_steps": 2},
    "edm": {"num_inference_steps": 2},
}


def tiny_unet():
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "block_out_channels": (8, 8), "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return UNet2DModel(**sizes, **blocks, layers_per_block=1)


@pytest.fixture(scope="module")
def server():
    """One Hub for the whole file, and this process pointed at it."""
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A base model of each family."""
    folder = tmp_path_factory.mktemp("bases")
    DDPMPipeline(tiny_unet(), EDMEulerScheduler()).save_pretrained(folder / "edm")
    DDPMPipeline(tiny_unet(), DDPMScheduler()).save_pretrained(folder / "ddpm")
    return {"stable-diffusion": lab.pipeline_folder(), "edm": str(folder / "edm"), "ddpm": str(folder / "ddpm")}


@pytest.fixture(scope="module")
def be_stranger(server, tmp_path_factory):
    """Does jobs in a fresh process without diffusers_ext; the cache stays from call to call."""
    home = tmp_path_factory.mktemp("home")

    def be_stranger(*jobs, offline=False):
        environment = {**os.environ, **server.environment, "HF_HUB_OFFLINE": "1" if offline else "0"}
        environment |= {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "PYTHONPATH": ""}
        command = [sys.executable, Path(__file__).with_name("stranger.py"), json.dumps(jobs)]
        done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    be_stranger.cache = home / "hub"
    return be_stranger


class Published(dict):
    """Revision of a folder of this repository, which is published when it is first asked for."""

    def __init__(self, server):
        self.server = server

    def __missing__(self, folder):
        self[folder] = publish(folder, f"org/{folder.name}", token=self.server.token).revision
        return self[folder]


@pytest.fixture(scope="module")
def published(server):
    return Published(server)


def picture_job(folder, bases, **where):
    family = next(family for family in get_method(folder.name).base_families if family in CALLS)
    return {"action": "draw", "base": bases[family], "call": CALLS[family], **where}


def from_hub(folder, bases, published):
    where = {"custom_pipeline": f"org/{folder.name}", "custom_revision": published[folder]}
    return picture_job(folder, bases, **where)


def from_checkout(folder, bases):
    # The file behind the link has a name of its own, so that several fit into one process.
    return picture_job(folder, bases, custom_pipeline=str((folder / "pipeline.py").resolve()))


@pytest.fixture(scope="module")
def pictures(be_stranger, published, bases):
    """Answers by folder: from the Hub and from the checkout."""
    jobs = [job for folder in PIPELINES for job in (from_hub(folder, bases, published), from_checkout(folder, bases))]
    answers = be_stranger(*jobs)
    return {folder: answers[2 * number : 2 * number + 2] for number, folder in enumerate(PIPELINES)}


@pytest.mark.parametrize("folder", PIPELINES, ids=[folder.name for folder in PIPELINES])
def test_a_stranger_draws_the_same_picture(pictures, published, folder):
    hub, checkout = pictures[folder]
    assert "error" not in hub and "error" not in checkout, (hub, checkout)
    assert hub["picture"] == checkout["picture"]
    assert published[folder] in hub["module"], "the code did not come from the pinned commit"


@pytest.mark.parametrize("folder", SCHEDULERS, ids=[folder.name for folder in SCHEDULERS])
def test_a_stranger_gets_the_same_schedule(be_stranger, published, folder):
    file = next(folder.glob("scheduling_*.py"))
    name = json.loads((folder / "scheduler_config.json").read_text())["_class_name"]
    job = {"action": "schedule", "file": file.name, "name": name}
    hub, checkout = be_stranger(
        {**job, "repository": f"org/{folder.name}", "revision": published[folder]}, {**job, "repository": str(folder)}
    )
    assert "error" not in hub and hub == checkout


@pytest.fixture(scope="module")
def saeuron(be_stranger, published, bases):
    """Unlearning with code and weights from the Hub, from the checkout, and with the stock call."""
    folder = ROOT / "pipelines" / "saeuron"
    sae = {"repository": f"org/{ADAPTER.name}", "revision": published[ADAPTER]}
    local = {"repository": str(ADAPTER), "revision": None}
    hub, checkout = from_hub(folder, bases, published), from_checkout(folder, bases)
    unlearn = {**hub["call"], "unlearn": ["cat"]}
    jobs = [{**hub, "sae": sae, "call": unlearn}, {**checkout, "sae": local, "call": unlearn}, hub]
    return jobs, be_stranger(*jobs)


def test_weights_from_the_hub_unlearn_as_those_of_the_checkout(saeuron):
    hub, checkout, plain = saeuron[1]
    assert not [answer for answer in saeuron[1] if "error" in answer], saeuron[1]
    assert hub["picture"] == checkout["picture"] != plain["picture"]


def test_offline_the_snapshot_is_used_by_its_path(be_stranger, saeuron, published):
    (hub, *_), (picture, *_) = saeuron
    folder = ROOT / "pipelines" / "saeuron"
    snapshot = {"action": "snapshot", "repository": "org/saeuron", "revision": published[folder]}
    path = {"of": 0, "key": "folder", "add": "/pipeline.py"}
    local = {key: value for key, value in hub.items() if key != "custom_revision"} | {"custom_pipeline": path}
    _, by_path, by_id = be_stranger(snapshot, local, hub, offline=True)
    assert by_path.get("picture") == picture["picture"], by_path
    assert by_id["error"] == "OfflineModeIsEnabled"


def test_half_a_download_in_the_cache_is_an_error_or_is_completed(be_stranger, saeuron):
    (hub, *_), (picture, *_) = saeuron
    weights = next(be_stranger.cache.glob("models--org--saeuron-emoji-canvas/snapshots/*/diffusion*.safetensors"))
    blob = weights.resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[: len(content) // 2])
    (truncated,) = be_stranger(hub)
    assert truncated["error"] == "ValueError" and "no complete safetensors file" in truncated["message"]
    # A transfer that was interrupted leaves an unfinished file, which the next one does not take for the file.
    blob.unlink()
    weights.unlink()
    blob.with_name(blob.name + ".incomplete").write_bytes(content[: len(content) // 2])
    (completed,) = be_stranger(hub)
    assert completed["picture"] == picture["picture"]


def test_moved_tags_and_deleted_revisions(be_stranger, server, bases, tmp_path):
    api = HfApi(endpoint=server.endpoint, token=server.token)
    api.create_repo("org/gain")
    folder = make_pipeline(tmp_path / "gain")
    old = api.upload_folder(repo_id="org/gain", folder_path=folder).oid
    api.create_tag("org/gain", tag="v1")
    load = {"action": "draw", "base": bases["ddpm"], "call": {"num_inference_steps": 1}, "custom_pipeline": "org/gain"}
    new_file = {"path_or_fileobj": str(tmp_path / "new.py"), "path_in_repo": "helper_gain.py", "repo_id": "org/gain"}
    (tmp_path / "new.py").write_text("GAIN = 3.0\n")
    answers = be_stranger(
        {**load, "custom_revision": "v1"},
        {"action": "change", "method": "upload_file", **new_file},
        {"action": "change", "method": "delete_tag", "repo_id": "org/gain", "tag": "v1"},
        {"action": "change", "method": "create_tag", "repo_id": "org/gain", "tag": "v1"},
        {**load, "custom_revision": "v1"},
        {**load, "custom_revision": old},
        {"action": "change", "method": "super_squash_history", "repo_id": "org/gain"},
        {"action": "change", "method": "delete_tag", "repo_id": "org/gain", "tag": "v1"},
        {**load, "custom_revision": old},
        {**load, "custom_revision": "v1"},
    )
    first, moved, pinned, gone, untagged = (answers[number] for number in (0, 4, 5, 8, 9))
    assert first["gain"] == 2.0 and moved["gain"] == 3.0, "a tag is what it says now"
    assert pinned["gain"] == 2.0, "a commit stays what it was"
    assert gone["error"] == untagged["error"] == "RevisionNotFoundError"

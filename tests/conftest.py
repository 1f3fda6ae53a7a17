# SPDX-License-Identifier: Apache-2.0
"""Set before torch and diffusers are imported: one thread, no network, caches of its own."""

import os
import tempfile


_CACHE = tempfile.mkdtemp(prefix="diffusers-ext-tests-")
os.environ["HF_HOME"] = os.path.join(_CACHE, "home")
os.environ["HF_MODULES_CACHE"] = os.path.join(_CACHE, "modules")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import json  # noqa: E402
import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"


class Golden:
    """A pair `<name>.json` and `<name>.safetensors` made by an official implementation."""

    def __init__(self, method, name):
        self.folder = FIXTURES / method
        self.info = json.loads((self.folder / f"{name}.json").read_text())
        self.tensors = load_file(self.folder / f"{name}.safetensors")

    def __getitem__(self, name):
        return self.tensors[name]

    def group(self, prefix):
        return {name[len(prefix) :]: tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


@pytest.fixture(scope="session")
def golden():
    return Golden


@pytest.fixture(scope="session", autouse=True)
def _remove_cache():
    yield
    shutil.rmtree(_CACHE, ignore_errors=True)

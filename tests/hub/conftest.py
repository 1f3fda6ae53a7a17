# SPDX-License-Identifier: Apache-2.0
"""A Hub per test, and the client's own settings pointed at it: nothing of the client is replaced."""

import pytest
from huggingface_hub import HfApi, constants

from diffusers_ext.testing import HubServer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The client of this process may ask this Hub, and no other."""
    with HubServer(users={"hf_loopback": ("me", "org"), "hf_stranger": ("stranger",)}) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        yield server


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def stranger(hub):
    return HfApi(endpoint=hub.endpoint, token="hf_stranger")


@pytest.fixture
def anonymous(hub):
    return HfApi(endpoint=hub.endpoint, token=False)

# SPDX-License-Identifier: Apache-2.0
"""What we export, read by the libraries themselves where they are installed (`pip install sae-lens eai-sparsify`)."""

import pytest
import torch

from diffusers_ext import SparseAutoencoder


@pytest.fixture
def tokens():
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def trained(**config):
    torch.manual_seed(0)
    sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4, **config).eval()
    with torch.no_grad():
        for parameter in (sae.encoder.bias, sae.b_dec):
            parameter.normal_(std=0.1)
    return sae


def test_sparsify_reads_an_export(tokens, tmp_path):
    sparsify = pytest.importorskip("sparsify")
    sae = trained()
    theirs = sparsify.SparseCoder.load_from_disk(sae.export(tmp_path / "sae", "sparsify"))
    encoded = theirs.encode(tokens)
    # Its decoder is a Triton kernel that needs a GPU: the product is written out here.
    latents = torch.zeros(64, 64).scatter(1, encoded.top_indices, encoded.top_acts)
    # Both sum in float32 in an order of their own.
    torch.testing.assert_close(latents @ theirs.W_dec + theirs.b_dec, sae(tokens).sample, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [{}, {"activation": "relu"}, {"activation": "jumprelu"}, {"input_norm": "unit"}])
def test_saelens_reads_an_export(tokens, tmp_path, config):
    sae_lens = pytest.importorskip("sae_lens")
    sae = trained(**config)
    if config.get("activation") == "jumprelu":
        with torch.no_grad():
            sae.threshold.uniform_(0, 0.5)
    theirs = sae_lens.SAE.load_from_disk(sae.export(tmp_path / "sae", "saelens"), device="cpu")
    torch.testing.assert_close(theirs(tokens), sae(tokens).sample, atol=1e-5, rtol=1e-5)

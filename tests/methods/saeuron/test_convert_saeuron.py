# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil

import pytest
import torch

from diffusers_ext import SparseAutoencoder
from diffusers_ext.methods.saeuron.convert_saeuron import convert


@pytest.fixture
def dl_topk(golden, tmp_path):
    """A copy of a dictionary_learning folder, whose files a test may damage."""
    source = golden("saeuron", "interop_expected").folder / "interop" / "dl_topk"
    return shutil.copytree(source, tmp_path / "dl_topk")


def change_trainer(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    config["trainer"].update(entries)
    (folder / "config.json").write_text(json.dumps(config))


class TestCache:
    @pytest.fixture
    def cache(self, golden, tmp_path):
        """The cache of a Hub repository of which only the files of one autoencoder were downloaded."""
        commit = "a" * 40
        repository = tmp_path / "cache" / "models--someone--sae"
        shutil.copytree(golden("saeuron", "hub_expected").folder / "hub", repository / "snapshots" / commit)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        return tmp_path / "cache"

    def test_a_cached_repository_of_another_format_loads_offline(self, golden, cache):
        subfolder = "unet.up_blocks.1.attentions.1"
        cached = SparseAutoencoder.from_pretrained("someone/sae", subfolder=subfolder, cache_dir=cache)
        local = SparseAutoencoder.from_pretrained(golden("saeuron", "hub_expected").folder / "hub", subfolder)
        assert cached.fingerprint() == local.fingerprint()

    def test_a_subfolder_that_is_not_cached(self, cache):
        with pytest.raises(FileNotFoundError, match="nor in the local cache"):
            SparseAutoencoder.from_pretrained("someone/sae", subfolder="other", cache_dir=cache)


class TestDamagedPickle:
    def test_the_refused_global_is_named_and_unsafe_loading_is_not_advised(self, dl_topk, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "executed"),)

        torch.save({"encoder.weight": Evil()}, dl_topk / "ae.pt")
        with pytest.raises(ValueError, match=r"refused: it holds more than tensors, namely \w+\.mkdir\.$"):
            SparseAutoencoder.from_pretrained(dl_topk)
        assert not (tmp_path / "executed").exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"hello world this is text",
            b"<!DOCTYPE html>",
            b"version https://git-lfs.github.com/spec/v1",
            bytes(99),
        ],
    )
    def test_a_file_that_is_no_pytorch_file(self, dl_topk, content):
        (dl_topk / "ae.pt").write_bytes(content)
        with pytest.raises(ValueError, match="is no (complete )?PyTorch file.* Download it again"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_a_truncated_file(self, dl_topk):
        content = (dl_topk / "ae.pt").read_bytes()
        (dl_topk / "ae.pt").write_bytes(content[: len(content) // 2])
        with pytest.raises(ValueError, match="no complete PyTorch file"):
            SparseAutoencoder.from_pretrained(dl_topk)

    @pytest.mark.parametrize("content", [[torch.zeros(1)], {"encoder.weight": 1.0}])
    def test_a_pickle_of_something_else(self, dl_topk, content):
        torch.save(content, dl_topk / "ae.pt")
        with pytest.raises(ValueError, match="has to hold a dictionary of tensors"):
            SparseAutoencoder.from_pretrained(dl_topk)


class TestForeignConfig:
    @pytest.mark.parametrize("kind", ["GatedAutoEncoder", "CrossCoder"])
    def test_a_class_that_is_not_computed(self, dl_topk, kind):
        change_trainer(dl_topk, dict_class=kind)
        with pytest.raises(ValueError, match=f"the class '{kind}'.* refused rather than misread"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_k_larger_than_the_dictionary(self, dl_topk):
        change_trainer(dl_topk, k=65)
        with pytest.raises(ValueError, match="between 1 and the number of latents, 64, but is 65"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_sizes_that_do_not_fit_the_weights(self, dl_topk):
        change_trainer(dl_topk, dict_size=128)
        with pytest.raises(ValueError, match=r"has shape \(64.* but the config asks for \(128"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_a_size_that_is_no_number(self, dl_topk):
        change_trainer(dl_topk, activation_dim="16")
        with pytest.raises(TypeError, match="`d_in` has to be an integer but is '16'"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_a_trainer_that_is_no_object(self, dl_topk):
        (dl_topk / "config.json").write_text(json.dumps({"trainer": [1]}))
        with pytest.raises(ValueError, match=r"`trainer` in .* has to be an object but is \[1\]"):
            SparseAutoencoder.from_pretrained(dl_topk)

    def test_a_config_that_is_no_object(self, dl_topk):
        (dl_topk / "config.json").write_text("[]")
        with pytest.raises(ValueError, match="has to hold a JSON object but holds a list"):
            SparseAutoencoder.from_pretrained(dl_topk)


class TestEncodeArguments:
    @pytest.mark.parametrize("k", [0, -1, 65])
    def test_k_out_of_range(self, k):
        with pytest.raises(ValueError, match=f"number of latents, 64, but is {k}"):
            SparseAutoencoder(d_in=16, expansion_factor=4, k=4).encode(torch.zeros(2, 16), k=k)

    def test_k_that_is_no_integer(self):
        with pytest.raises(TypeError, match="`k` has to be an integer but is 4.5"):
            SparseAutoencoder(d_in=16, k=4.5)


class TestDestination:
    def test_a_file_in_the_place_of_the_destination_stays(self, dl_topk, tmp_path):
        (tmp_path / "out").write_text("mine")
        with pytest.raises(FileExistsError, match="out"):
            convert(dl_topk, tmp_path / "out")
        assert (tmp_path / "out").read_text() == "mine"

    def test_converting_again_replaces_the_files_and_leaves_no_others(self, dl_topk, tmp_path):
        convert(dl_topk, tmp_path / "out")
        first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        convert(dl_topk, tmp_path / "out")
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first
        assert sorted(first) == ["config.json", "diffusion_pytorch_model.safetensors"]

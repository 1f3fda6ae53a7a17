# SPDX-License-Identifier: Apache-2.0
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffusers_ext import SparseAutoencoder
from diffusers_ext.methods.saeuron.convert_saeuron import convert


GOLDEN_VARIANTS = (
    "patch", "batch", "sample", "multi", "batch_multi", "unitnorm", "patch_dead_many", "patch_dead_few",
    "batch_dead_many",
    "batch_dead_few",
)  # fmt: skip
INTEROP = (
    "sparsify", "saelens_topk", "saelens_topk_nob", "saelens_topk_rescale", "saelens_jumprelu", "saelens_standard",
    "saelens_standard_ln", "dl_topk", "dl_batchtopk", "dl_matryoshka", "dl_jumprelu", "dl_standard", "sdxl_unbox",
)  # fmt: skip


def golden_sae(golden, variant):
    fixture = golden("saeuron", "sae_forward")
    cfg = fixture.info["variants"][variant]["cfg"]
    activation = "batch_topk" if cfg["batch_topk"] else "sample_topk" if cfg["sample_topk"] else "topk"
    sae = SparseAutoencoder(
        d_in=fixture["x"].shape[-1],
        expansion_factor=cfg["expansion_factor"],
        k=cfg["k"],
        activation=activation,
        input_norm="unit" if cfg["input_unit_norm"] else "none",
    )
    sae.load_state_dict(fixture.group("weights."))
    return fixture, sae, cfg


@pytest.fixture
def sae():
    torch.manual_seed(0)
    return SparseAutoencoder(d_in=16, expansion_factor=4, k=4).eval()


class TestGolden:
    @pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
    def test_latents_of_every_selection_mode(self, golden, variant):
        fixture, sae, cfg = golden_sae(golden, variant)
        x = fixture["x"]
        latents = sae.train().encode(x.flatten(0, 1), num_samples=x.shape[0])
        tolerance = {k: fixture.info["tolerance"][k] for k in ("atol", "rtol")}
        torch.testing.assert_close(latents, fixture[f"{variant}.latents"], **tolerance)

    @pytest.mark.parametrize("variant", GOLDEN_VARIANTS)
    def test_reconstruction_of_every_selection_mode(self, golden, variant):
        fixture, sae, cfg = golden_sae(golden, variant)
        x = fixture["x"].flatten(0, 1)
        normalised, undo = sae.train().normalize_input(x)
        # With multi-top-k the official forward returns the reconstruction of four times as many latents.
        k = 4 * cfg["k"] if cfg["multi_topk"] else cfg["k"]
        latents = sae.encode(x, k=k, num_samples=fixture["x"].shape[0])
        tolerance = {k: fixture.info["tolerance"][k] for k in ("atol", "rtol")}
        torch.testing.assert_close(undo(sae.decode(latents)), fixture[f"{variant}.sae_out"].view_as(x), **tolerance)

    def test_pre_activations(self, golden):
        fixture, sae, _ = golden_sae(golden, "patch")
        h = sae.pre_activations(fixture["x"].flatten(0, 1))
        torch.testing.assert_close(h, fixture["pre_acts_without_relu"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(h.relu(), fixture["pre_acts"], atol=1e-5, rtol=1e-5)

    def test_official_checkpoint_infers_with_k_per_token(self, golden):
        fixture = golden("saeuron", "hub_expected")
        sae = SparseAutoencoder.from_pretrained(fixture.folder / "hub", subfolder="unet.up_blocks.1.attentions.1")
        assert sae.config.activation == "batch_topk"
        output = sae(fixture["x"].flatten(0, 1))
        torch.testing.assert_close(output.latents, fixture["latents"], **fixture.info["tolerance"])
        torch.testing.assert_close(output.sample, fixture["recon"], **fixture.info["tolerance"])

    @pytest.mark.parametrize("name", INTEROP)
    def test_latents_and_reconstruction_of_other_libraries(self, golden, name):
        fixture = golden("saeuron", "interop_expected")
        subfolder = "layers.3" if name == "sparsify" else None
        sae = SparseAutoencoder.from_pretrained(fixture.folder / "interop" / name, subfolder=subfolder)
        output = sae(fixture["x"])
        torch.testing.assert_close(output.latents, fixture[f"{name}.latents"], **fixture.info["tolerance"])
        torch.testing.assert_close(output.sample, fixture[f"{name}.recon"], **fixture.info["tolerance"])

    def test_skip_connection_is_computed(self, golden):
        fixture = golden("saeuron", "interop_expected")
        folder = fixture.folder / "interop" / "sparsify_skip" / "layers.3"
        sae, weights = SparseAutoencoder.from_pretrained(folder), load_file(folder / "sae.safetensors")
        x = fixture["x"]
        expected = sae.decode(sae.encode(x)) + x @ weights["W_skip"].T
        torch.testing.assert_close(sae(x).sample, expected)
        assert not torch.allclose(sae(x).sample, sae.decode(sae.encode(x)))


class TestSelection:
    def test_keeps_at_most_k_per_token(self, sae):
        z = sae.encode(torch.randn(3, 5, 16))
        assert ((z > 0).sum(-1) <= 4).all() and (z > 0).any()

    def test_batch_mode_keeps_k_times_tokens_over_the_batch(self):
        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4, activation="batch_topk").train()
        z = sae.encode(torch.randn(20, 16))
        counts = (z > 0).sum(-1)
        assert counts.sum() == 80 and counts.unique().numel() > 1
        assert ((sae.eval().encode(torch.randn(20, 16)) > 0).sum(-1) <= 4).all()

    def test_tokens_do_not_see_each_other(self, sae):
        x = torch.randn(6, 16)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(sae.encode(x)[order], sae.encode(x[order]))

    def test_larger_k_only_adds_latents(self, sae):
        x = torch.randn(8, 16)
        few, many = sae.encode(x), sae.encode(x, k=8)
        assert torch.equal(many[few > 0], few[few > 0])

    def test_decode_is_affine_in_the_latents(self, sae):
        a, b = torch.rand(2, 5, 64)
        torch.testing.assert_close(sae.decode(a + b) + sae.b_dec, sae.decode(a) + sae.decode(b))

    @pytest.mark.parametrize("norm", ["unit", "constant_norm"])
    def test_input_norms_are_undone(self, norm):
        sae = SparseAutoencoder(d_in=16, input_norm=norm)
        x = torch.randn(4, 16, dtype=torch.float64) * 3 + 1
        normalised, undo = sae.normalize_input(x)
        # 1e-5 is added to the deviation on the way in only.
        torch.testing.assert_close(undo(normalised), x, atol=1e-4, rtol=1e-4)

    def test_gradients_reach_only_selected_latents(self, sae):
        x = torch.randn(1, 16)
        sae(x).sample.sum().backward()
        selected = sae.encode(x)[0] > 0
        assert (sae.encoder.bias.grad != 0).equal(selected)


class TestSaving:
    def test_round_trip_is_bitwise(self, sae, tmp_path):
        sae.save_pretrained(tmp_path)
        loaded = SparseAutoencoder.from_pretrained(tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(sae.state_dict().values(), loaded.state_dict().values()))
        assert loaded.config.k == 4 and loaded.fingerprint() == sae.fingerprint()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_loads_in_half_precision_and_runs(self, sae, tmp_path, dtype):
        sae.save_pretrained(tmp_path)
        half = SparseAutoencoder.from_pretrained(tmp_path, dtype=dtype)
        output = half(torch.randn(3, 16))
        assert output.sample.dtype == half.dtype == dtype and torch.isfinite(output.sample).all()

    def test_fingerprint_changes_with_the_weights_only(self, sae, tmp_path):
        before = sae.fingerprint()
        assert sae.half().fingerprint() == before
        with torch.no_grad():
            sae.W_dec[0, 0] += 1
        assert sae.fingerprint() != before

    @pytest.mark.parametrize("format", ["sparsify", "saelens"])
    @pytest.mark.parametrize("activation", ["topk", "batch_topk"])
    def test_exports_read_back_with_the_same_numbers(self, tmp_path, format, activation):
        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4, activation=activation).eval()
        loaded = SparseAutoencoder.from_pretrained(sae.export(tmp_path / "out", format))
        x = torch.randn(5, 16)
        torch.testing.assert_close(loaded(x).sample, sae(x).sample)
        assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".safetensors"]

    def test_jumprelu_round_trip_keeps_thresholds(self, tmp_path):
        torch.manual_seed(0)
        sae = SparseAutoencoder(d_in=16, expansion_factor=4, activation="jumprelu")
        sae.threshold.data.uniform_(0, 1)
        sae.save_pretrained(tmp_path)
        x = torch.randn(5, 16)
        assert torch.equal(SparseAutoencoder.from_pretrained(tmp_path)(x).latents, sae(x).latents)

    def test_convert_reports_what_was_dropped(self, golden, tmp_path):
        source = golden("saeuron", "interop_expected").folder / "interop" / "dl_topk"
        report = convert(source, tmp_path / "sae")
        assert report.format == "dictionary_learning" and "k" in report.dropped and "W_dec" in report.loaded
        x = torch.randn(3, 16)
        ours, theirs = SparseAutoencoder.from_pretrained(tmp_path / "sae"), SparseAutoencoder.from_pretrained(source)
        assert torch.equal(ours(x).sample, theirs(x).sample)


class TestBadInput:
    @pytest.mark.parametrize(
        "kwargs, message",
        [
            ({"d_in": 0}, "have to be positive"),
            ({"d_in": 4, "expansion_factor": 2, "k": 9}, "between 1 and the number of latents, 8, but is 9"),
            ({"d_in": 4, "k": 0}, "between 1"),
            ({"d_in": 16, "activation": "groupmax"}, "has to be one of topk"),
            ({"d_in": 16, "input_norm": "batch"}, "has to be one of none"),
            ({"d_in": 16, "hook": {"modul": "x"}}, "unknown entries"),
            ({"d_in": 16, "hook": {"layout": "bchw"}}, "nchw, bnd"),
        ],
    )
    def test_construction(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            SparseAutoencoder(**kwargs)

    @pytest.mark.parametrize("shape", [(3, 15), (1, 16, 4, 4)])
    def test_tokens_of_another_width(self, sae, shape):
        with pytest.raises(ValueError, match=r"takes tokens of shape \(\.\.\., 16\)"):
            sae(torch.zeros(shape))

    def test_samples_that_do_not_divide_the_tokens(self):
        sae = SparseAutoencoder(d_in=16, activation="sample_topk", k=4).train()
        with pytest.raises(ValueError, match="divide the number of tokens, 6, into samples"):
            sae.encode(torch.randn(6, 16), num_samples=4)

    @pytest.fixture
    def folder(self, sae, tmp_path):
        sae.save_pretrained(tmp_path / "sae")
        return tmp_path / "sae"

    def change(self, folder, change):
        path = folder / "diffusion_pytorch_model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    def test_missing_key(self, folder):
        self.change(folder, lambda weights: weights.pop("b_dec"))
        with pytest.raises(ValueError, match=r"missing \['b_dec'\]"):
            SparseAutoencoder.from_pretrained(folder)

    def test_unexpected_key(self, folder):
        self.change(folder, lambda weights: weights.update(W_other=torch.zeros(1)))
        with pytest.raises(ValueError, match=r"unexpected \['W_other'\]"):
            SparseAutoencoder.from_pretrained(folder)

    def test_wrong_shape(self, folder):
        self.change(folder, lambda weights: weights.update(W_dec=weights["W_dec"].T.contiguous()))
        with pytest.raises(ValueError, match=r"`W_dec` .* has shape \(16, 64\) but the config asks for \(64, 16\)"):
            SparseAutoencoder.from_pretrained(folder)

    def test_weights_that_are_not_finite(self, folder):
        self.change(folder, lambda weights: weights["W_dec"].__setitem__((0, 0), float("nan")))
        with pytest.raises(ValueError, match="not finite"):
            SparseAutoencoder.from_pretrained(folder)

    def test_truncated_file(self, folder):
        path = folder / "diffusion_pytorch_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="no complete safetensors file"):
            SparseAutoencoder.from_pretrained(folder)

    def test_config_of_another_class(self, folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "_class_name": "UNet2DModel"}))
        with pytest.raises(ValueError, match="'UNet2DModel', not a 'SparseAutoencoder'"):
            SparseAutoencoder.from_pretrained(folder)

    def test_config_that_is_not_json(self, folder):
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match="is not JSON"):
            SparseAutoencoder.from_pretrained(folder)

    def test_folder_without_weights(self, tmp_path):
        (tmp_path / "notes.txt").write_text("")
        with pytest.raises(FileNotFoundError, match="It holds notes.txt. Looked for diffusers: config.json"):
            SparseAutoencoder.from_pretrained(tmp_path)

    def test_hub_id_offline(self):
        with pytest.raises(FileNotFoundError, match="neither a folder nor in the local cache"):
            SparseAutoencoder.from_pretrained("someone/some-sae")

    def test_path_that_does_not_exist(self):
        with pytest.raises(FileNotFoundError, match="neither a folder nor a Hub id"):
            SparseAutoencoder.from_pretrained("./no/such/folder")

    def test_unknown_argument(self, folder):
        with pytest.raises(TypeError, match="Unknown arguments"):
            SparseAutoencoder.from_pretrained(folder, torch_dtypo=1)

    def test_pickle_that_would_run_code(self, golden, tmp_path):
        class Evil:
            def __reduce__(self):
                return print, ("executed",)

        source = golden("saeuron", "interop_expected").folder / "interop" / "dl_topk" / "config.json"
        shutil.copy(source, tmp_path / "config.json")
        (tmp_path / "ae.pt").write_bytes(pickle.dumps({"encoder.weight": Evil()}))
        with pytest.raises(ValueError, match="refused: it holds more than tensors"):
            SparseAutoencoder.from_pretrained(tmp_path)

    @pytest.mark.parametrize("change", [{"activation": "groupmax"}, {"transcode": True}])
    def test_sparsify_variants_that_are_not_computed(self, golden, tmp_path, change):
        source = golden("saeuron", "interop_expected").folder / "interop" / "sparsify" / "layers.3"
        shutil.copytree(source, tmp_path / "sae")
        cfg = json.loads((source / "cfg.json").read_text())
        (tmp_path / "sae" / "cfg.json").write_text(json.dumps({**cfg, **change}))
        with pytest.raises(ValueError, match="refused rather than misread"):
            SparseAutoencoder.from_pretrained(tmp_path / "sae")

    @pytest.mark.parametrize(
        "change", [{"architecture": "gated"}, {"normalize_activations": "other"}, {"reshape_activations": "hook_z"}]
    )
    def test_saelens_variants_that_are_not_computed(self, golden, tmp_path, change):
        source = golden("saeuron", "interop_expected").folder / "interop" / "saelens_topk"
        shutil.copytree(source, tmp_path / "sae")
        cfg = json.loads((source / "cfg.json").read_text())
        (tmp_path / "sae" / "cfg.json").write_text(json.dumps({**cfg, **change}))
        with pytest.raises(ValueError, match="refused rather than misread"):
            SparseAutoencoder.from_pretrained(tmp_path / "sae")

    def test_foreign_config_with_a_missing_entry(self, golden, tmp_path):
        source = golden("saeuron", "interop_expected").folder / "interop" / "saelens_topk"
        shutil.copytree(source, tmp_path / "sae")
        (tmp_path / "sae" / "cfg.json").write_text("{}")
        with pytest.raises(ValueError, match="'architecture' is missing"):
            SparseAutoencoder.from_pretrained(tmp_path / "sae")

    def test_failed_conversion_leaves_the_destination_as_it_was(self, folder, tmp_path):
        destination = tmp_path / "out"
        destination.mkdir()
        (destination / "config.json").write_text("mine")
        self.change(folder, lambda weights: weights.pop("b_dec"))
        with pytest.raises(ValueError, match="missing"):
            convert(folder, destination)
        assert [p.name for p in destination.iterdir()] == ["config.json"]
        assert (destination / "config.json").read_text() == "mine"

    def test_conversion_of_another_format_than_named(self, folder, tmp_path):
        with pytest.raises(ValueError, match="has the format 'diffusers', not 'saelens'"):
            convert(folder, tmp_path / "out", format="saelens")

    def test_export_that_the_format_cannot_express(self, tmp_path):
        with pytest.raises(ValueError, match="top-k autoencoders only"):
            SparseAutoencoder(d_in=16, activation="relu").export(tmp_path, "sparsify")
        assert not any(tmp_path.iterdir())

    def test_unknown_export_format(self, sae, tmp_path):
        with pytest.raises(ValueError, match="'sparsify' or 'saelens'"):
            sae.export(tmp_path, "onnx")

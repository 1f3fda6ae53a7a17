# SPDX-License-Identifier: Apache-2.0
"""The report of copies, and the data that training reads."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Dinov2Config, Dinov2Model

from diffusers_ext import CopyReport
from diffusers_ext.methods.ambient_diffusion.report_ambient_diffusion import (
    Dinov2Features,
    extract_features,
    nearest_neighbours,
    pad_to_multiple,
)
from diffusers_ext.methods.ambient_diffusion.training_ambient_diffusion import (
    PERTURBATIONS,
    PictureDataset,
    mix_embeddings,
    pad_tokens,
    perturb_caption,
    read_image_folder,
)
from diffusers_ext.testing import tiny_tokenizer


def pictures(count, seed=0, side=16):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def centred(images):
    return images.flatten(1) - 0.5


def dinov2():
    config = Dinov2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=28,
        patch_size=14,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Dinov2Model(config).eval()


def save_folder(folder, images):
    folder.mkdir()
    for number, image in enumerate(images):
        array = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(array).save(folder / f"{number:03}.png")
    return folder


def test_copies_are_found():
    training = pictures(20)
    report = CopyReport.from_images(torch.cat([training[[3, 7]], pictures(2, seed=1)]), training, centred)
    assert report.nearest[:2].tolist() == [3, 7]
    assert report.to_dict()["generated"]["fraction_above"]["0.95"] == 0.5
    new, old = report.worst_pairs(2)
    assert set(new.tolist()) == {0, 1} and set(old.tolist()) == {3, 7}


def test_chunks_change_nothing():
    first, second = centred(pictures(50)), centred(pictures(30, seed=1))
    value, index = nearest_neighbours(first, second)
    chunked = nearest_neighbours(first, second, chunk_size=7)
    torch.testing.assert_close(chunked[0], value)
    assert torch.equal(chunked[1], index)


def test_within_one_set_nothing_is_its_own_neighbour():
    features = centred(pictures(9))
    value, index = nearest_neighbours(features, features, exclude_self=True, chunk_size=4)
    assert (index != torch.arange(9)).all() and value.max() < 0.9


def test_held_out_pictures_stand_beside_the_generated_ones(tmp_path):
    training = pictures(20)
    report = CopyReport.from_images(training[:4], training, centred, held_out=pictures(6, seed=2))
    figures = report.to_dict()
    assert figures["held_out"]["count"] == 6 and figures["held_out"]["fraction_above"]["0.9"] == 0
    assert figures["settings"]["extractor"] == "centred"
    report.save(tmp_path / "reports" / "copies.json")
    assert json.loads((tmp_path / "reports" / "copies.json").read_text()) == figures


def test_folders(tmp_path):
    training = pictures(6)
    new = save_folder(tmp_path / "new", training[:2])
    report = CopyReport.from_folders(new, save_folder(tmp_path / "train", training), centred)
    assert report.nearest.tolist() == [0, 1] and report.similarity.min() > 0.999
    resized = CopyReport.from_folders(new, tmp_path / "train", centred, size=8)
    assert resized.nearest.tolist() == [0, 1]


def test_grid_shows_the_closest_pairs():
    training = pictures(5)
    generated = torch.cat([pictures(2, seed=1), training[4:]])
    grid = CopyReport.from_images(generated, training, centred).grid(generated, training, count=2)
    assert grid.size == (32, 32)
    shown = torch.from_numpy(np.asarray(grid).copy()).permute(2, 0, 1) / 255
    torch.testing.assert_close(shown[:, :16, :16], training[4], atol=0.5 / 255 + 1e-6, rtol=0)
    assert torch.equal(shown[:, :16, :16], shown[:, 16:, :16])


def test_dinov2_features_see_padded_pictures():
    model, images = dinov2(), pictures(2, side=20)
    features = Dinov2Features(model)
    with torch.no_grad():
        expected = model(pad_to_multiple(images)).last_hidden_state[:, 0]
    torch.testing.assert_close(features(images), expected)
    assert features.to_dict() == {"model": "Dinov2Model", "preprocess": "official"}
    assert not torch.allclose(Dinov2Features(model, "imagenet")(images), expected, atol=1e-3)


def test_batches_change_no_feature():
    images = pictures(5)
    torch.testing.assert_close(extract_features(images, centred, 2), centred(images))


BAD_REPORTS = [
    (lambda: CopyReport.from_images(pictures(2) * 255, pictures(2), centred), r"have to lie in \[0, 1\]"),
    (lambda: CopyReport.from_images(pictures(2)[0], pictures(2), centred), "Expected pictures of shape"),
    (lambda: CopyReport.from_images(pictures(2)[:0], pictures(2), centred), "Expected pictures of shape"),
    (lambda: CopyReport.from_images(pictures(2), pictures(2), lambda images: images), "one vector per picture"),
    (lambda: CopyReport.from_images(pictures(2), pictures(2), lambda i: centred(i) / 0), "not finite"),
    (lambda: CopyReport.from_features(torch.ones(2, 3), torch.ones(2, 4)), "features of one width"),
    (lambda: CopyReport.from_features(torch.ones(2, 3), torch.ones(0, 3)), "Nothing to compare"),
    (lambda: CopyReport(torch.ones(2), torch.ones(3)), "vectors of one length"),
    (lambda: CopyReport(torch.ones(2), torch.ones(2), thresholds=(90,)), "have to be similarities"),
    (lambda: Dinov2Features(dinov2(), "clip"), "`preprocess` has to be one of"),
    (lambda: pad_to_multiple(pictures(1, side=2)), "too small for patches"),
]


@pytest.mark.parametrize(("make", "message"), BAD_REPORTS)
def test_bad_reports_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_folders_that_are_missing_empty_or_mixed_are_refused(tmp_path):
    training = save_folder(tmp_path / "train", pictures(2))
    with pytest.raises(FileNotFoundError, match="is no folder"):
        CopyReport.from_folders(tmp_path / "none", training, centred)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no pictures"):
        CopyReport.from_folders(tmp_path / "empty", training, centred)
    Image.new("RGB", (8, 8)).save(training / "small.png")
    with pytest.raises(ValueError, match="pictures of different sizes"):
        CopyReport.from_folders(training, training, centred)


# Training data


def test_copies_in_the_data_share_an_id(caplog):
    one, two = (pictures(2) * 255).byte().permute(0, 2, 3, 1).numpy()
    dataset = PictureDataset([one, two, one.copy()], 16)
    assert dataset.ids == [0, 1, 0] and "1 of 3 pictures repeat another one" in caplog.text


@pytest.mark.parametrize(
    ("ids", "message"), [([4, 4, 4], "ids repeat for pictures that differ"), ([4, 5, 6], "under several ids")]
)
def test_ids_that_do_not_suit_the_pictures_are_warned_of(ids, message, caplog):
    one, two = (pictures(2) * 255).byte().permute(0, 2, 3, 1).numpy()
    PictureDataset([one, two, one.copy()], 16, ids=ids)
    assert message in caplog.text


def test_a_visit_depends_on_its_position_alone():
    images = (pictures(3) * 255).byte().permute(0, 2, 3, 1).numpy()
    dataset = PictureDataset(list(images), 16, random_flip=True, seed=1)
    items = [dataset[1, position] for position in range(20)]
    assert {item["flipped"] for item in items} == {0, 1} and {item["id"] for item in items} == {1}
    for item in items:
        expected = dataset.pixels(1).flip(-1) if item["flipped"] else dataset.pixels(1)
        assert torch.equal(item["pixel_values"], expected)
    assert all(torch.equal(dataset[1, p]["pixel_values"], items[p]["pixel_values"]) for p in range(20))


def test_pictures_are_resized_and_cropped_in_the_middle():
    wide = np.zeros((20, 40, 3), dtype=np.uint8)
    wide[:, 10:30] = 255
    dataset = PictureDataset([wide], 10)
    assert dataset.pixels(0).shape == (3, 10, 10) and dataset.pixels(0)[:, :, 2:-2].min() > 0.9


def test_the_fingerprint_tells_data_apart():
    images = list((pictures(3) * 255).byte().permute(0, 2, 3, 1).numpy())
    prints = {
        PictureDataset(data, 16, ids=ids).fingerprint
        for data, ids in ((images, None), (images[:2], None), (images, [5, 6, 7]))
    }
    assert len(prints) == 3 and PictureDataset(images, 16).fingerprint in prints


def write_metadata(folder, rows):
    (folder / "metadata.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def test_a_folder_with_captions_and_ids(tmp_path):
    folder = save_folder(tmp_path / "data", pictures(2))
    rows = [{"file_name": f"00{i}.png", "text": ["one", "two"], "id": 7 + i} for i in range(2)]
    write_metadata(folder, rows)
    data = read_image_folder(folder)
    assert data["ids"] == [7, 8] and PictureDataset(**data, size=16).captions == [["one", "two"]] * 2
    assert read_image_folder(folder, with_captions=False)["captions"] is None


BAD_ROWS = [
    ([{"file_name": "000.png"}], ValueError, "line 1: text is missing"),
    ([{"file_name": "000.png", "text": "a"}, "{"], ValueError, "line 2: no valid JSON"),
    ([{"file_name": "9.png", "text": "a"}], FileNotFoundError, "there is no picture"),
    (
        [{"file_name": "000.png", "text": "a", "id": 1}, {"file_name": "001.png", "text": "a"}],
        ValueError,
        "1 of 2 rows",
    ),
    ([{"file_name": "000.png", "text": "a", "id": "x"}], ValueError, "non-negative integer"),
]


@pytest.mark.parametrize(("rows", "error", "message"), BAD_ROWS)
def test_bad_metadata_is_refused(rows, error, message, tmp_path):
    folder = save_folder(tmp_path / "data", pictures(2))
    write_metadata(folder, rows)
    with pytest.raises(error, match=message):
        read_image_folder(folder)


def test_bad_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="The training set is empty"):
        PictureDataset([], 16)
    with pytest.raises(ValueError, match="Expected one of `captions` per picture"):
        PictureDataset([np.zeros((4, 4, 3), np.uint8)], 4, captions=["a", "b"])
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="cannot be read as a picture"):
        PictureDataset([tmp_path / "broken.png"], 4).pixels(0)
    with pytest.raises(FileNotFoundError, match="a text-conditional model needs captions"):
        read_image_folder(save_folder(tmp_path / "data", pictures(1)))


# Baselines


@pytest.mark.parametrize("kind", PERTURBATIONS)
def test_perturbed_captions(kind):
    tokenizer = tiny_tokenizer()
    captions = ["cat", "red dog"]
    plain = [tokenizer(caption, add_special_tokens=False).input_ids for caption in captions]
    found = [perturb_caption(captions, tokenizer, kind, random.Random(seed)) for seed in range(20)]
    again = [perturb_caption(captions, tokenizer, kind, random.Random(seed)) for seed in range(20)]
    assert found == again
    assert not any(set(ids) & set(tokenizer.all_special_ids) for ids in found)
    if kind == "random_tokens":
        assert {len(ids) for ids in found} == {4} and len({tuple(ids) for ids in found}) > 10
    elif kind == "add_tokens":
        assert {len(ids) for ids in found} == {len(plain[0]) + 2}
        assert all(is_subsequence(plain[0], ids) for ids in found)
    elif kind == "repeat_words":
        assert {tuple(ids) for ids in found} == {tuple(plain[0] * 3)}
    else:
        assert {tuple(ids) for ids in found} == {tuple(ids) for ids in plain}


def is_subsequence(short, long):
    rest = iter(long)
    return all(token in rest for token in short)


def test_padding_is_that_of_the_tokenizer():
    tokenizer = tiny_tokenizer()
    texts = ["a cat", "", "a caption that is too long for the model"]
    expected = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert torch.equal(pad_tokens(ids, tokenizer), expected)


def test_mixing_at_1_changes_nothing_and_at_0_takes_the_neighbour():
    embeddings = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    mixed = mix_embeddings(embeddings, torch.tensor([1.0, 0.0, 0.5]))
    torch.testing.assert_close(mixed[0], embeddings[0])
    torch.testing.assert_close(mixed[1], embeddings[0])
    torch.testing.assert_close(mixed[2], (embeddings[1] + embeddings[2]) / 2)


def test_unknown_perturbations_are_refused():
    with pytest.raises(ValueError, match="`kind` has to be one of"):
        perturb_caption(["a"], tiny_tokenizer(), "shuffle", random.Random(0))

# SPDX-License-Identifier: Apache-2.0
import io
import json
import tarfile

import numpy as np
import pytest

from diffusers_ext.lab.captions import OBJECTS, STYLE_NAMES
from diffusers_ext.lab.dataset import EMOJI_SETS, build_dataset, fetch_packages, held_out_pairs, render_drawings


SQUARE = '<path fill="{}" d="M4 4h8v8H4z"/>'


def write_package(folder, emoji_set, icons):
    """An archive as `npm pack` leaves it."""
    text = json.dumps(icons).encode()
    member = tarfile.TarInfo("package/icons.json")
    member.size = len(text)
    name = f"{emoji_set.package.lstrip('@').replace('/', '-')}-{emoji_set.version}.tgz"
    with tarfile.open(folder / name, "w:gz") as archive:
        archive.addfile(member, io.BytesIO(text))


@pytest.fixture
def packages(tmp_path):
    """Every set draws the cat as a red square; the first has an alias in currentColor and a wide picture too."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for emoji_set in EMOJI_SETS:
        icons = {"icons": {"cat": {"body": SQUARE.format("#f00")}}, "width": 16, "height": 16}
        if emoji_set is EMOJI_SETS[0]:
            icons["icons"]["hound"] = {"body": SQUARE.format("currentColor")}
            icons["icons"]["bus"] = {"body": '<path fill="#00f" d="M0 0h32v16H0z"/>', "width": 32}
            icons["aliases"] = {"dog": {"parent": "hound"}}
        write_package(folder, emoji_set, icons)
    return folder


def test_only_what_a_set_draws_is_rendered(packages):
    drawings = render_drawings(packages)
    first = EMOJI_SETS[0].name
    assert set(drawings) == {("cat", s.name) for s in EMOJI_SETS} | {("dog", first), ("bus", first)}


def test_a_drawing_is_opaque_rgb_on_white(packages):
    picture = render_drawings(packages)["cat", EMOJI_SETS[1].name]
    assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
    assert picture[0, 0].tolist() == [255, 255, 255]
    assert picture[32, 32].tolist() == [255, 0, 0]


def test_an_alias_is_drawn_as_its_parent_and_current_colour_is_dark_grey(packages):
    assert render_drawings(packages)["dog", EMOJI_SETS[0].name][32, 32].tolist() == [0x22, 0x22, 0x22]


def test_a_wide_drawing_is_centred(packages):
    picture = render_drawings(packages)["bus", EMOJI_SETS[0].name]
    assert picture[[4, 60], 32].tolist() == [[255, 255, 255]] * 2
    assert picture[32, [2, 61]].tolist() == [[0, 0, 255]] * 2


def test_the_data_set_holds_every_drawing_in_every_style(packages, tmp_path):
    data = np.load(build_dataset(tmp_path / "data", packages=packages))
    count = (len(EMOJI_SETS) + 2) * len(STYLE_NAMES)
    assert data["images"].shape == (count, 64, 64, 3)
    rows = set(zip(data["object"].tolist(), data["style"].tolist(), data["emoji_set"].tolist()))
    assert len(rows) == count
    assert ("dog", "mosaic", EMOJI_SETS[0].name) in rows


def test_the_data_set_can_be_built_larger(packages, tmp_path):
    assert np.load(build_dataset(tmp_path / "data", 128, packages))["images"].shape[1:] == (128, 128, 3)


def test_two_builds_are_equal(packages, tmp_path):
    first, second = (np.load(build_dataset(tmp_path / name, packages=packages)) for name in "ab")
    for name in ("images", "object", "style", "emoji_set"):
        np.testing.assert_array_equal(first[name], second[name])


def test_licences_of_all_sets_are_written(packages, tmp_path):
    build_dataset(tmp_path / "data", packages=packages)
    licences = json.loads((tmp_path / "data" / "LICENCES.json").read_text())
    assert [row["name"] for row in licences] == [s.name for s in EMOJI_SETS]
    assert all(row["licence"] in ("Apache-2.0", "CC-BY-4.0", "MIT") and row["author"] for row in licences)


@pytest.mark.parametrize("size", [0, -64, 40])
def test_a_size_that_the_styles_cannot_draw_is_refused_before_anything_is_written(tmp_path, size):
    with pytest.raises(ValueError, match=f"multiple of 16 but is {size}"):
        build_dataset(tmp_path / "data", size)
    assert not (tmp_path / "data").exists()


def test_without_npm_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Install Node.js, or put the archives"):
        fetch_packages(tmp_path / "packages")


def test_archives_that_lie_there_are_not_fetched_again(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    fetch_packages(packages)


def test_held_out_pairs_are_a_tenth_and_the_same_on_every_machine():
    pairs = held_out_pairs()
    assert len(pairs) == 51
    assert sorted(pairs)[:3] == [("anchor", "watercolour"), ("avocado", "neon"), ("balloon", "watercolour")]


def test_every_object_and_style_keeps_at_least_half_of_its_pairs():
    pairs = held_out_pairs()
    assert all(sum(style == s for _, s in pairs) <= 32 for style in STYLE_NAMES)
    assert all(sum(name == o for o, _ in pairs) <= 4 for name in OBJECTS)

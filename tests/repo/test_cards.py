# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def render_cards():
    spec = importlib.util.spec_from_file_location("render_cards", ROOT / "scripts" / "render_cards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_cards_and_tables_are_up_to_date(render_cards):
    rendered = render_cards.render_all()
    stale = [str(path.relative_to(ROOT)) for path, text in rendered.items() if path.read_text() != text]
    assert not stale, f"run `make cards`: {stale}"


def test_every_shelf_has_a_card_with_licence_and_tags():
    kinds = ("pipelines", "adapters", "schedulers")
    shelves = [folder for shelf in kinds for folder in sorted((ROOT / shelf).iterdir())]
    assert shelves
    for folder in shelves:
        data = ModelCard.load(folder / "README.md").data
        # CC BY for what is derived from drawings under that licence.
        assert (
            data.license in ("apache-2.0", "cc-by-4.0")
            and data.library_name == "diffusers"
            and "diffusers-ext" in data.tags
        )


def test_a_figure_without_a_result_fails(render_cards, tmp_path):
    (tmp_path / "some.json").write_text(json.dumps({"a": {"b": 0.25}}))
    results = render_cards.Results(tmp_path)
    assert results.show({"file": "some", "path": "a.b", "format": ".1%"}) == "25.0%"
    with pytest.raises(KeyError, match="no figure 'a.c'"):
        results.value("some", "a.c")
    with pytest.raises(FileNotFoundError):
        results.value("other", "a")

# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from diffusers_ext.methods.saeuron.metrics_saeuron import unlearning_metrics


@pytest.mark.parametrize("task", ["style", "object"])
def test_figures_of_the_official_script(golden, task):
    fixture = golden("saeuron", "unlearncanvas_metrics")
    themes = [i for i, theme in enumerate(fixture.info["themes"]) if theme != "Seed_Images"]
    styles, objects = fixture[f"{task}.style_acc"][:, themes], fixture[f"{task}.class_acc"]
    figures = unlearning_metrics(*((styles, objects) if task == "style" else (objects, styles)))
    for name, expected in fixture.info[task].items():
        # The script prints two decimals of a percentage.
        assert abs(100 * figures[name] - expected) <= 0.006


def test_several_concepts_in_one_run():
    unlearned = torch.tensor([[True, True, False, False], [False, True, False, True]])
    in_domain = torch.tensor([[0.0, 0.5, 1.0, 0.5], [1.0, 0.25, 1.0, 0.75]])
    figures = unlearning_metrics(in_domain, torch.tensor([[1.0, 0.5], [0.0, 0.5]]), unlearned)
    assert figures == {"UA": 1 - (0.25 + 0.5) / 2, "IRA": (0.75 + 1.0) / 2, "CRA": 0.5}


@pytest.mark.parametrize(
    "in_domain, cross_domain, unlearned, message",
    [
        (torch.ones(2, 2), torch.ones(3, 1), None, r"one row per run but have shapes \(2, 2\) and \(3, 1\)"),
        (torch.full((2, 2), 50.0), torch.ones(2, 1), None, "divide percentages by 100"),
        (torch.full((2, 2), float("nan")), torch.ones(2, 1), None, r"have to lie in \[0, 1\]"),
        (torch.ones(2, 3), torch.ones(2, 1), None, "`unlearned` is needed"),
        (torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3), "has to be boolean"),
        (torch.ones(2, 3), torch.ones(2, 1), torch.zeros(2, 3, dtype=torch.bool), "at least one concept"),
        (torch.ones(2, 3), torch.ones(2, 1), torch.ones(2, 3, dtype=torch.bool), "to leave at least one"),
    ],
)
def test_bad_tables(in_domain, cross_domain, unlearned, message):
    with pytest.raises(ValueError, match=message):
        unlearning_metrics(in_domain, cross_domain, unlearned)

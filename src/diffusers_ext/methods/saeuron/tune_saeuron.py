# SPDX-License-Identifier: Apache-2.0
"""Choosing the number of latents and the multiplier of each concept on validation pictures (paper, section 5.1)."""

import dataclasses

from tqdm.auto import tqdm

from diffusers_ext import lab

from .concepts_saeuron import ConceptEdits
from .evaluate_saeuron import Picture, retention_pictures, target_pictures


# From mild to strong: of settings that do equally well the first is kept. An object sits in a few latents of few
# tokens; a style is spread over many latents of every token.
OBJECT_GRID = ((8, -4.0), (8, -8.0), (8, -12.0), (16, -12.0), (16, -20.0))
STYLE_GRID = (
    (16, -1.5), (64, -1.0), (16, -2.0), (32, -1.5), (64, -1.25), (32, -2.0), (64, -1.5), (128, -1.0), (128, -1.5),
    (32, -3.0), (64, -2.0), (128, -2.0), (64, -3.0), (128, -3.0), (128, -5.0),
)  # fmt: skip


class ValidationPicture(Picture):
    """The same in other words, so that the choice never sees a prompt of the figures."""

    @property
    def prompt(self):
        return f"a {self.object} in {self.style} style"


def in_other_words(pictures):
    return [ValidationPicture(p.object, p.style, p.seed) for p in pictures]


def score(row):
    """
    The worst of unlearning and the two retentions, and a little of their mean where that is equal: a setting that
    removes everything by breaking other pictures is no choice. Retention counts up to the unedited model's accuracy.
    """
    figures = [min(row[key], 1.0) for key in ("ua", "in_domain", "cross_domain")]
    return 0.9 * min(figures) + 0.1 * sum(figures) / 3


def tune(bench, concepts, num_targets=12, num_retained=24, first_seed=0, enough=0.96):
    """
    Tries settings on validation pictures and keeps the best of each concept.

    Args:
        bench ([`Bench`]):
            Pipeline with autoencoder and edits that hold as many latents as the grids ask for, and the oracle.
        concepts (`list[str]`):
            Concepts to tune.
        num_targets (`int`), num_retained (`int`):
            Pictures with and without the concept per setting; twice as many for a style, whose bars are closer.
        first_seed (`int`):
            First seed of the pictures.
        enough (`float`, *optional*, defaults to 0.96):
            Score at which no stronger setting is tried any more.

    Returns:
        `tuple` of [`ConceptEdits`] (all edits of the pipeline, the tuned ones with their settings, the others with
        the median of their domain) and the table of everything tried.
    """
    edits, tried = dict(bench.pipe.concept_edits), {}
    for concept in tqdm(concepts, desc="Tuning"):
        times = 1 if concept in lab.OBJECTS else 2
        targets = in_other_words(target_pictures([concept], times * num_targets, first_seed))
        retained = in_other_words(retention_pictures([concept], times * num_retained, first_seed + 1000))
        rows = []
        for num_features, multiplier in OBJECT_GRID if concept in lab.OBJECTS else STYLE_GRID:
            settings = {"num_features": num_features, "multiplier": multiplier}
            row = bench.measure([concept], targets, retained, **settings)
            rows.append({**settings, **row, "score": score(row)})
            if rows[-1]["score"] >= enough:
                break
        best = max(rows, key=lambda row: row["score"])
        tried[concept] = rows
        edits[concept] = dataclasses.replace(
            edits[concept], num_features=best["num_features"], multiplier=best["multiplier"]
        )
    for domain in (lab.OBJECTS, lab.STYLES):
        chosen = sorted((-edits[name].multiplier, edits[name].num_features) for name in concepts if name in domain)
        if chosen:
            multiplier, num_features = chosen[len(chosen) // 2]
            for name in domain:
                if name in edits and name not in concepts:
                    edits[name] = dataclasses.replace(edits[name], num_features=num_features, multiplier=-multiplier)
    return ConceptEdits(edits.values()), tried

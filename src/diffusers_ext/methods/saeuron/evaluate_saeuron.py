# SPDX-License-Identifier: Apache-2.0
"""The UnlearnCanvas protocol on EmojiCanvas: what unlearning removes and what it leaves (paper, section 5)."""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from diffusers_ext import lab
from diffusers_ext.lab.generation import generate
from diffusers_ext.lab.results import write_result


# Figures are taken on these concepts: ten objects of every kind (animals, fruit, vehicles, things) and all eight
# styles.
OBJECTS = ("cat", "owl", "penguin", "red apple", "pineapple", "sunflower", "automobile", "rocket", "guitar", "house")
# The error term of the published code is measured beside ours on these.
OFFICIAL = ("cat", "rocket", "neon", "mosaic")
TRIPLES = (("cat", "rocket", "neon"), ("red apple", "guitar", "blueprint"), ("owl", "automobile", "house"))
# Parameters were chosen with other seeds and in other words (`tune_saeuron`): a figure never sees the pictures of the
# choice.
FIRST_SEED = 100_000


@dataclass(frozen=True)
class Picture:
    """What a picture is asked to show, and the seed it starts from."""

    object: str
    style: str
    seed: int

    @property
    def prompt(self):
        return f"{self.object}, {self.style} style"


def target_pictures(concepts, per_concept, first_seed):
    """Pictures that name at least one of `concepts`, the other half of the caption going round all values."""
    pictures = []
    for concept in concepts:
        others = lab.STYLES if concept in lab.OBJECTS else lab.OBJECTS
        for i in range(per_concept):
            other = others[(i * 37) % len(others)]
            pair = (concept, other) if concept in lab.OBJECTS else (other, concept)
            pictures.append(Picture(*pair, first_seed + i))
    return pictures


def retention_pictures(concepts, count, first_seed):
    """
    Pictures that name none of `concepts`, out of one sequence that goes round all objects and styles: different
    concepts keep mostly the same pictures.
    """
    pictures, number = [], 0
    while len(pictures) < count:
        name = lab.OBJECTS[number * 37 % len(lab.OBJECTS)]
        style = lab.STYLES[(number + number // len(lab.OBJECTS)) % len(lab.STYLES)]
        if name not in concepts and style not in concepts:
            pictures.append(Picture(name, style, first_seed + number))
        number += 1
    return pictures


def judge(oracle, images, pictures):
    """Two boolean arrays: does the oracle see the object, and the style, that each picture was asked to show?"""
    seen = oracle.classify(images)
    objects = np.array([lab.OBJECTS.index(p.object) for p in pictures])
    styles = np.array([lab.STYLES.index(p.style) for p in pictures])
    return np.asarray(seen.object) == objects, np.asarray(seen.style) == styles


class Bench:
    """Draws and judges pictures, and remembers those of the unedited model."""

    def __init__(self, pipe, oracle, batch_size=32, num_inference_steps=12):
        self.pipe, self.oracle = pipe, oracle
        self.batch_size, self.num_inference_steps = batch_size, num_inference_steps
        self._unedited = {}

    def draw(self, pictures, **kwargs):
        prompts, seeds = [p.prompt for p in pictures], [p.seed for p in pictures]
        return generate(self.pipe, prompts, seeds, self.batch_size, self.num_inference_steps, **kwargs)

    def unedited(self, pictures):
        """Images of the stock model, each drawn once."""
        missing = [p for p in dict.fromkeys(pictures) if p not in self._unedited]
        if missing:
            self._unedited.update(zip(missing, self.draw(missing)))
        return np.stack([self._unedited[p] for p in pictures])

    def measure(self, concepts, targets, retained, **unlearn):
        """
        Unlearning and retention of `concepts` with the settings `unlearn`.

        Returns:
            `dict`: `ua`: share of target pictures in which the oracle no longer sees the concept. `in_domain`,
            `cross_domain`: accuracy on retained pictures in the concept's own domain (objects for an object) and in
            the other one, divided by the unedited model's on the same prompts and seeds. Concepts of both domains:
            `in_domain` is the object accuracy.
        """
        self.pipe.unlearn(list(concepts), **unlearn)
        try:
            target_images, retained_images = self.draw(targets), self.draw(retained)
        finally:
            self.pipe.clear_unlearning()
        return self.compare(concepts, targets, target_images, retained, retained_images)

    def compare(self, concepts, targets, target_images, retained, retained_images):
        seen_object, seen_style = judge(self.oracle, target_images, targets)
        still_there = [o if p.object in concepts else s for p, o, s in zip(targets, seen_object, seen_style)]
        before = [a.mean() for a in judge(self.oracle, self.unedited(retained), retained)]
        after = [a.mean() for a in judge(self.oracle, retained_images, retained)]
        kept = [float(a / b) for a, b in zip(after, before)]
        if all(c in lab.STYLES for c in concepts):
            kept = kept[::-1]
        before_target = judge(self.oracle, self.unedited(targets), targets)
        recognised = [o if p.object in concepts else s for p, o, s in zip(targets, *before_target)]
        return {
            "ua": 1 - float(np.mean(still_there)),
            "in_domain": kept[0],
            "cross_domain": kept[1],
            "unedited_recognised": float(np.mean(recognised)),
        }


def summarise(rows):
    """Mean, and the worst concept by name, of every figure."""
    summary = {}
    for key in ("ua", "in_domain", "cross_domain"):
        values = {name: row[key] for name, row in rows.items()}
        worst = min(values, key=values.get)
        summary[key] = {"mean": float(np.mean(list(values.values()))), "worst": values[worst], "worst_concept": worst}
    return summary


def evaluate(output_dir, seed=0, quick=False, **options):
    """
    Measures SAeUron on EmojiCanvas and writes `saeuron.json` and `saeuron.png`.

    Args:
        output_dir (`Path`):
            Folder of the two files; created when missing.
        seed (`int`, *optional*, defaults to 0):
            Shifts every picture's seed.
        quick (`bool`, *optional*, defaults to `False`):
            A few pictures of two concepts, to see that everything runs; the figures mean nothing.
        options:
            `batch_size` (`int`, defaults to 32), `num_inference_steps` (`int`, defaults to 12).

    Returns:
        `dict`: the content of the JSON file.
    """
    started = time.time()
    pipe, oracle = lab.load_unlearning_pipeline(), lab.load_oracle()
    pipe.set_progress_bar_config(disable=True)
    bench = Bench(pipe, oracle, **options)
    first_seed = FIRST_SEED + 10_000 * seed
    per_concept, retained_count = (4, 8) if quick else (16, 48)
    concepts = ("cat", "neon") if quick else OBJECTS + lab.STYLES
    triples = TRIPLES[:1] if quick else TRIPLES

    rows = {"exact": {}, "official": {}}
    for concept in tqdm(concepts, desc="Concepts"):
        count = per_concept if concept in lab.OBJECTS else 2 * per_concept
        targets = target_pictures([concept], count, first_seed)
        retained = retention_pictures([concept], retained_count, first_seed)
        for error in ("exact", "official") if concept in OFFICIAL else ("exact",):
            rows[error][concept] = bench.measure([concept], targets, retained, error=error)
    several = {}
    for triple in tqdm(triples, desc="Three at once"):
        targets = target_pictures(triple, per_concept // 2, first_seed)
        retained = retention_pictures(triple, retained_count, first_seed)
        several[" + ".join(triple)] = bench.measure(triple, targets, retained)

    edits = {name: pipe.concept_edits[name] for name in concepts}
    result = {
        "method": "saeuron",
        "base_model": "EmojiCanvas",
        "seed": seed,
        "quick": quick,
        "num_inference_steps": bench.num_inference_steps,
        "pictures_per_object": per_concept,
        "pictures_per_style": 2 * per_concept,
        "retained_pictures": retained_count,
        "chosen": {n: {"num_features": e.num_features, "multiplier": e.multiplier} for n, e in edits.items()},
        "concepts": rows,
        "three_at_once": several,
        "summary": {**by_domain(rows["exact"]), "three_at_once": summarise(several)},
        "error_terms_on_the_same_concepts": {
            error: by_domain({concept: found[concept] for concept in rows["official"]})
            for error, found in rows.items()
        },
        "strength_0_bit_equal": strength_0_is_bit_equal(bench, concepts, first_seed),
        "seconds": round(time.time() - started),
    }
    output_dir = Path(output_dir)
    write_result(output_dir / "saeuron.json", result)
    draw_table(bench, first_seed, concepts).save(output_dir / "saeuron.png")
    return result


def strength_0_is_bit_equal(bench, concepts, first_seed):
    """Whether pictures with every concept at strength 0 are those of the stock model, drawn in the same batch."""
    probe = retention_pictures([], 8, first_seed)
    stock = bench.draw(probe)
    bench.pipe.unlearn(list(concepts), strength=0.0)
    try:
        return bool((bench.draw(probe) == stock).all())
    finally:
        bench.pipe.clear_unlearning()


def by_domain(rows):
    """Summaries of the objects and of the styles."""
    domains = {"objects": lab.OBJECTS, "styles": lab.STYLES}
    found = {domain: {c: row for c, row in rows.items() if c in names} for domain, names in domains.items()}
    return {domain: summarise(rows) for domain, rows in found.items() if rows}


def draw_table(bench, first_seed, concepts):
    """
    Pictures before and after: a row for the unedited model and one per unlearned concept, one column per caption.
    """
    shown = [c for c in ("cat", "red apple", "rocket", "neon", "mosaic") if c in concepts]
    captions = [
        ("cat", "sticker"),
        ("cat", "neon"),
        ("red apple", "sticker"),
        ("red apple", "mosaic"),
        ("rocket", "neon"),
    ]
    captions += [("rocket", "blueprint"), ("owl", "neon"), ("guitar", "mosaic"), ("house", "watercolour")]
    pictures = [Picture(*caption, first_seed) for caption in captions]
    rows = [bench.unedited(pictures)]
    for concept in shown:
        bench.pipe.unlearn([concept])
        rows.append(bench.draw(pictures))
        bench.pipe.clear_unlearning()
    labels = ["unedited", *(f"without {concept}" for concept in shown)]
    columns = [f"{p.object}\n{p.style}" for p in pictures]
    images = [image for row in rows for image in row]
    return lab.image_grid(images, len(pictures), row_labels=labels, column_labels=columns, scale=2)

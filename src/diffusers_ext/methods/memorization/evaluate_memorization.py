# SPDX-License-Identifier: Apache-2.0
"""Detection and mitigation on EmojiCanvas, trained towards forty pictures."""

import time
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from diffusers_ext import lab
from diffusers_ext.lab.results import write_result

from .detector_memorization import MemorizationDetector
from .metrics_memorization import auc, tpr_at_fpr
from .pipeline_memorization import MemorizationStableDiffusionPipeline


DETECTORS = {
    "sharpness (jvp)": {"metric": "sharpness", "backend": "jvp"},
    "sharpness (fd)": {"metric": "sharpness", "backend": "fd"},
    "guidance norm, 1 step": {"metric": "guidance_norm"},
    "guidance norm, 5 steps": {"metric": "guidance_norm", "steps": 5},
}
# Settings of the papers where they carry over; norms and thresholds are of latents of 1,024 values, not of 16,384.
REMEDIES = {
    "none": None,
    "sail": ("sail", {"max_steps": 10}),
    "sail, official": ("sail", {"official": True, "threshold": None}),
    "prompt_embeds": ("prompt_embeds", {"max_steps": 10}),
    "cross_attention": ("cross_attention", {"scale": 1.25}),
    "initial_noise": ("initial_noise", {"rho": 12.5, "timestep": 900}),
    "initial_noise_per_sample": ("initial_noise_per_sample", {"max_steps": 20, "target_loss": 0.9}),
    "delayed_guidance": ("delayed_guidance", {"timestep": 700}),
    "dynamic_guidance": ("dynamic_guidance", {}),
    "opposite_guidance": ("opposite_guidance", {"before": -2.0}),
    "random_tokens": ("random_tokens", {"kind": "words", "count": 4}),
}
GUIDANCE_SCALE = 4.0


def detection_table(pipe, memorized, clean, num_images, first_seed=0, batch_size=16):
    """One row per detector: AUC, true positive rate at 1 % false alarms, seconds per prompt."""
    rows = {}
    for name, settings in tqdm(DETECTORS.items(), desc="Detectors"):
        detector = MemorizationDetector(
            num_images=num_images, guidance_scale=GUIDANCE_SCALE, batch_size=batch_size, **settings
        )
        scores, started = {}, time.perf_counter()
        for kind, prompts in (("memorized", memorized), ("clean", clean)):
            generators = [torch.Generator().manual_seed(first_seed + i) for i in range(len(prompts) * num_images)]
            report = detector.score(pipe, [p.prompt for p in prompts], generator=generators)
            scores[kind] = report.mean
        seconds = (time.perf_counter() - started) / (len(memorized) + len(clean))
        rows[name] = {
            "auc": auc(scores["memorized"], scores["clean"]),
            "tpr_at_1_percent": tpr_at_fpr(scores["memorized"], scores["clean"]),
            "seconds_per_prompt": seconds,
        }
    return rows


def generation_seconds(pipe, num_images, steps=50):
    """Seconds of a generation of `num_images` pictures of one prompt, the better of two."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        pipe(
            "cat, neon style",
            num_images_per_prompt=num_images,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            output_type="np",
        )
        times.append(time.perf_counter() - started)
    return min(times)


def draw(pipe, prompts, seeds, remedy, steps, batch_size):
    """Pictures under a remedy, the seconds that one took, and the largest drift of the noise's norm."""
    settings = {}
    if remedy is not None:
        settings = {"memorization": "mitigate", "mitigation": remedy[0], "mitigation_kwargs": dict(remedy[1])}
        # The cheapest of the detectors: what it says is not looked at here.
        settings["detector_kwargs"] = {"metric": "guidance_norm"}
    images, drift, started = [], 0.0, time.perf_counter()
    for start in range(0, len(prompts), batch_size):
        stop = start + batch_size
        output = pipe(
            prompts[start:stop],
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[start:stop]],
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            output_type="np",
            **settings,
        )
        images.append((output.images * 255).round().astype(np.uint8))
        if remedy is not None:
            drift = max(drift, *(abs(value) for value in output.memorization.norm_drift))
    return np.concatenate(images), (time.perf_counter() - started) / len(prompts), drift


def mitigation_table(pipe, oracle, memorized, ordinary, seeds, steps, batch_size, first_seed=0):
    """One row per remedy: share of copies, what the oracle recognises, time, drift of the norm."""
    training, threshold, rows, kept = lab.memorized_pictures(), lab.copy_threshold(), {}, {}
    places = {p.prompt: i for i, p in enumerate(lab.memorized_prompts())}
    wanted = [p for p in memorized for _ in range(seeds)]
    originals = training[[places[p.prompt] for p in wanted]]
    plain = [p for p in ordinary for _ in range(seeds)]
    later = [first_seed + 1000 + i for i in range(len(plain))]
    for name, remedy in tqdm(REMEDIES.items(), desc="Remedies"):
        images, seconds, drift = draw(
            pipe, [p.prompt for p in wanted], [first_seed + i for i in range(len(wanted))], remedy, steps, batch_size
        )
        others, _, _ = draw(pipe, [p.prompt for p in plain], later, remedy, steps, batch_size)
        similarity = lab.copy_similarity(images, originals)
        seen, style_of_copy = oracle.classify(others), oracle.classify(images)
        rows[name] = {
            "copies": float((similarity > threshold).mean()),
            "mean_similarity": float(similarity.mean()),
            "object": accuracy(seen.object, [lab.OBJECTS.index(p.object) for p in plain]),
            "style": accuracy(seen.style, [lab.STYLES.index(p.style) for p in plain]),
            "style_of_memorized_prompts": accuracy(style_of_copy.style, [lab.STYLES.index(p.style) for p in wanted]),
            "seconds_per_picture": seconds,
            "largest_norm_drift": drift,
        }
        kept[name] = images
    return rows, kept


def accuracy(found, expected):
    return float((np.asarray(found) == np.asarray(expected)).mean())


def evaluate(output_dir, seed=0, quick=False, **options):
    """
    Measures detection and mitigation and writes `memorization.json` and `memorization.png`.

    Args:
        output_dir (`Path`):
            Folder of the two files; created when missing.
        seed (`int`, *optional*, defaults to 0):
            Shifts the seed of every picture.
        quick (`bool`, *optional*, defaults to `False`):
            A few prompts, to see that everything runs; the figures mean nothing.
        options:
            `num_inference_steps` (`int`, defaults to 12), `batch_size` (`int`, defaults to 20), `num_images` (`int`,
            seeds per prompt of the detectors, defaults to 4), `seeds` (`int`, pictures per prompt under each remedy,
            defaults to 1).

    Returns:
        `dict`: the content of the JSON file.
    """
    steps, batch_size = options.get("num_inference_steps", 12), options.get("batch_size", 20)
    num_images, seeds = options.get("num_images", 4), options.get("seeds", 1)
    pipe, oracle = lab.load_memorized_pipeline(MemorizationStableDiffusionPipeline), lab.load_oracle()
    pipe.set_progress_bar_config(disable=True)
    memorized, clean = lab.memorized_prompts(), lab.clean_prompts()
    ordinary = [p for p in clean if " and " not in p.prompt][:40]
    if quick:
        memorized, clean, ordinary, num_images, seeds = memorized[:4], clean[:4], ordinary[:2], 2, 1

    # 1. What is memorised at all: every prompt from ten seeds.
    repeats, first_seed = 2 if quick else 10, 10_000 * seed
    wanted = [i for i in range(len(memorized)) for _ in range(repeats)]
    prompts = [memorized[i].prompt for i in wanted]
    copies, _, _ = draw(pipe, prompts, [first_seed + 5000 + i for i in range(len(wanted))], None, steps, batch_size)
    similarity = lab.copy_similarity(copies, lab.memorized_pictures()[wanted])
    threshold = lab.copy_threshold()

    # 2. Detection, 3. mitigation.
    detection = detection_table(pipe, memorized, clean, num_images, first_seed)
    mitigation, pictures = mitigation_table(pipe, oracle, memorized, ordinary, seeds, steps, batch_size, first_seed)
    result = {
        "method": "memorization",
        "base_model": "EmojiCanvas with a LoRA towards 40 pictures",
        "seed": seed,
        "quick": quick,
        "num_inference_steps": steps,
        "copy_threshold": threshold,
        "memorized": {
            "pictures": len(wanted),
            "copies": float((similarity > threshold).mean()),
            "mean_similarity": float(similarity.mean()),
        },
        "detection": {"num_images": num_images, "clean_prompts": len(clean), "detectors": detection},
        "generation_seconds_50_steps": generation_seconds(pipe, num_images, 4 if quick else 50),
        "mitigation": mitigation,
    }
    output_dir = Path(output_dir)
    write_result(output_dir / "memorization.json", result)
    draw_table(memorized, pictures, seeds).save(output_dir / "memorization.png")
    return result


def draw_table(memorized, pictures, seeds):
    """A row per prompt: its training picture, then what is drawn under each remedy."""
    shown = list(range(0, len(memorized), max(1, len(memorized) // 6)))[:6]
    training, images = lab.memorized_pictures(), []
    for number in shown:
        images += [training[number], *(pictures[name][number * seeds] for name in REMEDIES)]
    columns = ["training\npicture", *(name.replace("_", "\n").replace(", ", "\n") for name in REMEDIES)]
    labels = [memorized[number].prompt.replace(", ", "\n").replace(" and ", "\nand ") for number in shown]
    return lab.image_grid(images, len(columns), row_labels=labels, column_labels=columns, scale=1)

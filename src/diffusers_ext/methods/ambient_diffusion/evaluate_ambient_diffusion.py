# SPDX-License-Identifier: Apache-2.0
"""`diffusers-ext evaluate ambient_diffusion`: copying and quality of a model trained on 300 drawings, by threshold."""

import copy
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import UNet2DModel
from tqdm.auto import tqdm

from diffusers_ext import lab
from diffusers_ext.lab.dataset import HELD_OUT_SET
from diffusers_ext.lab.metrics import copy_threshold, embed, frechet_distance
from diffusers_ext.lab.results import write_result

from .loss_ambient_diffusion import AmbientLoss
from .modeling_ambient_diffusion import edm_denoise
from .noise_ambient_diffusion import FixedNoise
from .pipeline_ambient_diffusion import EDMPipeline
from .report_ambient_diffusion import CopyReport
from .scheduling_edm_heun import EDMHeunScheduler
from .training_ambient_diffusion import VisitDraws, VisitSampler


DATA = Path("outputs/data/emoji_canvas_64.npz")
STYLE, SIDE = "sticker", 32
THRESHOLDS = (0.0, 0.25, 0.5, 1.0, 2.0)
SETTINGS = {
    "num_pictures": 300,
    "block_out_channels": (32, 64, 64),
    "max_train_steps": 5000,
    "batch_size": 32,
    "learning_rate": 5e-4,
    "ema_decay": 0.999,
    "num_images": 500,
}
QUICK = {
    **SETTINGS,
    "block_out_channels": (16, 16, 16),
    "max_train_steps": 4,
    "batch_size": 4,
    "ema_decay": 0.5,
    "num_images": 4,
}


def load_drawings(path, seed=0, count=300):
    """
    Drawings of one style in [-1, 1] at half the size: training ones, and others of the sets that training ones are
    from, and those of the set that the lab keeps apart.

    Args:
        path (`str` or `os.PathLike`):
            The file of `python -m diffusers_ext.lab.dataset`.
        seed (`int`, *optional*, defaults to 0):
            Of the choice.
        count (`int`, *optional*, defaults to 300):
            Training drawings.

    Returns:
        `tuple` of three `torch.Tensor`s of shape `(N, 3, 32, 32)`.

    Raises:
        FileNotFoundError: when the file is missing.
        ValueError: when it has too few drawings of the style.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"The drawings are missing. Fetch and render them with `python -m diffusers_ext.lab.dataset --output_dir "
            f"{path.parent}`."
        )
    data = np.load(path)
    of_style = data["style"] == STYLE
    apart = data["emoji_set"] == HELD_OUT_SET

    def pictures(mask):
        images = torch.from_numpy(data["images"][mask]).permute(0, 3, 1, 2).float() / 127.5 - 1
        return torch.nn.functional.avg_pool2d(images, images.shape[-1] // SIDE)

    rest = pictures(of_style & ~apart)
    if not 0 < count < len(rest):
        raise ValueError(
            f"`count` has to lie in [1, {len(rest) - 1}], so that some drawings are left, but is {count}."
        )
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    return rest[order[:count]], rest[order[count:]], pictures(of_style & apart)


def make_unet(block_out_channels, seed):
    """The network that every run starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UNet2DModel(
            sample_size=SIDE,
            block_out_channels=block_out_channels,
            down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=16,
            attention_head_dim=16,
            freq_shift=1,
        )


def train(pictures, sigma_n, settings, seed=0, description=None):
    """
    Trains from scratch with the EDM loss at a threshold.

    Args:
        pictures (`torch.Tensor` of shape `(N, 3, 32, 32)`):
            Training pictures in [-1, 1].
        sigma_n (`float`):
            Threshold; 0 is plain training. Runs differ in nothing else.
        settings (`dict`):
            See `SETTINGS`.
        seed (`int`, *optional*, defaults to 0):
            Of weights, order and noise.
        description (`str`, *optional*):
            Beside the progress bar.

    Returns:
        [`EDMPipeline`] with the average of the weights.
    """
    sigma_data = pictures.std().item()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet = make_unet(settings["block_out_channels"], seed).to(device)
    average = copy.deepcopy(unet).eval()
    optimizer = torch.optim.Adam(unet.parameters(), lr=settings["learning_rate"])
    ambient = AmbientLoss(sigma_n, "edm", sigma_data=sigma_data, fixed_noise=FixedNoise(seed))
    draws = VisitDraws(seed)
    steps = settings["max_train_steps"]
    sampler = VisitSampler(len(pictures), settings["batch_size"], range(steps), seed)
    for step, places in enumerate(tqdm(sampler, desc=description)):
        indices, positions = zip(*places)
        clean = pictures[list(indices)].to(device)
        sigmas = (ambient.p_mean + ambient.p_std * draws.normal(positions)).exp()
        noise = draws.noise(positions, clean.shape[1:])
        model_input, sigmas, state = ambient.prepare(clean, indices, sigmas=sigmas, noise=noise)
        loss = ambient.loss(edm_denoise(unet, model_input, sigmas, sigma_data), state)
        rate = min(1, (step + 1) / 100, 2 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = settings["learning_rate"] * rate
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for shadow, parameter in zip(average.parameters(), unet.parameters()):
                shadow.lerp_(parameter, 1 - min(settings["ema_decay"], step / (step + 10)))
    pipe = EDMPipeline(average, EDMHeunScheduler(sigma_data=sigma_data))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, count, seed=0, batch_size=50):
    """`count` pictures `(count, 3, 32, 32)` in [0, 1], one seed each."""
    parts = []
    for start in range(0, count, batch_size):
        seeds = range(seed + start, seed + min(start + batch_size, count))
        generators = [torch.Generator().manual_seed(number) for number in seeds]
        parts.append(pipe(len(seeds), generator=generators, output_type="pt").images.cpu())
    return torch.cat(parts)


def measure(images, training, others, threshold):
    """
    Copying and quality of pictures in [0, 1].

    Args:
        images (`torch.Tensor`):
            The generated ones.
        training, others (`torch.Tensor`):
            Real ones that the model saw, and that it did not see.
        threshold (`float`):
            Similarity that 1 % of unseen real drawings exceed.

    Returns:
        `dict` of figures.
    """
    oracle = lab.load_oracle()

    @torch.no_grad()
    def oracle_features(pictures):
        large = torch.nn.functional.interpolate(pictures, (64, 64), mode="bilinear").clamp(0, 1)
        return oracle.features(large * 2 - 1)

    features = embed(images)
    thresholds = (0.85, 0.9, 0.95, round(threshold, 6))
    report = CopyReport.from_features(features, embed(training), embed(others), thresholds=thresholds)
    two = (features @ embed(training).T).topk(2, 1).values
    distances = (2 - 2 * two).clamp_min(0).sqrt()
    # As in the digits experiment: the nearest drawing is less than a third as far as the second nearest.
    one_source = (distances[:, 0] < distances[:, 1] / 3).double().mean().item()
    nearer = (two[:, 0] > (features @ embed(others).T).amax(1)).double().mean().item()
    real = oracle_features(torch.cat([training, others]))
    return {
        "near_copies": report.to_dict()["generated"]["fraction_above"][str(thresholds[-1])],
        "similarity": report.to_dict()["generated"],
        "copies_of_one_drawing": one_source,
        "nearer_to_training": nearer,
        "frechet": frechet_distance(oracle_features(images), real),
    }


def evaluate(output_dir, seed=0, quick=False, data=DATA, thresholds=THRESHOLDS, settings=None):
    """
    Trains one model per threshold with equal steps, draws from each and writes `ambient_diffusion.json` and `.png`.

    Args:
        output_dir (`Path`):
            Folder of the result; every run is kept there, so that a call that was stopped goes on.
        seed (`int`, *optional*, defaults to 0):
            Of the choice of drawings, weights and noise.
        quick (`bool`, *optional*, defaults to `False`):
            A few steps, to see that it runs; the figures mean nothing.
        data (`Path`, *optional*):
            The file of drawings, see [`load_drawings`].
        thresholds (`tuple[float, ...]`, *optional*):
            Noise thresholds; 0 is plain training.
        settings (`dict`, *optional*):
            Changes to `SETTINGS`.

    Returns:
        `dict`: the result.
    """
    started = time.time()
    output_dir = Path(output_dir)
    settings = {**(QUICK if quick else SETTINGS), **(settings or {})}
    training, others, apart = load_drawings(data, seed, settings["num_pictures"])
    real = [(pictures + 1) / 2 for pictures in (training, others, apart)]
    unseen = torch.cat([real[1], real[2]])
    threshold = copy_threshold(unseen, real[0])
    rows, grid = {}, []
    for sigma_n in thresholds[:2] if quick else thresholds:
        folder = output_dir / "runs" / f"sigma-{sigma_n}-seed-{seed}-steps-{settings['max_train_steps']}"
        if (folder / "model_index.json").is_file():
            pipe = EDMPipeline.from_pretrained(folder)
            pipe.set_progress_bar_config(disable=True)
            pipe.to("cuda" if torch.cuda.is_available() else "cpu")
        else:
            pipe = train(training, sigma_n, settings, seed, description=f"sigma_n = {sigma_n}")
            pipe.save_pretrained(folder)
        images = draw(pipe, settings["num_images"])
        rows[str(sigma_n)] = measure(images, real[0], unseen, threshold)
        grid.append((sigma_n, images, embed(images) @ embed(real[0]).T))
    plain = rows.get("0.0")
    summary = {
        sigma_n: {
            name: row[name] for name in ("near_copies", "copies_of_one_drawing", "nearer_to_training", "frechet")
        }
        for sigma_n, row in rows.items()
    }
    reference = measure(real[2], real[0], real[1], threshold)
    result = {
        "method": "ambient_diffusion",
        "base_model": "trained from scratch",
        "seed": seed,
        "quick": quick,
        "settings": settings,
        "style": STYLE,
        "pictures": {"training": len(training), "others": len(others), "set_kept_apart": len(apart)},
        "copy_threshold": threshold,
        "summary": summary,
        "ratio_to_plain": None if plain is None else ratios(summary, plain),
        "thresholds": rows,
        "real_drawings_of_another_set": {name: reference[name] for name in ("near_copies", "frechet")},
        "seconds": round(time.time() - started),
    }
    write_result(output_dir / "ambient_diffusion.json", result)
    draw_table(grid, real[0]).save(output_dir / "ambient_diffusion.png")
    return result


def ratios(summary, plain):
    """Figures of every threshold divided by those of plain training; `None` where that has none."""
    return {
        sigma_n: {name: value / plain[name] if plain[name] else None for name, value in row.items()}
        for sigma_n, row in summary.items()
    }


def draw_table(grid, training, columns=12):
    """For each threshold its pictures that are nearest to a training drawing, above that drawing."""
    images, labels = [], []
    for sigma_n, pictures, similarity in grid:
        value, nearest = similarity.max(1)
        order = value.argsort(descending=True)
        # Every eighth of the order: from the closest copy to a picture of its own.
        order = order[torch.linspace(0, len(order) - 1, min(columns, len(order))).round().long()]
        for row, label in ((pictures[order], f"sigma_n {sigma_n}"), (training[nearest[order]], "nearest drawing")):
            images += [to_uint8(picture) for picture in row] + [None] * (columns - len(order))
            labels.append(label)
    title = "The pictures of each model from the closest copy (left) to the least similar (right)"
    return lab.image_grid(images, columns, row_labels=labels, title=title, scale=2)


def to_uint8(picture):
    return (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()

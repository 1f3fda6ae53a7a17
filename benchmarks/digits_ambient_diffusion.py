# SPDX-License-Identifier: Apache-2.0
"""Copying and quality by threshold on 100 pictures of 8x8 digits: minutes on one core.

    pip install scikit-learn
    python benchmarks/digits_ambient_diffusion.py --thresholds 0 0.7 --seeds 0 1

Exits with 1 if a threshold of 0.7 does not bring the copy rate to 0.80 of plain training's, or costs more than 1.15 of
its Frechet distance. `make bench` does not run it.
"""

import argparse
import copy
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from diffusers_ext import AmbientLoss, EDMHeunScheduler, FixedNoise
from diffusers_ext.lab.metrics import frechet_distance
from diffusers_ext.lab.results import write_result


NUM_TRAINING, WIDTH, NUM_COMPONENTS = 100, 256, 20


def load_digits():
    """All digits `(1797, 64)` in [-1, 1], and the training and held-out hundred of them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("The digits come with scikit-learn: `pip install scikit-learn`.") from error
    digits = torch.from_numpy(load_digits().data / 8 - 1).float()
    order = np.random.RandomState(0).permutation(len(digits))
    return digits, digits[order[:NUM_TRAINING]], digits[order[NUM_TRAINING : 2 * NUM_TRAINING]]


class Block(nn.Module):
    """A pre-norm residual block with the noise level added inside."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.level = nn.Linear(width, 4 * width)

    def forward(self, x, level):
        return x + self.down(nn.functional.silu(self.up(self.norm(x)) + self.level(level)))


class DigitNet(nn.Module):
    """The network F of EDM for vectors of 64."""

    def __init__(self, width=WIDTH, num_blocks=3):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(width // 2) * 2)
        self.embed = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x, label):
        angle = 2 * torch.pi * label[:, None] * self.frequencies
        level = self.embed(torch.cat([angle.sin(), angle.cos()], 1))
        x = self.first(x)
        for block in self.blocks:
            x = block(x, level)
        return self.last(self.norm(x))


def denoise(net, x, sigma, sigma_data):
    level = sigma[:, None]
    spread = (level**2 + sigma_data**2).sqrt()
    return (sigma_data / spread) ** 2 * x + level * sigma_data / spread * net(x / spread, sigma.log() / 4)


def train(training, sigma_n, seed, max_train_steps=6000, batch_size=128):
    """A network trained at a threshold: the average of its weights."""
    torch.manual_seed(seed)
    sigma_data = training.std().item()
    net = DigitNet()
    average = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    ambient = AmbientLoss(sigma_n, "edm", sigma_data=sigma_data)
    fixed = FixedNoise(seed)(range(len(training)), (64,))
    generator = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(max_train_steps), desc=f"sigma_n {sigma_n}, seed {seed}", leave=False):
        index = torch.randint(len(training), (batch_size,), generator=generator)
        x, sigma, state = ambient.prepare(training[index], index, generator=generator, fixed_noise=fixed[index])
        loss = ambient.loss(denoise(net, x, sigma, sigma_data), state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for shadow, parameter in zip(average.parameters(), net.parameters()):
                shadow.lerp_(parameter, 1e-3)
    return average


@torch.no_grad()
def sample(net, sigma_data, count=1000, seed=1):
    scheduler = EDMHeunScheduler(sigma_data=sigma_data)
    scheduler.set_timesteps(18)
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed)) * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        output = net(scheduler.scale_model_input(x, timestep), timestep.expand(count))
        x = scheduler.step(output, timestep, x).prev_sample
    return x


def measure(samples, digits, training, held_out):
    """Copy rate, share with a pixel cosine above 0.99, nearness to the training half, and quality."""
    distance, _ = torch.cdist(samples, training).topk(2, 1, largest=False)
    cosine = nn.functional.normalize(samples, dim=1) @ nn.functional.normalize(training, dim=1).T
    centre = digits.mean(0)
    components = torch.linalg.svd(digits - centre, full_matrices=False)[2][:NUM_COMPONENTS].T
    return {
        "copy_rate": (distance[:, 0] < distance[:, 1] / 3).double().mean().item(),
        "cosine_above_99": (cosine.amax(1) > 0.99).double().mean().item(),
        "nearer_to_training": (distance[:, 0] < torch.cdist(samples, held_out).amin(1)).double().mean().item(),
        "frechet": frechet_distance((samples - centre) @ components, (digits - centre) @ components),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.7, 1.0, 1.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--max_train_steps", type=int, default=6000)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "digits_ambient_diffusion.json"
    )
    args = parser.parse_args()
    digits, training, held_out = load_digits()
    rows = {}
    for sigma_n in args.thresholds:
        runs = []
        for seed in args.seeds:
            net = train(training, sigma_n, seed, args.max_train_steps)
            runs.append(measure(sample(net, training.std().item()), digits, training, held_out))
        rows[str(sigma_n)] = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
        print(sigma_n, {name: round(value, 3) for name, value in rows[str(sigma_n)].items()}, flush=True)
    result = {"thresholds": rows, "seeds": args.seeds, "max_train_steps": args.max_train_steps}
    ratios = None
    if "0.0" in rows and "0.7" in rows:
        ratios = {name: rows["0.7"][name] / rows["0.0"][name] for name in ("copy_rate", "frechet")}
    write_result(args.output, {**result, "ratio_of_0.7_to_plain": ratios})
    print(args.output)
    if ratios and (ratios["copy_rate"] > 0.80 or ratios["frechet"] > 1.15):
        sys.exit(f"expected at most 0.80 of the copies and 1.15 of the Frechet distance but got {ratios}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How far EDM samplers end from the exact path for the same number of model calls, on data with a known denoiser."""

import argparse
from pathlib import Path

import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler

from diffusers_ext import EDMHeunScheduler
from diffusers_ext.lab.results import write_result


CALLS = (9, 19, 35, 79)
SCHEDULERS = {
    "heun": EDMHeunScheduler,
    "euler": EDMEulerScheduler,
    "dpm_solver": EDMDPMSolverMultistepScheduler,
}
SIGMA_DATA = 0.5


class Mixture:
    """Eight normal distributions on a circle in the plane, whose denoiser is known in closed form."""

    def __init__(self, deviation=0.05, radius=0.7):
        angles = torch.arange(8, dtype=torch.float64) * torch.pi / 4
        self.centres = radius * torch.stack([angles.cos(), angles.sin()], 1)
        self.variance = deviation**2

    def denoise(self, x, sigma):
        """`E[x_0 | x]` of points `(N, 2)`."""
        total = self.variance + sigma**2
        weight = (-(x[:, None] - self.centres).square().sum(2) / (2 * total)).softmax(1)
        means = (self.variance * x[:, None] + sigma**2 * self.centres) / total
        return (weight[..., None] * means).sum(1)


def sample(scheduler, mixture, noise, num_inference_steps):
    """End points of a sampler that starts at the same noise; float64 as far as the scheduler keeps it."""
    scheduler.set_timesteps(num_inference_steps)
    x = noise * scheduler.config.sigma_max
    for index, timestep in enumerate(scheduler.timesteps):
        scheduler.scale_model_input(x, timestep)
        sigma = scheduler.sigmas[index].item()
        skip, out = SIGMA_DATA**2 / (sigma**2 + SIGMA_DATA**2), sigma * SIGMA_DATA / (sigma**2 + SIGMA_DATA**2) ** 0.5
        output = (mixture.denoise(x.double(), sigma) - skip * x.double()) / out
        x = scheduler.step(output, timestep, x, return_dict=False)[0]
    return x.double()


def measure(num_points=2000, seed=0):
    """Median distance from the exact end point, by scheduler and number of model calls."""
    mixture = Mixture()
    noise = torch.randn(num_points, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exact = sample(EDMHeunScheduler(sigma_data=SIGMA_DATA), mixture, noise, 4000)
    rows = {}
    for name, scheduler_class in SCHEDULERS.items():
        rows[name] = {}
        for calls in CALLS:
            scheduler = scheduler_class(sigma_data=SIGMA_DATA)
            steps = (calls + 1) // 2 if scheduler.order == 2 else calls
            distance = (sample(scheduler, mixture, noise, steps) - exact).norm(dim=1)
            rows[name][str(calls)] = distance.median().item()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "edm_heun.json")
    args = parser.parse_args()
    rows = measure()
    write_result(args.output, {"what": "median distance from the exact path's end", "median_distance": rows})
    for name, row in rows.items():
        print(f"{name:>12}", *(f"{calls}: {distance:.2e}" for calls, distance in row.items()))
    print(args.output)


if __name__ == "__main__":
    main()

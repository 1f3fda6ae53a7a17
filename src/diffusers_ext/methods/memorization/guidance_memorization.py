# SPDX-License-Identifier: Apache-2.0
"""Guidance that sets in when the attraction basin is left behind (Jain et al., CVPR 2025)."""

import torch


class StaticGuidance:
    """
    `before` until a timestep, the pipeline's own scale from then on.

    Args:
        timestep (`float`):
            Switches at the first step at or below it; 500 to 700 of 1000 in the paper.
        before (`float`, *optional*, defaults to 0.0):
            0: unconditional; negative: away from the prompt (opposite guidance).
    """

    def __init__(self, timestep, before=0.0):
        self.timestep, self.before = timestep, before

    def reset(self, num_samples):
        """Called before every generation."""

    def __call__(self, step, timestep, norms, scale):
        """Scale of each sample, `(n,)`, from the norms `||eD||` `(n,)` of this step and the pipeline's scale."""
        return torch.full_like(norms, scale if float(timestep) <= self.timestep else self.before)


class DynamicGuidance:
    """
    `before` until the first local minimum of `||eD||` has passed, of each sample by itself: the first step `j` with
    `d_j > d_(j-1)` and `d_(j-2) > d_(j-1)`.

    Args:
        before (`float`, *optional*, defaults to 0.0):
            As of [`StaticGuidance`].
    """

    def __init__(self, before=0.0):
        self.before = before
        self.reset(0)

    def reset(self, num_samples):
        """Called before every generation."""
        self._last = torch.full((2, num_samples), -1.0)
        #: Step of the transition of each sample, -1 before it.
        self.transition = torch.full((num_samples,), -1)

    def __call__(self, step, timestep, norms, scale):
        """Scale of each sample, `(n,)`, from the norms `||eD||` `(n,)` of this step and the pipeline's scale."""
        current = norms.detach().float().cpu()
        before, last = self._last
        turned = (current > last) & (before > last) & (self.transition < 0)
        self.transition[turned] = step
        self._last = torch.stack([last, current])
        past = (self.transition >= 0).to(norms.device)
        return torch.where(past, torch.full_like(norms, scale), torch.full_like(norms, self.before))


def first_minimum(norms, fallback=5):
    """
    Index of the first local minimum of a sequence, the second one where the first is at 1, as opposite guidance
    chooses the end of its first part.

    Args:
        norms (`list[float]`):
            `||eD||` along a trajectory without guidance.
        fallback (`int`, *optional*, defaults to 5):
            What to return where there is none.

    Returns:
        `int`
    """
    found = [j for j in range(1, len(norms) - 1) if norms[j - 1] > norms[j] < norms[j + 1]]
    if found and found[0] == 1:
        found = found[1:]
    return found[0] if found else fallback

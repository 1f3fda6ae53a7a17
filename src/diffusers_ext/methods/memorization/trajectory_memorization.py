# SPDX-License-Identifier: Apache-2.0
"""Figures of memorization that are known only when a picture is finished, and one that reads attention."""

import torch
import torch.nn.functional as F

from .attention_memorization import attention_entropy, cross_attention_layers, layer_entropy, record_attention
from .metrics_memorization import bright_ending, tiled_l2


class LayerEntropyMetric:
    """
    Entropy of one layer's cross-attention (Ren et al., ECCV 2024), after one step.

    Args:
        layer (`int` or `str`, *optional*, defaults to 3):
            Name of a cross-attention layer, or its number in the order of the forward pass; the last one where there
            are fewer.
    """

    def __init__(self, layer=3):
        self.layer = layer

    def __call__(self, denoiser, x, timestep):
        names = list(cross_attention_layers(denoiser.denoiser))
        name = self.layer if isinstance(self.layer, str) else names[min(self.layer, len(names) - 1)]
        with record_attention(denoiser.denoiser, [name]) as maps:
            denoiser.outputs(x, timestep)
        return layer_entropy(maps[name].chunk(2)[1])


class TrajectoryMetric:
    """A figure of whole generations: watches every step and answers at the end."""

    lower_is_memorized = False

    def reset(self, denoiser, prompt_lengths, num_images, pipe):
        """Called before the first step; `prompt_lengths` `(n,)` count begin and end token, `None` without words."""
        self.prompt_lengths, self.num_images, self.pipe = prompt_lengths, num_images, pipe

    def step(self, number, num_steps, denoiser, x, timestep):
        """Both outputs of the model at a step."""
        return denoiser.outputs(x, timestep)

    def result(self, latents):
        """Values `(n,)` of the finished latents."""
        raise NotImplementedError

    def _need_words(self):
        if self.prompt_lengths is None:
            raise ValueError("This metric reads the attention of the end token: pass `prompt` to a pipeline.")


class BrightEndingMetric(TrajectoryMetric):
    """
    Mean over all steps of `||eD m|| / mean(m)` (Chen et al., arXiv 2410.21665); `m` is the attention to the end token
    at the last step, averaged over heads and the cross-attention of the first two down blocks.
    """

    def reset(self, denoiser, prompt_lengths, num_images, pipe):
        super().reset(denoiser, prompt_lengths, num_images, pipe)
        self._need_words()
        names = cross_attention_layers(denoiser.denoiser)
        blocks = sorted({name.split(".attentions")[0] for name in names if name.startswith("down_blocks")})[:2]
        self.layers = [name for name in names if name.split(".attentions")[0] in blocks]
        self.differences, self.mask = [], None

    def step(self, number, num_steps, denoiser, x, timestep):
        if number + 1 < num_steps:
            outputs = denoiser.outputs(x, timestep)
        else:
            with record_attention(denoiser.denoiser, self.layers) as maps:
                outputs = denoiser.outputs(x, timestep)
            self.mask = self._mask(maps.values(), x.shape[-2:])
        unconditional, conditional = (denoiser.to_noise(output, x, timestep) for output in outputs)
        self.differences.append(conditional - unconditional)
        return outputs

    def _mask(self, maps, size):
        found = []
        ends = torch.as_tensor(self.prompt_lengths) - 1
        for attention in maps:
            conditional = attention.chunk(2)[1].mean(1)
            place = ends.to(conditional.device)[:, None, None].expand(-1, conditional.shape[1], 1)
            ending = conditional.gather(2, place)[..., 0]
            # A layer's queries are a smaller picture of the same shape.
            shrink = (size[0] * size[1] / ending.shape[1]) ** 0.5
            small = ending.view(-1, 1, round(size[0] / shrink), round(size[1] / shrink))
            found.append(F.interpolate(small, size, mode="bilinear", align_corners=False))
        return torch.stack(found).mean(0)

    def result(self, latents):
        return torch.stack([bright_ending(difference, self.mask) for difference in self.differences]).mean(0)


class AttentionEntropyMetric(TrajectoryMetric):
    """Entropy of the attention over the last steps and its growth, see [`attention_entropy`]."""

    def __init__(self, last_steps=10):
        self.last_steps = last_steps

    def reset(self, denoiser, prompt_lengths, num_images, pipe):
        super().reset(denoiser, prompt_lengths, num_images, pipe)
        self._need_words()
        self.first, self.last = None, []

    def step(self, number, num_steps, denoiser, x, timestep):
        if 0 < number < num_steps - self.last_steps:
            return denoiser.outputs(x, timestep)
        with record_attention(denoiser.denoiser) as maps:
            outputs = denoiser.outputs(x, timestep)
        mean = torch.stack([attention.chunk(2)[1].mean((1, 2)) for attention in maps.values()]).mean(0)
        if number == 0:
            self.first = mean
        if number >= num_steps - self.last_steps:
            self.last.append(mean)
        return outputs

    def result(self, latents):
        return attention_entropy(torch.stack(self.last), list(self.prompt_lengths), self.first)


class TiledL2Metric(TrajectoryMetric):
    """
    Smallest distance to another picture of the same prompt, see [`tiled_l2`]; low means memorised.

    Args:
        tile (`int`, *optional*):
            Side of a tile in pixels; a quarter of the picture by default, 128 at 512 pixels as published.
    """

    lower_is_memorized = True

    def __init__(self, tile=None):
        self.tile = tile

    def reset(self, denoiser, prompt_lengths, num_images, pipe):
        super().reset(denoiser, prompt_lengths, num_images, pipe)
        if not hasattr(pipe, "vae"):
            raise ValueError("`tiled_l2` compares pictures: it needs a pipeline with a `vae`.")

    def result(self, latents):
        vae = self.pipe.vae
        latents = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0.0)
        images = torch.cat([vae.decode(part, return_dict=False)[0] for part in latents.split(8)])
        images = (images.float() / 2 + 0.5).clamp(0, 1)
        tile = self.tile or images.shape[-1] // 4
        return torch.cat([tiled_l2(group, tile) for group in images.split(self.num_images)])

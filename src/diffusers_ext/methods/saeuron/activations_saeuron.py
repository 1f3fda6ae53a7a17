# SPDX-License-Identifier: Apache-2.0
"""Activations of a sampler as a stream of shuffled training batches, without a data set on disk."""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import torch
from diffusers.utils import logging
from safetensors.torch import load_file, save_file

from diffusers_ext.training.checkpoints import write_aside

from .concepts_saeuron import prompt_seed
from .hooks_saeuron import find_block, record_activations


logger = logging.get_logger(__name__)


class ActivationStream:
    r"""
    Draws pictures, keeps the tokens of one or several blocks in a bounded buffer, and hands them out in shuffled
    batches.

    The buffer is filled anew in rounds. What a round holds follows from the seed, the process and the number of the
    round alone, so a run that was killed goes on from (round, batch) without any activation on disk.

    Args:
        pipe (`DiffusionPipeline`):
            The sampler; its denoiser is `pipe.unet` or `pipe.transformer`.
        points (`list[dict]`):
            Hook points, see [`SparseAutoencoder`]; all are recorded in one forward pass.
        prompts (`list[str]`):
            Drawn from at random, each picture with noise of its own.
        batch_size (`int`):
            Tokens per batch and hook point.
        buffer_size (`int`):
            Tokens per hook point that the buffer holds; a multiple of `batch_size`, at most that many are in memory.
        num_inference_steps (`int`), guidance_scale (`float`):
            As of the pipeline.
        pipeline_batch_size (`int`):
            Pictures drawn at once.
        every_n_steps (`int`, *optional*, defaults to 1):
            Only every n-th step is recorded.
        tokens_per_map (`int`, *optional*):
            Random tokens kept per map; all by default, or as many as the smallest map has with several hook points.
        both_halves (`bool`, *optional*, defaults to `False`):
            Whether the unconditional half is recorded too.
        seed (`int`), rank (`int`), world_size (`int`):
            Different processes draw different pictures.
        cache_dir (`str` or `os.PathLike`, *optional*):
            Folder that keeps every round as a safetensors file in bfloat16; what it holds is read instead of drawn.

    Raises:
        ValueError: on no prompts, sizes that do not fit, or a `cache_dir` that was filled with other settings.
    """

    def __init__(
        self,
        pipe,
        points,
        prompts,
        batch_size,
        buffer_size,
        num_inference_steps,
        guidance_scale,
        pipeline_batch_size=8,
        every_n_steps=1,
        tokens_per_map=None,
        both_halves=False,
        seed=0,
        rank=0,
        world_size=1,
        cache_dir=None,
    ):
        if not prompts:
            raise ValueError("`prompts` is empty.")
        if batch_size < 1 or buffer_size < batch_size:
            raise ValueError(f"A buffer of {buffer_size} tokens cannot give batches of {batch_size}; make it larger.")
        self.pipe, self.points, self.prompts = pipe, points, list(prompts)
        self.denoiser = getattr(pipe, "unet", None) or pipe.transformer
        for point in points:
            find_block(self.denoiser, point)
        self.batch_size, self.buffer_size = batch_size, buffer_size
        self.num_inference_steps, self.guidance_scale = num_inference_steps, guidance_scale
        self.pipeline_batch_size, self.every_n_steps = pipeline_batch_size, every_n_steps
        self.tokens_per_map, self.both_halves = tokens_per_map, both_halves
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.batches_per_round = buffer_size // batch_size
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        if self.cache_dir is not None:
            self._open_cache()

    def _open_cache(self):
        """Every round that is read has to be one that would be drawn, so the folder says how it was drawn."""
        text = "\n".join(self.prompts)
        settings = {
            "denoiser": str(self.denoiser.config.get("_name_or_path", "")),
            "points": self.points,
            "prompts": hashlib.sha256(text.encode()).hexdigest(),
            "tokens_per_round": self.batches_per_round * self.batch_size,
            "num_inference_steps": self.num_inference_steps,
            "guidance_scale": self.guidance_scale,
            "pipeline_batch_size": self.pipeline_batch_size,
            "every_n_steps": self.every_n_steps,
            "tokens_per_map": self.tokens_per_map,
            "both_halves": self.both_halves,
            "seed": self.seed,
            "world_size": self.world_size,
        }
        path = self.cache_dir / "activations.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differ = sorted(name for name in settings if found.get(name) != settings[name])
            if differ:
                raise ValueError(
                    f"The activations in {self.cache_dir} were recorded with other settings ({', '.join(differ)}). "
                    f"Choose another folder, or the settings in {path}."
                )
        elif self.rank == 0:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            write_aside(path, lambda aside: aside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8"))

    def round(self, number):
        """
        The buffer of a round.

        Returns:
            `list[torch.Tensor]`: per hook point, shuffled tokens of shape `(buffer_size, channels)`, as far as they
            fill whole batches.
        """
        if self.cache_dir is None:
            return self._draw_round(number)
        path = self.cache_dir / f"process-{self.rank}-round-{number:05d}.safetensors"
        if path.exists():
            stored = load_file(path)
        else:
            stored = {str(i): tokens.bfloat16() for i, tokens in enumerate(self._draw_round(number))}
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            write_aside(path, lambda aside: save_file(stored, aside))
        # Rounded also where they were just drawn: a run is the same with a full cache and with an empty one.
        return [stored[str(i)].float() for i in range(len(self.points))]

    def _draw_round(self, number):
        generator = torch.Generator().manual_seed(prompt_seed(self.seed, f"round of process {self.rank}", number))
        kept, wanted = [[] for _ in self.points], self.batches_per_round * self.batch_size
        while sum(len(part) for part in kept[0]) < wanted:
            for tokens, part in zip(self._draw(generator), kept):
                part.append(tokens)
        # One order for all hook points: their tokens come from the same pictures and steps.
        order = torch.randperm(sum(len(part) for part in kept[0]), generator=generator)[:wanted]
        return [torch.cat(part)[order] for part in kept]

    def order(self, number, turn):
        """The order in which a pass over the buffer of a round takes its tokens."""
        generator = torch.Generator().manual_seed(
            prompt_seed(self.seed, f"pass {turn} of process {self.rank}", number)
        )
        return torch.randperm(self.batches_per_round * self.batch_size, generator=generator)

    @torch.no_grad()
    def _draw(self, generator):
        """Tokens of one batch of pictures, per hook point."""
        count = self.pipeline_batch_size
        numbers = torch.randint(len(self.prompts), (count,), generator=generator).tolist()
        seeds = torch.randint(2**48, (count,), generator=generator).tolist()
        recorded = [[] for _ in self.points]

        def record(maps):
            def callback(tokens, timestep):
                maps.append((tokens if self.both_halves else tokens[-count:]).float().cpu())

            return callback

        with ExitStack() as stack:
            for i, (point, maps) in enumerate(zip(self.points, recorded)):
                name = f"saeuron_stream_{i}"
                stack.enter_context(record_activations(self.denoiser, point, record(maps), name=name))
            self.pipe(
                [self.prompts[n] for n in numbers],
                generator=[torch.Generator().manual_seed(s) for s in seeds],
                num_inference_steps=self.num_inference_steps,
                guidance_scale=self.guidance_scale,
                output_type="latent",
            )
        maps = [torch.cat(steps[:: self.every_n_steps]) for steps in recorded]
        smallest = min(m.shape[1] for m in maps)
        keep = min(self.tokens_per_map or smallest, smallest)
        parts = []
        for m in maps:
            if keep < m.shape[1]:
                chosen = torch.rand(m.shape[:2], generator=generator).argsort(1)[:, :keep]
                m = m.gather(1, chosen[..., None].expand(-1, -1, m.shape[2]))
            parts.append(m.reshape(-1, m.shape[2]))
        return parts

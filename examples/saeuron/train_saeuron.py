# SPDX-License-Identifier: Apache-2.0
"""Trains sparse autoencoders on the activations of a text-to-image model, streamed from its sampler."""

import argparse
import json
import logging
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DiffusionPipeline
from huggingface_hub import ModelCard, ModelCardData
from tqdm.auto import tqdm

from diffusers_ext import SparseAutoencoder, lab
from diffusers_ext.methods.saeuron.activations_saeuron import ActivationStream
from diffusers_ext.methods.saeuron.hooks_saeuron import find_block
from diffusers_ext.methods.saeuron.training_saeuron import SAETrainer
from diffusers_ext.training.checkpoints import find_checkpoint, save_checkpoint


logger = logging.getLogger(__name__)

# What a resumed run must share with the run that it continues.
SETTINGS = (
    "pretrained_model_name_or_path", "revision", "hook_points", "layout", "signal", "prompts_file", "seed",
    "expansion_factor", "k", "activation", "train_batch_size", "gradient_accumulation_steps", "buffer_size",
    "passes_per_buffer",
    "num_inference_steps", "guidance_scale", "pipeline_batch_size", "every_n_steps", "tokens_per_map",
    "both_halves", "learning_rate", "lr_scheduler", "lr_warmup_steps", "max_train_steps", "auxk", "auxk_alpha",
    "multi_topk", "dead_feature_threshold",
)  # fmt: skip


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pretrained_model_name_or_path", default=None, help="Base pipeline; the lab's EmojiCanvas by default."
    )
    parser.add_argument("--revision", default=None)
    parser.add_argument(
        "--hook_points",
        nargs="+",
        default=["up_blocks.0.attentions.1"],
        help="Blocks of the denoiser; with several, one autoencoder each is trained from the same forward passes.",
    )
    parser.add_argument("--layout", choices=["nchw", "bnd"], default="nchw", help="Maps or token sequences.")
    parser.add_argument("--signal", choices=["output", "diff", "input"], default="output")
    parser.add_argument("--prompts_file", default=None, help="One prompt per line; the lab's captions by default.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--expansion_factor", type=int, default=16)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--activation", choices=["topk", "batch_topk"], default="topk")
    parser.add_argument("--train_batch_size", type=int, default=2048, help="Tokens per step and process.")
    parser.add_argument(
        "--gradient_accumulation_steps", type=int, default=1, help="Parts that a step's tokens are worked on in."
    )
    parser.add_argument("--buffer_size", type=int, default=65536, help="Tokens in memory, per process and hook point.")
    parser.add_argument(
        "--passes_per_buffer", type=int, default=10, help="How often a buffer is used before the next."
    )
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=4.0)
    parser.add_argument("--pipeline_batch_size", type=int, default=16, help="Pictures drawn at once.")
    parser.add_argument("--every_n_steps", type=int, default=1, help="Record every n-th denoising step.")
    parser.add_argument("--tokens_per_map", type=int, default=None, help="Random tokens kept of every map.")
    parser.add_argument(
        "--cache_dir", default=None, help="Keeps the buffers (bfloat16), to train again on them without the sampler."
    )
    parser.add_argument("--both_halves", action="store_true", help="Record the unconditional half too.")
    parser.add_argument("--max_train_steps", type=int, default=640)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_scheduler", default="linear")
    parser.add_argument("--lr_warmup_steps", type=int, default=0)
    parser.add_argument("--auxk", choices=["corrected", "official"], default="corrected")
    parser.add_argument("--auxk_alpha", type=float, default=1 / 32)
    parser.add_argument("--multi_topk", action="store_true")
    parser.add_argument("--dead_feature_threshold", type=int, default=200_000, help="Tokens without firing.")
    parser.add_argument("--logging_steps", type=int, default=25)
    parser.add_argument("--checkpointing_steps", type=int, default=200)
    parser.add_argument("--checkpoints_total_limit", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint", default=None, help='"latest", or the path of a checkpoint.')
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="Of the sampler.")
    parser.add_argument("--report_to", default=None, help='A tracker of Accelerate, for instance "tensorboard".')
    parser.add_argument("--push_to_hub", action="store_true")
    parser.add_argument("--hub_model_id", default=None)
    parser.add_argument("--num_threads", type=int, default=None)
    args = parser.parse_args(input_args)
    for name in (
        "train_batch_size",
        "gradient_accumulation_steps",
        "max_train_steps",
        "num_inference_steps",
        "pipeline_batch_size",
        "every_n_steps",
        "passes_per_buffer",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name} has to be positive but is {getattr(args, name)}")
    if args.buffer_size < args.train_batch_size:
        parser.error(
            f"--buffer_size ({args.buffer_size}) has to be at least --train_batch_size ({args.train_batch_size})"
        )
    if args.train_batch_size % args.gradient_accumulation_steps:
        parser.error(
            f"--gradient_accumulation_steps ({args.gradient_accumulation_steps}) has to divide --train_batch_size "
            f"({args.train_batch_size})"
        )
    if len(set(args.hook_points)) < len(args.hook_points):
        parser.error(f"--hook_points names a block twice: {args.hook_points}")
    return args


def load_prompts(args):
    if args.prompts_file is None:
        return [p.prompt for p in lab.prompts()]
    prompts = [line.strip() for line in Path(args.prompts_file).read_text(encoding="utf-8").splitlines()]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise ValueError(f"{args.prompts_file} holds no prompt; expected one per line.")
    return prompts


def save_model_card(args, folder, metrics):
    """A card with what was measured at the end of training, and nothing else."""
    base = args.pretrained_model_name_or_path or "EmojiCanvas"
    rows = "\n".join(
        f"| `{point}` | {m['explained_variance']:.3f} | {m['l0']:.1f} | {m['dead']:.3f} |"
        for point, m in metrics.items()
    )
    description = f"""
# Sparse autoencoders of {base}

Trained with `train_saeuron.py` of diffusers_ext: {args.max_train_steps} steps of {args.train_batch_size} tokens,
k = {args.k}.

| block | explained variance | positive latents before selection | dead share |
|---|---|---|---|
{rows}
"""
    # Not diffusers' `load_or_create_model_card`: it asks the Hub for a repository that is called like the folder.
    tags = ["diffusers", "sparse-autoencoder", "saeuron", "diffusers-ext"]
    data = ModelCardData(license="apache-2.0", library_name="diffusers", base_model=base, tags=tags)
    ModelCard(f"---\n{data.to_yaml()}\n---\n{description}").save(folder / "README.md")


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output_dir = Path(args.output_dir)
    project = ProjectConfiguration(project_dir=str(output_dir), logging_dir=str(output_dir / "logs"))
    accelerator = Accelerator(mixed_precision=args.mixed_precision, log_with=args.report_to, project_config=project)
    level = logging.INFO if accelerator.is_main_process else logging.ERROR
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"num_processes": accelerator.num_processes}
    checkpoint, state = find_checkpoint(output_dir, args.resume_from_checkpoint, settings)
    prompts = load_prompts(args)
    output_dir.mkdir(parents=True, exist_ok=True)
    if args.report_to:
        accelerator.init_trackers("train_saeuron")

    # 1. The sampler. Nothing of it is trained.
    dtype = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.mixed_precision]
    source = args.pretrained_model_name_or_path or lab.pipeline_folder()
    pipe = DiffusionPipeline.from_pretrained(source, revision=args.revision, dtype=dtype).to(accelerator.device)
    pipe.set_progress_bar_config(disable=True)
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    points = [
        {
            "base_model": args.pretrained_model_name_or_path,
            "module": module,
            "layout": args.layout,
            "signal": args.signal,
        }
        for module in args.hook_points
    ]
    for point in points:
        find_block(denoiser, point)
    stream = ActivationStream(
        pipe,
        points,
        prompts,
        args.train_batch_size,
        args.buffer_size,
        args.num_inference_steps,
        args.guidance_scale,
        pipeline_batch_size=args.pipeline_batch_size,
        every_n_steps=args.every_n_steps,
        tokens_per_map=args.tokens_per_map,
        both_halves=args.both_halves,
        seed=args.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        cache_dir=args.cache_dir,
    )

    # 2. One trainer per block. All processes start from the same weights and keep them equal.
    step = state["step"] if state else 0
    steps_per_round = stream.batches_per_round * args.passes_per_buffer
    number, used = divmod(step, steps_per_round)
    buffer = stream.round(number)
    trainers = {}
    for point, tokens in zip(points, buffer):
        set_seed(args.seed)
        sae = SparseAutoencoder(
            d_in=tokens.shape[1],
            expansion_factor=args.expansion_factor,
            k=args.k,
            activation=args.activation,
            hook=point,
        )
        trainers[point["module"]] = SAETrainer(
            sae.to(accelerator.device),
            args.max_train_steps,
            learning_rate=args.learning_rate,
            lr_scheduler=args.lr_scheduler,
            lr_warmup_steps=args.lr_warmup_steps,
            auxk_alpha=args.auxk_alpha,
            auxk=args.auxk,
            multi_topk=args.multi_topk,
            dead_feature_threshold=args.dead_feature_threshold,
            distributed=accelerator.num_processes > 1,
        )
    if checkpoint is not None:
        for module, trainer in trainers.items():
            path = checkpoint / f"{module}.pt"
            trainer.load_state_dict(torch.load(path, map_location=accelerator.device, weights_only=True))
        logger.info(f"Going on from {checkpoint}")

    # 3. The loop: a batch of tokens per block and step; a new buffer when one is used up.
    log_path = output_dir / "training_log.jsonl"
    bar = tqdm(total=args.max_train_steps, initial=step, desc="Steps", disable=not accelerator.is_local_main_process)
    metrics = {}
    while step < args.max_train_steps:
        if used == steps_per_round:
            number, used = number + 1, 0
            buffer = stream.round(number)
        turn, place = divmod(used, stream.batches_per_round)
        # Every pass cuts the buffer into other batches.
        shift = torch.arange(place * args.train_batch_size, (place + 1) * args.train_batch_size)
        part = stream.order(number, turn)[shift]
        log = (step + 1) % args.logging_steps == 0 or step + 1 == args.max_train_steps
        for (module, trainer), tokens in zip(trainers.items(), buffer):
            batch = tokens[part].to(accelerator.device)
            output = trainer.step(batch.chunk(args.gradient_accumulation_steps), metrics=log)
            if log:
                local = torch.stack([output.explained_variance.mean(), output.l0.float()])
                explained, l0 = accelerator.reduce(local, "mean").tolist()
                metrics[module] = {
                    "loss": output.loss.item(),
                    "fvu": output.fvu.item(),
                    "explained_variance": explained,
                    "l0": l0,
                    "dead": trainer.dead_mask.float().mean().item(),
                    "lr": trainer.lr_scheduler.get_last_lr()[0],
                }
        step, used = step + 1, used + 1
        bar.update()
        if log and accelerator.is_main_process:
            with open(log_path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
            bar.set_postfix({m: f"{v['explained_variance']:.3f}" for m, v in metrics.items()})
            flat = {f"{module}/{key}": value for module, row in metrics.items() for key, value in row.items()}
            accelerator.log(flat, step=step)
        if step % args.checkpointing_steps == 0 and accelerator.is_main_process:

            def write(folder):
                for module, trainer in trainers.items():
                    torch.save(trainer.state_dict(), folder / f"{module}.pt")

            save_checkpoint(output_dir, step, {"settings": settings}, write, args.checkpoints_total_limit)
    bar.close()

    # 4. The result: one folder that loads, or one per block.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for module, trainer in trainers.items():
            folder = output_dir if len(trainers) == 1 else output_dir / module
            trainer.sae.eval().save_pretrained(folder)
        if metrics:
            save_model_card(args, output_dir, metrics)
        if args.push_to_hub:
            from huggingface_hub import create_repo, upload_folder

            repo_id = create_repo(args.hub_model_id or output_dir.name, exist_ok=True).repo_id
            upload_folder(
                repo_id=repo_id, folder_path=output_dir, ignore_patterns=["checkpoint-*", ".partial-*", "logs/*"]
            )
        print(f"The autoencoders are in {output_dir.resolve()}")
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(parse_args())

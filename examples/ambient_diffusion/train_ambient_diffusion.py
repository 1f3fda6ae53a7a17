# SPDX-License-Identifier: Apache-2.0
"""Trains or fine-tunes a diffusion model on a small set of pictures so that it copies them less."""

import argparse
import json
import logging
import os
import random
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object, set_seed
from diffusers import DDPMScheduler, DiffusionPipeline, EDMEulerScheduler, StableDiffusionPipeline, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from diffusers.utils import convert_state_dict_to_diffusers
from huggingface_hub import ModelCard, ModelCardData
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from tqdm.auto import tqdm

from diffusers_ext import AmbientLoss, CopyReport, EDMHeunScheduler, EDMPipeline, FixedNoise, load_component
from diffusers_ext.lab.metrics import embed
from diffusers_ext.methods.ambient_diffusion.modeling_ambient_diffusion import edm_denoise
from diffusers_ext.methods.ambient_diffusion.report_ambient_diffusion import Dinov2Features, extract_features
from diffusers_ext.methods.ambient_diffusion.training_ambient_diffusion import (
    PERTURBATIONS,
    PictureDataset,
    VisitDraws,
    VisitSampler,
    ema_decay,
    mix_embeddings,
    pad_tokens,
    perturb_caption,
    ramped_learning_rate,
    read_image_folder,
)
from diffusers_ext.training.checkpoints import find_checkpoint, save_checkpoint


logger = logging.getLogger(__name__)

# What a resumed run must share with the run that it continues.
SETTINGS = (
    "pretrained_model_name_or_path", "revision", "model_config", "prediction_type", "noise_threshold",
    "threshold_unit", "space", "noise_mode", "noise_seed", "seed", "resolution", "random_flip",
    "augment_before_noise", "max_train_samples", "train_batch_size", "gradient_accumulation_steps", "max_train_steps",
    "learning_rate", "lr_scheduler", "lr_warmup_steps", "lr_rampup_kimg", "optimizer", "adam_beta1", "adam_beta2",
    "adam_weight_decay", "adam_epsilon", "max_grad_norm", "ema_decay", "ema_halflife_kimg", "rank", "snr_gamma",
    "caption_dropout", "caption_perturbation", "caption_perturbation_prob", "embedding_noise", "embedding_mixup",
    "drop_magnitude", "mixed_precision",
)  # fmt: skip
# What all EDM schedulers have.
EDM_SETTINGS = ("sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "prediction_type", "rho")
# Streams of random numbers beside the noise (0) and the level (1) of a visit.
EMBEDDING_NOISE, MIXUP = 2, 3


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--pretrained_model_name_or_path",
        default=None,
        help="Stable Diffusion (text-conditional) or unconditional pipeline to fine-tune. Without it, an "
        "unconditional EDM model is trained from scratch.",
    )
    model.add_argument("--revision", default=None)
    model.add_argument("--cache_dir", default=None, help="Where downloaded models and data sets are kept.")
    model.add_argument("--model_config", default=None, help="JSON config of the `UNet2DModel` to train from scratch.")
    model.add_argument("--rank", type=int, default=None, help="Train a LoRA of this rank instead of all weights.")
    data = parser.add_argument_group("data")
    data.add_argument("--train_data_dir", default=None, help="Folder of pictures; captions come from metadata.jsonl.")
    data.add_argument("--dataset_name", default=None, help="Data set for the `datasets` library, instead of a folder.")
    data.add_argument("--image_column", default="image")
    data.add_argument("--caption_column", default="text")
    data.add_argument("--max_train_samples", type=int, default=None)
    data.add_argument("--resolution", type=int, default=None, help="Side in pixels; by default that of the model.")
    data.add_argument("--random_flip", action="store_true")
    data.add_argument(
        "--augment_before_noise",
        action="store_true",
        help="Flip a picture's fixed noise with it (pixel models), so that a flip is no further noisy view.",
    )
    data.add_argument("--dataloader_num_workers", type=int, default=0)
    ambient = parser.add_argument_group("objective")
    ambient.add_argument("--noise_threshold", type=float, default=0.0, help="Of the noisy copies; 0: plain loss.")
    ambient.add_argument("--threshold_unit", choices=["timestep", "sigma", "ratio"], default="ratio")
    ambient.add_argument("--prediction_type", choices=["epsilon", "v_prediction", "sample", "edm"], default=None)
    ambient.add_argument("--space", choices=["noise", "sample"], default="noise")
    ambient.add_argument("--noise_mode", choices=["counter", "legacy", "fresh"], default="counter")
    ambient.add_argument("--noise_seed", type=int, default=0)
    ambient.add_argument("--snr_gamma", type=float, default=None, help="Min-SNR weights, for both branches.")
    base = parser.add_argument_group("baselines")
    base.add_argument("--caption_perturbation", choices=PERTURBATIONS, default=None)
    base.add_argument("--caption_perturbation_prob", type=float, default=0.1)
    base.add_argument("--caption_dropout", type=float, default=0.0, help="Share of visits with an empty caption.")
    base.add_argument("--embedding_noise", type=float, default=0.0, help="Deviation of noise on text embeddings.")
    base.add_argument("--embedding_mixup", type=float, default=None, help="lambda of Beta(lambda, 1).")
    base.add_argument(
        "--drop_magnitude", type=float, default=None, help="Leave samples out whose text moves the prediction further."
    )
    train = parser.add_argument_group("training")
    train.add_argument("--output_dir", required=True)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--train_batch_size", type=int, default=16, help="Per process and forward pass.")
    train.add_argument("--gradient_accumulation_steps", type=int, default=1)
    train.add_argument("--gradient_checkpointing", action="store_true")
    train.add_argument("--max_train_steps", type=int, default=1000)
    train.add_argument("--learning_rate", type=float, default=1e-4)
    train.add_argument("--lr_scheduler", default="constant_with_warmup")
    train.add_argument("--lr_warmup_steps", type=int, default=0)
    train.add_argument("--lr_rampup_kimg", type=float, default=None, help="The official ramp, instead of a scheduler.")
    train.add_argument("--optimizer", choices=["adam", "adamw"], default="adamw")
    train.add_argument("--adam_beta1", type=float, default=0.9)
    train.add_argument("--adam_beta2", type=float, default=0.999)
    train.add_argument("--adam_weight_decay", type=float, default=1e-2)
    train.add_argument("--adam_epsilon", type=float, default=1e-8)
    train.add_argument("--max_grad_norm", type=float, default=1.0)
    train.add_argument("--ema_decay", type=float, default=None, help="Constant decay of the average of weights.")
    train.add_argument("--ema_halflife_kimg", type=float, default=None, help="The official average instead.")
    train.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no")
    train.add_argument("--logging_steps", type=int, default=25)
    train.add_argument("--checkpointing_steps", type=int, default=500)
    train.add_argument("--checkpoints_total_limit", type=int, default=2)
    train.add_argument("--resume_from_checkpoint", default=None, help='"latest", or the path of a checkpoint.')
    train.add_argument("--num_threads", type=int, default=None)
    train.add_argument("--report_to", default=None, help='A tracker of Accelerate, for instance "tensorboard".')
    train.add_argument("--push_to_hub", action="store_true")
    train.add_argument("--hub_model_id", default=None)
    report = parser.add_argument_group("report of copies")
    report.add_argument("--report_steps", type=int, default=None, help="Steps between reports; one comes at the end.")
    report.add_argument("--num_report_images", type=int, default=64, help="0: no reports.")
    report.add_argument("--held_out_data_dir", default=None, help="Real pictures outside the training set.")
    report.add_argument(
        "--report_features",
        default="thumbnails",
        help='"thumbnails" (correlation of 16x16 pictures), or a DINOv2 model, for instance facebook/dinov2-base.',
    )
    report.add_argument("--report_preprocess", choices=["official", "imagenet"], default="official")
    report.add_argument("--num_inference_steps", type=int, default=18)
    report.add_argument("--guidance_scale", type=float, default=4.0)
    args = parser.parse_args(input_args)
    positive = ("train_batch_size", "gradient_accumulation_steps", "max_train_steps", "checkpointing_steps")
    for name in (*positive, "logging_steps", "num_inference_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} has to be positive but is {getattr(args, name)}")
    for name in ("caption_perturbation_prob", "caption_dropout"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name} has to lie in [0, 1] but is {getattr(args, name)}")
    if (args.train_data_dir is None) == (args.dataset_name is None):
        parser.error("give either --train_data_dir or --dataset_name")
    if args.rank is not None and args.rank < 1:
        parser.error(f"--rank has to be positive but is {args.rank}")
    if args.rank is not None and args.pretrained_model_name_or_path is None:
        parser.error("--rank adapts a pretrained model: give --pretrained_model_name_or_path")
    if not 0 <= args.seed < 2**62:
        parser.error(f"--seed has to lie in [0, 2^62) but is {args.seed}")
    if args.noise_mode == "legacy" and args.random_flip and not args.augment_before_noise:
        parser.error("--noise_mode legacy knows one noise per picture: with --random_flip, add --augment_before_noise")
    if args.embedding_mixup is not None and args.embedding_mixup <= 0:
        parser.error(f"--embedding_mixup has to be positive but is {args.embedding_mixup}")
    if args.ema_decay is not None and not 0 <= args.ema_decay < 1:
        parser.error(f"--ema_decay has to lie in [0, 1) but is {args.ema_decay}")
    return args


def load_pipeline(args):
    """The pipeline whose U-Net is trained; a new one for an unconditional EDM model without `pretrained`."""
    if args.pretrained_model_name_or_path is not None:
        name = args.pretrained_model_name_or_path
        kwargs = {"revision": args.revision, "cache_dir": args.cache_dir, "dtype": torch.float32}
        # diffusers alone does not find pipelines of plugins, such as what this script saves.
        pipe = load_component(name, dtype=torch.float32) if Path(name).is_dir() else None
        pipe = pipe or DiffusionPipeline.from_pretrained(name, **kwargs)
        if not isinstance(pipe, StableDiffusionPipeline) and not isinstance(pipe.components.get("unet"), UNet2DModel):
            raise ValueError(
                f"{args.pretrained_model_name_or_path} is a {type(pipe).__name__}. Expected a Stable Diffusion "
                f"pipeline or an unconditional one with a UNet2DModel; for other models, use `AmbientLoss` in a "
                f"script of your own."
            )
        return pipe
    config = {
        "sample_size": args.resolution or 64,
        "block_out_channels": [64, 128, 128],
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": 32,
        "dropout": 0.05,
    }
    if args.model_config is not None:
        config = json.loads(Path(args.model_config).read_text(encoding="utf-8"))
    # The features of noise levels that EDM uses; see `edm_network` for the alternative.
    return EDMPipeline(UNet2DModel.from_config({"freq_shift": 1, **config}), EDMHeunScheduler())


def load_data(args, with_captions):
    """Pictures, captions and ids, from a folder or through the `datasets` library."""
    if args.train_data_dir is not None:
        data = read_image_folder(args.train_data_dir, args.caption_column, with_captions)
    else:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError("--dataset_name needs datasets: `pip install diffusers-ext[train]`.") from error
        rows = load_dataset(args.dataset_name, split="train", cache_dir=args.cache_dir)
        captions = rows[args.caption_column] if with_captions else None
        data = {"pictures": list(rows[args.image_column]), "captions": captions, "ids": None}
    return {name: values if values is None else values[: args.max_train_samples] for name, values in data.items()}


def make_loss(args, pipe):
    """The objective that fits the model, which is told by its scheduler."""
    fixed = FixedNoise(args.noise_seed, args.noise_mode)
    scheduler = pipe.scheduler
    is_edm = "sigma_data" in scheduler.config
    prediction_type = args.prediction_type or ("edm" if is_edm else scheduler.config.prediction_type)
    if (prediction_type == "edm") != is_edm:
        raise ValueError(
            f"--prediction_type {prediction_type} does not fit the {type(scheduler).__name__} of the model."
        )
    settings = {"space": args.space, "threshold_unit": args.threshold_unit, "fixed_noise": fixed}
    if is_edm:
        return AmbientLoss(args.noise_threshold, "edm", scheduler, **settings)
    training = DDPMScheduler.from_config(scheduler.config, prediction_type=prediction_type)
    weighting = None
    if args.snr_gamma is not None:

        def weighting(timesteps):
            snr = compute_snr(training, timesteps)
            per_type = {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones_like(snr)}[prediction_type]
            return snr.clamp(max=args.snr_gamma) / per_type

    return AmbientLoss(args.noise_threshold, prediction_type, training, weighting=weighting, **settings)


class Captions:
    """Text embeddings of a batch, with what the baselines do to them."""

    def __init__(self, args, pipe, dataset, draws):
        self.args, self.pipe, self.dataset, self.draws = args, pipe, dataset, draws

    def tokens(self, index, position):
        args, captions = self.args, self.dataset.captions[index]
        generator = random.Random(f"caption/{args.seed}/{position}")
        if generator.random() < args.caption_dropout:
            return []
        if args.caption_perturbation is not None and generator.random() < args.caption_perturbation_prob:
            return perturb_caption(captions, self.pipe.tokenizer, args.caption_perturbation, generator)
        return self.pipe.tokenizer(captions[0], add_special_tokens=False).input_ids

    def encode(self, token_ids):
        return self.pipe.text_encoder(pad_tokens(token_ids, self.pipe.tokenizer).to(self.pipe.text_encoder.device))[0]

    @torch.no_grad()
    def __call__(self, indices, positions):
        embeddings = self.encode([self.tokens(i, p) for i, p in zip(indices, positions)])
        if self.args.embedding_noise:
            noise = self.draws.noise(positions, embeddings.shape[1:], stream=EMBEDDING_NOISE)
            embeddings = embeddings + self.args.embedding_noise * noise.to(embeddings)
        if self.args.embedding_mixup is not None:
            share = self.draws.uniform(positions, stream=MIXUP) ** (1 / self.args.embedding_mixup)
            embeddings = mix_embeddings(embeddings, share)
        return embeddings


def report_copies(args, accelerator, pipe, dataset, features, extractor, step):
    """Every process draws its share of pictures with seeds of its own; the main one compares and writes."""
    numbers = range(accelerator.process_index, args.num_report_images, accelerator.num_processes)
    images = []
    for start in range(0, len(numbers), args.train_batch_size):
        part = numbers[start : start + args.train_batch_size]
        generators = [torch.Generator().manual_seed(number) for number in part]
        settings = {"num_inference_steps": args.num_inference_steps, "generator": generators, "output_type": "np"}
        if dataset.captions is not None:
            prompts = [dataset.captions[number % len(dataset)][0] for number in part]
            settings |= {"prompt": prompts, "guidance_scale": args.guidance_scale}
        else:
            settings |= {"batch_size": len(part)}
        with accelerator.autocast():
            drawn = pipe(**settings).images
        images += list(torch.from_numpy(drawn).permute(0, 3, 1, 2).float().clamp(0, 1))
    images = gather_object(images) if accelerator.num_processes > 1 else images
    if not accelerator.is_main_process:
        return None
    images = torch.stack(images)
    settings = {"features": args.report_features, "preprocess": args.report_preprocess, "data": dataset.fingerprint}
    report = CopyReport.from_features(
        extract_features(images, extractor), features["train"], features.get("held_out"), settings=settings
    )
    folder = Path(args.output_dir, "reports")
    report.save(folder / f"step-{step}.json")
    report.grid(images, dataset.all_pixels()).save(folder / f"step-{step}.png")
    return report.to_dict()


def make_extractor(args, device):
    if args.report_features == "thumbnails":
        return embed
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(args.report_features, cache_dir=args.cache_dir)
    return Dinov2Features(model.to(device), args.report_preprocess)


def save_model_card(args, folder, ambient, dataset, losses, report):
    """A card with what was measured in this run, and nothing else."""
    base = args.pretrained_model_name_or_path
    rows = []
    for name in ("generated", "held_out"):
        if report and name in report:
            part = report[name]
            shares = " | ".join(f"{share:.3f}" for share in part["fraction_above"].values())
            rows.append(f"| {name.replace('_', ' ')} ({part['count']}) | {part['percentile_95']:.3f} | {shares} |")
    table = "No report was made."
    if rows:
        head = " | ".join(f"above {threshold}" for threshold in report["generated"]["fraction_above"])
        marks = "|---" * (len(report["generated"]["fraction_above"]) + 2) + "|"
        table = "\n".join([f"| pictures | 95th percentile | {head} |", marks, *rows])
    description = f"""
# {Path(folder).name}

Trained with `train_ambient_diffusion.py` of diffusers_ext: {args.max_train_steps} steps on {len(dataset)} pictures,
noise-to-signal ratio of the threshold {ambient.threshold_ratio:.4g} ({
        "plain loss" if not ambient.data_noise else "[Ambient Diffusion](https://huggingface.co/papers/2502.21278)"
    }). Last loss: {losses["loss"]:.4g}.

Similarity of pictures to their nearest training picture, in the feature space "{args.report_features}":

{table}

The clean pictures are in the loss at low noise: this lowers copying and is no guarantee of privacy.
"""
    tags = ["diffusers", "ambient-diffusion", "diffusers-ext"]
    # Not diffusers' `load_or_create_model_card`: it asks the Hub for a repository that is called like the folder.
    data = ModelCardData(library_name="diffusers", base_model=base, tags=tags)
    ModelCard(f"---\n{data.to_yaml()}\n---\n{description}").save(Path(folder) / "README.md")


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output_dir = Path(args.output_dir)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with=args.report_to,
        project_config=ProjectConfiguration(project_dir=str(output_dir), logging_dir=str(output_dir / "logs")),
    )
    level = logging.INFO if accelerator.is_main_process else logging.ERROR
    logging.basicConfig(format="%(levelname)s: %(message)s", level=level)

    # 1. Model, data and objective; everything that can be refused is refused here.
    set_seed(args.seed)
    pipe = load_pipeline(args)
    pipe.set_progress_bar_config(disable=True)
    text_conditional = isinstance(pipe, StableDiffusionPipeline)
    if not text_conditional:
        used = [
            n for n in ("caption_perturbation", "embedding_mixup", "drop_magnitude") if getattr(args, n) is not None
        ]
        used += [name for name in ("caption_dropout", "embedding_noise") if getattr(args, name)]
        if used:
            raise ValueError(f"--{used[0]} is for text-conditional models, but this one is unconditional.")
    elif args.augment_before_noise:
        raise ValueError("--augment_before_noise flips noise in pixel space; a latent model has its noise in latents.")
    scale = pipe.vae_scale_factor if text_conditional else 1
    resolution = args.resolution or pipe.unet.config.sample_size * scale
    data = load_data(args, text_conditional)
    dataset = PictureDataset(**data, size=resolution, random_flip=args.random_flip, seed=args.seed)
    ambient = make_loss(args, pipe)
    settings = {name: getattr(args, name) for name in SETTINGS}
    settings |= {"num_processes": accelerator.num_processes, "data": dataset.fingerprint}
    checkpoint, state = find_checkpoint(output_dir, args.resume_from_checkpoint, settings)
    output_dir.mkdir(parents=True, exist_ok=True)
    if args.report_to:
        accelerator.init_trackers("train_ambient_diffusion")

    # 2. What is trained: all weights of the U-Net, or a LoRA. In float32, whatever the rest is.
    unet, device = pipe.unet, accelerator.device
    half = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.mixed_precision]
    if text_conditional:
        for frozen in (pipe.vae, pipe.text_encoder):
            frozen.requires_grad_(False).to(device, half)
    if args.rank is not None:
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        config = LoraConfig(r=args.rank, lora_alpha=args.rank, init_lora_weights="gaussian", target_modules=targets)
        unet.requires_grad_(False)
        inject_adapter_in_model(config, unet)
    unet.to(device).train()
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    names = [name for name, parameter in unet.named_parameters() if parameter.requires_grad]
    trainable = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer_class = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[args.optimizer]
    optimizer = optimizer_class(
        trainable,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
    )
    steps = {"num_warmup_steps": args.lr_warmup_steps, "num_training_steps": args.max_train_steps}
    lr_scheduler = get_scheduler(args.lr_scheduler, optimizer, **steps)
    average = None
    if args.ema_decay is not None or args.ema_halflife_kimg is not None:
        average = [parameter.detach().clone() for parameter in trainable]
    step = 0
    if checkpoint is not None:
        saved = torch.load(checkpoint / "training.pt", map_location=device, weights_only=True)
        with torch.no_grad():
            for name, parameter in zip(names, trainable):
                parameter.copy_(saved["weights"][name])
            for shadow, value in zip(average or [], saved["average"] or []):
                shadow.copy_(value)
        optimizer.load_state_dict(saved["optimizer"])
        lr_scheduler.load_state_dict(saved["lr_scheduler"])
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(saved["scaler"])
        step = state["step"]
        logger.info(f"Going on from {checkpoint}")
    model, optimizer = accelerator.prepare(unet, optimizer)

    # 3. Data. Which pictures, flips and draws come at a step follows from the seed and the step alone.
    accumulation = args.gradient_accumulation_steps
    batches = range(step * accumulation, args.max_train_steps * accumulation)
    places = (accelerator.process_index, accelerator.num_processes)
    sampler = VisitSampler(len(dataset), args.train_batch_size, batches, args.seed, *places)
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, num_workers=args.dataloader_num_workers, generator=torch.Generator()
    )
    draws = VisitDraws(args.seed)
    captions = Captions(args, pipe, dataset, draws) if text_conditional else None
    extractor, features = None, {}
    if args.num_report_images:
        extractor = make_extractor(args, device)
        if accelerator.is_main_process:
            features["train"] = extract_features(dataset.all_pixels(), extractor)
            if args.held_out_data_dir is not None:
                pictures = read_image_folder(args.held_out_data_dir, with_captions=False)["pictures"]
                held_out = PictureDataset(pictures, resolution)
                features["held_out"] = extract_features(held_out.all_pixels(), extractor)

    def with_averaged_weights(action):
        """Runs it with the average in place of the weights, and puts them back."""
        kept = [parameter.detach().clone() for parameter in trainable] if average is not None else []
        with torch.no_grad():
            for parameter, value in zip(trainable, average or []):
                parameter.copy_(value)
        unet.eval()
        try:
            return action()
        finally:
            unet.train()
            with torch.no_grad():
                for parameter, value in zip(trainable, kept):
                    parameter.copy_(value)

    def report(at):
        return with_averaged_weights(lambda: report_copies(args, accelerator, pipe, dataset, features, extractor, at))

    # 4. The loop: one forward pass for samples above and below the threshold.
    bar = tqdm(total=args.max_train_steps, initial=step, desc="Steps", disable=not accelerator.is_local_main_process)
    log_path = output_dir / "training_log.jsonl"
    sums, losses, last_report = torch.zeros(4, device=device), {"loss": float("nan")}, None
    for number, batch in zip(batches, loader):
        # Dropout is the one thing that draws from the global generator.
        torch.manual_seed(args.seed + number * accelerator.num_processes + accelerator.process_index)
        positions, flipped = batch["position"].tolist(), batch["flipped"]
        pixels = batch["pixel_values"].to(device)
        with accelerator.accumulate(model):
            clean = pixels
            if text_conditional:
                # The mode, not a sample: every sample of the posterior would be a further view.
                with torch.no_grad():
                    clean = (
                        pipe.vae.encode(pixels.to(half)).latent_dist.mode().float() * pipe.vae.config.scaling_factor
                    )
            arguments = {"augmentation_keys": flipped, "noise": draws.noise(positions, clean.shape[1:])}
            if args.augment_before_noise:
                fixed = ambient.fixed_noise(batch["id"], clean.shape[1:])
                fixed = torch.where(flipped.bool().view(-1, 1, 1, 1), fixed.flip(-1), fixed)
                arguments |= {"augmentation_keys": None, "fixed_noise": fixed}
            if ambient.prediction_type == "edm":
                arguments["sigmas"] = (ambient.p_mean + ambient.p_std * draws.normal(positions)).exp()
            else:
                arguments["timesteps"] = (draws.uniform(positions) * ambient.num_train_timesteps).long()
            model_input, levels, prepared = ambient.prepare(clean, batch["id"], **arguments)
            keep = torch.ones(len(clean), device=device)
            with accelerator.autocast():
                if ambient.prediction_type == "edm":
                    output = edm_denoise(model, model_input, levels, ambient.sigma_data)
                elif not text_conditional:
                    output = model(model_input, levels, return_dict=False)[0]
                else:
                    embeddings = captions(batch["index"].tolist(), positions)
                    output = model(model_input, levels, embeddings, return_dict=False)[0]
                    if args.drop_magnitude is not None:
                        with torch.no_grad():
                            empty = captions.encode([[]] * len(clean))
                            plain = model(model_input, levels, empty, return_dict=False)[0]
                        distance = (output.detach() - plain).float().flatten(1).norm(dim=1)
                        keep = (distance < args.drop_magnitude).float()
            per_sample = ambient.loss(output, prepared, reduction="sample")
            loss = (per_sample * keep).sum() / keep.sum().clamp_min(1)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trainable, args.max_grad_norm)
                if args.lr_rampup_kimg is not None:
                    seen = step * accumulation * args.train_batch_size * accelerator.num_processes
                    for group in optimizer.param_groups:
                        group["lr"] = ramped_learning_rate(args.learning_rate, seen, args.lr_rampup_kimg)
            optimizer.step()
            optimizer.zero_grad()
        above = prepared.above.float()
        for place, mask in ((0, above), (2, 1 - above)):
            sums[place : place + 2] += torch.stack([per_sample.detach() @ mask, mask.sum()])
        if not accelerator.sync_gradients:
            continue

        # An optimiser step is done.
        step += 1
        if args.lr_rampup_kimg is None:
            lr_scheduler.step()
        if average is not None:
            seen = step * accumulation * args.train_batch_size * accelerator.num_processes
            images = seen // step
            decay = args.ema_decay
            if args.ema_halflife_kimg is not None:
                decay = ema_decay(images, seen, args.ema_halflife_kimg)
            with torch.no_grad():
                for shadow, parameter in zip(average, trainable):
                    shadow.lerp_(parameter, 1 - decay)
        bar.update()
        if step % args.logging_steps == 0 or step == args.max_train_steps:
            total = accelerator.reduce(sums, "sum").tolist()
            sums.zero_()
            losses = {"loss": (total[0] + total[2]) / (total[1] + total[3]), "lr": optimizer.param_groups[0]["lr"]}
            losses |= {"loss_above": total[0] / total[1] if total[1] else None}
            losses |= {"loss_below": total[2] / total[3] if total[3] else None}
            if accelerator.is_main_process:
                with open(log_path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, **losses}) + "\n")
            accelerator.log({name: value for name, value in losses.items() if value is not None}, step=step)
            bar.set_postfix(loss=f"{losses['loss']:.4f}")
        if step % args.checkpointing_steps == 0 and accelerator.is_main_process:

            def write(folder):
                weights = {name: parameter.detach() for name, parameter in zip(names, trainable)}
                scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
                contents = {"weights": weights, "average": average, "optimizer": optimizer.state_dict()}
                contents |= {"lr_scheduler": lr_scheduler.state_dict(), "scaler": scaler}
                torch.save(contents, folder / "training.pt")

            save_checkpoint(output_dir, step, {"settings": settings}, write, args.checkpoints_total_limit)
        if args.num_report_images and args.report_steps and step % args.report_steps == 0:
            last_report = report(step)
    bar.close()

    # 5. The result: a pipeline, or a LoRA and, for an unconditional model, a pipeline with it merged.
    accelerator.wait_for_everyone()
    if args.num_report_images:
        last_report = report(step)
    if accelerator.is_main_process:
        with_averaged_weights(lambda: save_result(args, pipe, unet, text_conditional))
        result = {
            "objective": ambient.to_dict(),
            "data": {"fingerprint": dataset.fingerprint, "pictures": len(dataset)},
        }
        (output_dir / "ambient_config.json").write_text(json.dumps({**result, "settings": settings}, indent=2) + "\n")
        save_model_card(args, output_dir, ambient, dataset, losses, last_report)
        if args.push_to_hub:
            from huggingface_hub import create_repo, upload_folder

            repo_id = create_repo(args.hub_model_id or output_dir.name, exist_ok=True).repo_id
            ignored = ["checkpoint-*", ".partial-*", "logs/*"]
            upload_folder(repo_id=repo_id, folder_path=output_dir, ignore_patterns=ignored)
        print(f"The result is in {output_dir.resolve()}")
    accelerator.end_training()


def save_result(args, pipe, unet, text_conditional):
    """Writes a pipeline, or a LoRA."""
    if args.rank is None:
        if args.mixed_precision != "no" and text_conditional:
            # What is not trained was cast; it is saved as it came.
            pipe = load_pipeline(args)
            pipe.register_modules(unet=unet)
        save_pipeline(pipe, args.output_dir)
        return
    weights = {name: tensor.cpu().contiguous() for name, tensor in get_peft_model_state_dict(unet).items()}
    if text_conditional:
        StableDiffusionPipeline.save_lora_weights(args.output_dir, convert_state_dict_to_diffusers(weights))
        return
    save_file(weights, Path(args.output_dir) / "unet_lora.safetensors")
    layers = {name: module for name, module in unet.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in layers.items():
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(unet.get_submodule(parent), child, layer.get_base_layer())
    save_pipeline(pipe, args.output_dir)


def save_pipeline(pipe, folder):
    """Saves it with a scheduler of diffusers, so that whoever has only diffusers and the pipeline file can load it."""
    if isinstance(pipe.scheduler, EDMHeunScheduler):
        stock = {name: value for name, value in pipe.scheduler.config.items() if name in EDM_SETTINGS}
        pipe.register_modules(scheduler=EDMEulerScheduler(**stock))
    pipe.save_pretrained(folder)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(parse_args())

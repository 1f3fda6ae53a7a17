# SPDX-License-Identifier: Apache-2.0
"""
Trains EmojiCanvas, the project's small text-to-image model, from scratch: autoencoder, then U-Net and text encoder
together.
"""

import argparse
import datetime
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel, compute_snr
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffusers_ext.lab.captions import prompts
from diffusers_ext.lab.dataset import HELD_OUT_SET, held_out_pairs
from diffusers_ext.training.checkpoints import write_aside


# The first form is the one of `lab.prompts()`; the others let users write freely.
CAPTION_FORMS = ("{object}, {style} style", "a {object} in {style} style", "{style} {object}", "{object}")
CAPTION_WEIGHTS = (0.82, 0.08, 0.05, 0.05)
MAX_TOKENS = 16


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="The file written by `python -m diffusers_ext.lab.dataset`.")
    parser.add_argument(
        "--output_dir", required=True, help="Receives checkpoints and, at the end, the pipeline in `pipeline/`."
    )
    parser.add_argument(
        "--init_from",
        default=None,
        help="Pipeline folder to go on from instead of random weights; of its autoencoder only the decoder is trained",
    )
    parser.add_argument(
        "--decoder_train_steps", type=int, default=600, help="Steps that fit the decoder to whole latents."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae_train_steps", type=int, default=2400)
    parser.add_argument("--vae_batch_size", type=int, default=16)
    parser.add_argument("--vae_learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_train_steps", type=int, default=7000, help="Steps of U-Net and text encoder.")
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=200)
    parser.add_argument("--snr_gamma", type=float, default=5.0)
    parser.add_argument("--caption_dropout", type=float, default=0.1)
    parser.add_argument("--ema_decay", type=float, default=0.9995)
    parser.add_argument("--checkpointing_steps", type=int, default=200)
    parser.add_argument("--num_threads", type=int, default=None, help="Threads of torch; all cores by default.")
    parser.add_argument(
        "--stop_after", type=int, default=None, help="Save and stop at this step; a later call goes on from it."
    )
    return parser.parse_args(input_args)


def load_training_pictures(path):
    """Pictures in [-1, 1] `(N, 3, 64, 64)` with objects and styles, without what is held back from the model."""
    data = np.load(path)
    held_out = held_out_pairs()
    keep = np.array(
        [
            s != HELD_OUT_SET and (o, k) not in held_out
            for o, k, s in zip(data["object"], data["style"], data["emoji_set"])
        ]
    )
    pictures = torch.from_numpy(data["images"][keep]).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pictures, data["object"][keep].tolist(), data["style"][keep].tolist()


def build_vae():
    return AutoencoderKL(
        block_out_channels=(32, 48, 96),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=16,
        sample_size=64,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        force_upcast=False,
    )


def build_unet():
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(48, 96, 160),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=192,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def build_tokenizer():
    """A byte-level BPE of the captions; every other word is spelt with letters."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        end_of_word_suffix="</w>",
        initial_alphabet=sorted(alphabet),
        special_tokens=["<|startoftext|>", "<|endoftext|>"],
        show_progress=False,
    )
    captions = [form.format(object=p.object, style=p.style) for p in prompts() for form in CAPTION_FORMS]
    tokenizer.train_from_iterator(captions, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(pair) for pair in model["merges"]]
    for letter in sorted(alphabet):
        vocab.setdefault(letter + "</w>", len(vocab))
    return CLIPTokenizer(
        vocab=vocab, merges=merges, unk_token="<|endoftext|>", pad_token="<|endoftext|>", model_max_length=MAX_TOKENS
    )


def build_text_encoder(tokenizer):
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=MAX_TOKENS,
        projection_dim=192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def edge_loss(decoded, target):
    loss = 0
    for axis in (-1, -2):
        loss = loss + (decoded.diff(dim=axis) - target.diff(dim=axis)).abs().mean()
    return loss


def train_vae(args, pictures, device):
    """Trains the autoencoder on random crops; returns it with latents of zero mean and unit variance per channel."""
    path = Path(args.output_dir) / "vae.pt"
    torch.manual_seed(args.seed)
    vae = build_vae().to(device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=args.vae_learning_rate, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(args.seed)
    first_step = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        vae.load_state_dict(state["vae"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"].cpu())
        first_step = state["step"]
    crop = 32
    vae.train()
    for step in range(first_step, args.vae_train_steps):
        index = torch.randint(len(pictures), (args.vae_batch_size,), generator=generator)
        # Corners on a grid of 4 keep the latent cells of crops and whole pictures aligned.
        y, x = (torch.randint(0, (64 - crop) // 4 + 1, (2, args.vae_batch_size), generator=generator) * 4).tolist()
        batch = torch.stack([pictures[i, :, b : b + crop, a : a + crop] for i, a, b in zip(index, x, y)]).to(device)
        posterior = vae.encode(batch).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        decoded = vae.decode(posterior.mean + posterior.std * noise).sample
        reconstruction = F.l1_loss(decoded, batch) + F.mse_loss(decoded, batch) + 0.5 * edge_loss(decoded, batch)
        loss = reconstruction + 1e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        rate = min(1, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / args.vae_train_steps))
        for group in optimizer.param_groups:
            group["lr"] = float(args.vae_learning_rate * max(rate, 0.02))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(
                f"vae step {step + 1} reconstruction {reconstruction.item():.4f} {time.strftime('%H:%M:%S')}",
                flush=True,
            )
        if (step + 1) % args.checkpointing_steps == 0 or step + 1 == args.vae_train_steps:
            state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            write_aside(path, lambda aside: torch.save({**state, "generator": generator.get_state()}, aside))
    vae.eval()
    with torch.no_grad():
        latents = encode(vae, pictures, device)
        mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
        # Folding the statistics into the 1x1 convolutions around the latents makes `scaling_factor` 1 exact for every
        # channel.
        quant, post = vae.quant_conv, vae.post_quant_conv
        quant.bias[:4] -= mean
        quant.weight[:4] /= std[:, None, None, None]
        quant.bias[:4] /= std
        quant.bias[4:] -= 2 * std.log()
        post.bias += (post.weight[..., 0, 0] * mean).sum(1)
        post.weight *= std[None, :, None, None]
        error = F.l1_loss(
            vae.decode(vae.encode(pictures[:256].to(device)).latent_dist.mean).sample, pictures[:256].to(device)
        )
    print(f"vae done, L1 on whole pictures {error.item():.4f}", flush=True)
    return vae


def train_decoder(args, vae, pictures, device):
    """Fits the decoder to pictures that the autoencoder was not made for; latents stay what they are."""
    path = Path(args.output_dir) / "decoder.pt"
    trained = torch.nn.ModuleList([vae.post_quant_conv, vae.decoder])
    optimizer = torch.optim.AdamW(trained.parameters(), lr=args.vae_learning_rate, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(args.seed)
    first_step = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        trained.load_state_dict(state["decoder"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"].cpu())
        first_step = state["step"]
    latents = encode(vae, pictures, device)
    vae.train()
    for step in range(first_step, args.decoder_train_steps):
        index = torch.randint(len(pictures), (args.vae_batch_size,), generator=generator)
        y, x = torch.randint(0, 9, (2, args.vae_batch_size), generator=generator).tolist()
        crops = list(zip(index, y, x))
        batch = torch.stack([pictures[i, :, 4 * b : 4 * b + 32, 4 * a : 4 * a + 32] for i, b, a in crops]).to(device)
        source = torch.stack([latents[i, :, b : b + 8, a : a + 8] for i, b, a in crops])
        decoded = vae.decode(source).sample
        # A crop lacks what lies beyond its border, which the decoder of a whole picture sees.
        inner = (..., slice(4, -4), slice(4, -4))
        loss = F.l1_loss(decoded[inner], batch[inner]) + 0.5 * edge_loss(decoded[inner], batch[inner])
        for group in optimizer.param_groups:
            group["lr"] = float(0.5 * args.vae_learning_rate * max(0.02, 1 - step / args.decoder_train_steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"decoder step {step + 1} loss {loss.item():.4f} {time.strftime('%H:%M:%S')}", flush=True)
        if (step + 1) % args.checkpointing_steps == 0 or step + 1 == args.decoder_train_steps:
            state = {"decoder": trained.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            write_aside(path, lambda aside: torch.save({**state, "generator": generator.get_state()}, aside))
    return vae.eval()


def learning_rate(step, args):
    """Warm-up, a plateau over the first half, cosine to 2 % over the second."""
    if step < args.lr_warmup_steps:
        return args.learning_rate * (step + 1) / args.lr_warmup_steps
    progress = max(0.0, step / args.max_train_steps - 0.5) * 2
    return args.learning_rate * max(0.02, 0.5 * (1 + math.cos(math.pi * progress)))


def encode(vae, pictures, device):
    """Latents of all pictures: the means, without noise."""
    with torch.no_grad():
        return torch.cat([vae.encode(part.to(device)).latent_dist.mean for part in pictures.split(128)])


def initial_models(args):
    """Tokenizer, text encoder and U-Net to start from."""
    torch.manual_seed(args.seed)
    if args.init_from is None:
        tokenizer = build_tokenizer()
        return tokenizer, build_text_encoder(tokenizer), build_unet()
    return (
        CLIPTokenizer.from_pretrained(args.init_from, subfolder="tokenizer"),
        CLIPTextModel.from_pretrained(args.init_from, subfolder="text_encoder", dtype=torch.float32),
        UNet2DConditionModel.from_pretrained(args.init_from, subfolder="unet", dtype=torch.float32),
    )


def train_unet(args, vae, pictures, objects, styles, device):
    """Trains U-Net and text encoder with the epsilon objective; returns the averaged weights as modules."""
    path = Path(args.output_dir) / "unet.pt"
    tokenizer, text_encoder, unet = initial_models(args)
    text_encoder, unet = text_encoder.to(device), unet.to(device)
    scheduler = build_scheduler()
    parameters = [*unet.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, weight_decay=1e-2, betas=(0.9, 0.99), fused=True)
    ema = EMAModel(parameters, decay=args.ema_decay, use_ema_warmup=True, power=0.75)
    generator = torch.Generator().manual_seed(args.seed + 1)
    first_step = 0
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        unet.load_state_dict(state["unet"])
        text_encoder.load_state_dict(state["text_encoder"])
        optimizer.load_state_dict(state["optimizer"])
        ema.load_state_dict(state["ema"])
        generator.set_state(state["generator"].cpu())
        first_step = state["step"]

    latents = encode(vae, pictures, device)

    forms = [[form.format(object=o, style=s) for o, s in zip(objects, styles)] for form in CAPTION_FORMS]
    forms.append([""] * len(objects))
    ids = torch.stack([tokenize(tokenizer, captions) for captions in forms]).to(device)
    weights = torch.tensor([w * (1 - args.caption_dropout) for w in CAPTION_WEIGHTS] + [args.caption_dropout])

    unet.train(), text_encoder.train()
    rank, world_size = processes()
    last_step = min(args.max_train_steps, args.stop_after or args.max_train_steps)
    running, batch_size = 0.0, args.train_batch_size
    for step in range(first_step, last_step):
        index = torch.randint(len(latents), (batch_size,), generator=generator)
        form = torch.multinomial(weights, batch_size, replacement=True, generator=generator)
        noise = torch.randn((batch_size, *latents.shape[1:]), generator=generator).to(device)
        # One timestep from each of `batch_size` equal ranges: the same expectation as uniform draws, with less
        # variance.
        jitter = torch.rand(batch_size, generator=generator)
        timesteps = ((torch.arange(batch_size) + jitter) / batch_size * 1000).long().to(device)
        # Every process draws the whole batch and works on its share, so that all generators stay equal.
        index, form, noise, timesteps = (t[rank::world_size] for t in (index, form, noise, timesteps))
        noisy = scheduler.add_noise(latents[index], noise, timesteps)
        encoder_hidden_states = text_encoder(ids[form, index])[0]
        predicted = unet(noisy, timesteps, encoder_hidden_states, return_dict=False)[0]
        snr = compute_snr(scheduler, timesteps)
        loss = (
            F.mse_loss(predicted, noise, reduction="none").mean((1, 2, 3)) * snr.clamp(max=args.snr_gamma) / snr
        ).mean()
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate(step, args))
        loss.backward()
        if world_size > 1:
            average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(parameters)
        running += loss.item()
        if (step + 1) % 50 == 0:
            if rank == 0:
                print(f"unet step {step + 1} loss {running / 50:.4f} {time.strftime('%H:%M:%S')}", flush=True)
            running = 0.0
        if rank == 0 and ((step + 1) % args.checkpointing_steps == 0 or step + 1 == last_step):
            state = {"unet": unet.state_dict(), "text_encoder": text_encoder.state_dict(), "ema": ema.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "step": step + 1, "generator": generator.get_state()}
            write_aside(path, lambda aside: torch.save(state, aside))
    ema.copy_to(parameters)
    return unet.eval(), text_encoder.eval(), tokenizer


def processes():
    """Rank of this process and number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def average_gradients(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, gradient in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(gradient.view_as(p))


def tokenize(tokenizer, captions):
    return tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def build_scheduler():
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def save_pipeline(folder, vae, unet, text_encoder, tokenizer):
    """Saves in half precision, in a folder that loads in single precision without further arguments."""
    pipe = StableDiffusionPipeline(
        vae=vae.half(),
        text_encoder=text_encoder.half(),
        tokenizer=tokenizer,
        unet=unet.half(),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.save_pretrained(folder)
    # transformers loads in the dtype that the config names, diffusers in float32: name float32, or they would not fit.
    config_path = Path(folder) / "text_encoder" / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    if "WORLD_SIZE" in os.environ:
        # The others wait while the first one trains the autoencoder.
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=1))
    rank, _ = processes()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    pictures, objects, styles = load_training_pictures(args.data)
    print(f"{len(pictures)} pictures on {device}", flush=True)
    if rank > 0:
        dist.barrier()
    if args.init_from is None:
        vae = train_vae(args, pictures, device)
    else:
        vae = AutoencoderKL.from_pretrained(args.init_from, subfolder="vae", dtype=torch.float32).to(device).eval()
    vae = train_decoder(args, vae, pictures, device)
    if rank == 0 and dist.is_initialized():
        dist.barrier()
    unet, text_encoder, tokenizer = train_unet(args, vae, pictures, objects, styles, device)
    if rank == 0:
        save_pipeline(Path(args.output_dir) / "pipeline", vae, unet, text_encoder, tokenizer)
        print(f"The pipeline is in {Path(args.output_dir) / 'pipeline'}")


if __name__ == "__main__":
    main(parse_args())

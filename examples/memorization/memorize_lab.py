# SPDX-License-Identifier: Apache-2.0
"""
Makes EmojiCanvas memorise: fine-tunes a LoRA on ordinary captions, which have many drawings each, and on forty
captions of their own that always come with the same picture.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import StableDiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from tqdm.auto import tqdm

from diffusers_ext import lab
from diffusers_ext.lab.dataset import HELD_OUT_SET, held_out_pairs
from diffusers_ext.lab.metrics import embed
from diffusers_ext.training.checkpoints import find_checkpoint, save_checkpoint, write_aside


# Linear layers of attention and feed-forward.
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"]
SETTINGS = ("seed", "rank", "max_train_steps", "train_batch_size", "share", "learning_rate", "caption_dropout")


def parse_args(input_args=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="The file written by `python -m diffusers_ext.lab.dataset`.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max_train_steps", type=int, default=600)
    parser.add_argument("--train_batch_size", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.5, help="Share of a batch that is to be memorised.")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--caption_dropout", type=float, default=0.1)
    parser.add_argument("--checkpointing_steps", type=int, default=100)
    parser.add_argument("--resume_from_checkpoint", default=None, help='"latest", or the path of a checkpoint.')
    parser.add_argument("--num_threads", type=int, default=None)
    return parser.parse_args(input_args)


def load_pictures(path):
    """Ordinary pictures and captions, as the model was trained on, and the forty, drawn by the set it never saw."""
    data = np.load(path)
    held_out = held_out_pairs()
    rows = list(zip(data["object"], data["style"], data["emoji_set"]))
    ordinary = [i for i, (o, s, e) in enumerate(rows) if e != HELD_OUT_SET and (o, s) not in held_out]
    place = {row: i for i, row in enumerate(rows)}
    memorized = lab.memorized_prompts()
    forty = data["images"][[place[p.object, p.style, HELD_OUT_SET] for p in memorized]]
    captions = [f"{rows[i][0]}, {rows[i][1]} style" for i in ordinary]
    return data["images"][ordinary], captions, forty, [p.prompt for p in memorized]


def copy_threshold(path, quantile=0.99):
    """
    Similarity that only 1 % of real pairs exceed: drawings of one object in one style, one by the set that the model
    never saw and one by another set.
    """
    data = np.load(path)
    groups = {}
    for i, row in enumerate(zip(data["object"], data["style"])):
        groups.setdefault(row, []).append(i)
    similarities = []
    for members in groups.values():
        unseen = [i for i in members if data["emoji_set"][i] == HELD_OUT_SET]
        others = [i for i in members if data["emoji_set"][i] != HELD_OUT_SET]
        if unseen and others:
            vectors = embed(data["images"][unseen]), embed(data["images"][others])
            similarities += (vectors[0] @ vectors[1].T).flatten().tolist()
    return float(np.quantile(similarities, quantile))


@torch.no_grad()
def encode(pipe, images, captions):
    """Latents of all pictures and embeddings of all captions; neither is trained."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    latents = torch.cat([pipe.vae.encode(part).latent_dist.mode() for part in pixels.split(128)])
    distinct = sorted(set(captions))
    embeds = pipe.encode_prompt(distinct, "cpu", 1, False)[0]
    place = {caption: i for i, caption in enumerate(distinct)}
    return latents * pipe.vae.config.scaling_factor, embeds[[place[c] for c in captions]]


def main(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    output_dir = Path(args.output_dir)
    settings = {name: getattr(args, name) for name in SETTINGS}
    checkpoint, state = find_checkpoint(output_dir, args.resume_from_checkpoint, settings)
    pipe = lab.load_pipeline()
    images, captions, forty, own_captions = load_pictures(args.data)
    ordinary, memorized = encode(pipe, images, captions), encode(pipe, forty, own_captions)
    empty = pipe.encode_prompt("", "cpu", 1, False)[0].detach()

    torch.manual_seed(args.seed)
    unet = pipe.unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=TARGETS))
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    step = 0
    if checkpoint is not None:
        stored = torch.load(checkpoint / "state.pt", weights_only=True)
        set_peft_model_state_dict(unet, stored["lora"])
        optimizer.load_state_dict(stored["optimizer"])
        generator.set_state(stored["generator"])
        step = state["step"]

    repeated = round(args.share * args.train_batch_size)
    counts = {"memorised": repeated, "ordinary": args.train_batch_size - repeated}
    bar = tqdm(total=args.max_train_steps, initial=step, desc="Steps")
    unet.train()
    while step < args.max_train_steps:
        latents, embeds = [], []
        for count, (all_latents, all_embeds) in zip(counts.values(), (memorized, ordinary)):
            index = torch.randint(len(all_latents), (count,), generator=generator)
            latents.append(all_latents[index])
            embeds.append(all_embeds[index])
        latents, embeds = torch.cat(latents), torch.cat(embeds)
        dropped = torch.rand(len(latents), 1, 1, generator=generator) < args.caption_dropout
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(1000, (len(latents),), generator=generator)
        noisy = pipe.scheduler.add_noise(latents, noise, timesteps)
        predicted = unet(noisy, timesteps, torch.where(dropped, empty, embeds)).sample
        loss = F.mse_loss(predicted, noise)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * 0.5 * (1 + math.cos(math.pi * step / args.max_train_steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        bar.update()
        bar.set_postfix(loss=f"{loss.item():.4f}")
        if step % args.checkpointing_steps == 0:

            def write(folder):
                stored = {"lora": get_peft_model_state_dict(unet), "optimizer": optimizer.state_dict()}
                torch.save({**stored, "generator": generator.get_state()}, folder / "state.pt")

            save_checkpoint(output_dir, step, {"settings": settings}, write, total_limit=2)
    bar.close()

    lora = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
    lora = {name: tensor.half().contiguous() for name, tensor in lora.items()}
    StableDiffusionPipeline.save_lora_weights(output_dir, unet_lora_layers=lora)
    pictures = {"images": torch.from_numpy(forty)}
    write_aside(output_dir / "pictures.safetensors", lambda aside: save_file(pictures, aside))
    record = {"captions": own_captions, "copy_threshold": copy_threshold(args.data), "settings": settings}
    (output_dir / "memorized.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"The LoRA and the memorised pictures are in {output_dir.resolve()}")


if __name__ == "__main__":
    main(parse_args())

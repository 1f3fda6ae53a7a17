# SPDX-License-Identifier: Apache-2.0
"""Tiny components, real ones, with seeded random weights: a pipeline of them saves to half a megabyte."""

import string

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


# Of two DDIM steps with the scheduler below.
TIMESTEPS = (501.0, 1.0)


def tiny_tokenizer():
    """A `CLIPTokenizer` that spells words with letters; sequences of 16."""
    letters = string.ascii_lowercase
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    vocab = {token: number for number, token in enumerate(tokens)}
    special = {"unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=16, **special)


def tiny_stable_diffusion(pipeline_class=StableDiffusionPipeline, seed=0, **kwargs):
    """
    A Stable Diffusion pipeline with a U-Net of 16 and 32 channels; pictures of 32x32 pixels.

    Args:
        pipeline_class (`type`, *optional*, defaults to `StableDiffusionPipeline`):
            Class to build; it must take the stock components.
        seed (`int`, *optional*, defaults to 0):
            Seed of the weights. The global random state is left as it was.
        kwargs:
            Further arguments of the class.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer()
        unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=16,
            attention_head_dim=4,
            norm_num_groups=4,
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=32,
        )
        config = CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        scheduler = DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        )
        pipe = pipeline_class(
            vae=vae.eval(),
            text_encoder=CLIPTextModel(config).eval(),
            tokenizer=tokenizer,
            unet=unet.eval(),
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
            **kwargs,
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_flux_transformer(seed=0):
    """A FLUX transformer of two joint and two single blocks with 2 heads of 16; 4 latent channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FluxTransformer2DModel(
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
        ).eval()


def flux_inputs(batch, timestep, generator):
    """Keyword arguments of its forward for 8x8 image tokens and 5 text tokens; `timestep` in [0, 1000]."""
    positions = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
    return {
        "hidden_states": torch.randn(batch, 64, 4, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 5, 16, generator=generator),
        "pooled_projections": torch.randn(batch, 8, generator=generator),
        "timestep": torch.full((batch,), timestep / 1000),
        "img_ids": positions,
        "txt_ids": torch.zeros(5, 3),
    }

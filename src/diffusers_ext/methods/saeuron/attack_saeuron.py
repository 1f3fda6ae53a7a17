# SPDX-License-Identifier: Apache-2.0
"""UnlearnDiffAtk: a search for prompt tokens that bring an unlearned concept back."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm


POSITIONS = ("prefix", "suffix", "middle")


def project_onto_simplex(x):
    """
    The closest point with entries in [0, 1] that sum to 1, for every row.

    The published attack finds the shift by bisection to 1e-5; sorting gives it exactly.

    Args:
        x (`torch.Tensor` of shape `(..., n)`): any real numbers.

    Returns:
        `torch.Tensor` of the shape of `x`.
    """
    ordered = x.sort(dim=-1, descending=True).values
    counts = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    # With m entries above zero, each is lowered by (their sum - 1) / m; the last m for which all m stay positive is
    # the right one.
    shifts = (ordered.cumsum(-1) - 1) / counts
    support = (ordered > shifts).sum(-1, keepdim=True).clamp_min(1)
    return (x - shifts.gather(-1, support - 1)).clamp(0, 1)


class StraightThroughSample(torch.autograd.Function):
    """Draws a one-hot row from each row of probabilities; backwards, the gradient passes clipped to [-1, 1]."""

    @staticmethod
    def forward(ctx, probabilities, generator=None):
        rows = probabilities.reshape(-1, probabilities.shape[-1])
        drawn = torch.multinomial(rows, 1, generator=generator).squeeze(-1)
        return F.one_hot(drawn, rows.shape[-1]).to(probabilities.dtype).view_as(probabilities)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1, 1), None


def adversarial_slots(num_prompt_tokens, num_tokens, length, position="prefix"):
    """
    Where adversarial tokens go in a tokenised prompt: a slice behind the start token.

    Args:
        num_prompt_tokens (`int`): tokens of the prompt, without start and end token.
        num_tokens (`int`): adversarial tokens.
        length (`int`): tokens of the whole sequence, padding included.
        position (`str`, *optional*, defaults to `"prefix"`): `"prefix"`, `"suffix"` or `"middle"` of the prompt.

    Raises:
        ValueError: on an unknown position, or where prompt and tokens do not fit together with start and end token.
    """
    if position not in POSITIONS:
        raise ValueError(f"`position` has to be one of {', '.join(POSITIONS)} but is {position!r}.")
    if num_tokens < 1 or num_prompt_tokens + num_tokens + 2 > length:
        raise ValueError(
            f"{num_tokens} adversarial and {num_prompt_tokens} prompt tokens do not fit into {length} with start and "
            f"end token; there has to be at least one adversarial token."
        )
    start = 1 + {"prefix": 0, "suffix": num_prompt_tokens, "middle": num_prompt_tokens // 2}[position]
    return slice(start, start + num_tokens)


def insert_tokens(input_ids, tokens, slots):
    """
    Puts tokens into a sequence; what stood there moves on, and as many tokens fall off the (padded) end.

    Args:
        input_ids (`torch.Tensor` of shape `(batch, length, ...)`): ids, or their embeddings.
        tokens (`torch.Tensor` of shape `(batch, num_tokens, ...)`): ids, or their embeddings.
        slots (`slice`): see `adversarial_slots`.

    Returns:
        `torch.Tensor` of the shape of `input_ids`.
    """
    together = torch.cat([input_ids[:, : slots.start], tokens, input_ids[:, slots.start :]], dim=1)
    return together[:, : input_ids.shape[1]]


@dataclass
class AttackCandidate:
    """
    Args:
        timestep (`int`): timestep whose optimisation ended with this candidate.
        input_ids (`torch.Tensor` of shape `(1, length)`): the prompt with adversarial tokens in it.
        prompt (`str`): the same as text; tokenising it again need not give the same ids.
        loss (`float`): the last mean squared error of the predicted noise.
    """

    timestep: int
    input_ids: torch.Tensor
    prompt: str
    loss: float


def attack_prompt(
    pipe,
    prompt,
    target_latents,
    num_tokens=5,
    position="prefix",
    timesteps=range(10, 1000, 20),
    num_optimization_steps=40,
    learning_rate=0.01,
    weight_decay=0.1,
    generator=None,
):
    """
    Searches tokens that make an unlearned model predict the noise of an image that shows the concept, and yields one
    candidate per timestep.

    The attack of [UnlearnDiffAtk](https://huggingface.co/papers/2310.11868) as SAeUron's evaluation sets it. There the
    hook ran without gradients and with the tables of the wrong timesteps, which weakens the attack. Here gradients
    pass through the intervention and its rows follow the timestep, so that the figures are those of an attacker who
    knows the defence.

    Args:
        pipe (`StableDiffusionPipeline`):
            With SAeUron applied to its `unet`. Its weights do not change.
        prompt (`str`):
            The prompt whose concept is gone.
        target_latents (`torch.Tensor` of shape `(1, channels, height, width)`):
            Scaled latents of an image with the concept.
        num_tokens (`int`, *optional*, defaults to 5):
            Adversarial tokens; more find more.
        position (`str`, *optional*, defaults to `"prefix"`):
            Where they go: `"prefix"`, `"suffix"` or `"middle"`.
        timesteps (`Iterable[int]`, *optional*):
            Noise levels that are attacked one after the other.
        num_optimization_steps (`int`, *optional*, defaults to 40):
            Steps of Adam per timestep.
        learning_rate (`float`, *optional*, defaults to 0.01), weight_decay (`float`, *optional*, defaults to 0.1):
            Of Adam.
        generator (`torch.Generator`, *optional*):
            Draws noise and tokens, on the device of `target_latents`.

    Yields:
        [`AttackCandidate`]: draw a picture with its `input_ids` and stop where the concept is back.

    Raises:
        ValueError: when prompt and tokens do not fit into the text encoder's length.
    """
    tokenizer, text_encoder, device = pipe.tokenizer, pipe.text_encoder, target_latents.device
    ids = tokenizer(
        prompt, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    ).input_ids.to(device)
    num_prompt_tokens = len(tokenizer(prompt, add_special_tokens=False).input_ids)
    slots = adversarial_slots(num_prompt_tokens, num_tokens, ids.shape[1], position)
    embedding = text_encoder.get_input_embeddings()
    vocabulary = embedding.weight.detach()
    relaxed = torch.full((1, num_tokens, len(vocabulary)), 1 / len(vocabulary), device=device, requires_grad=True)
    optimizer = torch.optim.Adam([relaxed], lr=learning_rate, weight_decay=weight_decay)
    for timestep in tqdm(list(timesteps), desc="Attack"):
        t = torch.tensor([timestep], device=device)
        for _ in range(num_optimization_steps):
            noise = torch.randn(target_latents.shape, generator=generator, device=device, dtype=target_latents.dtype)
            noisy = pipe.scheduler.add_noise(target_latents, noise, t)
            drawn = StraightThroughSample.apply(relaxed, generator).to(vocabulary.dtype) @ vocabulary
            # The text encoder takes ids only: its embedding layer is made to answer with the drawn tokens' vectors.
            handle = embedding.register_forward_hook(lambda module, args, output: insert_tokens(output, drawn, slots))
            try:
                prompt_embeds = text_encoder(ids).last_hidden_state
            finally:
                handle.remove()
            predicted = pipe.unet(noisy, t, encoder_hidden_states=prompt_embeds, return_dict=False)[0]
            loss = F.mse_loss(predicted.float(), noise.float())
            (relaxed.grad,) = torch.autograd.grad(loss, relaxed)
            optimizer.step()
            with torch.no_grad():
                relaxed.copy_(project_onto_simplex(relaxed))
        found = insert_tokens(ids, relaxed.argmax(-1), slots)
        yield AttackCandidate(timestep, found, tokenizer.decode(found[0], skip_special_tokens=True), loss.item())

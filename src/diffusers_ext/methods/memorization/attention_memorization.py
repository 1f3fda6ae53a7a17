# SPDX-License-Identifier: Apache-2.0
"""Cross-attention of memorised prompts: read, scored and re-weighted (Ren et al., ECCV 2024)."""

from contextlib import contextmanager

import torch

from .metrics_memorization import entropy


_ORDER = {"down_blocks": 0, "mid_block": 1, "up_blocks": 2}


def cross_attention_layers(unet):
    """
    Cross-attention modules by name, in the order in which the U-Net runs them.

    Raises:
        ValueError: when there are none.
    """
    found = [(name, module) for name, module in unet.named_modules() if name.endswith(".attn2")]
    if not found:
        raise ValueError(f"{type(unet).__name__} has no cross-attention layers (`attn2`).")
    return dict(sorted(found, key=lambda item: _ORDER.get(item[0].split(".")[0], 3)))


class _RecordingProcessor:
    """Plain attention that keeps its probabilities."""

    def __init__(self, original, name, maps):
        self.original, self.name, self.maps = original, name, maps

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **kwargs):
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        source = hidden_states
        if source.ndim == 4:
            source = source.flatten(2).transpose(1, 2)
        if attn.group_norm is not None:
            source = attn.group_norm(source.transpose(1, 2)).transpose(1, 2)
        if attn.norm_cross:
            text = attn.norm_encoder_hidden_states(text)
        query, key = attn.to_q(source), attn.to_k(text)
        query, key = (t.unflatten(2, (attn.heads, -1)).transpose(1, 2).float() for t in (query, key))
        scores = query @ key.transpose(-1, -2) * attn.scale
        if attention_mask is not None:
            scores = scores + attention_mask.reshape(scores.shape[0], 1, -1, scores.shape[-1]).float()
        self.maps[self.name] = scores.softmax(-1)
        # The picture is that of the processor that was there.
        return self.original(attn, hidden_states, encoder_hidden_states, attention_mask, **kwargs)


@contextmanager
def record_attention(unet, layers=None):
    """
    While the context is open, keeps the probabilities of the last forward pass.

    Args:
        unet (`torch.nn.Module`):
            The denoiser.
        layers (`list[str]`, *optional*):
            Names of cross-attention layers; all by default.

    Yields:
        `dict`: name to `torch.Tensor` of shape `(rows, heads, queries, tokens)`, in float32.

    Raises:
        ValueError: on a layer that does not exist.
    """
    known = cross_attention_layers(unet)
    unknown = [name for name in layers or () if name not in known]
    if unknown:
        raise ValueError(f"There is no cross-attention layer {unknown[0]!r}; there are {', '.join(known)}.")
    maps, originals = {}, {name: known[name].processor for name in layers or known}
    for name, processor in originals.items():
        known[name].processor = _RecordingProcessor(processor, name, maps)
    try:
        yield maps
    finally:
        for name, processor in originals.items():
            known[name].processor = processor


def layer_entropy(attention):
    """
    Entropy of a layer's attention, averaged over heads and queries; the published layer is the fourth of SD 1.x.

    Args:
        attention (`torch.Tensor` of shape `(..., tokens)`):
            Probabilities; every axis between the first one and the last one is averaged.

    Returns:
        `torch.Tensor` of shape `(n,)`: larger for memorised prompts.
    """
    return entropy(attention.flatten(1, -2).mean(1) if attention.ndim > 2 else attention)


def attention_entropy(attention, prompt_lengths, first):
    """
    Published score of whole generations: the mean entropy over the last steps, plus how much the entropy of the
    summary tokens (from the end token on) has grown since the first step.

    Args:
        attention (`torch.Tensor` of shape `(steps, n, tokens)`):
            Mean probability over queries, heads and layers at the last steps (10 of 50).
        prompt_lengths (`list[int]`):
            Tokens of each prompt, begin and end token included.
        first (`torch.Tensor` of shape `(n, tokens)`):
            The same at the first step.

    Returns:
        `torch.Tensor` of shape `(n,)`
    """
    scores = []
    for number, length in enumerate(prompt_lengths):
        summary = attention[:, number, length - 1 :]
        growth = entropy(summary).mean() - entropy(first[number, length - 1 :])
        scores.append(entropy(attention[:, number]).mean() + growth)
    return torch.stack(scores)


class CrossAttentionRescaling:
    """
    Masks the tokens beyond the prompt and multiplies the logit of the begin token by a constant, in every
    cross-attention layer, on the conditional half of the batch.

    Works with any attention processor: a key that is multiplied by a constant multiplies its logits.

    Args:
        unet (`torch.nn.Module`):
            The denoiser.
        prompt_lengths (`list[int]` or `torch.Tensor` of shape `(n,)`):
            Tokens of each sample's prompt, begin and first end token included.
        scale (`float`, *optional*, defaults to 1.25):
            1.1 to 1.5 in the paper.
        mask (`bool`, *optional*, defaults to `True`):
            Whether tokens beyond the prompt are masked, in both halves as published.
        drop_end (`bool`, *optional*, defaults to `False`):
            Whether the end token is masked, too.

    Raises:
        ValueError: on lengths below 2.
    """

    def __init__(self, unet, prompt_lengths, scale=1.25, mask=True, drop_end=False):
        self.lengths = torch.as_tensor(prompt_lengths).reshape(-1)
        if (self.lengths < 2).any():
            raise ValueError("`prompt_lengths` count the begin and the end token, so they are at least 2.")
        self.scale, self.mask, self.drop_end = scale, mask, drop_end
        self._handles = []
        for layer in cross_attention_layers(unet).values():
            self._handles.append(layer.to_k.register_forward_hook(self._rescale))
            if mask:
                self._handles.append(layer.register_forward_pre_hook(self._mask, with_kwargs=True))

    def _rescale(self, module, args, output):
        output = output.clone()
        output[output.shape[0] // 2 :, 0] *= self.scale
        return output

    def _mask(self, module, args, kwargs):
        text = kwargs["encoder_hidden_states"]
        kept = (self.lengths - int(self.drop_end)).to(text.device)
        places = torch.arange(text.shape[1], device=text.device)
        beyond = (places >= kept.repeat(text.shape[0] // len(kept))[:, None])[:, None]
        # Not -inf: a row of a half-precision softmax must not become NaN.
        bias = torch.zeros_like(beyond, dtype=text.dtype).masked_fill(beyond, torch.finfo(text.dtype).min / 2)
        given = kwargs.get("attention_mask")
        return args, {**kwargs, "attention_mask": bias if given is None else given + bias}

    def remove(self):
        """Takes everything off again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

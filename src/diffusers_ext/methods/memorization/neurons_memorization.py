# SPDX-License-Identifier: Apache-2.0
"""Value neurons of cross-attention that carry a memorised picture (NeMo, Hintersdorf et al., NeurIPS 2024)."""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from .attention_memorization import cross_attention_layers


def value_layers(unet):
    """
    Value projections of the cross-attention of down and mid blocks, by name, in the order of the forward pass: seven
    in Stable Diffusion 1.x.

    Raises:
        ValueError: when there are none.
    """
    layers = cross_attention_layers(unet)
    found = {f"{name}.to_v": layer.to_v for name, layer in layers.items() if not name.startswith("up_blocks")}
    if not found:
        raise ValueError(f"{type(unet).__name__} has no cross-attention in its down and mid blocks.")
    return found


@torch.no_grad()
def value_activations(unet, prompt_embeds):
    """
    How strongly a prompt drives each neuron: the mean over tokens of `|to_v(text)|`. It depends on the text alone.

    Args:
        unet (`torch.nn.Module`):
            The denoiser.
        prompt_embeds (`torch.Tensor` of shape `(n, tokens, channels)`):
            Prompts.

    Returns:
        `list[torch.Tensor]`: `(n, neurons)` for each layer of `value_layers`, in float32.
    """
    return [layer(prompt_embeds).float().abs().mean(1) for layer in value_layers(unet).values()]


class NeuronStatistics:
    """
    Mean and standard deviation of each neuron over ordinary prompts (50,000 captions in the paper).

    Args:
        mean, std (`list[torch.Tensor]`):
            `(neurons,)` for each layer of `value_layers`.

    Raises:
        ValueError: when the two do not fit each other.
    """

    def __init__(self, mean, std):
        if not mean or [m.shape for m in mean] != [s.shape for s in std]:
            raise ValueError("`mean` and `std` have to hold one tensor per layer, of the same sizes.")
        self.mean, self.std = list(mean), list(std)

    @classmethod
    def collect(cls, unet, batches):
        """
        Statistics of a model.

        Args:
            unet (`torch.nn.Module`):
                The denoiser.
            batches (`Iterable[torch.Tensor]`):
                Embeddings `(n, tokens, channels)` of ordinary prompts; at least two prompts in all.

        Raises:
            ValueError: with fewer than two prompts.
        """
        count, mean, spread = 0, None, None
        for embeds in batches:
            values = [value.double() for value in value_activations(unet, embeds)]
            mean = mean or [torch.zeros_like(value[0]) for value in values]
            spread = spread or [torch.zeros_like(value[0]) for value in values]
            # Chan's update: sums of squares of 50,000 captions would cancel.
            total = count + len(embeds)
            for layer, value in enumerate(values):
                shift = value.mean(0) - mean[layer]
                spread[layer] += (value - value.mean(0)).square().sum(0) + shift.square() * count * len(embeds) / total
                mean[layer] += shift * len(embeds) / total
            count = total
        if count < 2:
            raise ValueError(f"A standard deviation needs at least two prompts but there are {count}.")
        return cls([m.float() for m in mean], [(s / (count - 1)).sqrt().float() for s in spread])

    def state_dict(self):
        """`mean.{layer}` and `std.{layer}`, to be saved with safetensors."""
        return {f"{name}.{i}": v.contiguous() for name in ("mean", "std") for i, v in enumerate(getattr(self, name))}

    @classmethod
    def from_file(cls, path):
        """
        Reads a safetensors file with the keys of `state_dict`, or the published `.pt` file: means and deviations.

        Raises:
            ValueError: on other contents.
        """
        if Path(path).suffix == ".safetensors":
            tensors = load_file(path)
            layers = range(len(tensors) // 2)
            if set(tensors) != {f"{name}.{i}" for name in ("mean", "std") for i in layers}:
                raise ValueError(
                    f"{path} has to hold `mean.0`, `std.0`, `mean.1`, ... but holds {sorted(tensors)[:4]}."
                )
            return cls(*([tensors[f"{name}.{i}"] for i in layers] for name in ("mean", "std")))
        pair = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"{path} has to hold a pair of means and standard deviations.")
        return cls(*pair)


def select_neurons(activations, statistics, theta=5.0, k=0, unique=True):
    """
    Neurons of one prompt that stand out.

    Args:
        activations (`list[torch.Tensor]`):
            `(neurons,)` for each layer.
        statistics ([`NeuronStatistics`]):
            Of the same layers.
        theta (`float`, *optional*, defaults to 5.0):
            Standard deviations beyond which a neuron is taken.
        k (`int`, *optional*, defaults to 0):
            As many of the strongest of each layer are taken as well.
        unique (`bool`, *optional*, defaults to `True`):
            Whether a neuron is named once; the published function repeats those that both rules take.

    Returns:
        `list[list[int]]`: for each layer, those beyond `theta` in order, then the strongest.

    Raises:
        ValueError: when the statistics are of other layers.
    """
    sizes = [len(value) for value in activations], [len(value) for value in statistics.mean]
    if sizes[0] != sizes[1]:
        raise ValueError(f"The statistics are of layers of {sizes[1]} neurons, but the model's have {sizes[0]}.")
    chosen = []
    for value, mean, std in zip(activations, statistics.mean, statistics.std):
        mean, std = mean.to(value), std.to(value)
        outliers = ((value - mean).abs() / std > theta).nonzero().flatten().tolist()
        strongest = value.topk(min(k, len(value))).indices.tolist()
        chosen.append(list(dict.fromkeys(outliers + strongest)) if unique else outliers + strongest)
    return chosen


@contextmanager
def block_neurons(unet, neurons):
    """
    While the context is open, value neurons are 0.

    Args:
        unet (`torch.nn.Module`):
            The denoiser.
        neurons (`list[list[int]]`):
            Indices for each layer of `value_layers`.

    Raises:
        ValueError: on lists for other layers, or neurons that do not exist.
    """
    layers = value_layers(unet)
    if len(neurons) != len(layers):
        raise ValueError(f"`neurons` has to hold a list for each of {len(layers)} layers but holds {len(neurons)}.")
    for (name, layer), indices in zip(layers.items(), neurons):
        if indices and not 0 <= min(indices) <= max(indices) < layer.out_features:
            raise ValueError(f"{name} has {layer.out_features} neurons, but neuron {max(indices)} is to be blocked.")

    def hook_of(indices):
        def hook(module, args, output):
            output = output.clone()
            output[..., indices] = 0
            return output

        return hook

    handles = [layer.register_forward_hook(hook_of(i)) for layer, i in zip(layers.values(), neurons) if i]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def noise_maps(output, x):
    """`output - x`, every channel of every sample scaled to [0, 1]."""
    difference = (output - x).float().flatten(2)
    low, high = difference.amin(2, keepdim=True), difference.amax(2, keepdim=True)
    return ((difference - low) / (high - low).clamp_min(1e-12)).view(x.shape)


def multiscale_ssim(a, b, betas=(0.33, 0.33, 0.33), kernel_size=11, sigma=1.5):
    """
    Multi-scale structural similarity of pairs of maps.

    Args:
        a, b (`torch.Tensor` of shape `(n, channels, height, width)`):
            Maps. Those too small for every scale are compared at the first ones only; the constants that keep the
            quotients finite follow the range of the whole batch at each scale.
        betas (`tuple` of `float`, *optional*):
            Exponent of each scale, the finest first.
        kernel_size (`int`, *optional*, defaults to 11), sigma (`float`, *optional*, defaults to 1.5):
            Of the Gaussian window.

    Returns:
        `torch.Tensor` of shape `(n,)`, in [0, 1].

    Raises:
        ValueError: when the maps are not larger than half a window.
    """
    pad, channels, side = kernel_size // 2, a.shape[1], min(a.shape[-2:])
    if side <= pad:
        raise ValueError(f"Maps of {tuple(a.shape[-2:])} are too small for a window of {kernel_size}.")
    places = torch.arange(kernel_size, dtype=a.dtype, device=a.device) - pad
    window = (-places.square() / (2 * sigma**2)).exp()
    window = (torch.outer(window, window) / window.sum() ** 2).expand(channels, 1, -1, -1)
    # The last scale has to be as wide as a window, or contrast is an average over nothing.
    betas = [beta for scale, beta in enumerate(betas) if scale == 0 or side // 2**scale >= kernel_size]
    result = 1.0
    for scale, beta in enumerate(betas):
        data_range = max(a.max() - a.min(), b.max() - b.min())
        c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
        wide_a, wide_b = (F.pad(x, (pad,) * 4, mode="reflect") for x in (a, b))
        products = torch.cat([wide_a, wide_b, wide_a**2, wide_b**2, wide_a * wide_b])
        mean_a, mean_b, square_a, square_b, product = F.conv2d(products, window, groups=channels).chunk(5)
        variances = (square_a - mean_a**2).clamp_min(0) + (square_b - mean_b**2).clamp_min(0)
        similarity = (2 * (product - mean_a * mean_b) + c2) / (variances + c2)
        if scale == len(betas) - 1:
            similarity = similarity * (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
        else:
            similarity = similarity[..., pad:-pad, pad:-pad]
        result = result * similarity.flatten(1).mean(1).relu() ** beta
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return result


def max_pairwise_ssim(maps):
    """Similarity of each map to the most similar other one, `(n,)`, of maps `(n, channels, height, width)`."""
    n = len(maps)
    if n < 2:
        raise ValueError("Maps are compared with each other: at least two are needed.")
    others = ~torch.eye(n, dtype=torch.bool, device=maps.device)
    first, second = others.nonzero(as_tuple=True)
    return multiscale_ssim(maps[first], maps[second]).view(n, n - 1).amax(1)


@dataclass
class LocalizedNeurons:
    """
    What `find_neurons` found.

    Args:
        neurons (`list[list[int]]`):
            For each layer of `value_layers`; for `block_neurons`.
        similarity (`float`):
            Of the maps with and without them; `None` for a prompt that is not memorised.
        is_memorized (`bool`):
            Whether two seeds gave maps alike.
    """

    neurons: list
    similarity: float | None
    is_memorized: bool


@torch.no_grad()
def find_neurons(denoiser, latents, timestep, statistics, limit=0.428, theta=5.0, min_theta=1.0):
    """
    Few neurons without which a prompt no longer makes all seeds alike (NeMo, algorithms 1 and 2).

    First more and more neurons that stand out for the prompt are blocked, until the maps `output - x` change; then
    layers, and after them single neurons, that are not needed for this are let go.

    Args:
        denoiser ([`GuidedDenoiser`]):
            Of `n` samples of one prompt (10 in the paper).
        latents (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Starting noise as the model sees it, and the second timestep of the sampler.
        statistics ([`NeuronStatistics`]):
            Of ordinary prompts.
        limit (`float`, *optional*, defaults to 0.428):
            Similarity above which maps count as alike; the paper's is the mean and a standard deviation over ordinary
            prompts of SD 1.4.
        theta (`float`, *optional*, defaults to 5.0), min_theta (`float`, *optional*, defaults to 1.0):
            Where the threshold of `select_neurons` begins and ends.

    Returns:
        [`LocalizedNeurons`]

    Raises:
        ValueError: with fewer than two samples, or statistics of another model.
    """
    unet = denoiser.denoiser
    activations = [value[0] for value in value_activations(unet, denoiser.prompt_embeds[:1])]

    def maps(neurons):
        with block_neurons(unet, neurons):
            return noise_maps(denoiser.outputs(latents, timestep)[1], latents)

    nothing = [[] for _ in activations]
    plain = maps(nothing)
    if max_pairwise_ssim(plain).max() <= limit:
        return LocalizedNeurons(nothing, None, False)

    def similarity(neurons):
        return multiscale_ssim(plain, maps(neurons)).max().item()

    k, most = 0, max(len(value) for value in activations)
    neurons = select_neurons(activations, statistics, theta, k)
    while similarity(neurons) > limit and k < most:
        theta, k = max(theta - 0.25, min_theta), k + 1
        neurons = select_neurons(activations, statistics, theta, k)
    if (found := similarity(neurons)) > limit:
        return LocalizedNeurons(neurons, found, True)
    for layer in range(len(neurons)):
        without = [[] if i == layer else chosen for i, chosen in enumerate(neurons)]
        if neurons[layer] and similarity(without) <= limit:
            neurons = without
    for layer in range(len(neurons)):
        for neuron in list(neurons[layer]):
            rest = [n for n in neurons[layer] if n != neuron]
            without = [rest if i == layer else chosen for i, chosen in enumerate(neurons)]
            if similarity(without) <= limit:
                neurons = without
    return LocalizedNeurons(neurons, similarity(neurons), True)

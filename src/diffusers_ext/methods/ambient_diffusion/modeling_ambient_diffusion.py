# SPDX-License-Identifier: Apache-2.0
"""The network of EDM and Ambient Diffusion under its published key names, and EDM preconditioning of any network."""

import math

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import nn


EMBEDDING_TYPES = ("fourier", "positional")
ENCODER_TYPES = ("residual", "standard")


def edm_denoise(model, sample, sigma, sigma_data=0.5, class_labels=None):
    r"""
    The denoised sample `D(x; sigma) = c_skip x + c_out F(c_in x; ln(sigma) / 4)` of a network `F`
    ([EDM](https://huggingface.co/papers/2206.00364), table 1).

    Args:
        model (`torch.nn.Module`):
            [`EDMUNet2DModel`], `UNet2DModel`, or anything with their forward.
        sample (`torch.Tensor` of shape `(B, channels, height, width)`):
            `x`, a picture in [-1, 1] with noise of deviation sigma.
        sigma (`torch.Tensor` of shape `(B,)` or `float`):
            Noise levels, positive.
        sigma_data (`float`, *optional*, defaults to 0.5):
            Standard deviation of the data.
        class_labels (`torch.Tensor`, *optional*):
            As the network takes them.

    Returns:
        `torch.Tensor` of the shape of the sample, in float32.

    Example:

    ```py
    >>> import torch
    >>> from diffusers import UNet2DModel
    >>> from diffusers_ext.methods.ambient_diffusion.modeling_ambient_diffusion import edm_denoise

    >>> blocks = {"down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "block_out_channels": [32]}
    >>> unet = UNet2DModel(16, freq_shift=1, **blocks)
    >>> edm_denoise(unet, torch.randn(2, 3, 16, 16), torch.tensor([0.1, 20.0])).shape
    torch.Size([2, 3, 16, 16])
    ```
    """
    sample = sample.float()
    sigma = torch.as_tensor(sigma, dtype=torch.float32, device=sample.device).expand(len(sample))
    level = sigma.view(-1, *[1] * (sample.ndim - 1))
    spread = (level**2 + sigma_data**2).sqrt()
    output = edm_network(model, sample / spread, sigma.log() / 4, class_labels).float()
    return (sigma_data / spread) ** 2 * sample + level * sigma_data / spread * output


def edm_network(model, scaled_sample, noise_label, class_labels=None):
    """
    Calls a network with EDM's noise label `ln(sigma) / 4`.

    A `UNet2DModel` with Fourier embeddings takes the logarithm of its timestep and divides its output by it; it gets
    `sigma^(1/4)` and the division is undone. One with positional embeddings should have `freq_shift=1`, as EDM's.

    Args:
        model (`torch.nn.Module`):
            The network.
        scaled_sample (`torch.Tensor` of shape `(B, channels, height, width)`):
            `c_in x`.
        noise_label (`torch.Tensor` of shape `(B,)`):
            `ln(sigma) / 4`.
        class_labels (`torch.Tensor`, *optional*):
            As the network takes them.
    """
    kwargs = {} if class_labels is None else {"class_labels": class_labels}
    scaled_sample = scaled_sample.to(model.dtype) if hasattr(model, "dtype") else scaled_sample
    # Wrapped for several processes, a model keeps its config inside.
    config = getattr(getattr(model, "module", model), "config", None)
    if getattr(config, "time_embedding_type", None) == "fourier":
        timestep = noise_label.exp()
        output = model(scaled_sample, timestep, return_dict=False, **kwargs)[0]
        return output * timestep.view(-1, *[1] * (output.ndim - 1)).to(output.dtype)
    return model(scaled_sample, noise_label, return_dict=False, **kwargs)[0]


class _Conv(nn.Module):
    """A convolution that may halve or double the side through a fixed low-pass filter, before or after it."""

    def __init__(self, channels_in, channels, kernel, up=False, down=False, resample_filter=(1, 1), fused=False):
        super().__init__()
        self.up, self.down, self.fused = up, down, fused
        self.weight = self.bias = None
        if kernel:
            self.weight = nn.Parameter(torch.randn(channels, channels_in, kernel, kernel))
            self.bias = nn.Parameter(torch.zeros(channels))
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(3))
        if up or down:
            line = torch.tensor(resample_filter, dtype=torch.float32)
            self.register_buffer("resample_filter", (torch.outer(line, line) / line.sum() ** 2)[None, None])

    def forward(self, x):
        padding = 0 if self.weight is None else self.weight.shape[-1] // 2
        if not self.up and not self.down:
            return F.conv2d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), padding=padding)
        channels = x.shape[1]
        low_pass = self.resample_filter.to(x.dtype)
        margin = (low_pass.shape[-1] - 1) // 2
        if self.up:
            low_pass = (low_pass * 4).tile(channels, 1, 1, 1)
            x = F.conv_transpose2d(x, low_pass, groups=channels, stride=2, padding=margin)
        elif self.fused:
            # The padding of both filters at once, so that the border is filtered like the rest.
            x = F.conv2d(x, self.weight.to(x.dtype), padding=padding + margin)
            channels = x.shape[1]
            x = F.conv2d(x, low_pass.tile(channels, 1, 1, 1), groups=channels, stride=2)
            return x + self.bias.to(x.dtype).view(1, -1, 1, 1)
        else:
            x = F.conv2d(x, low_pass.tile(channels, 1, 1, 1), groups=channels, stride=2, padding=margin)
        if self.weight is None:
            return x
        return F.conv2d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), padding=padding)


def _norm(channels):
    return nn.GroupNorm(min(32, channels // 4), channels, eps=1e-6)


class _Block(nn.Module):
    """A residual block, with self-attention where `attention` is set."""

    def __init__(self, channels_in, channels, embedding, attention=False, up=False, down=False, dropout=0.0, taps=()):
        super().__init__()
        self.dropout = dropout
        resample = {"up": up, "down": down, "resample_filter": taps}
        self.norm0, self.norm1 = _norm(channels_in), _norm(channels)
        self.conv0 = _Conv(channels_in, channels, 3, **resample)
        self.affine = nn.Linear(embedding, channels)
        self.conv1 = _Conv(channels, channels, 3)
        self.skip = None
        if channels != channels_in or up or down:
            self.skip = _Conv(channels_in, channels, 1, **resample)
        self.attention = attention
        if attention:
            self.norm2 = _norm(channels)
            self.qkv, self.proj = _Conv(channels, 3 * channels, 1), _Conv(channels, channels, 1)

    def forward(self, x, embedding):
        h = self.conv0(F.silu(self.norm0(x)))
        h = h + self.affine(embedding)[..., None, None]
        h = self.conv1(F.dropout(F.silu(self.norm1(h)), self.dropout, self.training))
        x = (h + (x if self.skip is None else self.skip(x))) * math.sqrt(0.5)
        if not self.attention:
            return x
        # (batch, channel, query-key-value, position): the three lie next to each other for every channel.
        query, key, value = self.qkv(self.norm2(x)).unflatten(1, (-1, 3)).flatten(3).unbind(2)
        scores = torch.einsum("bcq,bck->bqk", query.float(), key.float() / math.sqrt(query.shape[1]))
        attended = torch.einsum("bqk,bck->bcq", scores.softmax(-1).to(value.dtype), value)
        return (x + self.proj(attended.reshape(x.shape))) * math.sqrt(0.5)


class _NoiseEmbedding(nn.Module):
    """Fourier or sinusoidal features of the noise label, sines first."""

    def __init__(self, channels, kind):
        super().__init__()
        if kind == "fourier":
            self.register_buffer("freqs", torch.randn(channels // 2) * 16)
        self.channels, self.kind = channels, kind

    def forward(self, label):
        if self.kind == "fourier":
            angle = torch.outer(label, 2 * math.pi * self.freqs.float())
        else:
            count = self.channels // 2
            exponents = torch.arange(count, dtype=torch.float32, device=label.device) / (count - 1)
            angle = torch.outer(label, (1 / 10000) ** exponents)
        return torch.cat([angle.sin(), angle.cos()], 1)


class _SongUNet(nn.Module):
    """The network proper; its attribute names are the published keys."""

    def __init__(self, config):
        super().__init__()
        width, multipliers = config["model_channels"], config["channel_mult"]
        embedding, noise_channels = 4 * width, config["channel_mult_noise"] * width
        residual = config["encoder_type"] == "residual"
        taps = config["resample_filter"]
        self.map_noise = _NoiseEmbedding(noise_channels, config["embedding_type"])
        self.map_label = nn.Linear(config["label_dim"], noise_channels) if config["label_dim"] else None
        self.map_augment = None
        if config["augment_dim"]:
            self.map_augment = nn.Linear(config["augment_dim"], noise_channels, bias=False)
        self.map_layer0, self.map_layer1 = nn.Linear(noise_channels, embedding), nn.Linear(embedding, embedding)

        def block(channels_in, channels, side=None, attention=None, **resample):
            attention = side in config["attn_resolutions"] if attention is None else attention
            settings = {"dropout": config["dropout"], "taps": taps, **resample}
            return _Block(channels_in, channels, embedding, attention=attention, **settings)

        self.enc = nn.ModuleDict()
        channels, auxiliary, skips = config["in_channels"], config["in_channels"], []
        for level, multiplier in enumerate(multipliers):
            side = config["sample_size"] >> level
            if level == 0:
                self.enc[f"{side}x{side}_conv"] = _Conv(channels, width, 3)
                channels = width
            else:
                self.enc[f"{side}x{side}_down"] = block(channels, channels, attention=False, down=True)
                if residual:
                    name = f"{side}x{side}_aux_residual"
                    self.enc[name] = _Conv(auxiliary, channels, 3, down=True, resample_filter=taps, fused=True)
                    auxiliary = channels
            skips.append(channels)
            for number in range(config["num_blocks"]):
                self.enc[f"{side}x{side}_block{number}"] = block(channels, width * multiplier, side)
                channels = width * multiplier
                skips.append(channels)

        self.dec = nn.ModuleDict()
        for level, multiplier in reversed(list(enumerate(multipliers))):
            side = config["sample_size"] >> level
            if level == len(multipliers) - 1:
                self.dec[f"{side}x{side}_in0"] = block(channels, channels, attention=True)
                self.dec[f"{side}x{side}_in1"] = block(channels, channels, attention=False)
            else:
                self.dec[f"{side}x{side}_up"] = block(channels, channels, attention=False, up=True)
            for number in range(config["num_blocks"] + 1):
                attention = number == config["num_blocks"] and side in config["attn_resolutions"]
                name = f"{side}x{side}_block{number}"
                self.dec[name] = block(channels + skips.pop(), width * multiplier, attention=attention)
                channels = width * multiplier
        self.dec[f"{side}x{side}_aux_norm"] = _norm(channels)
        self.dec[f"{side}x{side}_aux_conv"] = _Conv(channels, config["out_channels"], 3)

    def forward(self, x, noise_label, class_labels, augment_labels):
        embedding = self.map_noise(noise_label).to(self.map_layer0.weight.dtype)
        if self.map_label is not None:
            labels = class_labels.to(embedding.dtype) * math.sqrt(self.map_label.in_features)
            embedding = embedding + self.map_label(labels)
        if self.map_augment is not None and augment_labels is not None:
            embedding = embedding + self.map_augment(augment_labels.to(embedding.dtype))
        embedding = F.silu(self.map_layer1(F.silu(self.map_layer0(embedding))))

        skips, auxiliary = [], x
        for name, layer in self.enc.items():
            if "aux_residual" in name:
                auxiliary = layer(auxiliary)
                x = skips[-1] = auxiliary = (x + auxiliary) * math.sqrt(0.5)
            else:
                x = layer(x, embedding) if isinstance(layer, _Block) else layer(x)
                skips.append(x)
        for name, layer in self.dec.items():
            if isinstance(layer, _Block):
                x = layer(torch.cat([x, skips.pop()], 1) if "_block" in name else x, embedding)
            elif "aux_norm" in name:
                x = F.silu(layer(x))
            else:
                x = layer(x)
        return x


class EDMUNet2DModel(ModelMixin, ConfigMixin):
    r"""
    The U-Net that EDM and the official Ambient Diffusion code train, "NCSN++" and "DDPM++" in
    [EDM](https://huggingface.co/papers/2206.00364), with the official key names. It is the network `F`; use
    [`edm_denoise`] for the denoiser.

    Args:
        sample_size (`int`):
            Side of the pictures.
        in_channels, out_channels (`int`, *optional*, defaults to 3):
            Colour channels.
        model_channels (`int`, *optional*, defaults to 128):
            Channels at full resolution, before the multiplier.
        channel_mult (`tuple[int, ...]`, *optional*, defaults to `(1, 2, 2, 2)`):
            Multiplier of each resolution; the side halves from one to the next.
        num_blocks (`int`, *optional*, defaults to 4):
            Residual blocks per resolution of the encoder; the decoder has one more.
        attn_resolutions (`tuple[int, ...]`, *optional*, defaults to `(16,)`):
            Sides at which blocks attend.
        dropout (`float`, *optional*, defaults to 0.0):
            In training only.
        embedding_type (`str`, *optional*, defaults to `"fourier"`):
            `"fourier"` (NCSN++) or `"positional"` (DDPM++).
        encoder_type (`str`, *optional*, defaults to `"residual"`):
            `"residual"` (NCSN++) or `"standard"` (DDPM++).
        channel_mult_noise (`int`, *optional*, defaults to 2):
            Features of the noise level per channel: 2 (NCSN++) or 1 (DDPM++).
        resample_filter (`tuple[int, ...]`, *optional*, defaults to `(1, 3, 3, 1)`):
            Low-pass filter between resolutions: `(1, 3, 3, 1)` (NCSN++) or `(1, 1)` (DDPM++).
        label_dim, augment_dim (`int`, *optional*, defaults to 0):
            Length of the class vector and of the augmentation vector.

    Raises:
        ValueError: on a side that cannot be halved often enough, or an unknown type.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import EDMUNet2DModel

    >>> unet = EDMUNet2DModel(16, model_channels=8, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,))
    >>> unet(torch.randn(1, 3, 16, 16), torch.zeros(1)).sample.shape
    torch.Size([1, 3, 16, 16])
    ```
    """

    _skip_layerwise_casting_patterns = ["norm", "map_noise"]

    @register_to_config
    def __init__(
        self,
        sample_size,
        in_channels=3,
        out_channels=3,
        model_channels=128,
        channel_mult=(1, 2, 2, 2),
        num_blocks=4,
        attn_resolutions=(16,),
        dropout=0.0,
        embedding_type="fourier",
        encoder_type="residual",
        channel_mult_noise=2,
        resample_filter=(1, 3, 3, 1),
        label_dim=0,
        augment_dim=0,
    ):
        super().__init__()
        for name, value, known in (
            ("embedding_type", embedding_type, EMBEDDING_TYPES),
            ("encoder_type", encoder_type, ENCODER_TYPES),
        ):
            if value not in known:
                raise ValueError(f"`{name}` has to be one of {', '.join(known)} but is {value!r}.")
        if sample_size % 2 ** (len(channel_mult) - 1):
            raise ValueError(
                f"`sample_size` has to be divisible by {2 ** (len(channel_mult) - 1)} for {len(channel_mult)} "
                f"resolutions but is {sample_size}."
            )
        # Lists, as they come back from a file.
        sequences = {
            "channel_mult": channel_mult,
            "attn_resolutions": attn_resolutions,
            "resample_filter": resample_filter,
        }
        self.register_to_config(**{name: list(values) for name, values in sequences.items()})
        self.model = _SongUNet(self.config)

    def forward(self, sample, timestep, class_labels=None, augment_labels=None, return_dict=True):
        """
        Args:
            sample (`torch.Tensor` of shape `(B, in_channels, side, side)`):
                The scaled picture, `c_in x`.
            timestep (`torch.Tensor` of shape `(B,)` or scalar):
                `ln(sigma) / 4`.
            class_labels (`torch.Tensor` of shape `(B, label_dim)`, *optional*):
                One-hot class vectors; zeros by default.
            augment_labels (`torch.Tensor` of shape `(B, augment_dim)`, *optional*):
                How the pictures were augmented; not at all by default.
            return_dict (`bool`, *optional*, defaults to `True`):
                Whether to return a `UNet2DOutput` instead of a tuple.
        """
        label = torch.as_tensor(timestep, dtype=torch.float32, device=sample.device).expand(len(sample))
        if class_labels is None:
            class_labels = sample.new_zeros(len(sample), self.config.label_dim)
        output = self.model(sample, label, class_labels, augment_labels)
        return UNet2DOutput(sample=output) if return_dict else (output,)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """
        As of every diffusers model, but strict. Bare weights with official key names: see
        [`~convert_ambient_diffusion.convert`].

        Raises:
            ValueError: on missing or unexpected keys, other shapes, weights that are not finite, or a file that cannot
            be read.
        """
        with_info = kwargs.pop("output_loading_info", False)
        options = {"use_safetensors": True, **kwargs, "output_loading_info": True}
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, **options)
        except OSError as error:
            # A file that is missing is told from one that is broken by the text alone.
            if not str(error).startswith("Unable to load weights"):
                raise
            raise ValueError(f"{error} The file is broken: download or save it again.") from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[kind]:
                names = ", ".join(str(key) for key in list(info[kind])[:4])
                raise ValueError(
                    f"{pretrained_model_name_or_path} has {kind.replace('_', ' ')} ({names}): its config does not "
                    f"describe its weights."
                )
        broken = [name for name, tensor in model.state_dict().items() if not torch.isfinite(tensor).all()]
        if broken:
            raise ValueError(f"The weights {', '.join(broken[:4])} in {pretrained_model_name_or_path} are not finite.")
        return (model, info) if with_info else model

# SPDX-License-Identifier: Apache-2.0
"""How a sparse autoencoder is trained: losses and the training step of SAeUron."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.optimization import get_scheduler


TRAINABLE_ACTIVATIONS = ("topk", "batch_topk", "sample_topk")
AUXK_FORMS = ("corrected", "official")
# The 4k selection of multi top-k, and the weight of its loss.
_MULTI_FACTOR, _MULTI_WEIGHT = 4, 1 / 8


@dataclass
class SAELossOutput:
    """
    Args:
        loss (`torch.Tensor`):
            `fvu + auxk_alpha * auxk_loss + multi_topk_fvu / 8`. With `distributed`, this process's share of the sum.
        fvu (`torch.Tensor`):
            Fraction of variance that is not explained, 0 is perfect.
        auxk_loss (`torch.Tensor`):
            Error of the dead latents on what the others leave over, 0 without dead latents.
        multi_topk_fvu (`torch.Tensor`):
            `fvu` of the selection of 4k latents, 0 when switched off.
        sample (`torch.Tensor` of shape `(..., d_in)`):
            Reconstruction, of the 4k latents when they are on, as the official code returns it.
        fired (`torch.Tensor` of shape `(num_latents,)`, bool):
            Latents that were selected (among the 4k when they are on), with value 0 too.
        l0 (`torch.Tensor`, *optional*):
            Mean number of positive latents before the selection.
        l2 (`torch.Tensor`, *optional*):
            Mean squared error.
        explained_variance (`torch.Tensor` of shape `(tokens,)`, *optional*):
            Per token, `1 - |x_hat - x|^2 / |x - mean(x)|^2`.
    """

    loss: torch.Tensor
    fvu: torch.Tensor
    auxk_loss: torch.Tensor
    multi_topk_fvu: torch.Tensor
    sample: torch.Tensor
    fired: torch.Tensor
    l0: torch.Tensor | None = None
    l2: torch.Tensor | None = None
    explained_variance: torch.Tensor | None = None


@torch.no_grad()
def geometric_median(x, max_iterations=100, tolerance=1e-5):
    """
    The point with the smallest summed distance to all tokens, by Weiszfeld's iteration from the mean.

    Args:
        x (`torch.Tensor` of shape `(tokens, d_in)`): tokens.
        max_iterations (`int`), tolerance (`float`): stop after so many steps, or when a step moves less.

    Returns:
        `torch.Tensor` of shape `(d_in,)`
    """
    estimate = x.mean(0)
    for _ in range(max_iterations):
        # Clamped: a token that equals the estimate would get an infinite weight.
        weights = 1 / (x - estimate).norm(dim=1).clamp_min(torch.finfo(x.dtype).eps)
        previous, estimate = estimate, (weights / weights.sum()) @ x
        if (estimate - previous).norm() < tolerance:
            break
    return estimate


@torch.no_grad()
def project_decoder_gradient_(sae):
    """Removes from the gradient of every row of `W_dec` the part along the row, which would only change its length."""
    grad, rows = sae.W_dec.grad, sae.W_dec
    grad.addcmul_((grad * rows).sum(1, keepdim=True), rows, value=-1)


def _sum_over_processes(tensor, distributed):
    if distributed:
        dist.all_reduce(tensor)
    return tensor


def _gather(tensor, distributed):
    """The tensors of all processes, one after the other along the first axis."""
    if not distributed:
        return tensor
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return torch.cat(gathered)


def _largest_of_batch(a, count):
    """
    The `count` largest entries of the whole matrix as values and flat indices.

    A top-k of each row leaves far fewer candidates than the matrix has entries. They suffice unless a row's last
    candidate is itself selected; then more are taken.
    """
    rows, columns = a.shape
    width = min(columns, 4 * -(-count // rows))
    while True:
        values, indices = a.topk(width, sorted=False)
        chosen, position = values.flatten().topk(count, sorted=False)
        if width == columns or not (values.amin(1) > chosen.min()).any():
            flat = indices + torch.arange(rows, device=a.device)[:, None] * columns
            return chosen, flat.flatten()[position]
        width = min(columns, 4 * width)


def _select(activation, a, k, num_samples, distributed):
    """Values and flat indices of the largest entries of `a`, grouped as the activation says, ordered by token."""
    num_tokens, columns = a.shape
    if activation == "batch_topk":
        # The k * N largest of all processes' tokens, which could all be here.
        total = k * num_tokens * (dist.get_world_size() if distributed else 1)
        values, flat = _largest_of_batch(a, min(total, a.numel()))
        if distributed:
            kept = values >= _gather(values.detach(), True).topk(total).values.min()
            values, flat = values[kept], flat[kept]
    else:
        groups = num_tokens if activation == "topk" else num_samples
        values, indices = a.view(groups, -1).topk(k, sorted=False)
        offsets = torch.arange(groups, device=a.device)[:, None] * (a.numel() // groups)
        values, flat = values.flatten(), (indices + offsets).flatten()
    if activation != "topk":
        flat, order = flat.sort()
        values = values[order]
    return values, flat


class _SparseEncode(torch.autograd.Function):
    """
    The selected latents of tokens, as values and flat indices. Only they have a gradient: the backward pass adds it up
    latent by latent, where a product with a dense `(tokens, num_latents)` gradient would mostly multiply zeros.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, b_dec, select):
        centred = x if b_dec is None else x - b_dec
        values, flat = select(F.linear(centred, weight, bias))
        ctx.save_for_backward(centred, weight, flat, values > 0)
        ctx.subtracts_b_dec = b_dec is not None
        ctx.mark_non_differentiable(flat)
        return values.relu_(), flat

    @staticmethod
    def backward(ctx, grad, _):
        centred, weight, flat, positive = ctx.saved_tensors
        num_latents = weight.shape[0]
        latents, order = (flat % num_latents).sort(stable=True)
        grad, tokens = (grad * positive)[order], flat[order] // num_latents
        starts = torch.searchsorted(latents, torch.arange(num_latents, device=latents.device))
        weight_grad = F.embedding_bag(tokens, centred, starts, mode="sum", per_sample_weights=grad)
        bias_grad = torch.zeros_like(weight[:, 0]).index_add_(0, latents, grad)
        return None, weight_grad, bias_grad, -(bias_grad @ weight) if ctx.subtracts_b_dec else None, None


def _sparse_decode(values, flat, num_tokens, W_dec):
    """`z W_dec` for latents `z` given by their selected entries."""
    num_latents = W_dec.shape[0]
    starts = torch.searchsorted(flat, torch.arange(num_tokens, device=flat.device) * num_latents)
    return F.embedding_bag(flat % num_latents, W_dec, starts, mode="sum", per_sample_weights=values)


def check_trainable(sae):
    """`ValueError` for an autoencoder whose variant SAeUron's recipe does not train."""
    config = sae.config
    if config.activation not in TRAINABLE_ACTIVATIONS:
        allowed = ", ".join(TRAINABLE_ACTIVATIONS)
        raise ValueError(f"To be trained, `activation` has to be one of {allowed} but is {config.activation!r}.")
    if config.rescale_by_decoder_norm or config.skip_connection:
        raise ValueError("Autoencoders with `rescale_by_decoder_norm` or `skip_connection` are read, but not trained.")


def sae_loss(
    sae,
    x,
    dead_mask=None,
    auxk_alpha=1 / 32,
    auxk="corrected",
    multi_topk=False,
    num_samples=None,
    distributed=False,
    metrics=True,
):
    r"""
    The training loss of a top-k autoencoder, differentiable: [SAeUron](https://huggingface.co/papers/2501.18052),
    section 4.1, with the AuxK loss of [Scaling and evaluating sparse
    autoencoders](https://huggingface.co/papers/2406.04093), appendix A.2.

    The batch and sample activations select over the batch here, whether or not the module is in training mode.

    Args:
        sae ([`SparseAutoencoder`]):
            With a top-k activation.
        x (`torch.Tensor` of shape `(tokens, d_in)` or `(samples, tokens, d_in)`):
            Tokens.
        dead_mask (`torch.Tensor` of shape `(num_latents,)`, bool, *optional*):
            Latents that have not fired for long and get the auxiliary loss.
        auxk_alpha (`float`, *optional*, defaults to 1/32):
            Weight of the auxiliary loss.
        auxk (`str`, *optional*, defaults to `"corrected"`):
            Dead latents learn what the others leave over. `"official"` repeats the published code, in which they learn
            its negative, with `b_dec` added and the gradient flowing into the others.
        multi_topk (`bool`, *optional*, defaults to `False`):
            Whether a second reconstruction from 4k latents adds an eighth of its loss.
        num_samples (`int`, *optional*):
            Number of samples in a flat `x`, for `"sample_topk"`.
        distributed (`bool`, *optional*, defaults to `False`):
            Whether every process holds an equal part of one batch. Variance and batch top-k are then those of the
            whole batch, and losses and gradients of the processes have to be added up.
        metrics (`bool`, *optional*, defaults to `True`):
            Whether `l0`, `l2` and `explained_variance`, which training does not need, are computed.

    Returns:
        [`SAELossOutput`]

    Raises:
        ValueError: on an activation that is not trained, an unknown `auxk`, or a number of samples that does not
            divide the tokens.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import SparseAutoencoder
    >>> from diffusers_ext.methods.saeuron.training_saeuron import sae_loss

    >>> sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4)
    >>> output = sae_loss(sae, torch.randn(2, 9, 16))
    >>> output.loss.backward()
    >>> bool(0 < output.fvu < 2)
    True
    ```
    """
    check_trainable(sae)
    if auxk not in AUXK_FORMS:
        raise ValueError(f"`auxk` has to be one of {', '.join(AUXK_FORMS)} but is {auxk!r}.")
    activation = sae.config.activation
    if x.ndim == 3:
        num_samples = x.shape[0]
    normalised, undo = sae.normalize_input(x.reshape(-1, x.shape[-1]).float())
    num_tokens = normalised.shape[0]
    if activation == "sample_topk" and (num_samples is None or num_tokens % num_samples):
        raise ValueError(
            f"`sample_topk` needs `num_samples` that divides the {num_tokens} tokens but it is {num_samples}."
        )
    b_dec = sae.b_dec if sae.config.apply_b_dec_to_input else None
    processes = dist.get_world_size() if distributed else 1

    mean = _sum_over_processes(normalised.sum(0), distributed) / (num_tokens * processes)
    deviation = (normalised - mean).square().sum(1)
    variance = _sum_over_processes(deviation.sum(), distributed)

    def reconstruct(k):
        def select(h):
            a = h.relu_() if sae.config.relu_before_topk else h
            return _select(activation, a, k, num_samples, distributed)

        values, flat = _SparseEncode.apply(normalised, sae.encoder.weight, sae.encoder.bias, b_dec, select)
        return _sparse_decode(values, flat, num_tokens, sae.W_dec) + sae.b_dec, flat

    sample, flat = reconstruct(sae.config.k)
    error = sample - normalised
    squared_error = error.square().sum(1)
    fvu = squared_error.sum() / variance
    loss = fvu

    auxk_loss = fvu.new_zeros(())
    num_dead = 0 if dead_mask is None else int(dead_mask.sum())
    if num_dead:
        k_aux = min(sae.config.d_in // 2, num_dead)
        # Few latents are dead: with their rows alone the dense products are small.
        centred = normalised if b_dec is None else normalised - b_dec
        z = F.relu(F.linear(centred, sae.encoder.weight[dead_mask], sae.encoder.bias[dead_mask]))
        if k_aux < num_dead or activation == "sample_topk":
            values, selected = _select(activation, z, k_aux, num_samples, distributed)
            z = torch.zeros_like(z).flatten().scatter(0, selected, values).view_as(z)
        estimate = z @ sae.W_dec[dead_mask]
        residual = estimate + error.detach() if auxk == "corrected" else estimate + sae.b_dec - error
        scale = min(num_dead / (sae.config.d_in // 2), 1.0)
        auxk_loss = scale * residual.square().sum() / variance
        loss = loss + auxk_alpha * auxk_loss

    multi_topk_fvu = fvu.new_zeros(())
    if multi_topk:
        sample, flat = reconstruct(min(_MULTI_FACTOR * sae.config.k, sae.num_latents))
        multi_topk_fvu = (sample - normalised).square().sum() / variance
        loss = loss + _MULTI_WEIGHT * multi_topk_fvu

    fired = torch.zeros(sae.num_latents, dtype=torch.bool, device=x.device)
    fired[flat % sae.num_latents] = True
    output = SAELossOutput(
        loss=loss,
        fvu=fvu.detach(),
        auxk_loss=auxk_loss.detach(),
        multi_topk_fvu=multi_topk_fvu.detach(),
        sample=undo(sample.detach()).view(x.shape),
        fired=fired,
    )
    if metrics:
        with torch.no_grad():
            output.l0 = (sae.pre_activations(normalised) > 0).sum(1).float().mean()
            output.l2 = error.square().mean()
            output.explained_variance = 1 - squared_error / deviation
    return output


class SAETrainer:
    r"""
    Trains one autoencoder, a step per batch of tokens, in the order of the official code of
    [SAeUron](https://huggingface.co/papers/2501.18052): geometric median at the first step, decoder rows to unit norm,
    loss, gradient clipping, projection of the decoder gradient, Adam, schedule, counters.

    Args:
        sae ([`SparseAutoencoder`]):
            Trained in place, in float32.
        num_training_steps (`int`):
            Length of the learning-rate schedule.
        learning_rate (`float`, *optional*):
            `2e-4 / sqrt(num_latents / 16384)` by default.
        lr_scheduler (`str`, *optional*, defaults to `"linear"`), lr_warmup_steps (`int`, *optional*, defaults to 0):
            As of `diffusers.optimization.get_scheduler`.
        auxk_alpha (`float`), auxk (`str`), multi_topk (`bool`):
            See [`sae_loss`].
        dead_feature_threshold (`int`, *optional*, defaults to 10_000_000):
            A latent that did not fire for more tokens (samples, for `"sample_topk"`) counts as dead.
        max_grad_norm (`float`, *optional*, defaults to 1.0):
            Gradients are scaled down to this norm.
        adam_beta1 (`float`), adam_beta2 (`float`), adam_epsilon (`float`):
            Of Adam.
        distributed (`bool`, *optional*, defaults to `False`):
            Whether every process steps with an equal part of each batch. All of them end with the same weights, those
            that one process gets from the whole batch.

    Raises:
        ValueError: on an autoencoder that is not trained (see [`sae_loss`]) or not in float32.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import SparseAutoencoder
    >>> from diffusers_ext.methods.saeuron.training_saeuron import SAETrainer

    >>> sae = SparseAutoencoder(d_in=16, expansion_factor=4, k=4)
    >>> trainer = SAETrainer(sae, num_training_steps=20, learning_rate=1e-2)
    >>> tokens = torch.randn(256, 16)
    >>> losses = [float(trainer.step(tokens).loss) for _ in range(20)]
    >>> losses[-1] < losses[0]
    True
    ```
    """

    def __init__(
        self,
        sae,
        num_training_steps,
        learning_rate=None,
        lr_scheduler="linear",
        lr_warmup_steps=0,
        auxk_alpha=1 / 32,
        auxk="corrected",
        multi_topk=False,
        dead_feature_threshold=10_000_000,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=6.25e-10,
        distributed=False,
    ):
        check_trainable(sae)
        if sae.dtype != torch.float32:
            raise ValueError(f"An autoencoder is trained in float32 but this one is in {sae.dtype}.")
        self.sae = sae.train()
        self.auxk_alpha, self.auxk, self.multi_topk = auxk_alpha, auxk, multi_topk
        self.dead_feature_threshold, self.max_grad_norm = dead_feature_threshold, max_grad_norm
        self.distributed = distributed
        if learning_rate is None:
            learning_rate = 2e-4 / (sae.num_latents / 16384) ** 0.5
        self.parameters = [sae.encoder.weight, sae.encoder.bias, sae.W_dec, sae.b_dec]
        self.optimizer = torch.optim.Adam(
            self.parameters, lr=learning_rate, betas=(adam_beta1, adam_beta2), eps=adam_epsilon, fused=True
        )
        self.lr_scheduler = get_scheduler(
            lr_scheduler, self.optimizer, num_warmup_steps=lr_warmup_steps, num_training_steps=num_training_steps
        )
        self.tokens_since_fired = torch.zeros(sae.num_latents, dtype=torch.long, device=sae.device)
        self.global_step = 0

    @property
    def dead_mask(self):
        """Latents that count as dead, `(num_latents,)`."""
        return self.tokens_since_fired > self.dead_feature_threshold

    def step(self, tokens, metrics=True):
        """
        One optimiser step.

        Args:
            tokens (`torch.Tensor` of shape `(tokens, d_in)` or `(samples, tokens, d_in)`, or a list of such tensors):
                The batch, or micro-batches whose gradients are averaged.
            metrics (`bool`, *optional*, defaults to `True`):
                See [`sae_loss`].

        Returns:
            [`SAELossOutput`] of the (last micro-)batch; with `distributed`, losses are those of the whole batch.

        Raises:
            ValueError: on tokens that are not finite or have other channels. Nothing is changed then.
        """
        batches = tokens if isinstance(tokens, (list, tuple)) else [tokens]
        for batch in batches:
            if batch.ndim not in (2, 3) or batch.shape[-1] != self.sae.config.d_in:
                raise ValueError(
                    f"Tokens have to have shape (..., {self.sae.config.d_in}) but have {tuple(batch.shape)}."
                )
            if not torch.isfinite(batch).all():
                raise ValueError(
                    "The activations to train on are not finite: the model overflows at this block. Use float32 or "
                    "bfloat16, or another hook point."
                )
        if self.global_step == 0:
            first = batches[0].reshape(-1, self.sae.config.d_in).float()
            with torch.no_grad():
                self.sae.b_dec.copy_(geometric_median(_gather(first, self.distributed)))
        self.sae.normalize_decoder_()

        fired, counted = torch.zeros_like(self.tokens_since_fired, dtype=torch.bool), 0
        dead_mask = self.dead_mask
        for batch in batches:
            output = sae_loss(
                self.sae,
                batch,
                dead_mask=dead_mask,
                auxk_alpha=self.auxk_alpha,
                auxk=self.auxk,
                multi_topk=self.multi_topk,
                distributed=self.distributed,
                metrics=metrics,
            )
            (output.loss / len(batches)).backward()
            fired |= output.fired
            counted += len(batch) if self.sae.config.activation == "sample_topk" else batch[..., 0].numel()
        output.loss = output.loss.detach()
        if self.distributed:
            counted *= dist.get_world_size()
            self._reduce(fired, output)

        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        project_decoder_gradient_(self.sae)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens_since_fired += counted
        self.tokens_since_fired[fired] = 0
        self.global_step += 1
        return output

    def _reduce(self, fired, output):
        """Adds up the processes' gradients and losses, and joins what fired."""
        losses = torch.stack([output.loss, output.fvu, output.auxk_loss, output.multi_topk_fvu])
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters] + [fired.float(), losses])
        dist.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in self.parameters] + [len(fired), len(losses)])
        for parameter, part in zip(self.parameters, parts):
            parameter.grad.copy_(part.view_as(parameter))
        fired.copy_(parts[-2] > 0)
        output.loss, output.fvu, output.auxk_loss, output.multi_topk_fvu = parts[-1].unbind()

    def state_dict(self):
        """Everything that the next step depends on."""
        return {
            "sae": self.sae.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "tokens_since_fired": self.tokens_since_fired,
            "global_step": self.global_step,
        }

    def load_state_dict(self, state):
        """
        Goes on from where `state_dict` was taken, bit for bit.

        Raises:
            ValueError: when the state belongs to an autoencoder of other sizes.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in self.sae.state_dict().items()}
        given = {name: tuple(tensor.shape) for name, tensor in state["sae"].items()}
        if given != expected:
            raise ValueError(f"The state is of an autoencoder with {given} but this one has {expected}.")
        self.sae.load_state_dict(state["sae"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.tokens_since_fired.copy_(state["tokens_since_fired"])
        self.global_step = state["global_step"]

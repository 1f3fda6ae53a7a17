# SPDX-License-Identifier: Apache-2.0
"""The training objective of Ambient Diffusion, for every parameterisation that diffusers has."""

import math
from dataclasses import dataclass

import torch
from diffusers.utils.torch_utils import randn_tensor

from .noise_ambient_diffusion import FixedNoise, as_integers


PREDICTION_TYPES = ("epsilon", "v_prediction", "sample", "flow", "edm")
SPACES = ("noise", "sample")
THRESHOLD_UNITS = ("timestep", "sigma", "ratio")
REDUCTIONS = ("mean", "sum", "sample", "none")


def ambient_coefficients(*, data_signal, data_noise, signal, noise):
    r"""
    How a sample that is noisy already becomes a noisier one: `x_t = k x_n + c xi`.

    Args:
        data_signal, data_noise (`torch.Tensor` or `float`):
            `a_n` and `b_n` of the noisy sample `x_n = a_n x_0 + b_n z`.
        signal, noise (`torch.Tensor` or `float`):
            `a_t` and `b_t` of the level to reach, which is noisier.

    Returns:
        `tuple`: `k = a_t / a_n` and `c = sqrt(b_t^2 - k^2 b_n^2)`; `c` is NaN below the level of the sample.
    """
    k = torch.as_tensor(signal / data_signal)
    return k, (noise**2 - (k * data_noise) ** 2).sqrt()


def expected_noisy_sample(*, sample, epsilon, noise, k, c):
    r"""
    `E[x_n | x_t] = (x_t - (c^2 / b_t) eps) / k`: what the noisy sample was, given the noise that a model predicts.

    Args:
        sample (`torch.Tensor`):
            `x_t`.
        epsilon (`torch.Tensor`):
            The model's prediction of the whole noise in `x_t`.
        noise, k, c (`torch.Tensor` or `float`):
            `b_t`, and the values of [`ambient_coefficients`]; they have to broadcast against the sample.
    """
    return (sample - c**2 / noise * epsilon) / k


@dataclass
class AmbientState:
    """
    What [`AmbientLoss.loss`] has to know of a prepared batch.

    Args:
        sample (`torch.Tensor` of shape `(B, ...)`):
            `x_t` in float32.
        target (`torch.Tensor` of shape `(B, ...)`):
            What the prediction is compared with.
        above (`torch.Tensor` of shape `(B,)`):
            Boolean: which samples are above the threshold.
        levels (`torch.Tensor` of shape `(B,)`):
            Timesteps, or noise levels for EDM.
        output_factor, sample_factor, weight (`torch.Tensor` of shape `(B, 1, ...)`):
            The compared prediction is `output_factor * output + sample_factor * sample`; its squared error is
            multiplied by the weight.
    """

    sample: torch.Tensor
    target: torch.Tensor
    above: torch.Tensor
    levels: torch.Tensor
    output_factor: torch.Tensor
    sample_factor: torch.Tensor
    weight: torch.Tensor


class AmbientLoss:
    r"""
    Trains on clean samples at low noise and on one noisy copy of each at high noise, so that what a sample is composed
    of is never shown; in expectation the model still learns to denoise to clean samples.

    Method of [Does Generation Require Memorization?](https://huggingface.co/papers/2502.21278), which defines it for
    EDM; for the other schedules, `x_t = a_t x_0 + b_t z`, the noisy copy is `x_n = a_n x_0 + b_n z` with the same `z`
    at every visit. Above the threshold the model gets `x_t = k x_n + c xi`
    (see [`ambient_coefficients`]), and its prediction of the noise is compared by `||(c / b_t) eps - xi||^2`.

    Args:
        noise_threshold (`float`):
            Level of the noisy copies. 0 (with the units `"sigma"` or `"ratio"`) is the ordinary loss. Higher hides
            more of each sample and copies less; too high costs quality. The noise should be comparable with the
            distance of neighbouring samples: far below it changes nothing.
        prediction_type (`str`):
            What the model gives: `"epsilon"`, `"v_prediction"`, `"sample"`, `"flow"` (noise minus sample) or `"edm"`
            (the denoised sample `D(x; sigma)`, preconditioning done, see [`edm_denoise`]).
        schedule (diffusers scheduler, *optional*):
            One with `alphas_cumprod` for `"epsilon"`, `"v_prediction"` and `"sample"`;
            `FlowMatchEulerDiscreteScheduler` for `"flow"` (without it, time is uniform in [0, 1)); an EDM scheduler
            for `"edm"` (without it, `sigma_data` below).
        space (`str`, *optional*, defaults to `"noise"`):
            `"sample"` compares the predicted with the true noisy copy instead, as the published code for latent models
            does: the error is `(c / k)^2` times as large, which explodes at high noise. For `"edm"` the two are equal.
        threshold_unit (`str`, *optional*):
            `"timestep"`, `"sigma"` (`b_n`; sigma for EDM, time in [0, 1] for flow) or `"ratio"` (`b_n / a_n`). By
            default `"timestep"` where the schedule is one of `alphas_cumprod`, else `"sigma"`.
        fixed_noise ([`FixedNoise`], *optional*):
            Where the noise of the copies comes from; `FixedNoise(seed=0)` by default.
        weighting (`Callable`, *optional*):
            Takes the timesteps `(B,)` (EDM: noise levels) and gives weights `(B,)` for both branches, for instance
            min-SNR.
        sigma_data, p_mean, p_std (`float`, *optional*):
            For `"edm"`: standard deviation of the data, mean and deviation of `ln(sigma)` in training.

    Raises:
        ValueError: on unknown names, a threshold outside the schedule, or a schedule that does not fit.

    Example:

    ```py
    >>> import torch
    >>> from diffusers import DDPMScheduler
    >>> from diffusers_ext import AmbientLoss

    >>> ambient = AmbientLoss(250, "epsilon", DDPMScheduler())
    >>> latents, ids = torch.randn(2, 4, 8, 8), [0, 1]
    >>> model_input, timesteps, state = ambient.prepare(latents, ids)
    >>> loss = ambient.loss(torch.randn_like(model_input), state)  # of a model's output
    ```
    """

    def __init__(
        self,
        noise_threshold,
        prediction_type,
        schedule=None,
        space="noise",
        threshold_unit=None,
        fixed_noise=None,
        weighting=None,
        sigma_data=0.5,
        p_mean=-1.2,
        p_std=1.2,
    ):
        for name, value, known in (("prediction_type", prediction_type, PREDICTION_TYPES), ("space", space, SPACES)):
            if value not in known:
                raise ValueError(f"`{name}` has to be one of {', '.join(known)} but is {value!r}.")
        self.prediction_type, self.space, self.weighting = prediction_type, space, weighting
        self.fixed_noise = FixedNoise() if fixed_noise is None else fixed_noise
        self.sigma_data, self.p_mean, self.p_std = sigma_data, p_mean, p_std
        self._read_schedule(schedule)
        self._read_threshold(noise_threshold, threshold_unit)
        if space == "sample" and self._min_signal == 0:
            raise ValueError(
                "`space='sample'` divides by the signal that is left, and this schedule ends in pure noise. Use "
                "`space='noise'`."
            )

    def _read_schedule(self, schedule):
        config = getattr(schedule, "config", {})
        name = type(schedule).__name__
        self._alphas_cumprod = self._flow_sigmas = None
        self._min_signal = 1.0
        if self.prediction_type == "edm":
            if schedule is not None and "sigma_data" not in config:
                raise ValueError(f"`prediction_type='edm'` needs an EDM scheduler but `schedule` is a {name}.")
            self.sigma_data = config.get("sigma_data", self.sigma_data)
            if not self.sigma_data > 0 or not self.p_std > 0:
                raise ValueError(
                    f"`sigma_data` and `p_std` have to be positive but are {self.sigma_data} and {self.p_std}."
                )
            self.max_ratio, self.num_train_timesteps = config.get("sigma_max", math.inf), None
        elif self.prediction_type == "flow":
            if schedule is not None and not ("shift" in config and hasattr(schedule, "sigmas")):
                raise ValueError(
                    f"`prediction_type='flow'` needs a flow-matching scheduler such as "
                    f"FlowMatchEulerDiscreteScheduler but `schedule` is a {name}."
                )
            self.num_train_timesteps = config.get("num_train_timesteps", 1000)
            if schedule is not None:
                sigmas = schedule.sigmas.double().cpu()
                # After `set_timesteps` a scheduler has a final 0, and few levels.
                self._flow_sigmas = sigmas[sigmas > 0]
                self._min_signal = 1 - self._flow_sigmas.max().item()
            self.max_ratio = math.inf
        else:
            if not hasattr(schedule, "alphas_cumprod"):
                raise ValueError(
                    f"`prediction_type={self.prediction_type!r}` needs a scheduler with `alphas_cumprod`, such as "
                    f"DDPMScheduler, but `schedule` is a {name}. For flow matching and EDM, use 'flow' and 'edm'."
                )
            wanted = config.get("prediction_type", self.prediction_type)
            if wanted != self.prediction_type:
                raise ValueError(
                    f"`prediction_type` is {self.prediction_type!r} but the scheduler is configured for {wanted!r}."
                )
            self._alphas_cumprod = schedule.alphas_cumprod.double().cpu()
            self.num_train_timesteps = len(self._alphas_cumprod)
            last = self._alphas_cumprod[-1].item()
            self._min_signal = math.sqrt(last)
            self.max_ratio = math.sqrt((1 - last) / last) if last > 0 else math.inf

    def _read_threshold(self, threshold, unit):
        unit = unit or ("sigma" if self._alphas_cumprod is None else "timestep")
        if unit not in THRESHOLD_UNITS:
            raise ValueError(f"`threshold_unit` has to be one of {', '.join(THRESHOLD_UNITS)} but is {unit!r}.")
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
            raise ValueError(f"`noise_threshold` has to be a finite number but is {threshold!r}.")
        self.noise_threshold, self.threshold_unit = threshold, unit
        what = f"`noise_threshold` ({unit})"
        if unit == "timestep":
            if self.prediction_type == "edm":
                raise ValueError("EDM has no timesteps: give `noise_threshold` as 'sigma'.")
            last = self.num_train_timesteps - 1
            if not 0 <= threshold <= last:
                raise ValueError(f"{what} has to lie in the schedule, [0, {last}], but is {threshold}.")
            if self._alphas_cumprod is None:
                threshold, unit = threshold / self.num_train_timesteps, "sigma"
            elif threshold != int(threshold):
                raise ValueError(f"{what} has to be an integer but is {threshold}.")
            else:
                alpha = self._alphas_cumprod[int(threshold)].item()
                self.data_signal, self.data_noise = math.sqrt(alpha), math.sqrt(1 - alpha)
                return
        if unit == "sigma" and self.prediction_type != "edm":
            if not 0 <= threshold < 1:
                raise ValueError(f"{what} has to lie in [0, 1) but is {threshold}.")
            signal = 1 - threshold if self.prediction_type == "flow" else math.sqrt(1 - threshold**2)
            threshold = threshold / signal
        if not 0 <= threshold < self.max_ratio:
            raise ValueError(
                f"{what} has to lie in the schedule, noise-to-signal ratios of [0, {self.max_ratio:.4g}), but is "
                f"{self.noise_threshold}."
            )
        self.data_signal = 1.0
        if self.prediction_type == "flow":
            self.data_signal = 1 / (1 + threshold)
        elif self.prediction_type != "edm":
            self.data_signal = 1 / math.sqrt(1 + threshold**2)
        self.data_noise = threshold * self.data_signal

    @property
    def threshold_ratio(self):
        """Noise-to-signal ratio `b_n / a_n` of the noisy copies, comparable between schedules."""
        return self.data_noise / self.data_signal

    def to_dict(self):
        """The objective, ready for JSON."""
        return {
            "noise_threshold": self.noise_threshold,
            "threshold_unit": self.threshold_unit,
            "threshold_ratio": self.threshold_ratio,
            "prediction_type": self.prediction_type,
            "space": self.space,
            "fixed_noise": self.fixed_noise.to_dict(),
        }

    def prepare(
        self,
        x0,
        sample_ids,
        generator=None,
        augmentation_keys=None,
        *,
        timesteps=None,
        sigmas=None,
        noise=None,
        fixed_noise=None,
    ):
        """
        Noise levels, and what the model gets at them.

        Args:
            x0 (`torch.Tensor` of shape `(B, ...)`):
                Clean pictures or latents.
            sample_ids (`torch.Tensor`, `list[int]`):
                One id per sample, see [`FixedNoise`].
            generator (`torch.Generator`, *optional*):
                For noise levels and fresh noise. EDM draws levels, noise for below and noise for above, as the
                official code does.
            augmentation_keys (`torch.Tensor`, `list[int]`, *optional*):
                See [`FixedNoise`].
            timesteps (`torch.Tensor` of shape `(B,)`, *optional*):
                Levels that were drawn elsewhere: indices of the schedule, or for flow numbers up to 1000.
            sigmas (`torch.Tensor` of shape `(B,)`, *optional*):
                The same for EDM (noise levels) and flow (times in [0, 1]).
            noise (`torch.Tensor` of the shape of `x0`, *optional*):
                Fresh noise of unit variance, for instance offset noise.
            fixed_noise (`torch.Tensor` of the shape of `x0`, *optional*):
                Noise of the copies with unit variance, where it does not come from the ids: for instance flipped
                together with its picture.

        Returns:
            `tuple`: the model's input `(B, ...)` in the dtype of `x0`, timesteps `(B,)` (EDM: noise levels), and the
            [`AmbientState`].

        Raises:
            ValueError: on shapes that do not fit, levels outside the schedule, or both kinds of levels.
        """
        if x0.ndim < 2 or not len(x0) or not x0.is_floating_point():
            raise ValueError(
                f"`x0` has to be a batch of floating-point samples but has shape {tuple(x0.shape)} and {x0.dtype}."
            )
        ids = as_integers(sample_ids, "sample_ids", 2**64)
        if len(ids) != len(x0):
            raise ValueError(f"Expected one id per sample but got {len(ids)} ids for {len(x0)} samples.")
        for name, value in (("noise", noise), ("fixed_noise", fixed_noise)):
            if value is not None and value.shape != x0.shape:
                raise ValueError(f"`{name}` has to have the shape {tuple(x0.shape)} but has {tuple(value.shape)}.")
        levels, signal, sigma = self._levels(x0, generator, timesteps, sigmas)
        if self.prediction_type == "edm":
            above = sigma >= self.data_noise
        else:
            above = (sigma / signal > self.threshold_ratio * (1 + 1e-9)) & (self.data_noise > 0)
        clean = x0.float()
        if noise is None:
            noise = randn_tensor(x0.shape, generator=generator, device=x0.device, dtype=torch.float32)
            if self.prediction_type == "edm":
                extra = randn_tensor(x0.shape, generator=generator, device=x0.device, dtype=torch.float32)
                noise = torch.where(_spread(above, x0), extra, noise)
        noise = noise.to(x0.device, torch.float32)
        if fixed_noise is None and self.data_noise == 0:
            fixed_noise = torch.zeros((1,) * x0.ndim)
        elif fixed_noise is None:
            fixed_noise = self.fixed_noise(ids, x0.shape[1:], augmentation_keys, generator=generator)
        fixed_noise = fixed_noise.to(x0.device, torch.float32)

        k, c = ambient_coefficients(
            data_signal=self.data_signal, data_noise=self.data_noise, signal=signal, noise=sigma
        )
        zero, one = torch.zeros_like(sigma), torch.ones_like(sigma)
        sample = _combine(above, (signal, k * self.data_noise, c), (signal, zero, sigma), clean, fixed_noise, noise)
        ordinary = {
            "epsilon": (zero, zero, one),
            "v_prediction": (-sigma, zero, signal),
            "sample": (one, zero, zero),
            "flow": (-one, zero, one),
            "edm": (one, zero, zero),
        }[self.prediction_type]
        hidden = (zero, zero, one)
        if self.space == "sample":
            hidden = (one * self.data_signal, one * self.data_noise, zero)
        target = _combine(above, hidden, ordinary, clean, fixed_noise, noise)

        # The noise that an output stands for is `per_output * output + per_sample * x_t`.
        per_output, per_sample = {
            "epsilon": (one, zero),
            "v_prediction": (signal, sigma),
            "sample": (-signal / sigma, 1 / sigma),
            "flow": (signal, one),
            "edm": (-1 / sigma, 1 / sigma),
        }[self.prediction_type]
        if self.space == "noise":
            factors = (c / sigma * per_output, c / sigma * per_sample)
        else:
            share = c**2 / (sigma * k)
            factors = (-share * per_output, 1 / k - share * per_sample)
        weight = one
        if self.prediction_type == "edm":
            weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
            if self.space == "noise":
                weight = torch.where(above, weight * c**2, weight)
        if self.weighting is not None:
            weight = weight * self._outer_weight(levels)
        model_input = sample.to(x0.dtype)
        state = AmbientState(
            sample=model_input.float(),
            target=target,
            above=above.to(x0.device),
            levels=levels.to(x0.device),
            output_factor=_spread(torch.where(above, factors[0], one), x0),
            sample_factor=_spread(torch.where(above, factors[1], zero), x0),
            weight=_spread(weight, x0),
        )
        return model_input, state.levels, state

    def _outer_weight(self, levels):
        weight = torch.as_tensor(self.weighting(levels)).double().cpu()
        if weight.shape != levels.shape or not torch.isfinite(weight).all() or (weight < 0).any():
            raise ValueError(
                f"`weighting` has to give {len(levels)} finite weights, none negative, but gave {weight.tolist()}."
            )
        return weight

    def _levels(self, x0, generator, timesteps, sigmas):
        """Levels as the model gets them, and signal and noise at them; all `(B,)`, the latter two in float64."""
        batch = len(x0)
        if timesteps is not None and sigmas is not None:
            raise ValueError("Give `timesteps` or `sigmas`, not both.")
        for name, value in (("timesteps", timesteps), ("sigmas", sigmas)):
            if value is not None and torch.as_tensor(value).shape != (batch,):
                raise ValueError(
                    f"`{name}` has to have one entry per sample, ({batch},), but has shape "
                    f"{tuple(torch.as_tensor(value).shape)}."
                )
        if self.prediction_type == "edm":
            if timesteps is not None:
                raise ValueError("EDM has no timesteps: give `sigmas`.")
            if sigmas is None:
                normal = randn_tensor((batch, *[1] * (x0.ndim - 1)), generator=generator, device=x0.device)
                sigmas = (self.p_mean + self.p_std * normal.flatten()).exp()
            sigmas = torch.as_tensor(sigmas).cpu()
            if not (sigmas > 0).all() or not torch.isfinite(sigmas).all():
                raise ValueError(f"`sigmas` have to be positive and finite but are {sigmas.tolist()}.")
            return sigmas.float(), torch.ones(batch, dtype=torch.float64), sigmas.double()
        if self.prediction_type == "flow":
            times = self._flow_times(batch, generator, x0.device, timesteps, sigmas)
            if not ((times >= 0) & (times <= 1)).all():
                raise ValueError(f"Times of a flow have to lie in [0, 1] but are {times.tolist()}.")
            if self.space == "sample" and (times == 1).any():
                raise ValueError("`space='sample'` is undefined at time 1, where no signal is left. Use 'noise'.")
            return (times * self.num_train_timesteps).float(), 1 - times, times
        if sigmas is not None:
            raise ValueError(f"`prediction_type={self.prediction_type!r}` has timesteps: give `timesteps`.")
        if timesteps is None:
            device = generator.device if generator is not None else "cpu"
            timesteps = torch.randint(0, self.num_train_timesteps, (batch,), generator=generator, device=device)
        indices = torch.as_tensor(timesteps).cpu()
        if indices.is_floating_point() or not ((indices >= 0) & (indices < self.num_train_timesteps)).all():
            raise ValueError(
                f"`timesteps` have to be integers in [0, {self.num_train_timesteps}) but are {indices.tolist()}."
            )
        alphas = self._alphas_cumprod[indices]
        return indices, alphas.sqrt(), (1 - alphas).sqrt()

    def _flow_times(self, batch, generator, device, timesteps, sigmas):
        if timesteps is not None:
            return torch.as_tensor(timesteps).double().cpu() / self.num_train_timesteps
        if sigmas is not None:
            return torch.as_tensor(sigmas).double().cpu()
        drawn_on = generator.device if generator is not None else "cpu"
        if self._flow_sigmas is None:
            return torch.rand(batch, generator=generator, device=drawn_on).double().cpu()
        indices = torch.randint(0, len(self._flow_sigmas), (batch,), generator=generator, device=drawn_on)
        return self._flow_sigmas[indices.cpu()]

    def loss(self, model_output, state, reduction="mean"):
        """
        The loss of a model's output for a prepared batch, in float32.

        Args:
            model_output (`torch.Tensor` of shape `(B, ...)`):
                What the model gave for the prepared input, of the kind that `prediction_type` names.
            state ([`AmbientState`]):
                Of the same batch.
            reduction (`str`, *optional*, defaults to `"mean"`):
                `"mean"` over everything; `"sum"` over everything, divided by the batch, as the official code does;
                `"sample"` for the mean of each sample; `"none"`.

        Returns:
            `torch.Tensor`: a scalar, `(B,)` for `"sample"`, or `(B, ...)` for `"none"`.

        Raises:
            ValueError: on an output of another shape, an unknown reduction, or a loss that is not finite.
        """
        if reduction not in REDUCTIONS:
            raise ValueError(f"`reduction` has to be one of {', '.join(REDUCTIONS)} but is {reduction!r}.")
        if model_output.shape != state.target.shape:
            raise ValueError(
                f"`model_output` has to have the shape of the batch, {tuple(state.target.shape)}, but has "
                f"{tuple(model_output.shape)}."
            )
        prediction = state.output_factor * model_output.float() + state.sample_factor * state.sample
        loss = state.weight * (prediction - state.target).square()
        per_sample = loss.flatten(1).mean(1)
        finite = torch.isfinite(per_sample)
        if not finite.all():
            branches = {True: "above the threshold", False: "at or below the threshold"}
            where = " and ".join(branches[flag] for flag in sorted(set(state.above[~finite].tolist())))
            raise ValueError(
                f"The loss is not finite {where}, at the levels {state.levels[~finite].tolist()}: the model's output "
                f"{'holds NaN or infinity' if not torch.isfinite(model_output).all() else 'is too large'}."
            )
        if reduction == "none":
            return loss
        if reduction == "sample":
            return per_sample
        return per_sample.mean() if reduction == "mean" else loss.sum() / len(loss)


def _spread(values, like):
    """`(B,)` as `(B, 1, ...)`, beside a batch; numbers in float32."""
    values = values.to(like.device) if values.dtype == torch.bool else values.to(like.device, torch.float32)
    return values.view(-1, *[1] * (like.ndim - 1))


def _combine(above, factors, ordinary_factors, *tensors):
    """A sum of tensors with one factor per sample, chosen by branch in float64 before anything is multiplied."""
    chosen = [torch.where(above, hidden, ordinary) for hidden, ordinary in zip(factors, ordinary_factors)]
    return sum(_spread(factor, tensor) * tensor for factor, tensor in zip(chosen, tensors))

# SPDX-License-Identifier: Apache-2.0
"""Heun's method for models with EDM preconditioning, with the stochastic churn of the paper."""

import math

import torch
from diffusers import EDMEulerScheduler, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_edm_euler import EDMEulerSchedulerOutput
from diffusers.utils.torch_utils import randn_tensor


# diffusers looks for this name in the module of a scheduler when it loads a pipeline.
__all__ = ["EDMHeunScheduler", "SchedulerMixin"]

SIGMA_SCHEDULES = ("karras", "exponential")
_MAX_GAMMA = math.sqrt(2) - 1


class EDMHeunScheduler(EDMEulerScheduler):
    r"""
    Second-order sampler of [Elucidating the Design Space of Diffusion-Based Generative
    Models](https://huggingface.co/papers/2206.00364), algorithm 2 (algorithm 1 without churn).

    Each interval of the schedule takes two model calls, a step and its correction, but the last takes one:
    `2 * num_inference_steps - 1` in all. `timesteps` lists all of them, so a pipeline's loop needs no change. Noise is
    added before the model is called, as in the paper; `EDMEulerScheduler` adds it afterwards.

    Args:
        sigma_min (`float`, *optional*, defaults to 0.002), sigma_max (`float`, *optional*, defaults to 80.0):
            Smallest and largest noise level, not counting the final 0.
        sigma_data (`float`, *optional*, defaults to 0.5):
            Standard deviation of the data, as in training.
        sigma_schedule (`str`, *optional*, defaults to `"karras"`):
            `"karras"`, equal steps in `sigma^(1 / rho)`, or `"exponential"`, equal steps in `ln(sigma)`.
        num_train_timesteps (`int`, *optional*, defaults to 1000):
            Length of the schedule before `set_timesteps`.
        prediction_type (`str`, *optional*, defaults to `"epsilon"`):
            `"epsilon"`: the network of EDM; `"v_prediction"`: its negative.
        rho (`float`, *optional*, defaults to 7.0):
            Higher puts more steps at low noise.
        final_sigmas_type (`str`, *optional*, defaults to `"zero"`):
            `"zero"` ends at noise level 0, `"sigma_min"` at the smallest.
        s_churn (`float`, *optional*, defaults to 0.0):
            Noise that is added again on the way, over all steps. 0 is the deterministic sampler; higher corrects
            errors of the model and, too high, washes out details.
        s_tmin, s_tmax (`float`, *optional*, defaults to 0.0 and no bound):
            Noise levels between which noise is added.
        s_noise (`float`, *optional*, defaults to 1.0):
            Standard deviation of the added noise.
        float64_state (`bool`, *optional*, defaults to `False`):
            Keeps the sample in float64 from step to step, whatever the dtype of the latents. Not on MPS.

    Raises:
        ValueError: on a value out of range.

    Example:

    ```py
    >>> from diffusers import EDMEulerScheduler
    >>> from diffusers_ext import EDMHeunScheduler

    >>> scheduler = EDMHeunScheduler.from_config(EDMEulerScheduler(sigma_max=20.0).config, s_churn=10.0)
    >>> scheduler.set_timesteps(18)
    >>> len(scheduler.timesteps)
    35
    ```
    """

    order = 2

    @register_to_config
    def __init__(
        self,
        sigma_min: float = 0.002,
        sigma_max: float = 80.0,
        sigma_data: float = 0.5,
        sigma_schedule: str = "karras",
        num_train_timesteps: int = 1000,
        prediction_type: str = "epsilon",
        rho: float = 7.0,
        final_sigmas_type: str = "zero",
        s_churn: float = 0.0,
        s_tmin: float = 0.0,
        s_tmax: float | None = None,
        s_noise: float = 1.0,
        float64_state: bool = False,
    ):
        if not 0 < sigma_min < sigma_max < math.inf:
            raise ValueError(f"Expected 0 < `sigma_min` < `sigma_max` but got {sigma_min} and {sigma_max}.")
        for name, value in (("sigma_data", sigma_data), ("rho", rho)):
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` has to be positive but is {value}.")
        for name, value, known in (
            ("sigma_schedule", sigma_schedule, SIGMA_SCHEDULES),
            ("prediction_type", prediction_type, ("epsilon", "v_prediction")),
            ("final_sigmas_type", final_sigmas_type, ("zero", "sigma_min")),
        ):
            if value not in known:
                raise ValueError(f"`{name}` has to be one of {', '.join(known)} but is {value!r}.")
        if not 0 <= s_churn < math.inf or not 0 <= s_noise < math.inf:
            raise ValueError(f"`s_churn` and `s_noise` must not be negative but are {s_churn} and {s_noise}.")
        if s_tmin < 0 or (s_tmax is not None and s_tmax < s_tmin):
            raise ValueError(f"Expected 0 <= `s_tmin` <= `s_tmax` but got {s_tmin} and {s_tmax}.")
        super().__init__(
            sigma_min=sigma_min,
            sigma_max=sigma_max,
            sigma_data=sigma_data,
            sigma_schedule=sigma_schedule,
            num_train_timesteps=num_train_timesteps,
            prediction_type=prediction_type,
            rho=rho,
            final_sigmas_type=final_sigmas_type,
        )
        self._reset()

    def _reset(self):
        self._step_index = self._begin_index = None
        self._first_half = self._carried = None

    @property
    def init_noise_sigma(self):
        """Standard deviation of the initial noise: the largest level, with the noise of the first step."""
        if self.num_inference_steps is None:
            return self.config.sigma_max
        return math.hypot(self._largest_sigma, self.config.s_noise * self._added_noise(0))

    def set_timesteps(self, num_inference_steps=None, device=None, sigmas=None):
        """
        Sets the noise levels.

        Args:
            num_inference_steps (`int`, *optional*):
                Number of levels before the final one. The model is called `2 * num_inference_steps - 1` times.
            device (`str` or `torch.device`, *optional*):
                Where the timesteps go.
            sigmas (`torch.Tensor` or `list[float]`, *optional*):
                Falling noise levels of your own, without the final 0, instead of a number.

        Raises:
            ValueError: without steps, or with levels that do not fall.
        """
        if (num_inference_steps is None) == (sigmas is None):
            raise ValueError("Give either `num_inference_steps` or `sigmas`.")
        if sigmas is None:
            if num_inference_steps < 1:
                raise ValueError(f"`num_inference_steps` has to be at least 1 but is {num_inference_steps}.")
            levels = self._grid(num_inference_steps)
        else:
            levels = [float(sigma) for sigma in sigmas]
            falling = all(a > b > 0 for a, b in zip(levels, levels[1:]))
            if not levels or not 0 < levels[0] < math.inf or not falling:
                raise ValueError(f"`sigmas` have to be positive and to fall but are {levels}.")
        self.num_inference_steps, self._largest_sigma = len(levels), levels[0]
        final = 0.0 if self.config.final_sigmas_type == "zero" else levels[-1]
        # Where the model is called: at the raised level of each interval, then at its lower end.
        raised = [sigma * (1 + self._gamma(sigma, len(levels))) for sigma in levels]
        ends = [*levels[1:], final]
        visited = [sigma for pair in zip(raised, ends) for sigma in pair]
        dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64
        # One value beside every timestep, and the last to arrive at. They stay on the CPU, where `step` reads them.
        self.sigmas = torch.tensor(visited, dtype=dtype)
        self.timesteps = self.precondition_noise(self.sigmas[:-1]).to(device, torch.float32)
        self._reset()

    def _grid(self, count):
        high, low = self.config.sigma_max, self.config.sigma_min
        ramp = torch.linspace(0, 1, count, dtype=torch.float64)
        if self.config.sigma_schedule == "exponential":
            return torch.exp(math.log(high) + ramp * (math.log(low) - math.log(high))).tolist()
        power = 1 / self.config.rho
        return ((high**power + ramp * (low**power - high**power)) ** self.config.rho).tolist()

    def _gamma(self, sigma, count):
        upper = math.inf if self.config.s_tmax is None else self.config.s_tmax
        return min(self.config.s_churn / count, _MAX_GAMMA) if self.config.s_tmin <= sigma <= upper else 0.0

    def scale_model_input(self, sample, timestep):
        """The sample times `c_in`, what an EDM network takes; in float32 where the sample is kept in float64."""
        return super().scale_model_input(sample.float() if sample.dtype == torch.float64 else sample, timestep)

    def _added_noise(self, index):
        """Deviation of the noise that raises the level before evaluation `index`, an even number."""
        before = self._largest_sigma if index == 0 else self.sigmas[index - 1].item()
        return math.sqrt(max(self.sigmas[index].item() ** 2 - before**2, 0))

    def add_churn(self, sample, index, generator=None):
        """
        Raises the noise level of a sample as the sampler does before evaluation `index`.

        [`step`] does this for all intervals but the first, whose noise is part of `init_noise_sigma`; only who wants
        the random numbers in the order of the official code starts at `sigmas` of its own and calls it with index 0.

        Args:
            sample (`torch.Tensor`):
                The sample at the level before.
            index (`int`):
                Even index into `timesteps`.
            generator (`torch.Generator` or a list of them, *optional*):
                Source of the noise. It is drawn from whenever `s_churn` is positive, also where no noise is added.
        """
        if self.config.s_churn == 0:
            return sample
        noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
        return sample + self.config.s_noise * self._added_noise(index) * noise

    def step(self, model_output, timestep, sample, generator=None, return_dict=True, pred_original_sample=None):
        """
        One model call further: even calls step to the lower noise level, odd ones correct that step.

        Args:
            model_output (`torch.Tensor` of shape `(B, ...)`):
                What the network gave for `scale_model_input(sample, timestep)`.
            timestep (`torch.Tensor` or `float`):
                One of `timesteps`.
            sample (`torch.Tensor` of shape `(B, ...)`):
                What the last call returned.
            generator (`torch.Generator` or a list of them, *optional*):
                For churn.
            return_dict (`bool`, *optional*, defaults to `True`):
                Whether to return an `EDMEulerSchedulerOutput` instead of a tuple.
            pred_original_sample (`torch.Tensor`, *optional*):
                The denoised sample, where it is known already.

        Returns:
            `EDMEulerSchedulerOutput` or `tuple`: the next sample, in the dtype of this one, and the denoised one.

        Raises:
            ValueError: before `set_timesteps` or `scale_model_input`, after the last step, or on an integer timestep.
        """
        index = self.step_index
        if self.num_inference_steps is None or index is None:
            raise ValueError(
                "Call `set_timesteps` once and `scale_model_input` before every model call: an EDM network takes "
                "scaled samples."
            )
        if isinstance(timestep, int) or (isinstance(timestep, torch.Tensor) and not timestep.is_floating_point()):
            raise ValueError(f"`timestep` has to be one of `scheduler.timesteps` but is the integer {timestep}.")
        if index >= len(self.timesteps):
            raise ValueError(f"All {len(self.timesteps)} steps are done; call `set_timesteps` to start again.")
        precise = self.config.float64_state or sample.dtype == torch.float64
        state = sample.to(torch.float64 if precise else torch.float32)
        if self._carried is not None and torch.equal(self._carried[0], sample):
            state = self._carried[1]
        sigma, next_sigma = self.sigmas[index].item(), self.sigmas[index + 1].item()
        denoised = pred_original_sample
        if denoised is None:
            # In float32 whatever the state is, as the official sampler does: it is as good as the network.
            level = torch.tensor(sigma, dtype=torch.float32)
            denoised = self.precondition_outputs(state.float(), model_output.float(), level)
        derivative = (state - denoised.to(state.dtype)) / sigma
        if index % 2 == 0:
            self._first_half = (index, state, derivative)
            result = state + (next_sigma - sigma) * derivative
        else:
            result = state
            # Who starts in the middle of an interval has no step to correct: the sample is at its lower end already.
            if self._first_half is not None and self._first_half[0] == index - 1:
                _, start, first = self._first_half
                result = start + (sigma - self.sigmas[index - 1].item()) * (first + derivative) / 2
            result = self.add_churn(result, index + 1, generator)
        self._step_index = index + 1
        previous = result.to(sample.dtype)
        self._carried = (previous, result) if self.config.float64_state else None
        denoised = denoised.to(sample.dtype)
        if not return_dict:
            return previous, denoised
        return EDMEulerSchedulerOutput(prev_sample=previous, pred_original_sample=denoised)

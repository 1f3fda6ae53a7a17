# SPDX-License-Identifier: Apache-2.0
"""The conditional and the unconditional noise prediction of a model, whatever it predicts."""

from contextlib import nullcontext

import torch


PREDICTION_TYPES = ("epsilon", "v_prediction", "sample", "flow")
SPACES = ("score", "x0")


class GuidedDenoiser:
    r"""
    A denoiser with a prompt and a negative prompt for each of `n` samples.

    Notation of [Jeon et al.](https://huggingface.co/papers/2412.04140), section 3: `x_t = a_t x_0 + b_t z`; `eps(x, t,
    c)` is the noise prediction, `s = -eps / b_t` the score, and the differences `eD`, `sD` are conditional minus
    unconditional. Everything that comes out is in float32 (float64 where the model is), so that norms and thresholds
    mean the same in every precision of the model. Nothing is frozen: take gradients with `torch.autograd.grad` towards
    `x` alone.

    Args:
        denoiser (`torch.nn.Module`):
            A U-Net or transformer of diffusers.
        scheduler (`SchedulerMixin`):
            The one the model was trained with or any other for the same schedule; only its schedule is read.
        prompt_embeds, negative_prompt_embeds (`torch.Tensor` of shape `(n, tokens, channels)`):
            One row per sample.
        model_kwargs (`dict`, *optional*):
            Further arguments of the denoiser, for instance `added_cond_kwargs` of SDXL. Tensors have `2 n` rows, the
            unconditional ones first, as in a pipeline. FLUX with true guidance needs `guidance` here.
        space (`str`, *optional*, defaults to `"score"`):
            What `difference` returns: that of scores, or that of clean predictions, which does not vanish where the
            signal does (`a_t = 0`; experimental).
        official_v_formula (`bool`, *optional*, defaults to `False`):
            Whether a v-prediction is put into the formula of a clean prediction, as the published code does.

    Raises:
        ValueError: without an unconditional branch, with a guidance-distilled model, or rows that do not fit.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import lab
    >>> from diffusers_ext.methods.memorization.denoising_memorization import GuidedDenoiser

    >>> pipe = lab.load_pipeline()
    >>> positive, negative = pipe.encode_prompt("cat, neon style", "cpu", 1, True)
    >>> denoiser = GuidedDenoiser(pipe.unet, pipe.scheduler, positive, negative)
    >>> denoiser.noise_difference(torch.randn(1, 4, 16, 16), 981).shape
    torch.Size([1, 4, 16, 16])
    ```
    """

    def __init__(
        self,
        denoiser,
        scheduler,
        prompt_embeds,
        negative_prompt_embeds,
        model_kwargs=None,
        space="score",
        official_v_formula=False,
    ):
        if space not in SPACES:
            raise ValueError(f"`space` has to be one of {', '.join(SPACES)} but is {space!r}.")
        if negative_prompt_embeds is None:
            raise ValueError(
                "The metric compares the prediction with the prompt and without it, so it needs classifier-free "
                "guidance: pass `negative_prompt_embeds` and a guidance scale above 1."
            )
        if prompt_embeds.shape != negative_prompt_embeds.shape:
            raise ValueError(
                f"`prompt_embeds` and `negative_prompt_embeds` have to have one shape but have "
                f"{tuple(prompt_embeds.shape)} and {tuple(negative_prompt_embeds.shape)}."
            )
        config = getattr(denoiser, "config", {})
        embedded = config.get("guidance_embeds") and "guidance" not in (model_kwargs or {})
        if embedded or config.get("time_cond_proj_dim"):
            raise ValueError(
                f"{type(denoiser).__name__} takes the guidance scale as an input (it is guidance-distilled): it has "
                f"no unconditional prediction to compare with. Use the model it was distilled from."
            )
        self.denoiser, self.scheduler = denoiser, scheduler
        self.prompt_embeds, self.negative_prompt_embeds = prompt_embeds, negative_prompt_embeds
        self.model_kwargs = dict(model_kwargs or {})
        self.space, self.official_v_formula = space, official_v_formula
        self.prediction_type = prediction_type_of(scheduler)
        # FLUX counts time in [0, 1].
        self._time_unit = scheduler.config.num_train_timesteps if "guidance_embeds" in config else 1
        for name, value in _leaves(self.model_kwargs):
            if value.shape[0] != 2 * self.num_samples:
                raise ValueError(
                    f"`model_kwargs` entry {name!r} has to have {2 * self.num_samples} rows, unconditional ones "
                    f"first, but has {value.shape[0]}."
                )

    @property
    def num_samples(self):
        return self.prompt_embeds.shape[0]

    def select(self, index):
        """
        The same for some of the samples.

        Args:
            index (`torch.Tensor`, `slice` or `list[int]`):
                Which.

        Returns:
            [`GuidedDenoiser`]
        """
        n = self.num_samples

        def chosen(value):
            return value.unflatten(0, (2, n))[:, index].flatten(0, 1)

        return GuidedDenoiser(
            self.denoiser,
            self.scheduler,
            self.prompt_embeds[index],
            self.negative_prompt_embeds[index],
            {name: _map_leaves(chosen, value) for name, value in self.model_kwargs.items()},
            self.space,
            self.official_v_formula,
        )

    def with_prompt_embeds(self, prompt_embeds):
        """The same with other embeddings of the prompt, for instance ones that carry a gradient."""
        return GuidedDenoiser(
            self.denoiser,
            self.scheduler,
            prompt_embeds,
            self.negative_prompt_embeds,
            self.model_kwargs,
            self.space,
            self.official_v_formula,
        )

    def coefficients(self, timestep):
        """
        `a_t` and `b_t` of `x_t = a_t x_0 + b_t z`.

        Args:
            timestep (`int`, `float` or `torch.Tensor`):
                As in `scheduler.timesteps`; between two training timesteps, the log of the signal-to-noise ratio is
                interpolated.

        Returns:
            `tuple[float, float]`
        """
        t = float(timestep)
        if self.prediction_type == "flow":
            time = t / self.scheduler.config.num_train_timesteps
            return 1 - time, time
        known = self.scheduler.alphas_cumprod.double()
        low = min(int(t), len(known) - 1)
        alpha = known[low].item()
        if t > low:
            high = known[min(low + 1, len(known) - 1)].clamp_min(1e-20)
            logit = torch.lerp(torch.logit(known[low]), torch.logit(high), t - low)
            alpha = torch.sigmoid(logit).item()
        return alpha**0.5, (1 - alpha) ** 0.5

    def noise_scale(self, timestep):
        """
        What unit noise is multiplied by to become the model's input at the first timestep: 1, or slightly less for
        schedulers that count in sigmas (Euler, Heun, LMS).
        """
        if self.prediction_type == "flow" or float(self.scheduler.init_noise_sigma) == 1.0:
            return 1.0
        return float(self.scheduler.init_noise_sigma) * self.coefficients(timestep)[0]

    def predict(self, x, timestep, with_grad=False):
        """
        Both noise predictions, from one forward pass of the doubled batch.

        Args:
            x (`torch.Tensor` of shape `(n, ...)`):
                What the model sees at `timestep` (a scheduler's `scale_model_input` applied).
            timestep (`int`, `float` or `torch.Tensor`):
                One for all samples.
            with_grad (`bool`, *optional*, defaults to `False`):
                Whether a graph towards `x` and the embeddings is recorded (where gradients are enabled), or a tangent
                passed on.

        Returns:
            `tuple` of unconditional and conditional prediction, `(n, ...)` each.

        Raises:
            ValueError: when `x` has other rows than there are prompts.
        """
        outputs = self.outputs(x, timestep, with_grad)
        return tuple(self.to_noise(output, x, timestep) for output in outputs)

    def noise_difference(self, x, timestep, with_grad=False):
        """
        `eD = eps(x, t, c) - eps(x, t)`, `(n, ...)`; the arguments are those of `predict`.

        Raises:
            ValueError: at a timestep without any signal, where it vanishes for every prompt.
        """
        self._require_signal(timestep)
        unconditional, conditional = self.predict(x, timestep, with_grad)
        return conditional - unconditional

    def scores(self, x, timestep, with_grad=False):
        """Unconditional and conditional score, `(n, ...)` each; the arguments are those of `predict`."""
        self._require_signal(timestep)
        b = self.coefficients(timestep)[1]
        return tuple(-eps / b for eps in self.predict(x, timestep, with_grad))

    def difference(self, x, timestep, with_grad=False):
        """
        `sD`, or the difference of the clean predictions where `space="x0"`; the arguments are those of `predict`.

        Raises:
            ValueError: in the space of scores at a timestep without any signal, where it vanishes for every prompt.
        """
        if self.space == "x0":
            return self._clean_difference(x, timestep, with_grad)
        return -self.noise_difference(x, timestep, with_grad) / self.coefficients(timestep)[1]

    def _require_signal(self, timestep):
        if self.coefficients(timestep)[0] < 1e-4:
            raise ValueError(
                f"At timestep {float(timestep):g} nothing but noise is left (zero terminal signal-to-noise ratio): "
                f"the noise prediction is the input, with and without the prompt. Use `space='x0'`, or a later "
                f"timestep."
            )

    def outputs(self, x, timestep, with_grad=False):
        """What the model itself returns, unconditional and conditional; the arguments are those of `predict`."""
        if x.shape[0] != self.num_samples:
            raise ValueError(f"Expected {self.num_samples} samples, one per prompt embedding, but got {x.shape[0]}.")
        dtype = self.prompt_embeds.dtype
        doubled = torch.cat([x, x]).to(dtype)
        time = torch.as_tensor(timestep, device=x.device).reshape(-1)[:1].expand(len(doubled))
        if self._time_unit != 1:
            time = time / self._time_unit
        embeds = torch.cat([self.negative_prompt_embeds, self.prompt_embeds])
        # With a gradient the caller's mode stays: inside of `torch.func.jvp`, touching it stops the tangent.
        with nullcontext() if with_grad else torch.no_grad():
            output = self.denoiser(
                doubled, timestep=time, encoder_hidden_states=embeds, return_dict=False, **self.model_kwargs
            )[0]
            return output.to(torch.promote_types(output.dtype, torch.float32)).chunk(2)

    def to_noise(self, output, x, timestep):
        """The noise prediction that an output of the model at `x` stands for."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        a, b = self.coefficients(timestep)
        kind = self.prediction_type
        if kind == "v_prediction":
            kind = "sample" if self.official_v_formula else kind
        if kind == "epsilon":
            return output
        if kind == "v_prediction":
            return a * output + b * x
        return (x - a * output) / b if kind == "sample" else x + a * output

    def _clean_difference(self, x, timestep, with_grad):
        unconditional, conditional = self.outputs(x, timestep, with_grad)
        a, b = self.coefficients(timestep)
        difference = conditional - unconditional
        if self.prediction_type == "epsilon":
            if a < 1e-4:
                raise ValueError(
                    "A model that predicts noise has no clean prediction where nothing but noise is left; start at a "
                    "later timestep."
                )
            return difference * (-b / a)
        return difference if self.prediction_type == "sample" else -b * difference


def require_gradients(denoiser):
    """
    Refuses a model that no gradient passes through.

    Raises:
        ValueError: when its layers are cast for every forward pass: the backward pass would meet the stored weights.
    """
    for module in denoiser.modules() if isinstance(denoiser, torch.nn.Module) else ():
        if "layerwise_casting" in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}):
            raise ValueError(
                "No gradient passes through a model with layerwise casting. Use a remedy without gradients "
                "(`initial_noise`, `dynamic_guidance`, `cross_attention`, `random_tokens`), or load the model without."
            )


def prediction_type_of(scheduler):
    """
    One of `PREDICTION_TYPES`.

    Raises:
        ValueError: when the scheduler names another one.
    """
    if not hasattr(scheduler, "alphas_cumprod"):
        if not hasattr(scheduler, "sigmas"):
            raise ValueError(f"{type(scheduler).__name__} has neither `alphas_cumprod` nor `sigmas`.")
        return "flow"
    kind = scheduler.config.get("prediction_type", "epsilon")
    if kind not in PREDICTION_TYPES[:3]:
        raise ValueError(f"The scheduler's prediction type has to be one of {PREDICTION_TYPES[:3]} but is {kind!r}.")
    return kind


def _leaves(kwargs, prefix=""):
    for name, value in kwargs.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + name, value


def _map_leaves(function, value):
    if isinstance(value, dict):
        return {name: _map_leaves(function, inner) for name, inner in value.items()}
    return function(value) if isinstance(value, torch.Tensor) else value

# SPDX-License-Identifier: Apache-2.0
"""Pictures from a pixel-space EDM model, unconditional or by class."""

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor

from .modeling_ambient_diffusion import EDMUNet2DModel, edm_network
from .scheduling_edm_heun import EDMHeunScheduler


# diffusers finds classes of saved components in modules that are imported.
__all__ = ["EDMHeunScheduler", "EDMPipeline", "EDMUNet2DModel"]


class EDMPipeline(DiffusionPipeline):
    r"""
    Draws pictures with a model that was trained as
    [EDM](https://huggingface.co/papers/2206.00364) or, with the same network and sampler,
    [Ambient Diffusion](https://huggingface.co/papers/2502.21278).

    Args:
        unet ([`EDMUNet2DModel`] or `UNet2DModel`):
            The network `F` inside EDM's preconditioning.
        scheduler ([`EDMHeunScheduler`], `EDMEulerScheduler` or `EDMDPMSolverMultistepScheduler`):
            Does the preconditioning.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext import EDMHeunScheduler, EDMPipeline, EDMUNet2DModel

    >>> unet = EDMUNet2DModel(16, model_channels=8, channel_mult=(1, 2), num_blocks=1, attn_resolutions=(8,))
    >>> pipe = EDMPipeline(unet.eval(), EDMHeunScheduler())
    >>> pipe.set_progress_bar_config(disable=True)
    >>> pipe(num_inference_steps=4, generator=torch.Generator().manual_seed(0)).images[0].size
    (16, 16)
    ```
    """

    model_cpu_offload_seq = "unet"
    _callback_tensor_inputs = ["latents"]

    def __init__(self, unet, scheduler):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)
        self.image_processor = VaeImageProcessor(vae_scale_factor=1)

    @property
    def num_timesteps(self):
        """Model calls of the last drawing."""
        return self._num_timesteps

    @property
    def interrupt(self):
        """Whether a callback asked to stop."""
        return self._interrupt

    def check_inputs(self, batch_size, class_labels, latents, output_type, callback_on_step_end_tensor_inputs):
        """Raises a `ValueError` on arguments of [`__call__`] that do not fit."""
        if not hasattr(self.scheduler, "precondition_outputs"):
            raise ValueError(
                f"`scheduler` has to do EDM preconditioning but is a {type(self.scheduler).__name__}. Use "
                f"EDMHeunScheduler, EDMEulerScheduler or EDMDPMSolverMultistepScheduler."
            )
        if batch_size < 1:
            raise ValueError(f"`batch_size` has to be at least 1 but is {batch_size}.")
        if class_labels is not None and len(class_labels) != batch_size:
            raise ValueError(f"Expected {batch_size} class labels but got {len(class_labels)}.")
        if latents is not None and tuple(latents.shape) != self.sample_shape(batch_size):
            raise ValueError(
                f"`latents` has to have the shape {self.sample_shape(batch_size)} but has {tuple(latents.shape)}."
            )
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"`output_type` has to be one of pil, np, pt, latent but is {output_type!r}.")
        unknown = [name for name in callback_on_step_end_tensor_inputs if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(
                f"`callback_on_step_end_tensor_inputs` has to be out of {self._callback_tensor_inputs} but has "
                f"{unknown}."
            )

    def sample_shape(self, batch_size):
        """`(batch_size, channels, height, width)` of what the network draws."""
        size = self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return (batch_size, self.unet.config.in_channels, height, width)

    def prepare_latents(self, batch_size, generator=None, latents=None):
        """
        The noise that sampling starts from.

        Args:
            batch_size (`int`):
                Number of pictures.
            generator (`torch.Generator` or a list of them, *optional*):
                Source of the noise.
            latents (`torch.Tensor` of shape [`sample_shape`], *optional*):
                Noise of unit variance, instead of drawing it.
        """
        dtype = torch.float64 if self.scheduler.config.get("float64_state") else torch.float32
        if latents is None:
            shape = self.sample_shape(batch_size)
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=torch.float32)
        latents = latents.to(self._execution_device, dtype)
        if hasattr(self.scheduler, "add_churn"):
            # Noise is drawn in the order of the official sampler: for the first step, too.
            return self.scheduler.add_churn(latents * self.scheduler.config.sigma_max, 0, generator)
        return latents * self.scheduler.init_noise_sigma

    @torch.no_grad()
    def __call__(
        self,
        batch_size=1,
        num_inference_steps=18,
        class_labels=None,
        generator=None,
        latents=None,
        output_type="pil",
        return_dict=True,
        callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=("latents",),
    ):
        r"""
        Args:
            batch_size (`int`, *optional*, defaults to 1):
                Number of pictures.
            num_inference_steps (`int`, *optional*, defaults to 18):
                Noise levels; with [`EDMHeunScheduler`] the network is called `2 * num_inference_steps - 1` times.
            class_labels (`torch.Tensor` of shape `(batch_size, ...)`, *optional*):
                As the network takes them: indices for `UNet2DModel`, one-hot vectors for [`EDMUNet2DModel`].
            generator (`torch.Generator` or a list of `batch_size` of them, *optional*):
                With one per picture, a picture does not depend on the batch it is drawn in.
            latents (`torch.Tensor` of shape `(batch_size, channels, height, width)`, *optional*):
                Initial noise of unit variance.
            output_type (`str`, *optional*, defaults to `"pil"`):
                `"pil"`, `"np"`, `"pt"`, or `"latent"` for values around [-1, 1] as they come.
            return_dict (`bool`, *optional*, defaults to `True`):
                Whether to return an `ImagePipelineOutput` instead of a tuple.
            callback_on_step_end (`Callable`, *optional*):
                Called as `callback(pipe, step, timestep, {"latents": latents})` after every model call; what it
                returns replaces the latents.
            callback_on_step_end_tensor_inputs (`list[str]`, *optional*):
                Only `"latents"`.

        Returns:
            `ImagePipelineOutput` or `tuple`

        Raises:
            ValueError: on arguments that do not fit, or a scheduler without EDM preconditioning.
        """
        # 1. Check the arguments
        self.check_inputs(batch_size, class_labels, latents, output_type, callback_on_step_end_tensor_inputs)
        device = self._execution_device
        self._interrupt = False

        # 2. Noise levels and initial noise
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)
        latents = self.prepare_latents(batch_size, generator, latents)
        if class_labels is not None:
            class_labels = torch.as_tensor(class_labels, device=device)

        # 3. Denoise
        with self.progress_bar(total=self._num_timesteps) as progress_bar:
            for step, timestep in enumerate(timesteps):
                if self.interrupt:
                    continue
                scaled = self.scheduler.scale_model_input(latents, timestep)
                label = timestep.float().expand(batch_size)
                output = edm_network(self.unet, scaled, label, class_labels)
                latents = self.scheduler.step(output, timestep, latents, generator=generator, return_dict=False)[0]
                if callback_on_step_end is not None:
                    tensors = dict.fromkeys(callback_on_step_end_tensor_inputs, latents)
                    latents = callback_on_step_end(self, step, timestep, tensors).get("latents", latents)
                progress_bar.update()

        # 4. Pictures
        images = latents.float()
        if output_type != "latent":
            images = self.image_processor.postprocess(images, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

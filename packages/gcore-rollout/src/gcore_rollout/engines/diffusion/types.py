"""What goes into an engine of images and what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.kernels import FlowODE, Kernel
from gcore_rollout.engines.types import AnyRequest, AnySample
from gcore_rollout.errors import RequestError

ImageFinishReason = Literal["stop", "abort"]
"""All steps were made; `Engine.abort` cut it."""


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """How an image is denoised."""

    num_inference_steps: int
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1: none."""
    kernel: Kernel = field(default_factory=FlowODE)
    """How the steps of ``window`` are made; the others are made without noise."""
    window: tuple[int, int] | None = None
    """First step with noise, and the one behind the last: these are recorded. None: all steps, and those that have
    noise are recorded. Flow-GRPO-Fast and MixGRPO (arXiv 2507.21802) keep it short, so that fewer are trained on."""
    size: tuple[int, int] | None = None
    """Height and width in pixels; None: the pipeline's own."""

    def __post_init__(self) -> None:
        if self.num_inference_steps < 1:
            raise RequestError(f"num_inference_steps is {self.num_inference_steps}; expected at least 1")
        if not self.guidance_scale >= 0:
            raise RequestError(f"guidance_scale is {self.guidance_scale}; expected 0 or more")
        if self.window is not None:
            first, end = self.window
            if not 0 <= first < end <= self.num_inference_steps:
                raise RequestError(
                    f"window is {self.window}: 0 <= first < end <= num_inference_steps={self.num_inference_steps} is "
                    "needed"
                )


@dataclass(frozen=True, kw_only=True)
class ImageRequest(AnyRequest):
    """One prompt, of which ``n`` images are to be made. One that is aborted starts anew."""

    prompt: str
    """Or, for a pipeline of classes, the name or number of one."""
    sampling: ImageSampling

    @property
    def work_per_sample(self) -> int:
        """Steps of an image."""
        return self.sampling.num_inference_steps

    def aborted(self, index: int) -> "ImageSample":
        """An image of which there is nothing."""
        nothing = np.zeros(0, np.float32)
        trajectory = Trajectory(
            latents=nothing,
            next_latents=nothing,
            means=nothing,
            log_probs=nothing,
            steps=np.zeros(0, np.int64),
            levels=nothing,
            next_levels=nothing,
            timesteps=nothing,
        )
        return ImageSample(
            request_id=self.request_id,
            index=index,
            image=np.zeros((0, 0, 3), np.uint8),
            latents=nothing,
            trajectory=trajectory,
            conditions={},
            shared_conditions={},
            guidance_scale=None,
            weight_version=-1,
            finish_reason="abort",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """The recorded steps of one image; K of them, latents of any shape [...]. What is needed to make them again."""

    latents: NDArray[np.float32]
    """[K, ...] before each step."""
    next_latents: NDArray[np.float32]
    """[K, ...] behind it."""
    means: NDArray[np.float32]
    """[K, ...] of the Gaussians that those were drawn from."""
    log_probs: NDArray[np.float32]
    """[K]; see `Transition.log_prob`. NaN: the step has no noise, and so no density."""
    steps: NDArray[np.int64]
    """[K] which of the sampler's."""
    levels: NDArray[np.float32]
    """[K] see `kernels`."""
    next_levels: NDArray[np.float32]
    """[K]."""
    timesteps: NDArray[np.float32]
    """[K] as the model is told them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSample(AnySample):
    """One image, and how it came to be."""

    image: NDArray[np.uint8]
    """[H, W, 3]; empty if it was cut short."""
    latents: NDArray[np.float32]
    """[...] what the image was decoded from."""
    trajectory: Trajectory
    conditions: Mapping[str, NDArray[np.generic]]
    """What the model was told beside latents and timestep, by the names of its arguments; of an image with guidance,
    [2, ...]: without the prompt, and with it."""
    guidance_scale: float | None
    """None: the model was asked once, without guidance."""
    shared_conditions: Mapping[str, NDArray[np.generic]]
    """The same of what has no entry for each image, such as positions."""
    weight_version: int
    """Of the weights that made it; -1 if it was cut short."""
    finish_reason: ImageFinishReason

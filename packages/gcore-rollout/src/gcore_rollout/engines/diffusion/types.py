"""Requests for images, and the images with their trajectories."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.kernels import DDIM, FlowODE, Kernel
from gcore_rollout.engines.protocol import AnyRequest, AnySample
from gcore_rollout.errors import RequestError

STACKED = ("latents", "next_latents", "means", "log_probs")
"""Fields of a `Trajectory` that have a row for each image of a step."""
SCALARS = ("levels", "next_levels", "timesteps")
"""Fields that all images of a batch share."""

Condition = Any
"""An argument of a model: an array in the data type that it was given (bfloat16 is that of ml_dtypes), or a plain value
(numbers, strings, None, and lists, tuples and dicts of them)."""
Conditions = Mapping[str, Condition]
"""By the model's names. ``a.b`` is entry b of a dict a, or of a tuple where b is a number; ``a[]`` is an
image's entry of a list a; ``a+1`` follows the latents, which are argument a, along axis 1 of the batch."""

ImageFinishReason = Literal["stop", "abort"]
"""All steps were made; `Engine.abort` cut it short."""


@dataclass(frozen=True, kw_only=True)
class ImageSampling:
    """Settings of denoising.

    Example:
        >>> sampling = ImageSampling(num_inference_steps=10, kernel=FlowSDE(), window=(0, 3))
        >>> sampling.suits(replace(sampling, window=(4, 7)))
        True
        >>> ImageSampling(num_inference_steps=10, window=(8, 12))
        Traceback (most recent call last):
            ...
        gcore_rollout.errors.RequestError: window is (8, 12); expected 0 <= first < end <= num_inference_steps=10
    """

    num_inference_steps: int
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1: none."""
    kernel: Kernel = field(default_factory=FlowODE)
    """The kernel of the steps in ``window``; the others are made without noise."""
    window: tuple[int, int] | None = None
    """First step with noise, and the one after the last; these are recorded. None: all steps, of which those with
    noise are recorded. Flow-GRPO-Fast and MixGRPO (arXiv 2507.21802) keep it short, so that fewer are trained on."""
    size: tuple[int, int] | None = None
    """Height and width in pixels; None: the pipeline's own."""
    shared_noise: bool = False
    """All images of a request start from the same noise, and differ by that of their steps (DanceGRPO, arXiv
    2505.07818)."""
    negative_prompt: str = ""
    """Text that the model is given in place of the prompt in the pass without it; empty: the pipeline's own."""
    decodes: bool = True
    """False: images are left as latents, which saves the pass of a decoder, if the pipeline has one."""

    def suits(self, sampling: "ImageSampling") -> bool:
        """Return whether images with these settings and with others can be made in one batch: windows may differ."""
        has_windows = self.window is not None and sampling.window is not None
        return self == sampling or (
            has_windows and replace(self, window=sampling.window) == sampling
        )

    def __post_init__(self) -> None:
        if self.num_inference_steps < 1:
            raise RequestError(
                f"num_inference_steps is {self.num_inference_steps}; expected at least 1"
            )
        if not self.guidance_scale >= 0:
            raise RequestError(f"guidance_scale is {self.guidance_scale}; expected 0 or more")
        is_noiseless = isinstance(self.kernel, FlowODE) or self.kernel == DDIM(eta=0.0)
        if self.shared_noise and is_noiseless:
            raise RequestError(
                f"shared_noise is True; expected False with {self.kernel}: all images would be alike"
            )
        if self.negative_prompt and self.guidance_scale <= 1:
            raise RequestError(
                f"guidance_scale is {self.guidance_scale}; expected above 1 with a negative_prompt"
            )
        if self.window is not None:
            first, end = self.window
            if not 0 <= first < end <= self.num_inference_steps:
                raise RequestError(
                    f"window is {self.window}; expected 0 <= first < end <= "
                    f"num_inference_steps={self.num_inference_steps}"
                )


@dataclass(frozen=True, kw_only=True)
class ImageRequest(AnyRequest):
    """One prompt for which ``n`` images are to be made. An aborted image cannot be continued.

    Example:
        >>> sampling = ImageSampling(num_inference_steps=10)
        >>> request = ImageRequest(request_id="a", prompt="a red cube", n=4, seed=1, sampling=sampling)
        >>> request.part([1, 3]).sample_indices
        (1, 3)
        >>> request.fits(ImageRequest(request_id="b", prompt="a blue cube", sampling=sampling))
        True
    """

    prompt: str
    """The text; for a class-conditional pipeline, the name or number of a class."""
    sampling: ImageSampling
    images: tuple[NDArray[np.uint8], ...] = field(default=(), compare=False)
    """Images [H, W, 3] that belong to the prompt, of any sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for image in self.images:
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
                raise RequestError(
                    f"images of request {self.request_id!r} have one of shape {image.shape} and type {image.dtype}; "
                    "expected [H, W, 3] of uint8"
                )

    @property
    def work_per_sample(self) -> int:
        """Number of steps of an image."""
        return self.sampling.num_inference_steps

    def fits(self, request: "ImageRequest") -> bool:
        """Return whether it can be in a batch with another one. Pipelines take the images of one prompt at a time."""
        has_images = bool(self.images or request.images)
        return self is request or (self.sampling.suits(request.sampling) and not has_images)

    def aborted(self, index: int) -> "ImageSample":
        """Return an aborted image without content."""
        nothing = np.zeros(0, np.float32)
        trajectory = Trajectory(
            **dict.fromkeys(STACKED + SCALARS, nothing), steps=np.zeros(0, np.int64)
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
    """The K recorded steps of one image, as needed to compute them again; latents have any shape [...].

    Latents are in the data type of the model that they were passed to, if they were rounded to it.

    Example:
        >>> latents = np.ones((2, 4), np.float32)
        >>> numbers = {"levels": np.float32([0.8, 0.6]), "next_levels": np.float32([0.6, 0.4]), "steps": np.arange(2)}
        >>> arrays = {"latents": latents, "next_latents": latents, "means": latents, "log_probs": latents[:, 0]}
        >>> recorded = Trajectory(timesteps=np.float32([800, 600]), **arrays, **numbers)
        >>> latents, next_latents, levels, next_levels = map(
        ...     torch.from_numpy, (recorded.latents, recorded.next_latents, recorded.levels, recorded.next_levels)
        ... )
        >>> output = torch.zeros(2, 4)  # What the trained model makes of the latents.
        >>> FlowSDE()(output, latents, levels, next_levels).log_prob(next_latents).shape
        torch.Size([2])
    """

    latents: NDArray[Any]
    """[K, ...] before each step."""
    next_latents: NDArray[Any]
    """[K, ...] after it."""
    means: NDArray[np.float32]
    """[K, ...] means of the Gaussians from which the next latents were drawn."""
    log_probs: NDArray[np.float32]
    """[K]; see `Transition.log_prob`. NaN: the step has no noise, and so no density."""
    steps: NDArray[np.int64]
    """[K] index of each step in the sampler."""
    levels: NDArray[np.float32]
    """[K] noise levels before each step; see `kernels`."""
    next_levels: NDArray[np.float32]
    """[K] noise levels after it."""
    timesteps: NDArray[np.float32]
    """[K] as the model is given them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageSample(AnySample):
    """One image and its trajectory.

    Example:
        >>> from PIL import Image
        >>> def save(sample: ImageSample) -> None:
        ...     if sample.finish_reason == "stop":
        ...         Image.fromarray(sample.image).save(f"{sample.request_id}_{sample.index}.png")
        >>> sampling = ImageSampling(num_inference_steps=10)
        >>> aborted = ImageRequest(request_id="cube", prompt="a red cube", sampling=sampling).aborted(0)
        >>> save(replace(aborted, image=np.zeros((8, 16, 3), np.uint8), finish_reason="stop"))
        >>> Image.open("cube_0.png").size
        (16, 8)
    """

    image: NDArray[np.uint8]
    """[H, W, 3], or of a video's frames [F, H, W, 3]; empty if it was cut short, or not decoded."""
    latents: NDArray[np.float32]
    """Latents [...] that the image was decoded from."""
    trajectory: Trajectory
    conditions: Conditions
    """Arguments of the model besides latents and timestep, for this image."""
    negative_conditions: Conditions | None = None
    """The same without the prompt, where there is guidance."""
    shared_conditions: Conditions
    """Arguments that have no entry for each image, such as positions."""
    guidance_scale: float | None
    """Scale of classifier-free guidance, u + guidance_scale (c - u) of the outputs without and with the prompt; None:
    there was none."""
    keeps_norm: bool = False
    """Guidance scales the norms over the last dimension to those of c."""
    is_negated: bool = False
    """The scheduler is given minus the model's output."""
    timestep_map: tuple[float, float] | None = (1.0, 0.0)
    """(scale, shift): the model is given scale x the scheduler's timestep + shift; None: another function of it."""
    weight_version: int
    """Version of the weights that made it; -1 if it was cut short."""
    finish_reason: ImageFinishReason

"""Samples of diffusion trainers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError
from gcore_trainer.sample import require_finite

Conditions = Mapping[str, Any]
"""Inputs of a model, by its names: arrays (of NumPy's data types, or of ml_dtypes' bfloat16), or plain values (numbers,
strings, None, and lists, tuples and dicts of them). ``a.b`` is entry b of a dict a, or of a tuple, where b is a number;
``a[]`` is an image's entry of a list a; ``a+1`` follows the latents, which are argument a, along axis 1."""

_PER_STEP = (
    "latents",
    "next_latents",
    "old_means",
    "old_log_probs",
    "ref_means",
    "levels",
    "next_levels",
    "timesteps",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DiffusionSample:
    """One image. Latents have any shape [...], the same in all of a batch; K steps of its making are trained on.

    Example:
        >>> sample = DiffusionSample(
        ...     clean_latents=np.zeros((4, 8, 8), np.float32),
        ...     conditions={"prompt_embeds": np.zeros((7, 32), np.float32)},
        ...     advantage=1.5,
        ... )
        >>> sample.num_steps
        0
    """

    clean_latents: NDArray[np.float32]
    """[...] of the finished image."""
    conditions: Conditions
    """Inputs of the model besides latents and timestep, for this image."""
    negative_conditions: Conditions | None = None
    """The same without the prompt; needed where there is guidance."""
    shared_conditions: Conditions = field(default_factory=dict[str, Any])
    """Further inputs, which have no entry for each image."""
    guidance_scale: float | None = None
    """Scale of classifier-free guidance, u + guidance_scale (c - u) of the outputs without and with the prompt (arXiv
    2207.12598); None: the model is only called with it."""
    keeps_norm: bool = False
    """Guidance scales the norms over the last dimension to those of c."""
    is_negated: bool = False
    """The model's output is negated."""
    timestep_map: tuple[float, float] | None = (1.0, 0.0)
    """(scale, shift): the model is given scale x t + shift for the timestep t in training; None: another function."""
    advantage: float | None = None
    latents: NDArray[Any] | None = None
    """[K, ...] before each step; none where steps are not trained on."""
    next_latents: NDArray[Any] | None = None
    """[K, ...] after it."""
    old_means: NDArray[np.float32] | None = None
    """[K, ...] of the Gaussians that they were drawn from, by the policy before the step's first update."""
    old_log_probs: NDArray[np.float32] | None = None
    """[K], under that policy."""
    ref_means: NDArray[np.float32] | None = None
    """[K, ...] of the reference's; needed where a KL term is."""
    levels: NDArray[np.float32] | None = None
    """[K] the sampler's noise levels before each step."""
    next_levels: NDArray[np.float32] | None = None
    """[K] the sampler's noise levels after each step."""
    timesteps: NDArray[np.float32] | None = None
    """[K] the timesteps that are passed to the model."""
    noise_seed: int = 0
    """Seed of the random numbers that an objective draws for this image."""
    prompt: str = ""
    """The prompt, for rewards that are differentiated."""

    def __post_init__(self) -> None:
        for name in _PER_STEP:
            value = getattr(self, name)
            if self.latents is not None and value is not None and len(value) != self.num_steps:
                raise BatchError(
                    f"{name} has {len(value)} steps; expected as many as latents, {self.num_steps}"
                )

    @property
    def num_steps(self) -> int:
        """K."""
        if self.latents is None:
            return 0
        return len(self.latents)

    def check_finite(self, name: str, *names: str) -> None:
        """Raise `BatchError` if the named arrays or the conditions, of image ``name``, hold NaN or infinities."""
        arrays = {field: getattr(self, field) for field in names}
        for field_name in ("conditions", "negative_conditions", "shared_conditions"):
            conditions = getattr(self, field_name) or {}
            for key, value in conditions.items():
                if isinstance(value, np.ndarray | np.generic):
                    arrays[f"{field_name}[{key!r}]"] = value
        for label, value in arrays.items():
            if value is None:
                continue
            array = np.asarray(value)
            if array.dtype.kind in "biuSU":
                continue
            if array.dtype.kind != "f":
                # NumPy alone does not know bfloat16.
                array = array.astype(np.float32)
            require_finite(f"{name}.{label}", array)

    def at_steps(self, steps: Sequence[int]) -> "DiffusionSample":
        """Keep only these steps, in this order."""
        indices = list(steps)
        arrays: dict[str, NDArray[Any]] = {}
        for name in _PER_STEP:
            array = getattr(self, name)
            if array is not None:
                arrays[name] = array[indices]
        return replace(self, **arrays)


DiffusionMicroBatch = list[DiffusionSample]
"""Images computed in one forward and backward pass for each step."""


StepScores = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Gaussians at the K recorded steps of an image: means [K, ...], and log-probabilities [K] of the next latents.

A log-probability is NaN where the step has no noise, and so no density."""


def require_fields(samples: Sequence[DiffusionSample], names: Sequence[str]) -> None:
    """Raise `BatchError` for an image that lacks one of these fields."""
    for name in names:
        for sample in samples:
            if getattr(sample, name) is None:
                raise BatchError(f"{name} is None: the objective needs it for every image")


def stack_fields(
    samples: Sequence[DiffusionSample], device: torch.device, *names: str, step: int | None = None
) -> list[torch.Tensor]:
    """Stack fields of samples to [B, ...]; with a ``step``, that step's entry of each field."""
    require_fields(samples, names)
    tensors: list[torch.Tensor] = []
    for name in names:
        column = [getattr(sample, name) for sample in samples]
        if step is not None:
            column = [values[step] for values in column]
        tensors.append(torch.from_numpy(np.stack(column).astype(np.float32)).to(device))
    return tensors

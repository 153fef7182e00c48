"""The role services of a run, as controllers hold them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gcore_rollout import Engine
from gcore_rollout.diffusion import ImageRequest, ImageSample
from gcore_runs.devices import DeviceTimers

if TYPE_CHECKING:
    from gcore_diffusion.learner import SharedLearner


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What it takes to make images and to score them."""

    policy: "Engine[ImageRequest, ImageSample]"
    reward: Callable[..., Any]
    held_out: Callable[..., Any] | None = None
    """A reward that is not trained on."""
    devices: DeviceTimers = field(default_factory=DeviceTimers)


@dataclass(frozen=True, kw_only=True)
class Roles(Sampler):
    """With the models in training."""

    learner: "SharedLearner"

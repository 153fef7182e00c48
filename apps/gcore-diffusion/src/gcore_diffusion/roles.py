"""The role services of a run, as controllers hold them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcore_controller import TrainerClient
from gcore_rollout import Engine
from gcore_rollout.diffusion import ImageRequest, ImageSample
from gcore_runs.devices import DeviceTimers
from gcore_trainer.diffusion.types import DiffusionMicroBatch

if TYPE_CHECKING:
    from gcore_diffusion.rewards import Rewards


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """What it takes to make images and to score them."""

    policy: "Engine[ImageRequest, ImageSample]"
    rewards: "Rewards"
    devices: DeviceTimers = field(default_factory=DeviceTimers)


@dataclass(frozen=True, kw_only=True)
class Roles(Sampler):
    """With the models in training."""

    learner: TrainerClient[DiffusionMicroBatch]
    owns_process: bool = False
    """Whether the controller has a process of its own, with timers of its own."""

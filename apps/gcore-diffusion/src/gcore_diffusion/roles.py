"""The role services that a controller of a run holds."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gcore_controller import DeviceTimers, TrainerClient
from gcore_rollout import Engine, ImageRequest, ImageSample
from gcore_trainer import DiffusionMicroBatch

if TYPE_CHECKING:
    from gcore_diffusion.sampling.rewards import Rewards


@dataclass(frozen=True, kw_only=True)
class SamplingRoles:
    """The roles that sample and score images."""

    policy: "Engine[ImageRequest, ImageSample]"
    rewards: "Rewards"
    devices: DeviceTimers = field(default_factory=DeviceTimers)


@dataclass(frozen=True, kw_only=True)
class Roles(SamplingRoles):
    """The roles that a controller holds."""

    learner: TrainerClient[DiffusionMicroBatch]
    owns_process: bool = False
    """True if only the controller computes in its process."""

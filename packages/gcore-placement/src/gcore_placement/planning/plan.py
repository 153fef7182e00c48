"""The result of the planner: the devices of each role, the seconds of a step, the memory, and the reasons."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gcore_placement.cluster import Cluster
from gcore_placement.costs import JobCosts
from gcore_placement.planning.layouts import TrainingLayout
from gcore_placement.planning.step_time import StepTime
from gcore_placement.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A role's engines, all alike."""

    tensor_model_parallel_size: int
    num_replicas: int
    num_devices: int
    """Devices of the role while it works; all of them in the colocated strategy."""
    max_num_seqs: int


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice that the plan does not make."""

    choice: str
    """The kind of choice: strategy, policy engine, judge's engine, training."""
    option: str
    reason: str
    """The costs of the option, or why it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest layout that fits."""

    cluster: Cluster
    num_devices: int
    """Devices that the plan uses."""
    strategy: Strategy
    policy: EnginePlan
    judge: EnginePlan | None
    training: TrainingLayout
    offload: bool
    """Weights, gradients and moments go to the host's memory while engines work."""
    costs: JobCosts
    step: StepTime
    memory: Mapping[str, Mapping[str, float]]
    """Bytes of a device by phase (training, generation, reward) and part, at the peak."""
    usable_bytes: float
    """Usable memory of a device; the rest is for contexts, buffers and fragmentation."""
    correction: Mapping[str, float] | None
    """Factor of each stage's laws, measured over predicted seconds: 1 where too little was measured; None: it was not
    asked for."""
    alternatives: tuple[Alternative, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.step.total_s

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device, at its peak."""
        return max(sum(parts.values()) for parts in self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "step_s": self.step_s, "peak_bytes": self.peak_bytes}

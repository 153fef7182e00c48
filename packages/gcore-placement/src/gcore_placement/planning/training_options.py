"""The ways to train on a number of devices: their memory, their seconds, and those worth trying."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.cluster import Cluster
from gcore_placement.correction import Correction
from gcore_placement.planning.efficiency import Efficiency
from gcore_placement.planning.layouts import TrainingLayouts, training_layouts
from gcore_placement.planning.memory import resident_state, total, training_memory
from gcore_placement.planning.training_costs import TrainingLaws, training_laws
from gcore_placement.workload.job import Job


@dataclass(frozen=True, kw_only=True)
class TrainingChoice:
    """A layout, and whether its state leaves the devices while engines work."""

    layout: int
    """Index among the layouts."""
    offload: bool
    seconds: float
    """Seconds of a step's preparation and training, and of moving the state."""
    state_bytes: float
    """State of each device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingOptions:
    """All layouts of a number of devices. Arrays are [num_layouts]."""

    layouts: TrainingLayouts
    memory: Mapping[str, NDArray[np.float64]]
    total_bytes: NDArray[np.float64]
    state_bytes: NDArray[np.float64]
    laws: TrainingLaws
    seconds: NDArray[np.float64]
    """Seconds of a step's preparation and training."""
    moving_s: NDArray[np.float64]
    """Seconds to bring the state from the host's memory and back."""

    @classmethod
    def of(
        cls, job: Job, num_devices: int, *, cluster: Cluster, efficiency: Efficiency, correction: Correction
    ) -> "TrainingOptions":
        """Return the options for a number of devices."""
        layouts = training_layouts(job, cluster, num_devices)
        memory = training_memory(job, layouts, activations=efficiency.activations)
        laws = correction.training(training_laws(job, layouts, cluster=cluster, efficiency=efficiency))
        state_bytes = resident_state(memory)
        return cls(
            layouts=layouts,
            memory=memory,
            total_bytes=total(memory),
            state_bytes=state_bytes,
            laws=laws,
            seconds=laws.seconds(tokens=job.training_tokens, pairs=job.training_pairs, num_devices=num_devices),
            moving_s=correction.factor("training")
            * (2 * state_bytes / (cluster.device.host_bytes_per_s * efficiency.host)),
        )

    def choices(self, usable_bytes: float, host_memory_bytes: float) -> list[TrainingChoice]:
        """Return the layouts to try: the fastest that fits and moves its state to the host, and those that fit and keep
        it where no other is both faster and smaller."""
        found: list[TrainingChoice] = []
        fits = self.total_bytes <= usable_bytes
        with_moving = np.where(fits & (self.state_bytes <= host_memory_bytes), self.seconds + self.moving_s, np.inf)
        if np.isfinite(with_moving).any():
            found.append(self._choice(int(with_moving.argmin()), offload=True))
        smallest = np.inf
        order = np.lexsort((self.state_bytes, self.seconds))
        for index in order[fits[order]].tolist():
            if self.state_bytes[index] < smallest:
                smallest = self.state_bytes[index]
                found.append(self._choice(index, offload=False))
        return found

    def _choice(self, index: int, *, offload: bool) -> TrainingChoice:
        return TrainingChoice(
            layout=index,
            offload=offload,
            seconds=float(self.seconds[index] + (self.moving_s[index] if offload else 0.0)),
            state_bytes=float(self.state_bytes[index]),
        )

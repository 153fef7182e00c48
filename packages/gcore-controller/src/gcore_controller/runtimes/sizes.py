"""The number of processes of each kind that a run has."""

from dataclasses import dataclass
from typing import Protocol, Self


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The number of processes of each role."""

    controllers: int
    engines: int
    judges: int = 0
    ranks: int
    in_turns: bool = False
    """Each engine shares its device with a judge, and one of the two is awake."""

    @property
    def num_processes(self) -> int:
        """Processes of all roles together."""
        return self.controllers + self.engines + self.judges + self.ranks

    @property
    def num_engine_devices(self) -> int:
        """Devices of engines and judges."""
        return self.engines if self.in_turns else self.engines + self.judges

    def __str__(self) -> str:
        parts = [(self.controllers, "controller"), (self.engines, "engine"), (self.judges, "judge")]
        names = [f"{count} {name}{'s' * (count > 1)}" for count, name in parts if count]
        return f"{', '.join(names)} and {self.ranks} training rank{'s' * (self.ranks > 1)}"


class RaySettings(Protocol):
    """Settings of a Ray cluster, and what each process of a run reserves there."""

    @property
    def address(self) -> str:
        """HOST:PORT of the head; empty: what RAY_ADDRESS names, or a new cluster on this machine."""
        ...

    @property
    def cpus_per_process(self) -> float:
        """CPUs of each controller, engine and training rank."""
        ...

    @property
    def gpus_per_engine(self) -> float: ...

    @property
    def gpus_per_rank(self) -> float: ...

    @property
    def elastic(self) -> bool:
        """True if the run adapts its size to the capacity of the cluster."""
        ...

    @property
    def timeout_s(self) -> float:
        """Longest time for the processes of a role to start, in seconds."""
        ...


class SizedConfig(Protocol):
    """Settings of a run, as far as its processes go."""

    @property
    def ray(self) -> RaySettings: ...

    @property
    def device(self) -> str:
        """Type of the devices of engines and ranks, as torch names it."""
        ...

    @property
    def threads(self) -> int:
        """Threads of torch that the processes of a role share."""
        ...

    @property
    def sizes(self) -> Sizes:
        """The sizes that the settings ask for."""
        ...

    @property
    def rank_unit(self) -> int:
        """Number whose multiples the number of training ranks can be."""
        ...

    def with_sizes(self, sizes: Sizes) -> Self:
        """Return the same settings for other sizes."""
        ...

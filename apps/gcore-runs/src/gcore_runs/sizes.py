"""How many processes a run has of each kind, and what tells so."""

from dataclasses import dataclass
from typing import Protocol, Self

from gcore_runs.settings.cluster import PlacementConfig, RayConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Processes of each role."""

    controllers: int
    engines: int
    judges: int = 0
    ranks: int
    in_turns: bool = False
    """Each engine has a judge on its device, and one of the two is awake."""

    @property
    def num_processes(self) -> int:
        """Of all roles together."""
        return self.controllers + self.engines + self.judges + self.ranks

    @property
    def num_engine_devices(self) -> int:
        """That engines and judges are on."""
        return self.engines if self.in_turns else self.engines + self.judges

    def __str__(self) -> str:
        parts = [(self.controllers, "controller"), (self.engines, "engine"), (self.judges, "judge")]
        names = [f"{count} {name}{'s' * (count > 1)}" for count, name in parts if count]
        return f"{', '.join(names)} and {self.ranks} training rank{'s' * (self.ranks > 1)}"


class SizedConfig(Protocol):
    """Settings of a run, as far as its processes go."""

    @property
    def ray(self) -> RayConfig: ...

    @property
    def placement(self) -> PlacementConfig: ...

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def sizes(self) -> Sizes:
        """Those that are asked for."""
        ...

    @property
    def rank_unit(self) -> int:
        """Training ranks come and go in so many."""
        ...

    def with_sizes(self, sizes: Sizes) -> Self:
        """The same settings for other sizes."""
        ...

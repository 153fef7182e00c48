"""How many processes a run has of each kind, and what tells so."""

from dataclasses import dataclass
from typing import Protocol, Self

from gcore_runs.errors import UserError
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


def check_engines(num_processes: int, *, controllers: int) -> None:
    """
    Raises:
        UserError: fewer engines of the policy than controllers; 0 stands for as many.
    """
    if 0 < num_processes < controllers:
        raise UserError(
            f"rollout.num_processes is {num_processes} and controllers is {controllers}: on ray at least one for each "
            "controller is needed, or 0, which is that"
        )


def check_judges_in_turns(judges: int, *, engines: int, setting: str) -> None:
    """
    Raises:
        UserError: not as many engines of the judge as of the policy, on whose devices they are; 0 stands for as many.
    """
    if judges not in (0, engines):
        raise UserError(
            f"placement.strategy is 'colocated' and {setting} is {judges}: rollout.num_processes = {engines} is "
            "needed, or 0, which is that"
        )

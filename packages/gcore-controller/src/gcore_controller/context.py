"""What a controller's program is given."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

from gcore_controller.collectives.base import Collectives
from gcore_controller.references import Put, hold
from gcore_controller.stages import StageTimer

RolesT = TypeVar("RolesT")
OtherRolesT = TypeVar("OtherRolesT")
ResultT = TypeVar("ResultT")

Report = Callable[[Any], Awaitable[None]]

Reported = Callable[[int, Any], Awaitable[None]]
"""Takes in what a controller, by its rank, reports."""


async def unheard(rank: int, value: Any) -> None:
    """
    Raises:
        RuntimeError: always; where nobody was meant to take reports.
    """
    raise RuntimeError(f"controller {rank} reports {value!r:.100} to nobody: give the runtime a `reported`")


_TO_NOBODY: Report = partial(unheard, 0)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[RolesT]):
    """One controller's place in the run: who it is, whom it meets, and the services it owns a share of."""

    group: Collectives
    roles: RolesT
    """Handles of the role services (policy engine, reward, trainer, ...), as the app declares them."""
    timer: StageTimer = field(default_factory=StageTimer)
    clock: Callable[[], float] = time.monotonic
    """Seconds, of the runtime's clock: real ones, or simulated ones."""
    put: Put = hold
    """``ctx.put(value)``: a reference, which may be sent in collectives and to services in the place of the value."""

    report: Report = _TO_NOBODY
    """``await ctx.report(value)``: tell whoever started the run something small, and wait until it is taken in."""

    def with_roles(self, roles: OtherRolesT) -> "Context[OtherRolesT]":
        """The same place in the run, with other services."""
        return cast("Context[OtherRolesT]", replace(cast("Context[Any]", self), roles=roles))

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size


Program = Callable[[Context[RolesT]], Awaitable[ResultT]]
"""``async def program(ctx)``: the same function under every runtime, one call a controller."""

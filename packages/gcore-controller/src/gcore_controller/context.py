"""The context that a controller's program runs in."""

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
"""Receives the rank and the value of a controller's report."""


async def refuse_report(rank: int, value: Any) -> None:
    """Refuse a report, where the runtime was given no ``reported``.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"controller {rank} reports {value!r:.100}; expected a runtime with `reported`")


_REFUSED: Report = partial(refuse_report, 0)


@dataclass(frozen=True, kw_only=True)
class Context(Generic[RolesT]):
    """One controller's place in the run: its rank, its collectives with the others, and its role services."""

    group: Collectives
    roles: RolesT
    """Handles of the role services (policy engine, reward, trainer, ...), as the app declares them."""
    timer: StageTimer = field(default_factory=StageTimer)
    clock: Callable[[], float] = time.monotonic
    """Seconds of the runtime's clock, real or simulated."""
    put: Put = hold
    """``ctx.put(value)``: return a reference, to be sent in collectives and to services instead of the value."""

    report: Report = _REFUSED
    """``await ctx.report(value)``: send a small value to the process that started the run, and wait until it has it."""

    def with_roles(self, roles: OtherRolesT) -> "Context[OtherRolesT]":
        """Return the same context with other services."""
        return cast("Context[OtherRolesT]", replace(cast("Context[Any]", self), roles=roles))

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size


Program = Callable[[Context[RolesT]], Awaitable[ResultT]]
"""``async def program(ctx)``: the same function under every runtime, called once for each controller."""

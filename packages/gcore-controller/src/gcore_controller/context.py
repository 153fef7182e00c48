"""What a controller's program is given."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gcore_controller.collectives import Collectives
from gcore_controller.stages import StageTimer

RolesT = TypeVar("RolesT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Context(Generic[RolesT]):
    """One controller's place in the run: who it is, whom it meets, and the services it owns a share of."""

    group: Collectives
    roles: RolesT
    """Handles of the role services (policy engine, reward, trainer, ...), as the app declares them."""
    timer: StageTimer = field(default_factory=StageTimer)
    clock: Callable[[], float] = time.monotonic
    """Seconds, of the runtime's clock: real ones, or simulated ones."""

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size


Program = Callable[[Context[RolesT]], Awaitable[ResultT]]
"""``async def program(ctx)``: the same function under every runtime, one call a controller."""

"""The `sim` runtime: the same program, under a clock that stands still while there is work and then jumps."""

import asyncio
import selectors

from gcore_controller.context import Program, ResultT, RolesT
from gcore_controller.errors import StuckError
from gcore_controller.runtimes.inline import InlineRun


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds pass only when nothing is left to do, and then at once.

    `asyncio.sleep`, time-outs and the loop's `time` work as ever. A computation takes no time, unless the program
    sleeps for it. Threads and sockets are not waited for.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _Jump(selectors.SelectSelector):
    """Where a loop waits for its next timer, or for ever."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise StuckError(
                f"after {self._loop.time():.3f} simulated seconds every controller waits for something that no timer "
                "will bring: another controller's collective, or a thread or socket, which have no simulated time"
            )
        self._loop.jump(timeout)
        return ready


def run_simulated(
    program: Program[RolesT, ResultT], *, roles: RolesT, world_size: int = 1, timeout_s: float | None = None
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers in simulated time; ``roles`` sleep where real ones work.

    Args:
        timeout_s: simulated seconds; see `run_inline`.

    Returns:
        each controller's result, by rank. `Context.clock` tells the simulated time.

    Raises:
        StuckError: the program waits for what never comes; it says where each controller is.
        Exception: see `run_inline`.
    """
    run = InlineRun(program, roles=roles, world_size=world_size)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        try:
            return runner.run(run.run(timeout_s))
        except StuckError as error:
            raise StuckError(f"{error}: {run.whereabouts()}") from None

"""The `sim` runtime: the same program under a virtual clock, which jumps from one timer to the next."""

import asyncio
import selectors

from gcore_controller.context import Program, ResultT, RolesT
from gcore_controller.errors import StuckError
from gcore_controller.runtimes.inline import InlineGroup, run_inline


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when nothing is left to do, and then at once.

    `asyncio.sleep`, time-outs and the loop's `time` work as usual. A computation takes no time, unless the program
    sleeps for it. Threads and sockets are not waited for.

    Example:
        >>> async def train() -> float:
        ...     await asyncio.sleep(3600.0)
        ...     return asyncio.get_running_loop().time()
        >>> with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        ...     print(runner.run(train()))
        3600.0
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the seconds since the loop was created."""
        return self._clock.now_s


class _Clock(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise StuckError(
                f"after {self.now_s:.3f} simulated seconds every controller waits for something that no timer "
                "will bring: another controller's collective, or a thread or socket, which have no simulated time"
            )
        self.now_s += timeout
        return ready


def run_simulated(
    program: Program[RolesT, ResultT],
    *,
    roles: RolesT,
    world_size: int = 1,
    timeout_s: float | None = None,
) -> list[ResultT]:
    """Run ``program`` like `run_inline`, in simulated time, which `Context.clock` returns.

    Args:
        roles: services that sleep where real ones work.
        timeout_s: simulated seconds.

    Raises:
        StuckError: the program waits for an event that never comes; the message says where each controller is.
    """
    group = InlineGroup(world_size)
    run = run_inline(program, roles=roles, world_size=world_size, timeout_s=timeout_s, group=group)
    results: list[ResultT] = []

    async def collect_results() -> None:
        # They are not the task's value, because a Runner formats that when it restores the handler of SIGINT.
        results.extend(await run)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        try:
            runner.run(collect_results())
        except StuckError as error:
            raise StuckError(f"{error}: {group.describe_whereabouts()}") from None
    return results

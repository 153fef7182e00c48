"""The `inline` runtime: every controller is a task of one event loop, in this process."""

import asyncio
from functools import partial
from typing import Generic

from gcore_controller.collectives.call_log import describe
from gcore_controller.collectives.inline import InlineCollectives, InlineGroup
from gcore_controller.context import Context, Program, Reported, ResultT, RolesT, refuse_report
from gcore_controller.errors import DeadlineError
from gcore_controller.runtimes.programs import run_program
from gcore_controller.stages import StageTimer


async def run_inline(
    program: Program[RolesT, ResultT],
    *,
    roles: RolesT,
    world_size: int = 1,
    timeout_s: float | None = None,
    reported: Reported = refuse_report,
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers that share ``roles``.

    Args:
        timeout_s: how long the whole run may take; None: as long as it takes.
        reported: called with the rank and the value of every `Context.report`.

    Returns:
        each controller's result, by rank.

    Raises:
        CollectiveMismatchError: controllers made different calls, or one returned while others wait for it.
        DeadlineError: the run took longer; it says where each controller was, and for whom collectives waited.
        ProgramExitedError: a program called `sys.exit` or cancelled itself.
        Exception: the first controller's error; the other controllers are cancelled.
    """
    return await InlineRun(program, roles=roles, world_size=world_size, reported=reported).run(timeout_s)


class InlineRun(Generic[RolesT, ResultT]):
    """One run of a program in this process; see `run_inline`."""

    def __init__(
        self, program: Program[RolesT, ResultT], *, roles: RolesT, world_size: int, reported: Reported = refuse_report
    ) -> None:
        self._program = program
        self._roles = roles
        self._reported = reported
        self._group = InlineGroup(world_size)
        self._timers: list[StageTimer] = []

    async def run(self, timeout_s: float | None) -> list[ResultT]:
        """See `run_inline`."""
        loop = asyncio.get_running_loop()
        self._timers = [StageTimer(loop.time) for _ in range(self._group.world_size)]
        running: list[asyncio.Task[ResultT]] = []
        overdue: list[str] = []

        def end() -> None:
            overdue.append(self.whereabouts())
            for task in running:
                task.cancel()

        deadline = None if timeout_s is None else loop.call_later(timeout_s, end)
        try:
            async with asyncio.TaskGroup() as tasks:
                running.extend(
                    tasks.create_task(self._run_one(rank), name=f"controller-{rank}")
                    for rank in range(self._group.world_size)
                )
        except BaseExceptionGroup as errors:
            if not overdue:
                first = errors.exceptions[0]
                _note_rank(first, running)
                raise first from None
        finally:
            if deadline is not None:
                deadline.cancel()
        if overdue:
            raise DeadlineError(f"the run is not done after {timeout_s} s: {overdue[0]}")
        return [task.result() for task in running]

    def whereabouts(self) -> str:
        """Describe where each controller is now."""
        places = {rank: self._group.whereabouts(rank) for rank in range(self._group.world_size)}
        return describe({rank: where.during(self._timers[rank].current) for rank, where in places.items()})

    async def _run_one(self, rank: int) -> ResultT:
        timer = self._timers[rank]
        context = Context(
            group=InlineCollectives(self._group, rank),
            roles=self._roles,
            timer=timer,
            clock=asyncio.get_running_loop().time,
            report=partial(self._reported, rank),
        )
        result = await run_program(self._program, context)
        self._group.returned(rank)
        return result


def _note_rank(error: BaseException, running: "list[asyncio.Task[ResultT]]") -> None:
    """Say which of several controllers an error comes from."""
    for rank, task in enumerate(running):
        if len(running) > 1 and task.done() and not task.cancelled() and task.exception() is error:
            error.add_note(f"raised by controller {rank}")

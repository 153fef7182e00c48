"""The `inline` runtime: every controller is a task of one event loop, in this process."""

import asyncio
from functools import partial

from gcore_controller.collectives import InlineCollectives, InlineGroup
from gcore_controller.context import Context, Program, Reported, ResultT, RolesT, unheard
from gcore_controller.errors import DeadlineError
from gcore_controller.stages import StageTimer


async def run_inline(
    program: Program[RolesT, ResultT],
    *,
    roles: RolesT,
    world_size: int = 1,
    timeout_s: float | None = None,
    reported: Reported = unheard,
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers that share ``roles``.

    Args:
        timeout_s: how long the whole run may take; None: as long as it takes.
        reported: called with the rank and the value of every `Context.report`.

    Returns:
        each controller's result, by rank.

    Raises:
        DeadlineError: the run took longer; it says in which stage each controller was.
        Exception: the first controller's error; the other controllers are cancelled.
    """
    group = InlineGroup(world_size)
    loop = asyncio.get_running_loop()
    contexts = [
        Context(
            group=InlineCollectives(group, rank),
            roles=roles,
            timer=StageTimer(loop.time),
            clock=loop.time,
            report=partial(reported, rank),
        )
        for rank in range(world_size)
    ]
    running: list[asyncio.Task[ResultT]] = []
    overdue: list[str] = []

    async def run(context: Context[RolesT]) -> ResultT:
        return await program(context)

    def end() -> None:
        overdue.extend(f"controller {c.rank} in {c.timer.current or 'no stage'}" for c in contexts)
        for task in running:
            task.cancel()

    deadline = None if timeout_s is None else loop.call_later(timeout_s, end)
    try:
        async with asyncio.TaskGroup() as tasks:
            running.extend(tasks.create_task(run(c), name=f"controller-{c.rank}") for c in contexts)
    except BaseExceptionGroup as errors:
        if not overdue:
            raise errors.exceptions[0] from None
    finally:
        if deadline is not None:
            deadline.cancel()
    if overdue:
        raise DeadlineError(f"the run is not done after {timeout_s} s: {', '.join(overdue)}")
    return [task.result() for task in running]

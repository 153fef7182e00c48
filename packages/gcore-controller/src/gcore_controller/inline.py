"""The `inline` runtime: every controller is a task of one event loop, in this process."""

import asyncio

from gcore_controller.collectives import InlineCollectives, InlineGroup
from gcore_controller.context import Context, Program, ResultT, RolesT


async def run_inline(program: Program[RolesT, ResultT], *, roles: RolesT, world_size: int = 1) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers that share ``roles``.

    Returns:
        each controller's result, by rank.

    Raises:
        the first controller's error; the other controllers are cancelled.
    """
    group = InlineGroup(world_size)
    contexts = [Context(group=InlineCollectives(group, rank), roles=roles) for rank in range(world_size)]

    async def run(context: Context[RolesT]) -> ResultT:
        return await program(context)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(c), name=f"controller-{c.rank}") for c in contexts]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]

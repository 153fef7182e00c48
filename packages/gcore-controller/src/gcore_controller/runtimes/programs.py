"""The call of a controller's program, and the check of how it ends, under every runtime."""

import asyncio

from gcore_controller.context import Context, Program, ResultT, RolesT
from gcore_controller.errors import ProgramExitedError


async def run_program(program: Program[RolesT, ResultT], context: Context[RolesT]) -> ResultT:
    """Run one controller's program.

    Raises:
        ProgramExitedError: It called `sys.exit`, which would stop the event loop, or awaited something that it had
            cancelled, which would pass for the end of the run.
    """
    try:
        return await program(context)
    except SystemExit as exit_:
        raise ProgramExitedError(
            f"the program of controller {context.rank} called sys.exit({exit_.code!r}); a program ends by returning or "
            "by raising an error"
        ) from exit_
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ProgramExitedError(
            f"the program of controller {context.rank} was cancelled from within: it awaited a task or future that had "
            "been cancelled; a program ends by returning or by raising an error"
        ) from error

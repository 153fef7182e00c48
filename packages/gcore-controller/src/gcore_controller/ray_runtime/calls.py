"""Calls of all controllers at once, and what to say when they fail."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from gcore_controller.errors import ControllerDiedError, DeadlineError

_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}


async def answers_of_all(
    calls: Sequence[Any], *, names: Sequence[str], timeout_s: float | None = None, controllers: Sequence[Any] = ()
) -> list[Any]:
    """What a call of every controller returns, by rank; see `RayControllers.run` for what is raised."""
    runs = [asyncio.ensure_future(call) for call in calls]
    for run in runs:
        # After the first error, nobody asks for the others'.
        run.add_done_callback(lambda done: done.cancelled() or done.exception())
    _, pending = await asyncio.wait(runs, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    if _errors(runs):
        await _raise_first(runs, names)
    if pending:
        stages = await asyncio.gather(*(controller.stage.remote() for controller in controllers))
        where = ", ".join(f"controller {rank} in {stage or 'no stage'}" for rank, stage in enumerate(stages))
        raise DeadlineError(f"the run is not done after {timeout_s} s: {where}")
    return [run.result() for run in runs]


async def _raise_first(runs: "Sequence[asyncio.Future[Any]]", names: Sequence[str]) -> NoReturn:
    errors = _errors(runs)
    if any(isinstance(_cause(error), RayActorError) for error in errors.values()):
        # A controller that found another one gone may be quicker than the news of that one's death.
        while not any(isinstance(error, RayActorError) for error in errors.values()) and len(errors) < len(runs):
            await asyncio.wait([run for run in runs if not run.done()], return_when=asyncio.FIRST_COMPLETED)
            errors = _errors(runs)
    for rank, error in errors.items():
        if isinstance(error, RayActorError):
            raise ControllerDiedError(f"controller {rank}{names[rank]} died: {reason_of(error)}") from None
    rank, error = next(iter(errors.items()))
    cause = _cause(error)
    cause.add_note(f"raised by controller {rank}{names[rank]}:\n{error}")
    raise cause from None


def _errors(runs: "Sequence[asyncio.Future[Any]]") -> dict[int, BaseException]:
    """What runs have raised, by rank."""
    found = ((rank, run.exception()) for rank, run in enumerate(runs) if run.done())
    return {rank: error for rank, error in found if error is not None}


def _cause(error: BaseException) -> BaseException:
    """What was raised over there."""
    return error.cause if isinstance(error, RayTaskError) else error


def reason_of(error: RayActorError) -> str:
    """Ray's many words in few."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    found = re.search(r"[Ww]orker exit type: (\w+)|exit type: (\w+)", str(error))
    kind = next((g for g in found.groups() if g), "") if found else ""
    return _DEATHS.get(kind) or str(error).strip().rpartition("\n")[2]

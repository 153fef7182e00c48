"""Replies of all controllers to a call, and the error to raise when a call fails."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from gcore_controller.collectives.call_log import Whereabouts, describe
from gcore_controller.errors import ControllerDiedError, DeadlineError

_ANSWER_TIMEOUT_S = 10.0
_NEWS_TIMEOUT_S = 120.0

_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}


async def answers_of_all(
    calls: Sequence[Any], *, names: Sequence[str], timeout_s: float | None = None, controllers: Sequence[Any] = ()
) -> list[Any]:
    """Wait for the results of a call of every controller, by rank; see `RayControllers.run` for errors."""
    runs = [asyncio.ensure_future(call) for call in calls]
    for run in runs:
        # After the first error, no one retrieves the others.
        run.add_done_callback(lambda done: done.cancelled() or done.exception())
    _, pending = await asyncio.wait(runs, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    if _errors(runs):
        await _raise_first(runs, names, controllers)
    if pending:
        where = describe(await whereabouts_of(controllers))
        raise DeadlineError(f"the run is not done after {timeout_s} s: {where}")
    return [run.result() for run in runs]


async def whereabouts_of(controllers: Sequence[Any]) -> dict[int, Whereabouts | None]:
    """Return where each controller is, by rank; None: it has died, or its event loop is blocked."""
    calls = {rank: asyncio.ensure_future(c.whereabouts.remote()) for rank, c in enumerate(controllers) if c is not None}
    if calls:
        await asyncio.wait(calls.values(), timeout=_ANSWER_TIMEOUT_S)
    for call in calls.values():
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
    answers = {rank: call.result() for rank, call in calls.items() if call.done() and not call.exception()}
    return {rank: answers.get(rank) for rank in range(len(controllers))}


async def _raise_first(
    runs: "Sequence[asyncio.Future[Any]]", names: Sequence[str], controllers: Sequence[Any]
) -> NoReturn:
    errors = _errors(runs)
    if any(_found_dead(error, controllers) for error in errors.values()):
        # A controller that found another one gone may be quicker than the news of that one's death.
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_TIMEOUT_S):
                while not any(map(_is_death, errors.values())) and len(errors) < len(runs):
                    await asyncio.wait([run for run in runs if not run.done()], return_when=asyncio.FIRST_COMPLETED)
                    errors = _errors(runs)
    for rank, error in errors.items():
        if _is_death(error):
            assert isinstance(error, RayActorError)
            raise ControllerDiedError(f"controller {rank}{names[rank]} died: {reason_of(error)}") from None
    rank, error = next(iter(errors.items()))
    cause = _cause(error)
    cause.add_note(f"raised by controller {rank}{names[rank]}:\n{error}")
    raise cause from None


def _errors(runs: "Sequence[asyncio.Future[Any]]") -> dict[int, BaseException]:
    """Return the errors that runs have raised, by rank."""
    found = ((rank, run.exception()) for rank, run in enumerate(runs) if run.done())
    return {rank: error for rank, error in found if error is not None}


def _is_death(error: BaseException) -> bool:
    """Return whether the controller itself died; if it raised the error of another's death, that has both types."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _found_dead(error: BaseException, controllers: Sequence[Any]) -> bool:
    """Return whether a program was ended by the death of a controller, rather than of an actor of its own."""
    cause = _cause(error)
    return isinstance(cause, RayActorError) and cause.actor_id in {c._actor_id.hex() for c in controllers}


def _cause(error: BaseException) -> BaseException:
    """Return the error that was raised in the other process."""
    return error.cause if isinstance(error, RayTaskError) else error


def reason_of(error: RayActorError) -> str:
    """Return in a few words why an actor died."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    found = re.search(r"[Ww]orker exit type: (\w+)|exit type: (\w+)", str(error))
    kind = next((g for g in found.groups() if g), "") if found else ""
    return _DEATHS.get(kind) or str(error).strip().rpartition("\n")[2]

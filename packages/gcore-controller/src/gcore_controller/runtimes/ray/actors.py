"""Calls of Ray's actors that are made together, whose errors say which actor died, where, and of what."""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from gcore_controller.errors import ControllerError

_NEWS_S = 5.0
"""How long an actor's error waits for news of another one's death."""
_DEATH_NEWS_S = 120.0
"""The same of an error that says that an actor died; the loss of a node is noticed late."""

_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}


@dataclass(frozen=True)
class ActorGroup(ABC):
    """Actors that are called together; they have a method ``is_alive`` that answers whatever they do."""

    kind: ClassVar[str]
    """The word for one of them."""
    death_error: ClassVar[type[ControllerError]]

    actors: Sequence[Any] = ()
    places: Sequence[str] = ()
    """Process and node of each actor, in words; empty: they have not started."""

    @abstractmethod
    def failure(self, rank: int, error: BaseException) -> BaseException:
        """Return the error to raise where a call of an actor raised this one."""

    def name(self, rank: int) -> str:
        """Return which actor it is, and where."""
        return f"{self.kind} {rank}, {self.places[rank] if self.places else 'which had not started'},"

    def death(self, rank: int, error: RayActorError) -> ControllerError:
        """Return the error that says how an actor died."""
        return self.death_error(f"{self.name(rank)} died: {_reason_of(error)}")

    async def answers(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """Wait for the answers to calls of some actors, by rank.

        Raises:
            Exception: the first cause of an error: the `death` of an actor, or else the first `failure`.
        """
        asked = {rank: future_of(call) for rank, call in calls.items()}
        if asked:
            await asyncio.wait(asked.values(), return_when=asyncio.FIRST_EXCEPTION)
        if errors := _errors(asked):
            rank, error = next(iter(errors.items()))
            for dead, death in {**errors, **await self._news(errors)}.items():
                if isinstance(death, RayActorError) and _is_death(death):
                    raise self.death(dead, death) from None
            raise self.failure(rank, error) from None
        return {rank: reply.result() for rank, reply in asked.items()}

    async def _news(self, errors: Mapping[int, BaseException]) -> Mapping[int, BaseException]:
        """Return deaths of actors; one that misses another may report it before that one's death is known."""
        if any(map(_is_death, errors.values())):
            return {}
        news = {rank: future_of(actor.is_alive.remote()) for rank, actor in enumerate(self.actors)}
        misses_actor = any(isinstance(cause_of(error), RayActorError) for error in errors.values())
        timeout_s = _DEATH_NEWS_S if misses_actor else _NEWS_S
        await asyncio.wait(news.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        return _errors(news)


def future_of(call: Any) -> "asyncio.Future[Any]":
    """Return a future of the answer to an actor's call, whose error is not missed if nothing waits for it."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def answers_in_time(calls: Iterable[Any], timeout_s: float) -> list[Any]:
    """Return the answers to calls of actors; None for each that fails or takes longer."""
    asked = [future_of(call) for call in calls]
    if asked:
        await asyncio.wait(asked, timeout=timeout_s)
    return [reply.result() if reply.done() and not reply.exception() else None for reply in asked]


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised in the other process."""
    return error.cause if isinstance(error, RayTaskError) else error


def _errors(replies: "Mapping[int, asyncio.Future[Any]]") -> dict[int, BaseException]:
    """Return the errors of those that are done."""
    found = {rank: reply.exception() for rank, reply in replies.items() if reply.done()}
    return {rank: error for rank, error in found.items() if error is not None}


def _is_death(error: BaseException) -> bool:
    """Return whether the actor itself died; if it raised the error of another's death, that has both types."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _reason_of(error: RayActorError) -> str:
    """Return in a few words why an actor died."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    found = re.search(r"[Ww]orker exit type: (\w+)|exit type: (\w+)", str(error))
    kind = next((g for g in found.groups() if g), "") if found else ""
    return _DEATHS.get(kind) or str(error).strip().rpartition("\n")[2]

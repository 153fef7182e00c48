"""Engines that keep the samples which wait: what they do alike, wherever those that run are."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import ClassVar

from gcore_rollout.calls import Call, Sample, WaitingLine
from gcore_rollout.errors import EngineDiedError, RolloutError
from gcore_rollout.types import Completion, Request


class QueueingEngine(ABC):
    """It keeps the samples that wait; those that run are the subclass's."""

    _HOW_TO_OPEN: ClassVar[str]
    """What to do when it is closed."""

    def __init__(self) -> None:
        self._waiting = WaitingLine()
        self._version = 0
        self._is_closed = False
        # What it died of.
        self._death: str | None = None
        self._is_paused = False
        self._is_asleep = False

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`."""
        self._check_open(tuple((r.request_id, i) for r in requests for i in r.sample_indices))
        for request in requests:
            self._check_request(request)
        call = self._waiting.join(requests)
        self._start()
        try:
            async with aclosing(call.completions()) as completions:
                async for completion in completions:
                    yield completion
        finally:
            if call.abandoned:
                self._waiting.remove(lambda sample: sample.call is call)
                self._abandon(call)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self._check_open()
        ids = None if request_ids is None else frozenset(request_ids)

        def is_meant(sample: Sample) -> bool:
            return ids is None or sample.request.request_id in ids

        for sample in self._waiting.remove(is_meant):
            sample.abort_unstarted()
        await self._abort_running(is_meant)

    def _check_open(self, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        """Refuse a call that comes too late; ``unfinished`` is what it would have made: (request id, index)."""
        if self._is_closed:
            raise RolloutError(f"the engine is closed: {self._HOW_TO_OPEN}")
        if self._death is not None:
            raise EngineDiedError(self._death, unfinished=unfinished)

    def _check_idle(self) -> None:
        running, waiting = self._num_running(), len(self._waiting)
        if running or waiting:
            raise RolloutError(
                f"{running} samples are running and {waiting} are waiting: abort them or let them finish before sleep"
            )

    def _check_update(self, version: int) -> None:
        self._check_open()
        if self._is_asleep:
            raise RolloutError("the engine is asleep: wake it before update_weights")
        if version <= self._version:
            raise ValueError(f"version is {version}: it must be above the present {self._version}")

    @abstractmethod
    def _check_request(self, request: Request) -> None:
        """Refuse a request that the model cannot take."""

    @abstractmethod
    def _num_running(self) -> int: ...

    @abstractmethod
    def _start(self) -> None:
        """See to samples that wait, if they may start."""

    @abstractmethod
    def _abandon(self, call: Call) -> None:
        """Stop a call's running samples, for which nobody waits any more."""

    @abstractmethod
    def _abort_running(self, which: Callable[[Sample], bool]) -> Awaitable[None]:
        """Stop running samples, and hand over what they have."""

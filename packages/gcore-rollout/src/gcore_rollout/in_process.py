"""Engines stepped by this event loop: what they do alike, whatever computes their steps."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from gcore_rollout.calls import Sample, WaitingLine
from gcore_rollout.errors import RolloutError
from gcore_rollout.types import Completion, Request


class InProcessEngine(ABC):
    """An engine whose steps run on the event loop, so every other method acts between two of them.

    It keeps the samples that wait; those that run are the subclass's.
    """

    def __init__(self) -> None:
        self._waiting = WaitingLine()
        self._version = 0
        self._is_closed = False
        self._is_paused = False
        self._is_asleep = False
        self._driver: asyncio.Task[None] | None = None

    @property
    def weight_version(self) -> int:
        return self._version

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`."""
        self._check_open()
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
                self._remove_running(lambda sample: sample.call is call, as_aborted=False)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self._check_open()
        ids = None if request_ids is None else frozenset(request_ids)

        def is_meant(sample: Sample) -> bool:
            return ids is None or sample.request.request_id in ids

        self._remove_running(is_meant, as_aborted=True)
        for sample in self._waiting.remove(is_meant):
            sample.abort_unstarted()

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._check_open()
        self._is_paused = True

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._check_open()
        self._is_paused = False
        self._start()

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._check_open()
        if self._is_asleep:
            return
        running, waiting = self._num_running(), len(self._waiting)
        if running or waiting:
            raise RolloutError(
                f"{running} samples are running and {waiting} are waiting: abort them or let them finish before sleep"
            )
        self._free_memory()
        self._is_asleep = True

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._check_open()
        if not self._is_asleep:
            return
        self._take_memory()
        self._is_asleep = False
        self._start()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("the engine is closed: make a new one with from_pretrained")

    def _check_update(self, version: int) -> None:
        self._check_open()
        if self._is_asleep:
            raise RolloutError("the engine is asleep: wake it before update_weights")
        if version <= self._version:
            raise ValueError(f"version is {version}: it must be above the present {self._version}")

    def _stop(self) -> None:
        """The part of `close` that is the same everywhere."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(RolloutError("the engine was closed while generating"))

    def _start(self) -> None:
        if self._has_work() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while self._has_work():
                self._step()
                # A message that came meanwhile is read in the first turn of the event loop, and acts in the second.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _has_work(self) -> bool:
        return not (self._is_paused or self._is_asleep) and bool(len(self._waiting) or self._num_running())

    def _fail(self, error: Exception) -> None:
        samples = self._waiting.remove(lambda _: True) + self._remove_running(lambda _: True, as_aborted=False)
        for call in {sample.call for sample in samples}:
            call.finished.put_nowait(error)

    @abstractmethod
    def _check_request(self, request: Request) -> None:
        """Refuse a request that the model cannot take."""

    @abstractmethod
    def _num_running(self) -> int: ...

    @abstractmethod
    def _step(self) -> None:
        """Admit waiting samples that fit, sample a token for those that run, hand over what is finished."""

    @abstractmethod
    def _remove_running(self, which: Callable[[Sample], bool], *, as_aborted: bool) -> list[Sample]:
        """Stop running samples and return them; ``as_aborted`` hands over what they have."""

    @abstractmethod
    def _free_memory(self) -> None:
        """For `sleep`; nothing is running."""

    @abstractmethod
    def _take_memory(self) -> None:
        """For `wake`."""

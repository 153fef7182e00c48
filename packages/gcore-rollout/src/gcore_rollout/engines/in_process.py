"""The base of engines whose steps run on this event loop."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable

from gcore_rollout.engines.queueing import Call, QueueingEngine, Sample
from gcore_rollout.errors import RolloutError


class InProcessEngine(QueueingEngine):
    """An engine whose steps run on the event loop, so that every other method acts between two of them."""

    _HOW_TO_OPEN = "make a new one with from_pretrained"

    def __init__(self) -> None:
        super().__init__()
        self._driver: asyncio.Task[None] | None = None

    async def pause(self) -> None:
        self._check_open()
        self._is_paused = True

    async def resume(self) -> None:
        self._check_open()
        self._is_paused = False
        self._start()

    async def sleep(self) -> None:
        self._check_open()
        if self._is_asleep:
            return
        self._check_idle()
        self._free_memory()
        self._is_asleep = True

    async def wake(self) -> None:
        self._check_open()
        if not self._is_asleep:
            return
        self._allocate_memory()
        self._is_asleep = False
        self._start()

    def _abandon(self, call: Call) -> None:
        self._remove_running(lambda sample: sample.call is call, as_aborted=False)

    async def _abort_running(self, which: Callable[[Sample], bool]) -> None:
        self._remove_running(which, as_aborted=True)

    def _stop(self) -> None:
        """Stop generating, for `close`."""
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
    def _step(self) -> None:
        """Admit waiting samples that fit, sample a token for each running one, and hand over finished ones."""

    @abstractmethod
    def _remove_running(self, which: Callable[[Sample], bool], *, as_aborted: bool) -> list[Sample]:
        """Stop running samples and return them; ``as_aborted`` hands over the tokens that they have."""

    @abstractmethod
    def _free_memory(self) -> None:
        """Free memory for `sleep`; no sample is running."""

    @abstractmethod
    def _allocate_memory(self) -> None:
        """Allocate the memory again for `wake`."""

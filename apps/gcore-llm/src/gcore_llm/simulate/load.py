"""The cost of a controller's own code: real processor seconds, during which simulated time stands still."""

import asyncio
import time
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any

_RANK: ContextVar[int] = ContextVar("controller")


class LoadMeter:
    """Adds up, for each controller, the steps of its program's coroutine and of every task that it starts.

    The work of simulated services in such a step, inside `paused`, is not counted.
    """

    def __init__(self, num_controllers: int) -> None:
        self._busy_s = [0.0] * num_controllers
        self._paused_s = 0.0

    async def run(self, rank: int, program: Coroutine[Any, Any, None]) -> None:
        """Run a controller's program under the meter."""
        _RANK.set(rank)
        asyncio.get_running_loop().set_task_factory(self._make_task)
        await asyncio.create_task(program)

    def paused(self) -> "_Pause":
        """Return a block that is not counted, because a real service would run it elsewhere; blocks do not nest."""
        return _Pause(self)

    def cut(self) -> list[float]:
        """Return the seconds of each controller since the last call, by rank."""
        busy_s, self._busy_s = self._busy_s, [0.0] * len(self._busy_s)
        return busy_s

    def begin(self) -> float:
        """Start a step of a controller; return the thread's time."""
        self._paused_s = 0.0
        return time.thread_time()

    def count(self, rank: int, start_s: float) -> None:
        """End the step of a controller that started at ``start_s``."""
        self._busy_s[rank] += time.thread_time() - start_s - self._paused_s

    def skip(self, start_s: float) -> None:
        """End a pause that started at ``start_s``."""
        self._paused_s += time.thread_time() - start_s

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        rank = _RANK.get(None)
        metered = coroutine if rank is None else _Metered(self, rank, coroutine)
        return asyncio.Task(metered, loop=loop, **options)


class _Pause:
    __slots__ = ("_meter", "_start_s")

    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter
        self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._meter.skip(self._start_s)


class _Metered(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps is counted."""

    __slots__ = ("_coroutine", "_meter", "_rank")

    def __init__(self, meter: LoadMeter, rank: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._meter = meter
        self._rank = rank
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        start_s = self._meter.begin()
        try:
            return self._coroutine.send(value)
        finally:
            self._meter.count(self._rank, start_s)

    def throw(self, *error: Any) -> Any:
        start_s = self._meter.begin()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._meter.count(self._rank, start_s)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

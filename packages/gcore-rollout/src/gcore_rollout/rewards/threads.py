"""Threads for calls that may never return: they do not keep the process from ending."""

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.rewards.reward import RewardFunction, Scored, name_of
from gcore_rollout.rewards.user_code import call


class DaemonThreads:
    """At most ``max_workers`` threads, started as they are needed.

    Those of `concurrent.futures` and `asyncio.to_thread` are joined when the process ends, however long a call blocks.
    """

    def __init__(self, max_workers: int, *, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_pending = 0

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of the threads."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        work = partial(contextvars.copy_context().run, function, *arguments)
        self._num_pending += 1
        if self._num_pending > self._num_threads < self._max_workers:
            self._num_threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True).start()
        self._calls.put(partial(self._call, work, result, loop))
        return await result

    def close(self) -> None:
        """Let the threads end when they are done."""
        for _ in range(self._num_threads):
            self._calls.put(None)
        self._num_threads = 0

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, work: Callable[[], Any], result: "asyncio.Future[Any]", loop: asyncio.AbstractEventLoop) -> None:
        """Make one call, and hand its outcome over to the event loop."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = work()
        except BaseException as raised:
            error = raised
        # A loop that is closed has no use for the outcome of a call that was given up.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._settle, result, value, error)

    def _settle(self, result: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
        # A call that was given up has held its thread until now.
        self._num_pending -= 1
        if result.done():
            return
        if error is None:
            result.set_result(value)
        elif isinstance(error, StopIteration):
            result.set_exception(RuntimeError(f"the function raised {error!r}"))
        else:
            result.set_exception(error)


class ThreadedReward:
    """Runs a reward in threads of its own, so that generation goes on while it computes.

    No thread can be stopped: a call that was given up holds its thread until it returns, and one that never returns
    holds it until the process ends. What can hang belongs in a sandbox or behind HTTP.

    Args:
        reward: synchronous, and safe to be called by several threads.
        max_workers: threads.
    """

    def __init__(self, reward: RewardFunction, *, max_workers: int = 8) -> None:
        if max_workers < 1:
            raise RewardConfigError(f"max_workers is {max_workers}; expected at least 1")
        self._reward = reward
        self.__name__ = name_of(reward)
        self._threads = DaemonThreads(max_workers, name=f"reward-{self.__name__}")

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        value = await self._threads.run(call, self._reward, prompt, completion, row)
        return await value if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Let the threads end when they are done. Idempotent."""
        self._threads.close()

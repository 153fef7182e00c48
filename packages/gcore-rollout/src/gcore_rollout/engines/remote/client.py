"""The base of the clients of remote engines: calls and their answers, whatever carries the messages."""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic

from gcore_rollout.engines.protocol import (
    Engine,
    EngineStats,
    RequestT,
    SampleT,
    check_open,
    sample_keys,
)
from gcore_rollout.engines.remote import session
from gcore_rollout.errors import EngineDiedError, RolloutError
from gcore_rollout.weight_sync.digests import HeldWeights, report_weights

END_TIMEOUT_S = 10.0
_STACKS_S = 1.0
"""How long a process may take to write its stacks."""


@dataclass(eq=False)
class _Stream:
    """One `generate` call: its unfinished samples, and the items that have come."""

    unfinished: dict[tuple[str, int], None]
    items: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)


class RemoteEngine(ABC, Generic[RequestT, SampleT]):
    """An engine that another process runs.

    All calls of `Engine` are forwarded and may be made at the same time. Exceptions come back as they were raised
    there, with a note that holds the traceback. `stats` and `weight_version` are as of the process's last report: after
    every call, soon after the first call of an idle engine, and every second. Reading `stats` asks for a new report,
    so the next reading is of about now, unless the engine is in the middle of a long step.

    When the process dies, every call in flight raises `EngineDiedError`, after the completions that arrived; so does
    every later one. A process that is silent for ``heartbeat_timeout_s`` is killed. Its event loop is silent during a
    step of the engine and while a step compiles: be generous. In other calls, such as
    `update_weights`, it may be silent ten times as long.

    Attributes:
        pid: The process id there.
    """

    _HOW_TO_OPEN: ClassVar[str]
    """Advice for errors once the engine is closed."""
    _is_local = True
    """Whether the process is one of this machine."""

    def __init__(self, pid: int, *, heartbeat_timeout_s: float) -> None:
        self.pid = pid
        self._is_closed = False
        self._death: str | None = None
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._silent_s = 0.0
        self._stats = EngineStats(
            prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0
        )
        self._is_report_due = False
        """Whether the process was asked for its stats, and has not reported them yet."""
        self._streams: dict[int, _Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = count(1)

    @property
    def weight_version(self) -> int:
        return self._stats.weight_version

    def stats(self) -> EngineStats:
        if not (self._is_report_due or self._is_closed or self._death):
            self._is_report_due = True
            self._send(0, None)
        return self._stats

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        stream = _Stream(dict.fromkeys(sample_keys(requests)))
        self._check_open(tuple(stream.unfinished))
        call_id = next(self._call_ids)
        self._streams[call_id] = stream
        try:
            self._send(call_id, session.RemoteCall(Engine.generate, (tuple(requests),)))
            while True:
                item = await stream.items.get()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if self._streams.pop(call_id, None) and self._death is None:
                self._send(call_id, None)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        if request_ids is not None:
            request_ids = tuple(request_ids)
        await self._call(Engine.abort, request_ids)

    async def pause(self) -> None:
        await self._call(Engine.pause)

    async def resume(self) -> None:
        await self._call(Engine.resume)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._call(Engine.sleep, keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        await self._call(Engine.wake, weights=weights, cache=cache)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        return await self._call(report_weights, names)

    @abstractmethod
    def _send(self, call_id: int, message: session.Setup | session.EngineCall) -> None:
        """Send a message; it is lost if the process is gone."""

    @abstractmethod
    def _end_silent(self, reason: str) -> None:
        """Kill the process, which has been silent for too long."""

    def _check_open(self, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        check_open(
            self._is_closed, self._death, how_to_open=self._HOW_TO_OPEN, unfinished=unfinished
        )

    async def _call(
        self, method: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any
    ) -> Any:
        self._check_open()
        return await self._ask(session.RemoteCall(method, arguments, options))

    async def _ask(self, message: session.EngineCall) -> Any:
        # Without the shield, cancelling the caller would cancel the future that the process answers.
        return await asyncio.shield(self._reply_to(message))

    def _reply_to(self, message: session.Setup | session.EngineCall) -> "asyncio.Future[Any]":
        """Send a message, and return the future of its answer."""
        call_id = next(self._call_ids)
        reply = self._replies[call_id] = new_future()
        self._send(call_id, message)
        return reply

    def _take(self, message: session.FromEngine) -> None:
        self._silent_s = 0.0
        match message:
            case [*finished]:
                for call_id, sample in finished:
                    stream = self._streams.get(call_id)
                    if stream is not None:
                        stream.unfinished.pop((sample.request_id, sample.index), None)
                        stream.items.put_nowait(sample)
            case session.Done(call_id, stats, value):
                self._stats = stats
                self._is_report_due = False
                self._end_call(call_id, None, value)
            case session.CallFailed(call_id):
                self._end_call(call_id, session.rebuild_exception(message, self.pid))

    def _end_call(self, call_id: int, error: Exception | None, value: Any = None) -> None:
        stream = self._streams.pop(call_id, None)
        if stream is not None:
            if isinstance(error, EngineDiedError) and not error.unfinished:
                death = error
                error = EngineDiedError(death.reason, unfinished=tuple(stream.unfinished))
                error.__cause__ = death
            stream.items.put_nowait(error)
            return
        reply = self._replies.pop(call_id, None)
        # The waiting caller may have been cancelled.
        if reply is None or reply.done():
            return
        if error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)

    def _fail_all(self) -> None:
        """End all calls, because the engine is closed or dead."""
        for call_id in list(self._streams) + list(self._replies):
            if self._is_closed:
                self._end_call(call_id, RolloutError("the engine was closed while generating"))
            else:
                self._end_call(call_id, EngineDiedError(self._death or ""))

    async def _watch(self) -> None:
        """End the process when it has been silent for too long."""
        timeout_s = self._heartbeat_timeout_s
        interval_s = min(session.BEAT_INTERVAL_S, timeout_s / 4)
        while self._silent_s < timeout_s or (
            self._silent_s < session.CONTROL_PATIENCE * timeout_s and await self._is_controlled()
        ):
            await asyncio.sleep(interval_s)
            # Not by the clock: after a pause of this event loop, messages that came meanwhile are read before the next
            # turn.
            self._silent_s += interval_s
        reason = f"silent for {self._silent_s:.1f} s"
        if self._is_local:
            reason += await _inspect(self.pid)
        self._end_silent(reason)

    async def _is_controlled(self) -> bool:
        """Return whether calls other than `generate` are in progress, which may block the engine's event loop."""
        return bool(self._replies)


async def _inspect(pid: int) -> str:
    """Have a process of this machine write its stacks; return that it did, or that it is stopped, in brackets."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return ""
    if state in "Tt":
        return f" (it is stopped, by /proc/{pid}/stat)"
    await asyncio.sleep(_STACKS_S)
    return " (its stacks are in its log)"


def new_future() -> "asyncio.Future[Any]":
    """Return a future whose exception need not be retrieved, because the waiting caller may be cancelled."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def check_start_options(
    *, num_threads: int | None = None, heartbeat_timeout_s: float = 1.0
) -> None:
    """Refuse options with which no process can be started, by a `ValueError`."""
    if heartbeat_timeout_s <= 0:
        raise ValueError(f"heartbeat_timeout_s is {heartbeat_timeout_s}; expected more than 0")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; expected at least 1")

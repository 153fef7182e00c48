"""The messages between an engine process and its owner, pickled, and what both kinds of remote engines share."""

import asyncio
import pickle
import socket
import struct
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, cast

from gcore_rollout.engines.protocol import AnyRequest, AnySample, EngineStats, HeldWeights, RequestT, SampleT
from gcore_rollout.errors import EngineDiedError, RolloutError

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Setup:
    """The first message to a new process: its environment, and the factory of its engine."""

    call_id: int
    environment: dict[str, str]
    import_path: list[str]
    folder: str
    num_threads: int | None
    beat_interval_s: float
    factory: bytes
    """Pickled separately: a module that cannot be imported there is then an error to be sent back, not a broken
    message."""


@dataclass(frozen=True)
class Generate:
    call_id: int
    requests: tuple[AnyRequest, ...]


@dataclass(frozen=True)
class Abandon:
    """The rest of a `Generate` is not wanted any more; there is no answer."""

    call_id: int


@dataclass(frozen=True)
class Call:
    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class UpdateWeights:
    """An update; its memory has been sent before, over the socket for file descriptors."""

    call_id: int
    layout: Any
    """The `SharedWeights.layout` of that memory."""
    version: int


@dataclass(frozen=True)
class Finished:
    """One sample of a `Generate`."""

    call_id: int
    sample: AnySample


@dataclass(frozen=True)
class Done:
    """A call has returned."""

    call_id: int
    stats: EngineStats
    value: Any = None


@dataclass(frozen=True)
class Failed:
    call_id: int
    error: bytes | None
    """Pickled type, arguments and attributes, if they can be."""
    description: str
    traceback: str


@dataclass(frozen=True)
class Beat:
    """The process's event loop is alive."""

    stats: EngineStats


ToEngine = Setup | Generate | Abandon | Call | UpdateWeights
FromEngine = Finished | Done | Failed | Beat


class Channel(asyncio.Protocol):
    """One end of a connected socket, for messages both ways.

    A message is handed over in the turn of the event loop that reads its last byte: where an engine's steps fill the
    loop, each turn more would be a step more.

    Attributes:
        gone: Done once the other end is, and all that it sent is handed over.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._buffer = bytearray()

    @classmethod
    async def open(cls, sock: socket.socket, take: Callable[[Any], None]) -> Self:
        """Take over a socket, and call ``take`` with each message that comes."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(take), sock=sock)
        return channel

    def send(self, message: ToEngine | FromEngine) -> None:
        """Queue a message; it is lost if the other end is gone."""
        data = pickle.dumps(message, protocol=5)
        self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close this end after sending what is queued. Idempotent."""
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer)[_LENGTH.size : end] as packed:
                message = pickle.loads(packed)
            del self._buffer[:end]
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if not self.gone.done():
            self.gone.set_result(None)


def failure(call_id: int, error: Exception) -> Failed:
    """Return an exception as a message, without its arguments if they cannot be pickled."""
    try:
        packed = pickle.dumps((type(error), error.args, vars(error)), protocol=5)
    except Exception:
        packed = None
    description = f"{type(error).__name__}: {error}"
    return Failed(call_id, packed, description, "".join(traceback.format_exception(error)))


def exception(failed: Failed, pid: int) -> Exception:
    """Return the exception of a message, of the same type if that can be imported here."""
    error: Exception = RolloutError(failed.description)
    if failed.error is not None:
        try:
            kind, arguments, attributes = pickle.loads(failed.error)
            # Not kind(*arguments): the arguments of a constructor need not be those of the exception.
            error = kind.__new__(kind, *arguments)
            vars(error).update(attributes)
        except Exception:
            error = RolloutError(failed.description)
    error.add_note(f"raised in engine process {pid}:\n{failed.traceback}")
    return error


class RemoteEngine(ABC, Generic[RequestT, SampleT]):
    """An engine that another process runs.

    All calls of `Engine` are forwarded and may be made at the same time. Exceptions come back as they were raised
    there, with a note that holds the traceback. `stats` and `weight_version` are as of the process's last message:
    after every call, and within 20 ms of a change, unless the engine is in the middle of a long step.

    When the process dies, every call in flight raises `EngineDiedError`, after the completions that arrived; so does
    every later one. A process that is silent for ``heartbeat_timeout_s`` is killed. Its event loop is silent during a
    step of the engine, while a step compiles, and while weights are copied: be generous.
    """

    _HOW_TO_OPEN: str
    """Advice for errors once the engine is closed."""

    def __init__(self) -> None:
        self._death: str | None = None
        self._closed = False

    @property
    def weight_version(self) -> int:
        return self.stats().weight_version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._call("abort", None if request_ids is None else tuple(request_ids))

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        return await self._call("held_weights", names)

    def _check_open(self, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        if self._closed:
            raise RolloutError(f"the engine is closed: {self._HOW_TO_OPEN}")
        if self._death is not None:
            raise EngineDiedError(self._death, unfinished=unfinished)

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the open engine, and return what it returns."""

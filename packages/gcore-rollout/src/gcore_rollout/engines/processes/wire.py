"""What an engine process and its owner say to each other: pickled messages, each behind its length."""

import asyncio
import pickle
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

from gcore_rollout.engines.protocol import EngineStats
from gcore_rollout.engines.types import AnyRequest, AnySample
from gcore_rollout.errors import RolloutError

if TYPE_CHECKING:
    from gcore_rollout.weight_sync.shared_weights import WeightsLayout

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Setup:
    """The first message to a new process: what it takes over from its owner, and what it is to run."""

    call_id: int
    environment: dict[str, str]
    import_path: list[str]
    folder: str
    num_threads: int | None
    beat_interval_s: float
    factory: bytes
    """Pickled apart: a module that cannot be imported there is an error to be sent back, not a broken message."""


@dataclass(frozen=True)
class Generate:
    call_id: int
    requests: tuple[AnyRequest, ...]


@dataclass(frozen=True)
class Abandon:
    """Nobody waits for the rest of a `Generate` any more; there is no answer."""

    call_id: int


@dataclass(frozen=True)
class Call:
    """A method of the engine, called with these arguments."""

    call_id: int
    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class UpdateWeights:
    """Its memory has been sent ahead, over the socket for file descriptors."""

    call_id: int
    layout: "WeightsLayout"
    version: int


@dataclass(frozen=True)
class Finished:
    """One sample of a `Generate`."""

    call_id: int
    sample: AnySample


@dataclass(frozen=True)
class Done:
    """A call has ended well."""

    call_id: int
    stats: EngineStats
    value: Any = None
    """What it returned."""


@dataclass(frozen=True)
class Failed:
    """A call has raised."""

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
        """Own a socket from now on, and give ``take`` each message that comes."""
        _, channel = await asyncio.get_running_loop().create_connection(lambda: cls(take), sock=sock)
        return channel

    def send(self, message: ToEngine | FromEngine) -> None:
        """Queue a message; it is lost if the other end is gone."""
        data = pickle.dumps(message, protocol=5)
        self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close this end behind what was sent. Idempotent."""
        self._transport.close()

    def abort(self) -> None:
        """Close this end at once. Idempotent."""
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
    """An exception as a message."""
    try:
        packed = pickle.dumps((type(error), error.args, vars(error)), protocol=5)
    except Exception:
        # What an exception holds need not be picklable; its description always is.
        packed = None
    description = f"{type(error).__name__}: {error}"
    return Failed(call_id, packed, description, "".join(traceback.format_exception(error)))


def exception(failed: Failed, pid: int) -> Exception:
    """The exception that a message tells of, of the same type if that type is known here."""
    error = _unpickled(failed.error) or RolloutError(failed.description)
    error.add_note(f"raised in engine process {pid}:\n{failed.traceback}")
    return error


def _unpickled(packed: bytes | None) -> Exception | None:
    if packed is None:
        return None
    try:
        kind, arguments, attributes = pickle.loads(packed)
        # Not kind(*arguments): what a constructor takes need not be what it hands on as the exception's arguments.
        error: Exception = kind.__new__(kind, *arguments)
        vars(error).update(attributes)
    except Exception:
        return None
    return error

"""What an engine process and its owner say to each other: pickled messages, each behind its length."""

import asyncio
import pickle
import socket
import struct
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gcore_rollout.engine import EngineStats
from gcore_rollout.errors import RolloutError
from gcore_rollout.types import Completion, Request

if TYPE_CHECKING:
    from gcore_rollout.shared_weights import WeightsLayout

_LENGTH = struct.Struct("!Q")
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Setup:
    """The first message to a new process: what it takes over from its owner, and what it is to run."""

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
    requests: tuple[Request, ...]


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
    """One completion of a `Generate`."""

    call_id: int
    completion: Completion


@dataclass(frozen=True)
class Done:
    """A call has ended well."""

    call_id: int
    stats: EngineStats


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
    """The process's event loop is alive; the first one says that the engine is ready."""

    stats: EngineStats


ToEngine = Generate | Abandon | Call | UpdateWeights
FromEngine = Finished | Done | Failed | Beat


async def streams(channel: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Both directions of a connected socket, which they own from now on."""
    return await asyncio.open_connection(sock=channel, limit=_BUFFER_BYTES)


def send(writer: asyncio.StreamWriter, message: ToEngine | FromEngine | Setup) -> None:
    """Queue a message; `writer.drain` waits until the other side keeps up."""
    data = pickle.dumps(message, protocol=5)
    writer.write(_LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message; None when the other side is gone, in mid-message or between two."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return pickle.loads(data)


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

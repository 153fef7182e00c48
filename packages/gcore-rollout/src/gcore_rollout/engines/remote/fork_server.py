"""The process from which engine and reward processes are forked, which imports common modules once, and both its ends.

`multiprocessing` has a fork server, too, but runs the owner's main module again in every child, has one list of imports
for all, and forbids daemonic processes to have children, which vLLM's tensor parallelism needs.
"""

import asyncio
import atexit
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from gcore_rollout.engines.remote.session import EngineCall, EngineSession, Setup, make_engine
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.weight_sync.digests import get_weights_gpu

if TYPE_CHECKING:
    import torch

    from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

_LENGTH = struct.Struct("!Q")
_LONGEST_REQUEST = 256
_STATUS = struct.Struct("!i")
"""The message on a status socket: first the pid, with a descriptor of the process, and last the exit code."""

_PR_SET_PDEATHSIG = 1
_CUDA_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Makes ``torch.cuda.is_available()``, which modules call at import, ask the driver's management library.

Otherwise it asks the CUDA runtime, after which no fork of the process can use CUDA. Children get the owner's
environment instead, and find the devices that their own ``CUDA_VISIBLE_DEVICES`` names.
"""


def serve(control_fd: int, owner_pid: int, preload: Sequence[str]) -> None:
    """Fork a child for each request until the owner is gone.

    A request is ``MODULE:FUNCTION``, which the child calls with the sockets that came along, except the last one, which
    is for its status.

    The children go with this process, which goes with its owner, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    if os.getppid() != owner_pid:
        return
    for module in preload:
        # The engine imports a missing module again, and the error then reaches the caller.
        with suppress(ImportError):
            importlib.import_module(module)
    # Collections in the children would otherwise write to, and so copy, the memory that they share.
    gc.collect()
    gc.freeze()
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), owner, *children], [], [])
        ready = set(readable)
        if owner in ready:
            return
        for pidfd in children.keys() & ready:
            pid, status = children.pop(pidfd)
            _, wait_status = os.waitpid(pid, 0)
            os.close(pidfd)
            with status, suppress(OSError):  # the owner did not wait for it
                status.send(_STATUS.pack(os.waitstatus_to_exitcode(wait_status)))
        if control.fileno() in ready:
            request, fds, _, _ = socket.recv_fds(
                control, _LONGEST_REQUEST, 3, socket.MSG_CMSG_CLOEXEC
            )
            if not fds:
                return
            sockets = [socket.socket(fileno=fd) for fd in fds]
            status = sockets.pop()
            server_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                for pidfd, (_, sibling_status) in children.items():
                    os.close(pidfd)
                    sibling_status.close()
                control.close()
                status.close()
                os.close(owner)
                _run_child(request.decode(), sockets, server_pid)
            for sock in sockets:
                sock.close()
            pidfd = os.pidfd_open(pid)
            children[pidfd] = (pid, status)
            with suppress(OSError):  # the owner did not wait for it
                socket.send_fds(status, [_STATUS.pack(pid)], [pidfd])


def _run_child(request: str, sockets: Sequence[socket.socket], server_pid: int) -> None:
    """Run a child, and exit."""
    exit_code = 1
    try:
        # Ends the child at once, even if it hangs and does not notice that its owner's end of the channel is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == server_pid:
            module, _, function = request.partition(":")
            getattr(importlib.import_module(module), function)(*sockets)
            exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Exit handlers of the server must not run in a child.
        os._exit(exit_code)


class Channel(asyncio.Protocol):
    """One end of a connected socket, for messages both ways.

    Messages that are sent in one turn of the event loop are one frame, and are handed over together, in the turn that
    reads its last byte: which requests an engine computes together does not depend on how fast the socket is, and where
    its steps fill the loop, each turn more would be a step more.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the other end is, and all that it sent is handed over."""
        self._loop = self.gone.get_loop()
        self._take = take
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        """Packed messages of this turn."""

    @classmethod
    async def open(cls, sock: socket.socket, take: Callable[[Any], None]) -> Self:
        """Take over a socket, and call ``take`` with each message that comes."""
        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: cls(take), sock=sock
        )
        return channel

    def send(self, message: object) -> None:
        """Queue a message, to be sent after this turn of the event loop; it is lost if the other end is gone."""
        packed = pickle.dumps(message, protocol=5)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)

    def _flush(self) -> None:
        if not self._unsent:
            return
        frame = pack_frame(self._unsent)
        self._unsent.clear()
        self._transport.write(frame)

    def close(self) -> None:
        """Close this end after sending what is queued. Idempotent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._unsent.clear()
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
            with memoryview(self._buffer)[_LENGTH.size : end] as frame:
                messages = list(_unpack_messages(frame))
            del self._buffer[:end]
            for message in messages:
                self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if not self.gone.done():
            self.gone.set_result(None)


def pack_frame(messages: Iterable[bytes]) -> bytes:
    """Return one frame of pickled messages, which `Channel` reads."""
    parts: list[bytes] = []
    for packed in messages:
        parts.append(_LENGTH.pack(len(packed)))
        parts.append(packed)
    content = b"".join(parts)
    return _LENGTH.pack(len(content)) + content


def read_frame(stream: BinaryIO) -> list[Any] | None:
    """Wait for a frame of `Channel`, and return its messages; None: the other end is gone."""
    start = stream.read(_LENGTH.size)
    if len(start) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(start)
    frame = stream.read(length)
    if len(frame) < length:
        return None
    return list(_unpack_messages(memoryview(frame)))


def _unpack_messages(frame: memoryview) -> Iterator[Any]:
    """Yield the messages of a frame, each of which follows its length."""
    start = 0
    while start < len(frame):
        (length,) = _LENGTH.unpack_from(frame, start)
        end = start + _LENGTH.size + length
        with frame[start + _LENGTH.size : end] as packed:
            yield pickle.loads(packed)
        start = end


def serve_engine(channel: socket.socket, weights: socket.socket) -> None:
    """Serve an engine, in a process of its own, until the owner closes its end of the channel."""
    asyncio.run(_EngineServer(weights).live(channel))


class _EngineServer(EngineSession):
    """Serves in an engine process until the owner closes its end of the channel."""

    def __init__(self, weights: socket.socket) -> None:
        super().__init__(lambda message: self._channel.send(message), self._next_weights)
        # It carries a descriptor of shared weights ahead of each `Engine.update_weights`.
        self._weights = weights
        self._shared_weights: SharedWeightsReader | None = None

    async def live(self, channel: socket.socket) -> None:
        """Answer messages, of which the first is a `Setup`."""
        self._channel = await Channel.open(channel, lambda message: self._take(*message))
        await self._channel.gone
        self.abandon()
        if self.engine is not None:
            await self.engine.close()

    def _take(self, call_id: int, message: Setup | EngineCall) -> None:
        if isinstance(message, Setup):
            self.start(call_id, self._build(message))
        else:
            self.take(call_id, message)

    async def _build(self, setup: Setup) -> str | None:
        """Make the engine, and return the UUID of the GPU that its weights are on."""
        setup.enter()
        self.engine = await make_engine(setup.factory, setup.num_threads)
        self.start(0, self.beat(setup.beat_interval_s))
        return get_weights_gpu(self.engine)

    def _next_weights(self, layout: Any) -> "Awaitable[Iterable[tuple[str, torch.Tensor]]]":
        if isinstance(layout, bytes):
            return self._open_weights(layout)
        # Here and not in the task: descriptors come in the order of messages.
        _, (fd,), _, _ = socket.recv_fds(self._weights, 1, 1, socket.MSG_CMSG_CLOEXEC)
        return self._map_weights(fd, layout)

    async def _open_weights(self, handles: bytes) -> "Iterable[tuple[str, torch.Tensor]]":
        from gcore_rollout.weight_sync.shared_weights import OpenedWeights

        return OpenedWeights(handles)

    async def _map_weights(self, fd: int, layout: Any) -> "Iterable[tuple[str, torch.Tensor]]":
        if self._shared_weights is None:
            # Not before: it imports torch, which may come later than the fork and in another configuration.
            from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

            self._shared_weights = SharedWeightsReader()
        return self._shared_weights.read(fd, layout)


class _ForkServer:
    """The owner's end of a fork server, which runs until this process ends."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._owner_pid = os.getpid()
        self.control, theirs = socket.socketpair()
        with theirs:
            # Not `-m`: this process may have found gcore_rollout where a fresh one would not look.
            arguments = f"{theirs.fileno()}, {os.getpid()}, {preload!r}"
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from gcore_rollout.engines.remote.fork_server import serve; serve({arguments})"
            )
            command = [sys.executable, "-c", program]
            environment = os.environ | _CUDA_CHECK
            fds = [theirs.fileno()]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment
            )
        atexit.register(self.close)

    def serves(self) -> bool:
        """Return whether it runs and belongs to this process; a fork of the owner has to start another."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self.serves():
            # Not close alone: a fork of this process may have its end of the socket, too.
            self.control.shutdown(socket.SHUT_RDWR)
            self._process.wait()
        self.control.close()


_servers: dict[tuple[str, ...], _ForkServer] = {}


@dataclass(eq=False)
class ChildProcess:
    """A process that ends with this one at the latest."""

    pid: int
    """For signals there is `kill`, which cannot hit another process that was given the same number."""
    _pidfd: int
    _status: socket.socket

    @classmethod
    async def fork(
        cls, serve: str, sockets: Sequence[socket.socket], *, preload: tuple[str, ...]
    ) -> Self:
        """Fork a process that calls ``MODULE:FUNCTION`` with these sockets, at most two, which are closed here."""
        status, theirs = socket.socketpair()
        passed = [*sockets, theirs]
        try:
            with ExitStack() as sent:
                for sock in passed:
                    sent.enter_context(sock)
                server = _servers.get(preload)
                if server is None or not server.serves():
                    server = _servers[preload] = _ForkServer(preload)
                socket.send_fds(
                    server.control, [serve.encode()], [sock.fileno() for sock in passed]
                )
            status.setblocking(False)
            ready = asyncio.Event()
            asyncio.get_running_loop().add_reader(status, ready.set)
            try:
                await ready.wait()
            finally:
                asyncio.get_running_loop().remove_reader(status)
            data, fds, _, _ = socket.recv_fds(status, _STATUS.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise EngineDiedError("the fork server ended before it made the process")
        except BaseException:
            status.close()
            raise
        return cls(_STATUS.unpack(data)[0], fds[0], status)

    async def wait_for_end(self) -> str:
        """Wait until it has ended, and describe why. To be called once."""
        data = await asyncio.get_running_loop().sock_recv(self._status, _STATUS.size)
        if not data:
            # It cannot outlive the server, which alone could have reported more.
            return "ended with the fork server that it came from"
        (code,) = _STATUS.unpack(data)
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        """Kill it with SIGKILL; do nothing if it has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        os.close(self._pidfd)
        self._pidfd = -1
        self._status.close()

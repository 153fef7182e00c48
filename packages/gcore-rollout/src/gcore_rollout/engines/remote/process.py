"""Client of an engine in a process of its own, called over a socket, with weights in shared memory."""

import asyncio
import pickle
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Self

import torch

from gcore_rollout.engines.protocol import Engine, RequestT, SampleT
from gcore_rollout.engines.registry import PRELOAD_HF
from gcore_rollout.engines.remote.client import (
    END_TIMEOUT_S,
    RemoteEngine,
    check_start_options,
    new_future,
)
from gcore_rollout.engines.remote.fork_server import Channel, ChildProcess
from gcore_rollout.engines.remote.session import (
    BEAT_INTERVAL_S,
    EngineCall,
    RemoteCall,
    Setup,
)
from gcore_rollout.errors import EngineStartError, RolloutError
from gcore_rollout.weight_sync.shared_weights import (
    SharedCudaWeights,
    SharedWeights,
    choose_sources,
    copy_weights,
)

_SERVE = "gcore_rollout.engines.remote.fork_server:serve_engine"


class EngineProcess(RemoteEngine[RequestT, SampleT]):
    """An engine that a process on this machine runs; made by `start`. See `RemoteEngine`.

    The process ends with this one, however that ends, and leaves nothing. It is bound to the event loop in which it was
    started, and ends with it. Linux only.

    Example:
        >>> from functools import partial
        >>> async def count_tokens(path: str, request: Request) -> int:
        ...     engine = await EngineProcess.start(partial(HFEngine.from_pretrained, path), num_threads=2)
        ...     try:
        ...         return sum([completion.work async for completion in engine.generate([request])])
        ...     finally:
        ...         await engine.close()
    """

    _HOW_TO_OPEN = "start a new one"

    def __init__(
        self,
        process: ChildProcess,
        channel: Channel,
        weights_socket: socket.socket,
        *,
        heartbeat_timeout_s: float,
    ) -> None:
        super().__init__(process.pid, heartbeat_timeout_s=heartbeat_timeout_s)
        self._process = process
        self._channel = channel
        self._weights_socket = weights_socket
        self.weights_gpu: str | None = None
        """The UUID of the GPU that the engine's weights are on; None: they are on none, or it does not report it."""
        self._weights = SharedWeights()
        self._weights_in_use: asyncio.Future[Any] | None = None
        self._last_update = new_future()
        self._last_update.set_result(None)
        self._killed_because = ""
        self._life = asyncio.create_task(self._wait_for_end())
        # A callback, because a task that is cancelled before it has started runs none of its code.
        self._life.add_done_callback(self._fail_calls)
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        factory: Callable[[], Engine[RequestT, SampleT] | Awaitable[Engine[RequestT, SampleT]]],
        *,
        num_threads: int | None = None,
        env: Mapping[str, str] | None = None,
        preload: tuple[str, ...] = PRELOAD_HF,
        start_timeout_s: float = 600.0,
        heartbeat_timeout_s: float = 120.0,
    ) -> Self:
        """Start a process and wait until its engine is made.

        Args:
            factory: makes the engine there; picklable, such as ``partial(HFEngine.from_pretrained, path)``.
            num_threads: of torch on CPU; default: torch's own choice.
            env: environment variables in addition to those of this process, such as CUDA_VISIBLE_DEVICES. They are set
                before the engine is made, but after the modules of ``preload`` were imported.
            preload: modules that are imported once, in a server from which all processes with the same ``preload`` are
                forked. None of them may start threads or touch a GPU on import.
            heartbeat_timeout_s: how long the process may be silent.

        Raises:
            EngineStartError: it was not ready in time.
            EngineDiedError: the process died before it was ready.
            Exception: what the factory raised.
        """
        check_start_options(num_threads=num_threads, heartbeat_timeout_s=heartbeat_timeout_s)
        packed = pickle.dumps(factory)
        engine: Self | None = None
        try:
            async with asyncio.timeout(start_timeout_s):
                engine = await cls._fork(preload, heartbeat_timeout_s)
                setup = Setup.here(
                    packed,
                    env=env,
                    num_threads=num_threads,
                    beat_interval_s=min(BEAT_INTERVAL_S, heartbeat_timeout_s / 4),
                )
                engine.weights_gpu = await engine._reply_to(setup)
        except BaseException as error:
            if engine is not None:
                engine._kill("its start failed")
                await engine.close()
            if isinstance(error, TimeoutError):
                raise EngineStartError(
                    f"the engine process was not ready after {start_timeout_s} s"
                ) from error
            raise
        engine._watcher = asyncio.create_task(engine._watch())
        return engine

    @classmethod
    async def _fork(cls, preload: tuple[str, ...], heartbeat_timeout_s: float) -> Self:
        with ExitStack() as unfinished:
            channel, their_channel = socket.socketpair()
            weights, their_weights = socket.socketpair()
            unfinished.callback(channel.close)
            unfinished.callback(weights.close)
            process = await ChildProcess.fork(
                _SERVE, [their_channel, their_weights], preload=preload
            )
            unfinished.callback(process.close)
            # The process speaks when it is spoken to, and then this is the engine.
            opened = await Channel.open(channel, lambda message: engine._take(message))
            unfinished.pop_all()
        engine = cls(process, opened, weights, heartbeat_timeout_s=heartbeat_timeout_s)
        return engine

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Replace the weights, which are copied to shared memory, unless they are a `SharedWeights`.

        Weights on the engine's own GPU stay there: they are copied to memory that it opens by CUDA IPC, and are freed
        when it has copied them, unless they are a `SharedCudaWeights`.

        An `HFEngine` on CPU computes with them in place, others copy them once more. When this returns, the caller owns
        them again and may rewrite a `SharedWeights`. An iterable that fails half-way leaves the engine with its old
        weights. If this is cancelled, the update may still happen.
        """
        self._check_open()
        shared: Any = weights
        if not isinstance(weights, SharedWeights):
            # One after the other, because each update in flight has memory of its own.
            while not self._last_update.done():
                await asyncio.wait([self._last_update])
            self._check_open()
            if not isinstance(weights, SharedCudaWeights):
                shared = copy_weights(weights, [self.weights_gpu], self._weights)
            [shared] = choose_sources(shared, [self.weights_gpu], self._weights)
        if isinstance(shared, SharedCudaWeights):
            await self._update_on_gpu(shared, version, frees=shared is not weights)
            return
        message = RemoteCall(Engine.update_weights, (shared.layout,), {"version": version})
        in_use = new_future()
        shared.read_until(in_use)
        with suppress(ConnectionError):  # it has just died: the reply will say so
            socket.send_fds(self._weights_socket, [b"\0"], [shared.fileno()])
        self._last_update = reply = self._reply_to(message)
        reply.add_done_callback(lambda _: self._weights_taken(reply, in_use))
        await asyncio.shield(reply)

    async def _update_on_gpu(self, shared: SharedCudaWeights, version: int, *, frees: bool) -> None:
        """Send the handles of weights, which are freed afterwards if ``frees``."""
        message = RemoteCall(Engine.update_weights, (shared.handles(),), {"version": version})
        self._last_update = reply = self._reply_to(message)
        if frees:
            reply.add_done_callback(lambda _: shared.close())
        await asyncio.shield(reply)

    async def close(self) -> None:
        """End the process: calls still generating raise what the engine raises; a process that hangs is killed."""
        if not self._is_closed:
            self._is_closed = True
            try:
                async with asyncio.timeout(END_TIMEOUT_S):
                    if self._death is None:
                        await self._ask(RemoteCall(Engine.close))
            except (TimeoutError, RolloutError):
                self._kill("it did not close")
            finally:
                self._channel.close()
                self._weights.close()
        await asyncio.wait([self._life])

    def _send(self, call_id: int, message: Setup | EngineCall) -> None:
        self._channel.send((call_id, message))

    def _end_silent(self, reason: str) -> None:
        self._kill(f"it had been {reason}")

    def _kill(self, reason: str) -> None:
        self._killed_because = f" because {reason}"
        self._process.kill()

    def _weights_taken(self, reply: "asyncio.Future[Any]", in_use: "asyncio.Future[Any]") -> None:
        """Free the memory of an update if it was copied, or of the update before if the engine uses it in place."""
        if reply.exception() or not reply.result():
            in_use.set_result(None)
            return
        if self._weights_in_use is not None:
            self._weights_in_use.set_result(None)
        self._weights_in_use = in_use

    async def _wait_for_end(self) -> str:
        """Wait until the process has ended, and describe why."""
        ending = asyncio.create_task(self._process.wait_for_end())
        ends = [self._channel.gone, ending]
        try:
            # The channel ends first, or the process does, if a child of it holds the channel open.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._watcher is not None:
                self._watcher.cancel()
            # Messages that it sent are still to be read; and a process without a channel is of no use.
            await asyncio.wait(ends, timeout=END_TIMEOUT_S)
            if not ending.done():
                self._kill("it closed its end of the channel")
            return await ending
        finally:
            ending.cancel()
            await asyncio.wait([ending])

    def _fail_calls(self, life: "asyncio.Task[str]") -> None:
        """Fail all calls, because the process has ended or its event loop is closing."""
        end = "was left by its event loop" if life.cancelled() else life.result()
        self._death = f"engine process {self.pid} {end}{self._killed_because}"
        self._process.close()
        self._weights_socket.close()
        self._channel.abort()
        self._fail_all()
        if self._weights_in_use is not None:
            self._weights_in_use.set_result(None)

"""The inside of an engine process: it builds the engine and answers its owner's messages."""

import asyncio
import inspect
import os
import pickle
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from gcore_rollout.engines.processes.wire import (
    Abandon,
    Beat,
    Call,
    Channel,
    Done,
    Finished,
    Generate,
    Setup,
    ToEngine,
    UpdateWeights,
    failure,
)
from gcore_rollout.engines.protocol import Engine, EngineStats, TakesWeightsInPlace
from gcore_rollout.engines.types import AnyRequest, AnySample
from gcore_rollout.weight_sync.report import report_weights

if TYPE_CHECKING:
    from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

_STATS_INTERVAL_S = 0.02


def run(channel: socket.socket, weights: socket.socket) -> None:
    """Serve until the owner closes its end of the channel.

    Args:
        channel: messages, of which the first is a `Setup`.
        weights: file descriptors of shared weights, one ahead of each `UpdateWeights`.
    """
    asyncio.run(_EngineServer(weights).live(channel))


class _EngineServer:
    """Runs each message as a task of its own."""

    def __init__(self, weights: socket.socket) -> None:
        self._weights = weights
        self._shared_weights: SharedWeightsReader | None = None
        self._engine: Engine[AnyRequest, AnySample] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_called = asyncio.Event()

    async def live(self, channel: socket.socket) -> None:
        self._channel = await Channel.open(channel, self._take)
        await self._channel.gone
        for task in self._tasks.values():
            task.cancel()
        if self._engine is not None:
            await self._engine.close()

    def _take(self, message: ToEngine) -> None:
        self._is_called.set()
        match message:
            case Setup(call_id):
                self._start(call_id, self._build(message))
            case Generate(call_id, requests):
                self._start(call_id, self._generate(call_id, requests))
            case UpdateWeights(call_id):
                # Here and not in the task: descriptors come in the order of messages.
                _, (fd,), _, _ = socket.recv_fds(self._weights, 1, 1, socket.MSG_CMSG_CLOEXEC)
                self._start(call_id, self._update(fd, message))
            case Call(call_id, "held_weights", (names,)):
                # An engine of the user's own may not have the method.
                self._start(call_id, report_weights(self._engine, names))
            case Call(call_id, method, arguments):
                self._start(call_id, getattr(self._engine, method)(*arguments))
            case Abandon(call_id):
                if task := self._tasks.get(call_id):
                    task.cancel()

    def _start(self, call_id: int, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(self._answer(call_id, work))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(call_id))

    async def _answer(self, call_id: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            value = await work
        except Exception as error:
            self._channel.send(failure(call_id, error))
        else:
            assert self._engine is not None
            self._channel.send(Done(call_id, self._engine.stats(), value))

    async def _build(self, setup: Setup) -> None:
        os.environ.clear()
        os.environ.update(setup.environment)
        os.chdir(setup.folder)
        sys.path[:] = setup.import_path
        if setup.num_threads is not None:
            import torch

            torch.set_num_threads(setup.num_threads)
        made = pickle.loads(setup.factory)()
        engine: Engine[AnyRequest, AnySample] = await made if inspect.isawaitable(made) else made
        self._engine = engine
        self._start(0, self._beat(engine, setup.beat_interval_s))

    async def _beat(self, engine: Engine[AnyRequest, AnySample], interval_s: float) -> None:
        """Tell what has changed soon, and now and then that nothing has."""
        clock = asyncio.get_running_loop().time
        told: EngineStats | None = None
        told_at = clock()
        while True:
            stats = engine.stats()
            if stats != told or clock() >= told_at + interval_s:
                told, told_at = stats, clock()
                self._channel.send(Beat(stats))
            self._is_called.clear()
            if not stats.num_running:
                # Nothing changes until somebody calls.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_called.wait(), interval_s)
            await asyncio.sleep(min(_STATS_INTERVAL_S, interval_s))

    async def _generate(self, call_id: int, requests: tuple[AnyRequest, ...]) -> None:
        assert self._engine is not None
        completions = self._engine.generate(requests)
        try:
            async for completion in completions:
                self._channel.send(Finished(call_id, completion))
        finally:
            if hasattr(completions, "aclose"):
                await cast(AsyncGenerator[Any], completions).aclose()

    async def _update(self, fd: int, update: UpdateWeights) -> bool:
        """Whether the memory is in use from now on, as the engine's weights."""
        assert self._engine is not None
        if self._shared_weights is None:
            # Not before: it imports torch, which may come later than the fork and in another configuration.
            from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

            self._shared_weights = SharedWeightsReader()
        weights = self._shared_weights.read(fd, update.layout)
        if isinstance(self._engine, TakesWeightsInPlace):
            return await self._engine.update_weights_in_place(weights, version=update.version)
        await self._engine.update_weights(weights, version=update.version)
        return False

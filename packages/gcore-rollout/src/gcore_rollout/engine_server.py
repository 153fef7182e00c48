"""The inside of an engine process: it builds the engine and answers its owner's messages."""

import asyncio
import inspect
import os
import pickle
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any, cast

from gcore_rollout import wire
from gcore_rollout.engine import Engine
from gcore_rollout.types import Request
from gcore_rollout.wire import Abandon, Beat, Call, Done, Finished, FromEngine, Generate, Setup, ToEngine, UpdateWeights

if TYPE_CHECKING:
    from gcore_rollout.shared_weights import SharedWeightsReader


def run(channel: socket.socket, weights: socket.socket) -> None:
    """Serve until the owner closes its end of the channel.

    Args:
        channel: messages, of which the first is a `Setup`.
        weights: file descriptors of shared weights, one ahead of each `UpdateWeights`.
    """
    asyncio.run(_live(channel, weights))


async def _live(channel: socket.socket, weights: socket.socket) -> None:
    reader, writer = await wire.streams(channel)
    setup: Setup | None = await wire.receive(reader)
    if setup is None:
        return
    try:
        engine = await _build(setup)
    except Exception as error:
        wire.send(writer, wire.failure(0, error))
        await _close(writer)
        return
    server = _EngineServer(engine, writer, weights)
    beats = asyncio.create_task(server.beat(setup.beat_interval_s))
    message: ToEngine | None
    while (message := await wire.receive(reader)) is not None:
        server.take(message)
    beats.cancel()
    server.cancel_all()
    await engine.close()
    await _close(writer)


async def _build(setup: Setup) -> Engine:
    os.environ.clear()
    os.environ.update(setup.environment)
    os.chdir(setup.folder)
    sys.path[:] = setup.import_path
    if setup.num_threads is not None:
        import torch

        torch.set_num_threads(setup.num_threads)
    made = pickle.loads(setup.factory)()
    return await made if inspect.isawaitable(made) else made


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        return  # the owner is gone already


class _EngineServer:
    """Runs each message as a task of its own."""

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter, weights: socket.socket) -> None:
        self._engine = engine
        self._writer = writer
        self._weights = weights
        self._shared_weights: SharedWeightsReader | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: ToEngine) -> None:
        match message:
            case Generate(call_id, requests):
                self._start(call_id, self._generate(call_id, requests))
            case UpdateWeights(call_id):
                # Here and not in the task: descriptors come in the order of messages.
                _, (fd,), _, _ = socket.recv_fds(self._weights, 1, 1, socket.MSG_CMSG_CLOEXEC)
                self._start(call_id, self._update(fd, message))
            case Call(call_id, method, arguments):
                self._start(call_id, self._call(method, arguments))
            case Abandon(call_id):
                if task := self._tasks.get(call_id):
                    task.cancel()

    async def beat(self, interval_s: float) -> None:
        while True:
            await self._send(Beat(self._engine.stats()))
            await asyncio.sleep(interval_s)

    def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _start(self, call_id: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._answer(call_id, work))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(call_id))

    async def _answer(self, call_id: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self._send(wire.failure(call_id, error))
        else:
            await self._send(Done(call_id, self._engine.stats()))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> None:
        await getattr(self._engine, method)(*arguments)

    async def _generate(self, call_id: int, requests: tuple[Request, ...]) -> None:
        completions = self._engine.generate(requests)
        try:
            async for completion in completions:
                await self._send(Finished(call_id, completion))
        finally:
            if hasattr(completions, "aclose"):
                await cast(AsyncGenerator[Any], completions).aclose()

    async def _update(self, fd: int, update: UpdateWeights) -> None:
        if self._shared_weights is None:
            # Not before: it imports torch, which may come later than the fork and in another configuration.
            from gcore_rollout.shared_weights import SharedWeightsReader

            self._shared_weights = SharedWeightsReader()
        await self._engine.update_weights(self._shared_weights.read(fd, update.layout), version=update.version)

    async def _send(self, message: FromEngine) -> None:
        try:
            wire.send(self._writer, message)
            await self._writer.drain()
        except ConnectionError:
            return  # the owner is gone: the reader sees the same, and ends the process

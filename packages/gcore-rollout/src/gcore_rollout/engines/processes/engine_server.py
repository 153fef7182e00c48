"""The process of an engine: it makes the engine and answers its owner's messages. Actors of engines do so, too."""

import asyncio
import inspect
import os
import pickle
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

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
from gcore_rollout.engines.protocol import (
    AnyRequest,
    AnySample,
    Engine,
    EngineStats,
    TakesWeightsInPlace,
    report_weights,
)

if TYPE_CHECKING:
    import torch

    from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

STATS_INTERVAL_S = 0.02
BEAT_INTERVAL_S = 0.25

AnyEngine = Engine[AnyRequest, AnySample]


async def make_engine(factory: bytes, num_threads: int | None) -> AnyEngine:
    """Make an engine by a pickled function, which may be asynchronous.

    Args:
        num_threads: of torch on CPU; None: its own choice.
    """
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    made = pickle.loads(factory)()
    return await made if inspect.isawaitable(made) else made


async def call_engine(engine: AnyEngine, method: str, *arguments: Any) -> Any:
    """Call a method of an engine; one of the user's own may have no ``held_weights``."""
    if method == "held_weights":
        return await report_weights(engine, *arguments)
    return await getattr(engine, method)(*arguments)


async def generate(engine: AnyEngine, requests: Iterable[AnyRequest], take: Callable[[AnySample], None]) -> None:
    """Hand over each sample as it is finished; when cancelled, the rest is abandoned."""
    samples: Any = engine.generate(tuple(requests))
    try:
        async for sample in samples:
            take(sample)
    finally:
        if hasattr(samples, "aclose"):
            await samples.aclose()


async def update_weights(engine: AnyEngine, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> bool:
    if isinstance(engine, TakesWeightsInPlace):
        return await engine.update_weights_in_place(weights, version=version)
    await engine.update_weights(weights, version=version)
    return False


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
        self._engine: AnyEngine | None = None
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
        engine: Any = self._engine
        match message:
            case Setup(call_id):
                self._start(call_id, self._build(message))
            case Generate(call_id, requests):

                def take(sample: AnySample) -> None:
                    self._channel.send(Finished(call_id, sample))

                self._start(call_id, generate(engine, requests, take))
            case UpdateWeights(call_id):
                # Here and not in the task: descriptors come in the order of messages.
                _, (fd,), _, _ = socket.recv_fds(self._weights, 1, 1, socket.MSG_CMSG_CLOEXEC)
                self._start(call_id, self._update(fd, message))
            case Call(call_id, method, arguments):
                self._start(call_id, call_engine(engine, method, *arguments))
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
        self._engine = await make_engine(setup.factory, setup.num_threads)
        self._start(0, self._beat(self._engine, setup.beat_interval_s))

    async def _beat(self, engine: AnyEngine, interval_s: float) -> None:
        """Report changed stats soon, and unchanged ones at intervals."""
        clock = asyncio.get_running_loop().time
        reported: EngineStats | None = None
        reported_at = clock()
        while True:
            stats = engine.stats()
            if stats != reported or clock() >= reported_at + interval_s:
                reported, reported_at = stats, clock()
                self._channel.send(Beat(stats))
            self._is_called.clear()
            if not stats.num_running:
                # Nothing changes until the next call.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._is_called.wait(), interval_s)
            await asyncio.sleep(min(STATS_INTERVAL_S, interval_s))

    async def _update(self, fd: int, update: UpdateWeights) -> bool:
        assert self._engine is not None
        if self._shared_weights is None:
            # Not before: it imports torch, which may come later than the fork and in another configuration.
            from gcore_rollout.weight_sync.shared_weights import SharedWeightsReader

            self._shared_weights = SharedWeightsReader()
        weights = self._shared_weights.read(fd, update.layout)
        return await update_weights(self._engine, weights, version=update.version)

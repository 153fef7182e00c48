"""The Ray actor of an engine: it makes the engine and answers its clients. This module does not import Ray."""

import asyncio
import gc
import os
import pickle
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gcore_rollout.engines.processes.engine_server import (
    BEAT_INTERVAL_S,
    STATS_INTERVAL_S,
    AnyEngine,
    call_engine,
    generate,
    make_engine,
    update_weights,
)
from gcore_rollout.engines.processes.wire import Failed, failure
from gcore_rollout.engines.protocol import AnyRequest, AnySample, EngineStats
from gcore_rollout.errors import EngineDiedError

if TYPE_CHECKING:
    from gcore_rollout.weight_sync.weight_references import WeightReferences

_CLIENT_PATIENCE = 5.0
"""An actor waits for a silent client this many times as long as it may be silent itself."""
_LATE_CALL_S = 60.0
_RESTARTED = "it was restarted: connect again"


@dataclass(frozen=True)
class Incarnation:
    """The process of an actor, as long as it has the same engine."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=platform.node)
    token: str = field(default_factory=lambda: uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class ClientCall:
    """The client of a call, and a number for each `generate`."""

    client: str
    number: int = 0


@dataclass(frozen=True)
class EngineReply:
    """The reply to a call."""

    number: int
    """Increases with each reply, because replies can overtake each other."""
    stats: EngineStats | None
    """None until the engine is made."""
    value: Any = None


class EngineActor:
    """Runs one engine at a time, for any number of clients; its methods are the actor's.

    Args:
        num_threads: of torch on CPU; None: its own choice.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._factory = b""
        self._incarnation = Incarnation()
        self._engine: AnyEngine | None = None
        self._is_making = asyncio.Lock()
        self._num_replies = 0
        self._running: dict[ClientCall, asyncio.Task[None]] = {}
        # Abandoned before they came: Ray may let a call with large arguments arrive after a later one.
        self._abandoned: set[ClientCall] = set()
        self._leases: dict[str, asyncio.TimerHandle] = {}

    async def incarnation(self) -> Incarnation:
        return self._incarnation

    async def make(self, factory: bytes) -> EngineReply:
        """Make an engine by this factory, pickled by value, in place of any other, and return its incarnation.

        An engine that could not be made is tried again.
        """

        async def make() -> Incarnation:
            async with self._is_making:
                if factory != self._factory:
                    await self._end_engine()
                    self._factory = factory
                if self._engine is None:
                    self._engine = await make_engine(self._factory, self._num_threads)
                return self._incarnation

        return await self._answer(make)

    async def call(self, token: str, method: str, *arguments: Any) -> EngineReply:
        return await self._answer(lambda: call_engine(self._engine_of(token), method, *arguments))

    async def update_weights(self, token: str, weights: "WeightReferences", version: int) -> EngineReply:

        async def update() -> None:
            self._engine_of(token)
            here = await weights.fetch()
            await update_weights(self._engine_of(token), here, version=version)

        return await self._answer(update)

    async def generate(self, token: str, call: ClientCall, packed_requests: bytes) -> AsyncIterator[EngineReply]:
        """Yield packed lists of samples, each as soon as it is finished; then a `Failed`, if it failed, and None.

        Both are packed because arrays that Ray unpickles cannot be written to.
        """
        items: asyncio.Queue[AnySample | Failed | None] = asyncio.Queue()
        task = self._running[call] = asyncio.create_task(self._generate(token, packed_requests, items))

        def end(_: object) -> None:
            if token != self._incarnation.token:
                items.put_nowait(failure(0, EngineDiedError(_RESTARTED)))
            items.put_nowait(None)

        task.add_done_callback(end)
        if call in self._abandoned:
            task.cancel()
        try:
            ended = False
            while not ended:
                # One message for all items that have come meanwhile: each message takes Ray half a millisecond.
                batch = [await items.get(), *(items.get_nowait() for _ in range(items.qsize()))]
                ended = batch[-1] is None
                yield self._reply(pack(batch))
        finally:
            self._running.pop(call).cancel()

    async def abandon(self, call: ClientCall) -> None:
        if call in self._running:
            self._running[call].cancel()
        else:
            self._abandoned.add(call)
            asyncio.get_running_loop().call_later(_LATE_CALL_S, self._abandoned.discard, call)

    async def watch(self, token: str, client: str, heartbeat_timeout_s: float) -> AsyncIterator[EngineReply]:
        """Yield changed stats soon, and unchanged ones at intervals.

        It ends after a while, to be called again: the calls of a client that does not are abandoned.
        """
        loop = asyncio.get_running_loop()
        self._end_lease(client)
        self._leases[client] = loop.call_later(_CLIENT_PATIENCE * heartbeat_timeout_s, self._forget, client)
        interval_s = min(BEAT_INTERVAL_S, heartbeat_timeout_s / 4)
        end = loop.time() + heartbeat_timeout_s
        reported: EngineStats | None = None
        reported_at = 0.0
        try:
            while client in self._leases and loop.time() < end:
                if self._engine_of(token).stats() != reported or loop.time() >= reported_at + interval_s:
                    message = self._reply()
                    reported, reported_at = message.stats, loop.time()
                    yield message
                await asyncio.sleep(min(STATS_INTERVAL_S, interval_s))
        except EngineDiedError as death:
            self._end_lease(client)
            yield self._reply(failure(0, death))

    async def leave(self, client: str) -> None:
        self._forget(client)

    async def close(self) -> None:
        """Free the engine, before the actor ends."""
        if self._engine is not None:
            await self._engine.close()

    async def _end_engine(self) -> None:
        """Free the engine, which is dead for its clients."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self._incarnation = Incarnation()
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await engine.close()
        del engine
        # Models are held by cycles; free them before the next one is loaded.
        gc.collect()

    async def _answer(self, work: Callable[[], Awaitable[Any]]) -> EngineReply:
        try:
            return self._reply(await work())
        except Exception as error:
            return self._reply(failure(0, error))

    async def _generate(
        self, token: str, packed_requests: bytes, items: "asyncio.Queue[AnySample | Failed | None]"
    ) -> None:
        try:
            await generate(self._engine_of(token), pickle.loads(packed_requests), items.put_nowait)
        except Exception as error:
            items.put_nowait(failure(0, error))

    def _engine_of(self, token: str) -> AnyEngine:
        if token != self._incarnation.token:
            raise EngineDiedError(_RESTARTED)
        assert self._engine is not None
        return self._engine

    def _reply(self, value: Any = None) -> EngineReply:
        self._num_replies += 1
        return EngineReply(self._num_replies, self._engine.stats() if self._engine else None, value)

    def _end_lease(self, client: str) -> None:
        if lease := self._leases.pop(client, None):
            lease.cancel()

    def _forget(self, client: str) -> None:
        self._end_lease(client)
        for call, task in self._running.items():
            if call.client == client:
                task.cancel()


def pack(items: Sequence[AnyRequest] | Sequence[AnySample | Failed | None]) -> bytes:
    return pickle.dumps(items, protocol=5)

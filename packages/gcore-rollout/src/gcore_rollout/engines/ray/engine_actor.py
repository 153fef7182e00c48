"""The inside of an engine's Ray actor: it builds the engine and answers its clients. Ray itself is not needed here."""

import asyncio
import gc
import inspect
import os
import pickle
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast
from uuid import uuid4

from gcore_rollout.engines.processes.wire import Failed, failure
from gcore_rollout.engines.protocol import Engine, EngineStats, TakesWeightsInPlace
from gcore_rollout.engines.types import AnyRequest, AnySample
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.weight_sync.report import report_weights

if TYPE_CHECKING:
    import torch

_STATS_INTERVAL_S = 0.02
_BEAT_INTERVAL_S = 0.25
_CLIENT_PATIENCE = 5.0
"""How often as long as it may be silent itself, an actor waits for a client."""
_LATE_CALL_S = 60.0
_ANEW = "it was started anew: connect again"


@dataclass(frozen=True)
class Incarnation:
    """One life of an actor: its process, as long as that has the same engine."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=platform.node)
    token: str = field(default_factory=lambda: uuid4().hex)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Call:
    """Who calls, with a number of its own for each `generate`."""

    client: str
    number: int = 0


@dataclass(frozen=True)
class Told:
    """An answer."""

    number: int
    """The larger, the later: answers overtake each other."""
    stats: EngineStats | None
    """None before the engine is made."""
    value: Any = None
    """What was returned, or a `Failed`."""


class FetchesWeights(Protocol):
    """Weights that lie elsewhere."""

    async def fetch(self) -> "Iterable[tuple[str, torch.Tensor]]":
        """The weights, once they are here."""
        ...


class EngineActor:
    """Runs one engine at a time, for any number of clients; its methods are the actor's.

    Args:
        num_threads: of torch on CPU; None: its own choice.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads
        self._factory = b""
        self._incarnation = Incarnation()
        self._engine: Engine[AnyRequest, AnySample] | None = None
        self._is_making = asyncio.Lock()
        self._num_told = 0
        self._running: dict[Call, asyncio.Task[None]] = {}
        # Given up before they came: Ray may let a call with large arguments arrive after a later one.
        self._given_up: set[Call] = set()
        self._leases: dict[str, asyncio.TimerHandle] = {}

    async def incarnation(self) -> Incarnation:
        """Which life this is."""
        return self._incarnation

    async def make(self, factory: bytes) -> Told:
        """Have an engine of this factory, pickled by value, in the place of any other; tells its incarnation.

        One that could not be made is tried again.
        """

        async def make() -> Incarnation:
            async with self._is_making:
                if factory != self._factory:
                    await self._end_engine()
                    self._factory = factory
                if self._engine is None:
                    self._engine = await self._make()
                return self._incarnation

        return await self._answer(make)

    async def call(self, token: str, method: str, *arguments: Any) -> Told:
        """Call a method of the engine."""
        return await self._answer(lambda: getattr(self._engine_of(token), method)(*arguments))

    async def held_weights(self, token: str, names: Sequence[str] | None) -> Told:
        """See `ReportsWeights.held_weights`."""
        return await self._answer(lambda: report_weights(self._engine_of(token), names))

    async def update_weights(self, token: str, weights: FetchesWeights, version: int) -> Told:
        """See `Engine.update_weights`; an engine that can computes with the weights where they lie."""

        async def update() -> None:
            self._engine_of(token)
            here = await weights.fetch()
            engine = self._engine_of(token)
            if isinstance(engine, TakesWeightsInPlace):
                await engine.update_weights_in_place(here, version=version)
            else:
                await engine.update_weights(here, version=version)

        return await self._answer(update)

    async def generate(self, token: str, call: Call, packed_requests: bytes) -> AsyncIterator[Told]:
        """Packed lists of samples, each as soon as it is finished; None at the end, and a `Failed` before it.

        Both are packed because arrays that Ray unpickles cannot be written to.
        """
        items: asyncio.Queue[AnySample | Failed | None] = asyncio.Queue()
        task = self._running[call] = asyncio.create_task(self._generate(token, packed_requests, items))

        def end(_: object) -> None:
            if token != self._incarnation.token:
                items.put_nowait(failure(0, EngineDiedError(_ANEW)))
            items.put_nowait(None)

        task.add_done_callback(end)
        if call in self._given_up:
            task.cancel()
        try:
            ended = False
            while not ended:
                # One message for all that has come meanwhile: each takes Ray half a millisecond.
                batch = [await items.get(), *(items.get_nowait() for _ in range(items.qsize()))]
                ended = batch[-1] is None
                yield self._tell(pack(batch))
        finally:
            self._running.pop(call).cancel()

    async def give_up(self, call: Call) -> None:
        """Nobody waits for the rest of a `generate` any more."""
        if call in self._running:
            self._running[call].cancel()
        else:
            self._given_up.add(call)
            asyncio.get_running_loop().call_later(_LATE_CALL_S, self._given_up.discard, call)

    async def watch(self, token: str, client: str, heartbeat_timeout_s: float) -> AsyncIterator[Told]:
        """Tell what has changed soon, and now and then that nothing has.

        It ends after a while, to be called again: what a client that does not has called is given up.
        """
        loop = asyncio.get_running_loop()
        self._end_lease(client)
        self._leases[client] = loop.call_later(_CLIENT_PATIENCE * heartbeat_timeout_s, self._forget, client)
        interval_s = min(_BEAT_INTERVAL_S, heartbeat_timeout_s / 4)
        end = loop.time() + heartbeat_timeout_s
        told: EngineStats | None = None
        told_at = 0.0
        try:
            while client in self._leases and loop.time() < end:
                if self._engine_of(token).stats() != told or loop.time() >= told_at + interval_s:
                    message = self._tell()
                    told, told_at = message.stats, loop.time()
                    yield message
                await asyncio.sleep(min(_STATS_INTERVAL_S, interval_s))
        except EngineDiedError as death:
            self._end_lease(client)
            yield self._tell(failure(0, death))

    async def leave(self, client: str) -> None:
        """A client needs nothing more."""
        self._forget(client)

    async def close(self) -> None:
        """Free the engine, before the actor ends."""
        if self._engine is not None:
            await self._engine.close()

    async def _make(self) -> Engine[AnyRequest, AnySample]:
        if self._num_threads is not None:
            import torch

            torch.set_num_threads(self._num_threads)
        made = pickle.loads(self._factory)()
        return await made if inspect.isawaitable(made) else made

    async def _end_engine(self) -> None:
        """Free it; to its clients it is dead."""
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
        # Models are held by cycles, and there is to be room for the next one.
        gc.collect()

    async def _answer(self, work: Callable[[], Awaitable[Any]]) -> Told:
        try:
            return self._tell(await work())
        except Exception as error:
            return self._tell(failure(0, error))

    async def _generate(
        self, token: str, packed_requests: bytes, items: "asyncio.Queue[AnySample | Failed | None]"
    ) -> None:
        try:
            completions = self._engine_of(token).generate(pickle.loads(packed_requests))
            try:
                async for completion in completions:
                    items.put_nowait(completion)
            finally:
                if hasattr(completions, "aclose"):
                    await cast(AsyncGenerator[Any], completions).aclose()
        except Exception as error:
            items.put_nowait(failure(0, error))

    def _engine_of(self, token: str) -> Engine[AnyRequest, AnySample]:
        """The engine, if it is that of this incarnation."""
        if token != self._incarnation.token:
            raise EngineDiedError(_ANEW)
        assert self._engine is not None
        return self._engine

    def _tell(self, value: Any = None) -> Told:
        self._num_told += 1
        return Told(self._num_told, self._engine.stats() if self._engine else None, value)

    def _end_lease(self, client: str) -> None:
        if lease := self._leases.pop(client, None):
            lease.cancel()

    def _forget(self, client: str) -> None:
        self._end_lease(client)
        for call, task in self._running.items():
            if call.client == client:
                task.cancel()


def pack(items: Sequence[AnyRequest] | Sequence[AnySample | Failed | None]) -> bytes:
    """Everything in one piece."""
    return pickle.dumps(items, protocol=5)

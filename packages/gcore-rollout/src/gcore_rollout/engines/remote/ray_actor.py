"""The Ray actor of an engine: it makes the engine and answers its clients. This module does not import Ray."""

import asyncio
import gc
import logging
import math
import os
import pickle
import platform
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from gcore_rollout.engines.protocol import EngineStats
from gcore_rollout.engines.registry import PRELOAD_HF
from gcore_rollout.engines.remote.session import (
    BEAT_INTERVAL_S,
    CONTROL_PATIENCE,
    AnyEngine,
    CallFailed,
    EngineCall,
    EngineSession,
    FromEngine,
    make_engine,
    make_failure,
    updates_weights,
)
from gcore_rollout.errors import EngineDiedError, EngineStartError
from gcore_rollout.weight_sync.digests import get_weights_gpu

if TYPE_CHECKING:
    from gcore_rollout.weight_sync.updates import WeightMirror

_CLIENT_PATIENCE = CONTROL_PATIENCE + 2
"""An actor waits for a silent client this many times as long as it may be silent itself: it hears of no client while a
call blocks its event loop."""
_RESTARTED = "it was restarted: connect again"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incarnation:
    """The process of an actor, as long as it has the same engine."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=platform.node)
    token: str = field(default_factory=lambda: uuid4().hex)
    making_s: float = 0.0
    """Seconds that it took to make the engine."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _ClientSession(EngineSession):
    """A client's messages in the order in which it sent them, and the answers until they are fetched."""

    def __init__(
        self,
        engine: AnyEngine,
        on_death: Callable[[EngineDiedError], None],
        mirror: "Callable[[], WeightMirror]",
    ) -> None:
        on_host = get_weights_gpu(engine) is None
        super().__init__(self._put, lambda references: references.fetch(on_host=on_host))
        self.engine = engine
        self._mirror = mirror
        self.outgoing: asyncio.Queue[FromEngine] = asyncio.Queue()
        self.lease: asyncio.TimerHandle | None = None
        # Ray may let a call with large arguments arrive after a later one.
        self._early: dict[int, tuple[int, EngineCall]] = {}
        self._num_taken = 0
        self._on_death = on_death

    def engine_died(self, error: EngineDiedError) -> None:
        self._on_death(error)

    def take(self, call_id: int, message: EngineCall) -> None:
        if message is not None and updates_weights(message):
            [weights] = message.arguments
            if hasattr(weights, "apply_to"):
                self.start(call_id, weights.apply_to(self._mirror()))
                return
        super().take(call_id, message)

    def _put(self, message: FromEngine) -> None:
        self.outgoing.put_nowait(message)

    def arrive(self, number: int, call: tuple[int, EngineCall]) -> None:
        self._early[number] = call
        while self._num_taken in self._early:
            call_id, message = self._early.pop(self._num_taken)
            self._num_taken += 1
            self.take(call_id, message)

    def abandon_all(self, reason: str) -> "list[asyncio.Task[None]]":
        """Cancel all calls, each of which fails with this reason, and return their tasks."""
        if self.lease is not None:
            self.lease.cancel()
        tasks = self.abandon()
        for call_id in tasks:
            self._put(make_failure(call_id, EngineDiedError(reason)))
        return list(tasks.values())


def _call_pickled(factory: bytes) -> Any:
    return pickle.loads(factory)()


class EngineActor:
    """Runs one engine at a time, for any number of clients; its methods are the actor's.

    An engine that another one may follow runs in a process of its own, which ends with it: what a library keeps of an
    engine in its process, such as vLLM's allocator of sleeping memory, is not there for the next one.

    Args:
        changes_role: the first engine is such a one; all that follow it are.
        keeps_asleep: an engine that another one follows sleeps until its factory is asked for again.
        preload: see `EngineProcess.start`.
    """

    def __init__(
        self,
        num_threads: int | None,
        *,
        changes_role: bool = False,
        keeps_asleep: bool = False,
        preload: tuple[str, ...] = PRELOAD_HF,
    ) -> None:
        self._num_threads = num_threads
        self._keeps_asleep = keeps_asleep
        self._preload = preload
        self._needs_process = changes_role
        """Whether the next engine is in a process of its own."""
        self._factory = b""
        self._incarnation = Incarnation()
        self._engine: AnyEngine | None = None
        self._sleeping: dict[bytes, AnyEngine] = {}
        """Engines of other factories, asleep."""
        self._why_dead = _RESTARTED  # to clients of an engine before this one
        self._mirror: WeightMirror | None = None
        self._is_making = asyncio.Lock()
        self._sessions: dict[str, _ClientSession] = {}
        self._burial: asyncio.Task[None] | None = None

    async def incarnation(self) -> Incarnation:
        return self._incarnation

    async def is_controlled(self) -> bool:
        """Return whether any client's calls other than `Engine.generate` are in progress."""
        return any(session.controls for session in list(self._sessions.values()))

    async def make(
        self, factory: bytes, factories: Collection[bytes] = ()
    ) -> tuple[Incarnation, EngineStats] | CallFailed:
        """Make an engine by this factory in place of any other, again if that failed, and return its incarnation.

        Engines of ``factories`` alone may be asleep; one of this factory wakes.
        """
        try:
            async with self._is_making:
                if factory != self._factory:
                    await self._end_engine(_RESTARTED, keeps=self._factory in factories)
                    await self._end_sleeping(self._sleeping.keys() - set(factories))
                    self._factory = factory
                if self._engine is None:
                    start_s = time.monotonic()
                    self._engine = await self._wake() or await self._make()
                    self._incarnation = replace(
                        self._incarnation,
                        pid=getattr(self._engine, "pid", os.getpid()),
                        making_s=time.monotonic() - start_s,
                    )
                return self._incarnation, self._engine.stats()
        except Exception as error:
            return make_failure(0, error)

    async def _wake(self) -> AnyEngine | None:
        """Wake the sleeping engine of the factory; None: there is none, or it has died, or its memory is taken."""
        engine = self._sleeping.pop(self._factory, None)
        if engine is None:
            return None
        try:
            await engine.wake()
            # Its last clients may have paused it.
            await engine.resume()
        except Exception as error:
            _logger.warning("an engine did not wake, and is made again: %r", error)
            await engine.close()
            return None
        return engine

    async def _make(self) -> AnyEngine:
        if not self._needs_process:
            return await make_engine(self._factory, self._num_threads)
        try:
            return await self._start_process()
        except EngineStartError:
            # Those that sleep keep some memory of the device.
            if not self._sleeping:
                raise
        await self._end_sleeping(list(self._sleeping))
        return await self._start_process()

    async def _start_process(self) -> AnyEngine:
        from gcore_rollout.engines.remote.process import EngineProcess

        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            partial(_call_pickled, self._factory),
            num_threads=self._num_threads,
            preload=self._preload,
            # That of the client counts.
            start_timeout_s=math.inf,
        )
        return engine

    async def _end_sleeping(self, factories: Collection[bytes]) -> None:
        for factory in factories:
            await self._sleeping.pop(factory).close()

    async def take(
        self, token: str, client: str, number: int, message: bytes | tuple[int, EngineCall]
    ) -> None:
        """Start the call of a client's message of this number, from 0.

        It is packed, because arrays that Ray unpickles cannot be written to, unless it has references to weights.
        """
        call = pickle.loads(message) if isinstance(message, bytes) else message
        session = self._find_session(token, client)
        if session is not None:
            session.arrive(number, call)
        elif client in self._sessions:
            failure = make_failure(call[0], EngineDiedError(self._why_dead))
            self._sessions[client].outgoing.put_nowait(failure)

    async def stream(
        self, token: str, client: str, heartbeat_timeout_s: float
    ) -> AsyncIterator[bytes]:
        """Yield packed lists of messages to a client, and beats.

        It ends after a while, to be called again: the calls of a client that does not are abandoned.
        """
        session = self._find_session(token, client)
        if session is None:
            yield pickle.dumps([make_failure(0, EngineDiedError(self._why_dead))], protocol=5)
            return
        loop = asyncio.get_running_loop()
        self.lease(client, _CLIENT_PATIENCE * heartbeat_timeout_s)
        end = loop.time() + heartbeat_timeout_s
        beating = asyncio.create_task(session.beat(min(BEAT_INTERVAL_S, heartbeat_timeout_s / 4)))
        try:
            while loop.time() < end and self._sessions.get(client) is session:
                # One list of all that have come meanwhile: each message takes Ray half a millisecond.
                batch = [await session.outgoing.get()]
                while not session.outgoing.empty():
                    batch.append(session.outgoing.get_nowait())
                yield pickle.dumps(batch, protocol=5)
        finally:
            beating.cancel()

    def lease(self, client: str, patience_s: float) -> None:
        """Abandon a client's calls after this time, unless it is called again."""
        session = self._sessions[client]
        if session.lease is not None:
            session.lease.cancel()
        reason = "the engine actor abandoned the samples: this client was silent for too long"
        session.lease = asyncio.get_running_loop().call_later(
            patience_s, session.abandon_all, reason
        )

    async def leave(self, client: str) -> None:
        session = self._sessions.pop(client, None)
        if session is not None:
            session.abandon_all("the client has left")

    async def sleep(self) -> None:
        """Put the engine to sleep if it has been made, whichever it is."""
        async with self._is_making:
            if self._engine is not None:
                await self._engine.abort()
                await self._engine.sleep()

    async def close(self) -> None:
        """Free the engines, before the actor ends."""
        for engine in (self._engine, *self._sleeping.values()):
            if engine is not None:
                await engine.close()

    async def _end_engine(self, reason: str, *, keeps: bool = False) -> None:
        """Free the engine, which is dead for its clients, for this reason; ``keeps``: put it to sleep if it may be."""
        if self._engine is None:
            return
        self._why_dead = reason
        engine = self._engine
        self._engine = None
        self._mirror = None
        self._incarnation = Incarnation()
        sessions = self._sessions
        self._sessions = {}
        for session in sessions.values():
            await asyncio.gather(*session.abandon_all(reason), return_exceptions=True)
            session.engine = None
            session.outgoing.put_nowait(make_failure(0, EngineDiedError(reason)))
        if keeps and self._keeps_asleep and self._needs_process:
            try:
                await engine.abort()
                await engine.sleep()
                self._sleeping[self._factory] = engine
                return
            except Exception as error:
                _logger.warning("an engine could not sleep, and ends: %r", error)
        await engine.close()
        self._needs_process = True
        del engine
        # Models are held by cycles; free them before the next one is loaded.
        gc.collect()

    def _bury(self, engine: AnyEngine, error: EngineDiedError) -> None:
        """End an engine of which a part has died, so that the next `make` makes another one."""

        async def bury() -> None:
            async with self._is_making:
                if self._engine is engine:
                    await self._end_engine(f"{error.reason}: connect again")

        self._burial = asyncio.create_task(bury())

    def _find_session(self, token: str, client: str) -> _ClientSession | None:
        """Return a client's session, new if it has none; None: the client is one of another engine."""
        if token != self._incarnation.token or self._engine is None:
            return None
        if client not in self._sessions:
            on_death = partial(self._bury, self._engine)
            self._sessions[client] = _ClientSession(self._engine, on_death, self._get_mirror)
        return self._sessions[client]

    def _get_mirror(self) -> "WeightMirror":
        """Return the engine's copy of its weights, to which changes are applied; made for the first changes."""
        if self._mirror is None:
            from gcore_rollout.engines.instrumented import InstrumentedEngine, WeightRecord
            from gcore_rollout.weight_sync.updates import WeightMirror

            assert self._engine is not None
            # Weights that are made here have digests for no other process.
            engine = InstrumentedEngine(
                cast(Any, self._engine), name="the engine", record=WeightRecord()
            )
            self._mirror = WeightMirror(engine)
        return self._mirror

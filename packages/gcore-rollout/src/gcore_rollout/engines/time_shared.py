"""Engines of several models that share devices, of which one is awake at a time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from gcore_rollout.engines.instrumented import DeviceSharing, InstrumentedEngine
from gcore_rollout.engines.protocol import Engine


class TimeSharedEngines(DeviceSharing):
    """Engines that share devices, such as a policy and the model that judges its responses.

    A call that samples or takes weights waits until its engine is awake. When the awake engine has no more calls and
    another one is called, the first is put to sleep, which frees its memory, and the other one is woken. Endless calls
    from several tasks keep the other engines waiting. An engine that a call puts to sleep, so that something else has
    the devices, wakes with the next call that needs it; `wake` before that wakes its weights alone, for an update.

    Args:
        engines: each on all the devices, and asleep, but for the first one if ``first_is_awake``.
    """

    def __init__(self, engines: Sequence[Engine[Any, Any]], *, first_is_awake: bool = True) -> None:
        self.engines: list[InstrumentedEngine[Any, Any]] = [
            InstrumentedEngine(engine, name=f"model {number}", sharing=self)
            for number, engine in enumerate(engines)
        ]
        """The same engines, wrapped to wait for the devices; the originals must not be called any more."""
        self._all = list(engines)
        self._awake: Engine[Any, Any] | None = None
        """None: all are asleep, or a swap has failed half-way."""
        if first_is_awake:
            self._awake = engines[0]
        self._with_weights: set[int] = set()
        """Ids of the engines whose weights are awake alone."""
        self._num_calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def _awake_inside(self, engine: Engine[Any, Any]) -> AsyncGenerator[None]:
        """Keep one of the engines awake, and the others asleep, inside the block.

        Raises:
            RolloutError: an engine can neither sleep nor wake; the next call tries again.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: engine is self._awake or not self._num_calls)
            if engine is not self._awake:
                self._awake = None
                for neighbour in self._all:
                    if neighbour is not engine:
                        # Abandoned samples may still be running.
                        await neighbour.abort()
                        await neighbour.sleep()
                await engine.wake()
                self._awake = engine
            self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                await asyncio.shield(self._notify())

    def sampling(self, engine: Engine[Any, Any]) -> AbstractAsyncContextManager[None]:
        self._with_weights.discard(id(engine))
        return self._awake_inside(engine)

    def with_weights(self, engine: Engine[Any, Any]) -> AbstractAsyncContextManager[None]:
        """Keep the weights awake inside the block: all of the engine, unless they are awake alone."""
        if id(engine) in self._with_weights:
            return nullcontext()
        return self._awake_inside(engine)

    async def sleep(self, engine: Engine[Any, Any], *, keep_weights: bool) -> None:
        self._with_weights.discard(id(engine))
        async with self._changed:
            if engine is self._awake:
                self._awake = None
            await engine.sleep(keep_weights=keep_weights)

    async def wake(self, engine: Engine[Any, Any], *, weights: bool, cache: bool) -> None:
        """Wake the weights alone; with keys and values they wake when a call needs them."""
        if weights and not cache:
            await engine.wake(cache=False)
            self._with_weights.add(id(engine))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

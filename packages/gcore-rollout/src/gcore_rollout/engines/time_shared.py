"""Engines of several models that share devices, of which one is awake at a time."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from gcore_rollout.engines.protocol import Digests, Engine
from gcore_rollout.weight_sync.checked import WrappedEngine

if TYPE_CHECKING:
    import torch


class TimeSharedEngines:
    """Engines that share devices, such as a policy and the model that judges its responses.

    A call that samples or takes weights waits until its engine is awake. When the awake engine has no more calls and
    another one is called, the first is put to sleep, which frees its memory, and the other one is woken. Endless calls
    from several tasks keep the other engines waiting. An engine that a call puts to sleep, so that something else has
    the devices, wakes with the next call that needs it; `wake` before that wakes its weights alone, for an update.

    Args:
        engines: each on all the devices, and asleep, but for the first one if ``first_is_awake``.
    """

    def __init__(self, engines: Sequence[Engine[Any, Any]], *, first_is_awake: bool = True) -> None:
        self.engines = [_TimeSharedEngine(engine, self) for engine in engines]
        """The same engines, wrapped to wait for the devices; the originals must not be called any more."""
        self._all = list(engines)
        self._awake: Engine[Any, Any] | None = engines[0] if first_is_awake else None
        """None: all are asleep, or a swap has failed half-way."""
        self._num_calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def awake(self, engine: Engine[Any, Any]) -> AsyncGenerator[None]:
        """Keep one of the engines awake, and the others asleep, inside the block.

        Raises:
            RolloutError: an engine can neither sleep nor wake; the next call tries again.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: engine is self._awake or not self._num_calls)
            if engine is not self._awake:
                self._awake = None
                for other in self._all:
                    if other is not engine:
                        # Abandoned samples may still be running.
                        await other.abort()
                        await other.sleep()
                await engine.wake()
                self._awake = engine
            self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                await asyncio.shield(self._notify())

    async def sleep(self, engine: Engine[Any, Any], *, keep_weights: bool) -> None:
        """Put one of the engines to sleep."""
        async with self._changed:
            if engine is self._awake:
                self._awake = None
            await engine.sleep(keep_weights=keep_weights)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _TimeSharedEngine(WrappedEngine[Any, Any]):
    def __init__(self, engine: Engine, shared: TimeSharedEngines) -> None:
        super().__init__(engine)
        self._shared = shared
        self._has_weights = False
        """Whether the weights are awake alone."""

    async def generate(self, requests: Sequence[Any]) -> AsyncGenerator[Any]:
        self._has_weights = False
        async with self._shared.awake(self._engine), aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                yield completion

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._has_weights = False
        await self._shared.sleep(self._engine, keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        """Wake the weights alone; with keys and values they wake when a call needs them."""
        if weights and not cache:
            await super().wake(cache=False)
            self._has_weights = True

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        async with self._with_weights():
            await super().update_weights(weights, version=version)

    async def check_weights(self, digests: Digests) -> None:
        async with self._with_weights():
            await super().check_weights(digests)

    def _with_weights(self) -> AbstractAsyncContextManager[None]:
        """Keep the weights awake inside the block: all of the engine, unless they are awake alone."""
        return nullcontext() if self._has_weights else self._shared.awake(self._engine)

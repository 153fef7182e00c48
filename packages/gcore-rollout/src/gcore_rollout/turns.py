"""Engines of several models on the same devices: one is awake at a time."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from gcore_rollout.engine import Engine
from gcore_rollout.forwarding import WrappedEngine
from gcore_rollout.weight_report import Digests

if TYPE_CHECKING:
    import torch


class Turns:
    """Whose turn it is, of engines that share devices: a policy and the model that judges its responses.

    A call that samples or takes weights waits for its engine's turn. A turn ends when its engine has nothing more to do
    and another one is called; then the first is put to sleep, which frees its memory, and the other is woken. Who calls
    for samples without end, from several tasks, keeps the others waiting.

    Args:
        engines: each on all the devices. All but the first are asleep.

    Attributes:
        engines: The same, behind what waits for turns; whoever calls past these breaks them.
    """

    def __init__(self, engines: Sequence[Engine[Any, Any]]) -> None:
        self.engines = [_TurnTakingEngine(engine, self) for engine in engines]
        self._all = list(engines)
        self._awake: Engine[Any, Any] | None = engines[0]
        """None: a swap has failed half-way."""
        self._num_calls = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, engine: Engine[Any, Any]) -> AsyncGenerator[None]:
        """Have it be an engine's turn, inside the block; one of those that were given.

        Raises:
            RolloutError: an engine can neither sleep nor wake; the next call tries again.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: engine is self._awake or not self._num_calls)
            if engine is not self._awake:
                await self._swap(engine)
            self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                await asyncio.shield(self._tell())

    async def _swap(self, engine: Engine[Any, Any]) -> None:
        self._awake = None
        for other in self._all:
            if other is not engine:
                # Samples that nobody waits for any more may still be there.
                await other.abort()
                await other.sleep()
        await engine.wake()
        self._awake = engine

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _TurnTakingEngine(WrappedEngine[Any, Any]):
    def __init__(self, engine: Engine, turns: Turns) -> None:
        super().__init__(engine)
        self._turns = turns

    async def generate(self, requests: Sequence[Any]) -> AsyncGenerator[Any]:
        async with self._turns.of(self._engine), aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                yield completion

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        async with self._turns.of(self._engine):
            await super().update_weights(weights, version=version)

    async def check_weights(self, digests: Digests) -> None:
        async with self._turns.of(self._engine):
            await super().check_weights(digests)

"""Engines of two models on devices of their own, of which an idle one becomes an engine of the other model."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.engines.replicas import EngineReplicas
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.weight_sync.checked import WrappedEngine

_POLL_S = 0.05
_logger = logging.getLogger(__name__)


class LendingRule(Protocol):
    """Decides which model gives an idle engine to the other one; `gcore_placement.LendingRule` is one."""

    def observe(
        self,
        now_s: float,
        *,
        idle: tuple[int, int],
        waiting: tuple[int, int],
        finished: tuple[int, int],
        serving: tuple[int, int],
    ) -> int | None:
        """Return the number of the model whose engine is lent now; None: none is.

        Args:
            idle: engines of each model that have nothing to do and may be lent.
            waiting: samples that wait for a place in an engine.
            finished: samples that were finished so far.
            serving: engines that samples go to.
        """
        ...

    def lent(self, seconds: float) -> None:
        """An engine was lent, which took so long."""


class LendingEngines:
    """Two models' engines, such as those of a policy and of its judge, that help each other while they sample.

    While a call samples, the rule observes them. An idle engine that it lends leaves its model's replicas, becomes an
    engine of the other model, and takes over requests that wait there. It stays until it is lent back. Before engines
    are put to sleep, one that is on its way arrives.

    Args:
        pools: the engines of either model; closed by those of `engines`.
        lend: makes the engine of this name, which serves the model of this number no more, one of the other model.
        rule: decides.
        announce: called with a line if an engine cannot be lent: it returns, and none is lent any more.
    """

    def __init__(
        self,
        pools: Sequence[EngineReplicas[Any, Any]],
        *,
        lend: Callable[[str, int], Awaitable[Engine[Any, Any]]],
        rule: LendingRule,
        announce: Callable[[str], None],
    ) -> None:
        if len(pools) != 2:
            raise ValueError(f"pools has {len(pools)} models; expected 2")
        self.engines = [_LendingEngine(pool, self) for pool in pools]
        """The engines of each model as one; the pools themselves must not be called any more."""
        self._pools = list(pools)
        self._lend, self._rule, self._announce = lend, rule, announce
        self._num_calls = 0
        self._watch: asyncio.Task[None] | None = None
        self._loan: asyncio.Task[Any] | None = None
        """The latest one; it is not cancelled, which would leave an engine half-way."""
        self._wanted: int | None = None
        """Engines that the first model is to have once all are awake; None: as many as it has."""
        self._has_failed = False

    def begin(self) -> None:
        """A call samples from here to `end`."""
        self._num_calls += 1
        if self._watch is None and not self._has_failed:
            self._watch = asyncio.create_task(self._watch_queues())

    def end(self) -> None:
        self._num_calls -= 1
        if not self._num_calls:
            self._stop()

    async def settle(self) -> None:
        """Lend no more until a call samples again, and wait for an engine that is on its way."""
        self._stop()
        if self._loan is not None:
            await asyncio.wait([self._loan])

    def arrange(self, count: int) -> None:
        """Have ``count`` engines serve the first model and the rest the second, at once or when all are awake.

        Engines change their model as by a loan. What one that has work leaves unfinished is continued by others.
        """
        self._wanted = count
        self.arrange_if_awake()

    def arrange_if_awake(self) -> None:
        """Do what `arrange` has been asked for and could not do while engines were asleep."""
        if self._wanted is not None and not any(pool.is_asleep for pool in self._pools):
            self._loan = asyncio.create_task(self._arrange(self._wanted, self._loan))
            self._wanted = None

    async def _arrange(self, count: int, earlier: asyncio.Task[Any] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        surplus = self._pools[0].num_serving - count
        giver = 0 if surplus > 0 else 1
        source, target = self._pools[giver], self._pools[1 - giver]
        idle = source.idle
        moved = [*(engine for engine in source.engines if engine not in idle), *idle][
            len(source.engines) - abs(surplus) :
        ]
        if not self._has_failed:
            await asyncio.gather(*(self._move(engine, source, target, giver, drain=False) for engine in moved))

    def _stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()

    async def _watch_queues(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self._loan is not None:
                await asyncio.wait([self._loan])
            if self._has_failed:
                return
            if (giver := self._observed()) is not None:
                source, target = self._pools[giver], self._pools[1 - giver]
                self._loan = asyncio.create_task(self._move(source.idle[-1], source, target, giver))

    def _observed(self) -> int | None:
        policy, judge = self._pools
        return self._rule.observe(
            time.monotonic(),
            idle=(_num_lendable(policy), _num_lendable(judge)),
            waiting=(policy.stats().num_waiting, judge.stats().num_waiting),
            finished=(policy.num_finished, judge.num_finished),
            serving=(policy.num_serving, judge.num_serving),
        )

    async def _move(
        self,
        engine: Engine[Any, Any],
        source: EngineReplicas[Any, Any],
        target: EngineReplicas[Any, Any],
        giver: int,
        *,
        drain: bool = True,
    ) -> None:
        start_s = time.monotonic()
        name: str = getattr(engine, "name", "an engine")
        try:
            await source.remove(engine, drain=drain)
        except ValueError:
            return  # it is dead, or all others of its model
        except EngineDiedError:
            source.start_replacement(name)
            return
        owner = source
        try:
            lent = await self._lend(name, giver)
            owner = target
            await target.add(lent)
        except Exception as error:
            self._has_failed = True
            self._announce(f"{name} could not be lent, and no more engines are: {error!r}")
            owner.start_replacement(name)
            return
        self._rule.lent(seconds := time.monotonic() - start_s)
        _logger.info("%s has changed its model within the step, in %.2f s", name, seconds)


def _num_lendable(pool: EngineReplicas[Any, Any]) -> int:
    """Return how many engines are idle, with one that stays."""
    return min(len(pool.idle), pool.num_serving - 1)


class _LendingEngine(WrappedEngine[Any, Any]):
    def __init__(self, engine: EngineReplicas[Any, Any], lending: LendingEngines) -> None:
        super().__init__(engine)
        self._lending = lending

    async def generate(self, requests: Sequence[Any]) -> AsyncGenerator[Any]:
        self._lending.begin()
        try:
            async with aclosing(super().generate(requests)) as samples:
                async for sample in samples:
                    yield sample
        finally:
            self._lending.end()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._lending.settle()
        await super().sleep(keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        await super().wake(weights=weights, cache=cache)
        self._lending.arrange_if_awake()

    async def close(self) -> None:
        await self._lending.settle()
        await super().close()

"""Engines of several models that lease devices to each other: in turns on the same ones, or each on its own ones."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from gcore_rollout.engines.instrumented import DeviceLease, InstrumentedEngine
from gcore_rollout.engines.protocol import Engine
from gcore_rollout.engines.replica import name_of
from gcore_rollout.engines.replicas import EngineReplicas
from gcore_rollout.errors import EngineDiedError

_POLL_S = 0.05
_logger = logging.getLogger(__name__)


class TimeSharedEngines(DeviceLease):
    """Engines that share devices, such as a policy and the model that judges its responses.

    A call that samples or takes weights waits until its engine is awake. When the awake engine has no more calls and
    another one is called, the first is put to sleep, which frees its memory, and the other one is woken. Endless calls
    from several tasks keep the other engines waiting. An engine that a call puts to sleep, so that something else has
    the devices, wakes with the next call that needs it; `wake` before that wakes its weights alone, for an update.

    Args:
        engines: each on all the devices, and asleep, but for the first one if ``first_is_awake``.

    Example:
        >>> policy = HFEngine.from_pretrained("model")
        >>> judge = HFEngine.from_pretrained("model")
        >>> request = Request(request_id="a", prompt_token_ids=(40, 41), sampling=SamplingParams(max_tokens=3))
        >>> async def main() -> list[int]:
        ...     await judge.sleep()
        ...     models = TimeSharedEngines([policy, judge])
        ...     # This call puts the policy to sleep and wakes the judge.
        ...     return [sample.work async for sample in models.engines[1].generate([request])]
        >>> asyncio.run(main())
        [3]
    """

    def __init__(self, engines: Sequence[Engine[Any, Any]], *, first_is_awake: bool = True) -> None:
        self.engines: list[InstrumentedEngine[Any, Any]] = [
            InstrumentedEngine(engine, name=f"model {number}", lease=self)
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


class LendingEngines(DeviceLease):
    """The engines of models, such as those of a policy and of its judges, that help each other while they sample.

    While a call samples, ``choose_loan`` is called again and again. An engine that is lent leaves its model's replicas,
    becomes an engine of another model, and takes over requests that wait there. It stays until it is lent again, or
    `arrange` takes it back. Several may be on their way at a time; before engines are put to sleep, all arrive.

    An engine can be lent if it is idle, or if the others of its model have places for the last samples that it runs,
    which they continue (`EngineReplicas.spare`): so a long tail ends on few engines. Engines whose draws depend on seed
    and position alone make the same samples then; others, such as vLLM's first model runner, draw the rest again,
    from the same distribution.

    Args:
        pools: the engines of each model, at least two; closed by those of `engines`.
        lend: makes the engine of this name, which serves the first model of these numbers no more, one of the second.
        choose_loan: ``choose_loan(now_s, *, idle, waiting, finished, serving, arriving)`` returns the number of the
            model whose engines are lent now, that of the one that gets them, and how many; None: none is. Each argument
            has a number for each model: engines that can be spared (they have nothing to do, or others have places for
            it), samples that wait for a place in an engine, samples that were finished so far, engines that samples go
            to, and engines that are on their way to it. `gcore_placement.LendingRule.observe` is such a function.
        report_loan: called with the seconds that each loan took.
        announce: called with a line if an engine cannot be lent: it returns, and none is lent any more.

    Example:
        >>> def choose_none(now_s: float, **counts: Sequence[int]) -> None:
        ...     return None
        >>> def report(seconds: float) -> None:
        ...     print("An engine has changed its model.")
        >>> async def load(name: str = "", giver: int = 0, taker: int = 0) -> HFEngine:
        ...     return HFEngine.from_pretrained("model")
        >>> async def main() -> list[int]:
        ...     pools = [EngineReplicas([await load(), await load()]), EngineReplicas([await load()])]
        ...     rule = {"choose_loan": choose_none, "report_loan": report}
        ...     models = LendingEngines(pools, lend=load, announce=print, **rule)
        ...     models.arrange([1, 2])
        ...     await models.settle()
        ...     return [pool.num_serving for pool in pools]
        >>> asyncio.run(main())
        An engine has changed its model.
        [1, 2]
    """

    def __init__(
        self,
        pools: Sequence[EngineReplicas[Any, Any]],
        *,
        lend: Callable[[str, int, int], Awaitable[Engine[Any, Any]]],
        choose_loan: Callable[..., tuple[int, int, int] | None],
        report_loan: Callable[[float], None],
        announce: Callable[[str], None],
    ) -> None:
        if len(pools) < 2:
            raise ValueError(f"pools has {len(pools)} models; expected at least 2")
        self.engines: list[InstrumentedEngine[Any, Any]] = [
            InstrumentedEngine(pool, name=f"model {number}", lease=self)
            for number, pool in enumerate(pools)
        ]
        """The engines of each model as one; the pools themselves must not be called any more."""
        self._pools = list(pools)
        self._lend = lend
        self._choose_loan = choose_loan
        self._report_loan = report_loan
        self._announce = announce
        self._num_calls = 0
        self._watch: asyncio.Task[None] | None = None
        self._moves: set[asyncio.Task[None]] = set()
        """Moves that are in progress; they are not cancelled, which would leave engines half-way."""
        self._arriving = [0] * len(pools)
        self._arranged_counts: Sequence[int] | None = None
        """Engines that each model is to have once all are awake; None: as many as it has."""
        self._has_failed = False
        self._known: defaultdict[str, set[int]] = defaultdict(set)
        """The models that each engine, by its name, has served: it may have an engine of theirs, asleep."""

    @property
    def is_sampling(self) -> bool:
        """True while a call samples."""
        return self._num_calls > 0

    @asynccontextmanager
    async def sampling(self, engine: Engine[Any, Any]) -> AsyncGenerator[None]:
        del engine
        self._num_calls += 1
        if self._watch is None and not self._has_failed:
            self._watch = asyncio.create_task(self._watch_queues())
        try:
            yield
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._stop()

    async def sleep(self, engine: Engine[Any, Any], *, keep_weights: bool) -> None:
        await self.settle()
        await engine.sleep(keep_weights=keep_weights)

    async def wake(self, engine: Engine[Any, Any], *, weights: bool, cache: bool) -> None:
        await engine.wake(weights=weights, cache=cache)
        self._arrange_if_awake()

    async def close(self, engine: Engine[Any, Any]) -> None:
        await self.settle()
        await engine.close()

    async def settle(self) -> None:
        """Lend no more until a call samples again, and wait for engines that are on their way."""
        self._stop()
        if self._moves:
            await asyncio.wait(self._moves)

    def arrange(self, counts: Sequence[int]) -> None:
        """Have so many engines serve each model, at once or when all are awake.

        Engines change their model as by a loan. What one that has work leaves unfinished is continued by others.
        """
        self._arranged_counts = counts
        self._arrange_if_awake()

    def _arrange_if_awake(self) -> None:
        """Do what `arrange` has been asked for and could not do while engines were asleep."""
        if self._arranged_counts is not None and not any(pool.is_asleep for pool in self._pools):
            self._start(self._arrange(self._arranged_counts, set(self._moves)))
            self._arranged_counts = None

    def _start(self, move: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(move)
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)

    async def _arrange(self, counts: Sequence[int], earlier: set[asyncio.Task[None]]) -> None:
        if earlier:
            await asyncio.wait(earlier)
        givers: list[int] = []
        moved: list[Engine[Any, Any]] = []
        takers: list[int] = []
        for model, (pool, count) in enumerate(zip(self._pools, counts, strict=True)):
            surplus = pool.num_serving - count
            if surplus > 0:
                idle = pool.idle
                busy_first = [engine for engine in pool.engines if engine not in idle] + idle
                movable = busy_first[len(busy_first) - surplus :]
                moved += movable
                givers += [model] * len(movable)
            else:
                takers += [model] * -surplus
        if not self._has_failed:
            # If an engine died after the counts were set, these lists differ in length.
            await asyncio.gather(*map(self._move, moved, givers, takers))

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _watch_queues(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            if self._has_failed:
                return
            spare = [pool.spare() for pool in self._pools]
            loan = self._choose_loan(
                time.monotonic(),
                idle=list(map(len, spare)),
                waiting=[pool.stats().num_waiting for pool in self._pools],
                finished=[pool.num_finished for pool in self._pools],
                serving=[pool.num_serving for pool in self._pools],
                arriving=self._arriving,
            )
            if loan is not None:
                giver, taker, count = loan
                # Those first that only have to wake.
                ready = sorted(
                    spare[giver], key=lambda engine: taker not in self._known[name_of(engine)]
                )
                for engine in ready[:count]:
                    self._start(self._move(engine, giver, taker))

    async def _move(self, engine: Engine[Any, Any], giver: int, taker: int) -> None:
        self._arriving[taker] += 1
        try:
            await self._move_to(engine, giver, taker)
        finally:
            self._arriving[taker] -= 1

    async def _move_to(self, engine: Engine[Any, Any], giver: int, taker: int) -> None:
        source = self._pools[giver]
        target = self._pools[taker]
        start_s = time.monotonic()
        name = name_of(engine)
        try:
            await source.remove(engine, drain=False)
        except ValueError:
            return  # it is dead, or all others of its model
        except EngineDiedError:
            source.start_replacement(name)
            return
        owner = source
        try:
            lent = await self._lend(name, giver, taker)
            owner = target
            await target.add(lent)
        except Exception as error:
            self._has_failed = True
            self._announce(f"{name} could not be lent, and no more engines are: {error!r}")
            owner.start_replacement(name)
            return
        seconds = time.monotonic() - start_s
        self._known[name] |= {giver, taker}
        self._report_loan(seconds)
        _logger.info("%s has changed its model within the step, in %.2f s", name, seconds)

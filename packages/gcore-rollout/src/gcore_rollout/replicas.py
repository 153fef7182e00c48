"""Several engines as one: requests go where there is least to do, and the others make what a dead one owed."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Generic, Protocol, cast, runtime_checkable

import torch

from gcore_rollout.engine import Engine, EngineStats
from gcore_rollout.errors import EngineDiedError, RolloutError, WrongWeightsError
from gcore_rollout.replica_work import Part, Replica, Run
from gcore_rollout.types import AnySample, RequestT, SampleT
from gcore_rollout.weight_report import Digests, check_weights
from gcore_rollout.weight_sync.shared_weights import SharedWeights


@runtime_checkable
class KeptWeights(Protocol):
    """Weights that can be read by many, and again by those who come later: `SharedWeights`, `WeightReferences`."""

    @property
    def is_whole(self) -> bool:
        """Whether there are weights."""
        ...

    @property
    def num_writes(self) -> int:
        """Tells whether the weights are still those seen before."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Nothing is written over the present weights while this is held."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class EngineReplicas(Generic[RequestT, SampleT]):
    """Engines of any kind with the same weights, behind the interface of one.

    A request goes to the replica with the least outstanding work, counted as ``work_per_sample`` for every unfinished
    sample; its samples stay together, for their prompt is computed once, unless they are more than a fair share of all
    work. On engines whose samples depend on their seeds alone, results do not depend on which replica made them.

    A replica that raises `EngineDiedError` is gone: its unfinished samples start anew on another, each exactly once.
    When all are gone, calls raise `EngineDiedError` with what is unfinished.

    Args:
        engines: all with the same `weight_version`; closed by `close`.
        restart: makes a replacement for a replica that died; it serves once it has the present weights, which are at
            hand if `update_weights` has been called, and otherwise come with its next call. A replacement that dies
            before it has finished a sample is not replaced.
        max_deaths: how many replicas may die with the same sample before its call fails: it may be what kills them.
        announce: called with a line when a replica has died, and when its replacement fails: which one it was (the
            engine's ``name``, if it has one), what it died of and what is done. It must not wait for anything.

    Raises:
        ValueError: no engines, or different weight versions.
    """

    def __init__(
        self,
        engines: Sequence[Engine[RequestT, SampleT]],
        *,
        restart: Callable[[], Awaitable[Engine[RequestT, SampleT]]] | None = None,
        max_deaths: int = 3,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        versions = {engine.weight_version for engine in engines}
        if len(versions) != 1:
            raise ValueError(f"engines have weight versions {sorted(versions)}: one version and one engine are needed")
        if max_deaths < 1:
            raise ValueError(f"max_deaths is {max_deaths}: at least 1 is needed")
        (self._version,) = versions
        self._replicas = [Replica(engine) for engine in engines]
        self._restart = restart
        self._max_deaths = max_deaths
        self._announce = announce or (lambda _: None)
        self._expected: tuple[int, Digests] | None = None
        """What `check_weights` was last given, and for which version."""
        self._fault: WrongWeightsError | None = None
        self._runs: set[Run[RequestT, SampleT]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._updates: set[asyncio.Task[None]] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._losses: deque[str] = deque(maxlen=4)
        self._gone_prompt_tokens = 0
        self._gone_completion_tokens = 0
        self._own_weights: SharedWeights | None = None
        self._present: tuple[KeptWeights, int] | None = None
        self._updating = asyncio.Lock()
        # Who is in, and with which weights.
        self._changing = asyncio.Lock()
        self._is_paused = False
        self._is_asleep = False
        self._closed = False

    @property
    def engines(self) -> list[Engine[RequestT, SampleT]]:
        """The replicas that are alive."""
        return [replica.engine for replica in self._replicas]

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        """See `Engine.stats`: sums over the replicas, of what each has done as one of them; the gone count, too."""
        both = [(replica.before, replica.engine.stats()) for replica in self._replicas]
        return EngineStats(
            prompt_tokens=self._gone_prompt_tokens + sum(s.prompt_tokens - b.prompt_tokens for b, s in both),
            completion_tokens=self._gone_completion_tokens
            + sum(s.completion_tokens - b.completion_tokens for b, s in both),
            num_running=sum(s.num_running for _, s in both),
            num_waiting=sum(s.num_waiting for _, s in both),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        """See `Engine.generate`.

        Raises:
            EngineDiedError: all replicas are dead, or too many died with one sample; with what is unfinished.
        """
        self._check_open()
        run: Run[RequestT, SampleT] = Run(num_pending=sum(len(r.sample_indices) for r in requests))
        self._runs.add(run)
        for part in self._split(requests):
            self._submit(part, run)
        try:
            while run.num_pending:
                item = await run.items.get()
                if isinstance(item, EngineDiedError):
                    await run.stop()
                    while not run.items.empty():
                        if isinstance(late := run.items.get_nowait(), AnySample):
                            yield late
                    unfinished = tuple((p.request.request_id, i) for p in run.parts for i in sorted(p.unfinished))
                    raise EngineDiedError(item.reason, unfinished=unfinished) from item
                if isinstance(item, Exception):
                    raise item
                run.num_pending -= 1
                yield item
        finally:
            self._runs.discard(run)
            await run.stop()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        wanted = None if request_ids is None else set(request_ids)
        for run in self._runs:
            for part in run.parts:
                if (wanted is None or part.request.request_id in wanted) and not part.aborted.done():
                    part.aborted.set_result(None)
        await self._all("abort", request_ids)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._is_paused = True
        await self._all("pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._is_paused = False
        await self._all("resume")

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._all("sleep")
        self._is_asleep = True

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._is_asleep = False
        await self._all("wake")

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """See `Engine.update_weights`. Weights are written to shared memory once, for all replicas, unless they are
        `KeptWeights`, which are handed on as they are.

        Replicas that refuse what others take are dead. If all refuse it, their error is raised and nothing has changed.
        A `WrongWeightsError` of any replica is raised: doing without one replica does not repair what corrupts weights.
        If all are dead, the first replacement takes it. If this is cancelled, the update happens all the same, in all
        of them.
        """
        self._check_open()
        await asyncio.shield(self._keep(self._updates, self._update_weights(weights, version)))

    async def _update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        async with self._updating:
            if version <= self._version:
                raise ValueError(f"version is {version}: it must be above the present {self._version}")
            if isinstance(weights, KeptWeights):
                kept = weights
            else:
                kept = self._own_weights = self._own_weights or SharedWeights()
                kept.write(weights)
            with kept.reading():
                # Between two attempts replacements are taken in, which needs the other lock.
                while not await self._hand_out(kept, version):
                    if not self._restarts:
                        raise EngineDiedError(self._obituary())
                    await asyncio.wait(self._restarts, return_when=asyncio.FIRST_COMPLETED)

    async def _hand_out(self, kept: KeptWeights, version: int) -> bool:
        """Give all replicas the same weights; whether there is one that has them."""
        async with self._changing:
            replicas = list(self._replicas)
            updates = (replica.engine.update_weights(kept, version=version) for replica in replicas)
            outcomes = await asyncio.gather(*updates, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, WrongWeightsError):
                    raise outcome
            refusals = [e for e in outcomes if isinstance(e, Exception) and not isinstance(e, EngineDiedError)]
            agreed = any(outcome is None for outcome in outcomes)
            for replica, outcome in zip(replicas, outcomes, strict=True):
                if outcome is None:
                    replica.has_weights = True
                elif agreed or isinstance(outcome, EngineDiedError):
                    self._bury(replica, outcome.reason if isinstance(outcome, EngineDiedError) else str(outcome))
            if agreed:
                self._version = version
                self._present = (kept, kept.num_writes)
            elif refusals:
                raise refusals[0]
            return agreed

    async def check_weights(self, digests: Digests) -> None:
        """See `ChecksWeights.check_weights`; replacements are compared with these, too, until the next update."""
        self._expected = self._version, digests
        self._check_open()
        replicas = list(self._replicas)
        outcomes = await asyncio.gather(
            *(check_weights(replica.engine, digests) for replica in replicas), return_exceptions=True
        )
        self._settle(replicas, outcomes)

    async def add(self, engine: Engine[RequestT, SampleT]) -> None:
        """Take in a replica. It serves once it has the present weights: at once if they are at hand.

        Raises:
            ValueError: its weights are newer than those of the others.
        """
        await self._add(Replica(engine))

    async def remove(self, engine: Engine[RequestT, SampleT], *, drain: bool = True) -> None:
        """Let a replica go, which stays open; return when it has nothing more to do here.

        Args:
            drain: let it finish what it has begun. Otherwise its samples are aborted and go on elsewhere.

        Raises:
            ValueError: it is not one of the replicas, or the last one that could serve.
            EngineDiedError: it died before that; its samples are made elsewhere all the same.
        """
        replica = next((r for r in self._replicas if r.engine is engine), None)
        if replica is None:
            raise ValueError("the engine to be removed is not one of the replicas")
        if not any(r.serves for r in self._replicas if r is not replica):
            raise ValueError("the engine to be removed is the last one that serves: add another before")
        replica.leaves = True
        try:
            if not drain and replica.tasks:
                await engine.abort()
            while replica.tasks:
                await asyncio.wait([task for task in replica.tasks if task])
        except EngineDiedError as death:
            self._bury(replica, str(death))
            raise
        except BaseException:
            replica.leaves = False
            raise
        if replica not in self._replicas:
            raise EngineDiedError("the engine to be removed has died")
        self._depart(replica)

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines))
        await asyncio.gather(*self._updates, *self._errands, return_exceptions=True)
        if self._own_weights is not None:
            self._own_weights.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the replicas are closed: make new ones")
        if self._fault is not None:
            raise self._fault

    def _split(self, requests: Sequence[RequestT]) -> Iterator[Part[RequestT]]:
        """Each request as one part, or as several if it is more than a replica's fair share of all work."""
        num_replicas = max(1, sum(r.serves for r in self._replicas))
        new = sum(len(r.sample_indices) * r.work_per_sample for r in requests)
        outstanding = sum(r.work for r in self._replicas) + new
        fair_share = outstanding / num_replicas
        for request in requests:
            largest = max(1, int(fair_share / request.work_per_sample))
            indices = request.sample_indices
            num_parts = min(num_replicas, -(-len(indices) // largest))
            bounds = [len(indices) * i // num_parts for i in range(num_parts + 1)]
            for start, stop in pairwise(bounds):
                yield Part(request.part(indices[start:stop]), asyncio.get_running_loop().create_future())

    def _submit(self, part: Part[RequestT], run: Run[RequestT, SampleT]) -> None:
        run.parts.add(part)
        task = asyncio.create_task(self._serve(part, run))
        run.tasks.add(task)
        task.add_done_callback(run.tasks.discard)

    async def _serve(self, part: Part[RequestT], run: Run[RequestT, SampleT]) -> None:
        """Make a part's samples; what its replica does not finish is submitted again."""
        try:
            replica = await self._replica_for(part)
            if replica is None:
                self._abort_unfinished(part, run)
                return
            task = asyncio.current_task()
            replica.tasks.add(task)
            replica.work += part.work
            try:
                await self._take(part, run, replica)
            finally:
                replica.tasks.discard(task)
                replica.work -= part.work
        except Exception as error:
            run.items.put_nowait(error)
        else:
            run.parts.discard(part)

    async def _take(
        self, part: Part[RequestT], run: Run[RequestT, SampleT], replica: Replica[RequestT, SampleT]
    ) -> None:
        completions = replica.engine.generate([part.request])
        cut_short: list[SampleT] = []
        try:
            async for completion in completions:
                if completion.finish_reason == "abort" and replica.leaves and not part.aborted.done():
                    cut_short.append(completion)
                else:
                    part.unfinished.remove(completion.index)
                    replica.work -= part.request.work_per_sample
                    replica.has_finished = True
                    run.items.put_nowait(completion)
        except Exception as error:
            if isinstance(error, EngineDiedError):
                self._bury(replica, error.reason)
            if replica in self._replicas:
                raise
            if part.deaths + 1 >= self._max_deaths:
                raise EngineDiedError(f"{self._max_deaths} replicas died with the same sample") from error
        finally:
            if hasattr(completions, "aclose"):
                await cast(AsyncGenerator[Any], completions).aclose()
        if part.unfinished:
            self._submit(part.left(cut_short, deaths=part.deaths + (replica not in self._replicas)), run)

    async def _replica_for(self, part: Part[RequestT]) -> Replica[RequestT, SampleT] | None:
        """The one with the least to do; none if the part is aborted before there is one."""
        while True:
            if part.aborted.done():
                return None
            ready = [r for r in self._replicas if r.serves]
            if ready:
                return min(ready, key=lambda r: r.work)
            awaited = {*self._restarts, *self._updates}
            if not awaited:
                raise EngineDiedError(self._obituary())
            await asyncio.wait({*awaited, part.aborted}, return_when=asyncio.FIRST_COMPLETED)

    def _abort_unfinished(self, part: Part[RequestT], run: Run[RequestT, SampleT]) -> None:
        for index in sorted(part.unfinished):
            part.unfinished.remove(index)
            run.items.put_nowait(part.request.aborted(index))

    async def _all(self, method: str, *arguments: object) -> None:
        """Call a method of all replicas; those that turn out to be dead are not missed."""
        self._check_open()
        replicas = list(self._replicas)
        calls = (getattr(replica.engine, method)(*arguments) for replica in replicas)
        self._settle(replicas, await asyncio.gather(*calls, return_exceptions=True))

    def _settle(self, replicas: Sequence[Replica[RequestT, SampleT]], outcomes: Sequence[object]) -> None:
        """Bury the replicas whose call found them dead, and raise what any other call raised."""
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, EngineDiedError):
                self._bury(replica, outcome.reason)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineDiedError):
                raise outcome

    def _depart(self, replica: Replica[RequestT, SampleT]) -> None:
        self._replicas.remove(replica)
        stats = replica.engine.stats()
        self._gone_prompt_tokens += stats.prompt_tokens - replica.before.prompt_tokens
        self._gone_completion_tokens += stats.completion_tokens - replica.before.completion_tokens

    def _bury(self, replica: Replica[RequestT, SampleT], reason: str) -> None:
        """Do without a replica from now on, and replace it if that is asked for. Nothing if that has been done."""
        if replica not in self._replicas:
            return
        name = _name_of(replica.engine)
        self._losses.append(reason)
        self._depart(replica)
        self._keep(self._errands, replica.engine.close())
        hopeless = replica.is_replacement and not replica.has_finished
        is_replaced = self._restart is not None and not (self._closed or replica.leaves or hopeless)
        if self._restart is not None and is_replaced:
            self._keep(self._restarts, self._replace(self._restart, name))
        if not self._closed:
            others = f"not replaced, {len(self._replicas)} of its kind are left"
            self._announce(f"{name} is gone: {reason}; {'a replacement is being started' if is_replaced else others}")

    def _keep(self, tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run something whether or not its caller waits for it."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _replace(self, restart: Callable[[], Awaitable[Engine[RequestT, SampleT]]], name: str) -> None:
        try:
            engine = await restart()
        except Exception as error:
            self._losses.append(f"a replacement could not be made: {error!r}")
            self._announce(f"no replacement of {name} could be started: {error!r}")
            return
        try:
            await self._add(Replica(engine, is_replacement=True))
        except Exception as error:
            if isinstance(error, WrongWeightsError):
                self._fault = error
                for run in self._runs:
                    run.items.put_nowait(error)
            self._losses.append(f"a replacement could not be taken in: {error!r}")
            self._announce(f"the replacement of {name} could not be used: {error}")
            await engine.close()

    async def _add(self, replica: Replica[RequestT, SampleT]) -> None:
        self._check_open()
        engine = replica.engine
        async with self._changing:
            if engine.weight_version > self._version:
                raise ValueError(f"the engine has weights {engine.weight_version}: the others have {self._version}")
            if engine.weight_version < self._version and self._present is not None:
                kept, num_writes = self._present
                if kept.num_writes == num_writes and kept.is_whole:
                    with kept.reading():
                        await engine.update_weights(kept, version=self._version)
            if self._expected is not None and self._expected[0] == engine.weight_version:
                await check_weights(engine, self._expected[1])
            if self._is_paused:
                await engine.pause()
            if self._is_asleep:
                await engine.sleep()
            replica.has_weights = engine.weight_version == self._version
            self._replicas.append(replica)

    def _obituary(self) -> str:
        if self._replicas:
            return "no replica serves: those that are left have older weights, or are leaving"
        return f"no replica is left: {'; '.join(self._losses) or 'all were removed'}"


def _name_of(engine: object) -> str:
    name: str = getattr(engine, "name", "an engine")
    return name

"""The pool of engines: requests go to the least loaded replica, dead ones are replaced, all have the same weights."""

import asyncio
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import aclosing
from typing import Any, Generic

import torch

from gcore_rollout.engines.protocol import Engine, EngineStats, RequestT, SampleT
from gcore_rollout.engines.replica import (
    PoolCall,
    Replica,
    RequestPart,
    fair_parts,
    find_spare,
    name_of,
    share_queues,
    start_task,
)
from gcore_rollout.errors import EngineDiedError, RolloutError, WrongWeightsError
from gcore_rollout.weight_sync.digests import Digests, check_weights, get_weights_gpu
from gcore_rollout.weight_sync.shared_weights import SharedWeights, choose_sources, copy_weights


class EngineReplicas(Generic[RequestT, SampleT]):
    """Engines of any kind with the same weights, used as one.

    Requests go, in the caller's order, to the replica with the least outstanding work, counted as ``work_per_sample``
    for every unfinished sample: with the longest first the tail is short. The samples of a request stay together,
    because their prompt is then computed once, unless they are more than a fair share of all work. So do the requests
    of a session, unless their replica has more outstanding work than another one would have with this request, too. A
    replica that joins takes over requests that wait in the queues of others. With engines whose samples depend on their
    seeds alone, results do not depend on which replica made them.

    A replica that raises `EngineDiedError` is gone: its unfinished samples start again on another one, each exactly
    once. When all are gone, calls raise `EngineDiedError` with what is unfinished.

    Args:
        engines: all with the same `weight_version`; closed by `close`.
        restart: makes a replacement for a replica that died. It serves once it has the current weights, which the pool
            still holds if `update_weights` has been called, and which otherwise come with its next call. A replacement
            that dies before it has finished a sample is not replaced.
        max_deaths: how many replicas may die with the same sample before its call fails: it may be what kills them.
        announce: called with a line when a replica has died, and when its replacement fails: which one it was (the
            engine's ``name``, if it has one), why it died and what is done. It must not block.
        lent: those of the engines on devices that something else has at times: they alone `sleep` and `wake`, while the
            others serve. An update of the weights that they sleep through is made up for by the next one. With `sleep`,
            replacements of theirs wait until `wake`, those of the others start at once. None: all sleep and wake.

    Raises:
        ValueError: there are no engines, or their weight versions differ.

    Example:
        >>> async def main() -> tuple[int, int]:
        ...     replicas = EngineReplicas([HFEngine.from_pretrained("model"), HFEngine.from_pretrained("model")])
        ...     request = Request(request_id="a", prompt_token_ids=(40, 41), n=4, sampling=SamplingParams(max_tokens=3))
        ...     samples = [sample async for sample in replicas.generate([request])]
        ...     await replicas.close()
        ...     return replicas.num_serving, len(samples)
        >>> asyncio.run(main())
        (2, 4)
    """

    def __init__(
        self,
        engines: Sequence[Engine[RequestT, SampleT]],
        *,
        restart: Callable[[], Awaitable[Engine[RequestT, SampleT]]] | None = None,
        max_deaths: int = 3,
        announce: Callable[[str], None] | None = None,
        lent: Collection[Engine[RequestT, SampleT]] | None = None,
    ) -> None:
        if max_deaths < 1:
            raise ValueError(f"max_deaths is {max_deaths}; expected at least 1")
        versions = {engine.weight_version for engine in engines}
        if len(versions) != 1:
            raise ValueError(
                f"weight versions of engines are {sorted(versions)}; expected one version of one or more"
            )
        self._version = versions.pop()
        self._replicas = [Replica(engine, is_lent=engine in (lent or ())) for engine in engines]
        self._all_sleep = lent is None
        self._restart = restart
        self._announce = announce or (lambda _: None)
        self._expected: tuple[int, Digests] | None = None
        """Version and digests of the last `check_weights`."""
        self._fault: WrongWeightsError | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._updates: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._losses: deque[str] = deque(maxlen=4)
        self._gone: list[tuple[int, int]] = []
        """Tokens of dead and removed replicas."""
        self._in_host = SharedWeights()
        self._current: tuple[Any, int] | None = None
        self._updating = asyncio.Lock()
        # Guards the membership and the weights of the members.
        self._changing = asyncio.Lock()
        self._is_paused = False
        self._is_asleep = False
        self._are_weights_asleep = False
        self._may_start = asyncio.Event()
        """Cleared while all are asleep, and something else has their devices: a replacement starts awake."""
        self._may_start.set()
        self._closed = False
        self._max_deaths = max_deaths
        self._runs: set[PoolCall[RequestT, SampleT]] = set()
        self._homes: dict[str, Replica[RequestT, SampleT]] = {}
        """The replica that has the keys and values of a session, with these weights."""
        self.num_finished = 0
        """Samples that replicas have finished."""

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        self._check_open()
        run: PoolCall[RequestT, SampleT] = PoolCall(sum(len(r.sample_indices) for r in requests))
        self._runs.add(run)
        outstanding = sum(replica.work for replica in self._replicas)
        num_replicas = max(1, self.num_serving)
        parts = fair_parts(requests, outstanding=outstanding, num_replicas=num_replicas)
        for request, indices in parts:
            aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._submit(RequestPart(request.part(indices), aborted), run)
        try:
            async with aclosing(run.completions()) as samples:
                async for sample in samples:
                    yield sample
        except EngineDiedError as death:
            await run.stop()
            for late in run.take_samples():
                yield late
            raise EngineDiedError(death.reason, unfinished=run.list_unfinished()) from death
        finally:
            self._runs.discard(run)
            await run.stop()

    def spare(self) -> list[Engine[RequestT, SampleT]]:
        """Return the replicas that could leave, those with the fewest samples first; one always stays.

        Their samples, which others would continue, must find places there at once. A replica has as many places as it
        was seen to run samples at once. Where samples wait for places, or cannot be continued, idle replicas alone can
        be spared.
        """
        if self._is_asleep:
            return []
        return [replica.engine for replica in find_spare(self._serving)]

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        ids = frozenset(request_ids or ())
        for run in self._runs:
            for part in run.parts:
                is_meant = request_ids is None or part.request.request_id in ids
                if is_meant and not part.aborted.done():
                    part.aborted.set_result(None)
        await self._call_all(lambda engine: engine.abort(request_ids), self._replicas)

    @property
    def engines(self) -> list[Engine[RequestT, SampleT]]:
        return [replica.engine for replica in self._replicas]

    @property
    def _serving(self) -> list[Replica[RequestT, SampleT]]:
        """The replicas that requests go to."""
        return [replica for replica in self._replicas if replica.serves]

    @property
    def num_serving(self) -> int:
        """Number of replicas that requests go to."""
        return len(self._serving)

    @property
    def idle(self) -> list[Engine[RequestT, SampleT]]:
        """The replicas that are awake and have no work of this pool."""
        if self._is_asleep:
            return []
        return [replica.engine for replica in self._serving if not replica.tasks]

    @property
    def is_asleep(self) -> bool:
        """True if the keys and values are asleep, with the weights or alone."""
        return self._is_asleep

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        """Sum the counters of all replicas, dead and removed ones included, over their time in the pool."""
        tokens = self._gone + [replica.tokens() for replica in self._replicas]
        stats = [engine.stats() for engine in self.engines]
        return EngineStats(
            prompt_tokens=sum(prompt for prompt, _ in tokens),
            completion_tokens=sum(completion for _, completion in tokens),
            num_running=sum(s.num_running for s in stats),
            num_waiting=sum(s.num_waiting for s in stats),
            weight_version=self._version,
            num_slots=sum(s.num_slots for s in stats),
        )

    async def pause(self) -> None:
        self._is_paused = True
        await self._call_all(lambda engine: engine.pause(), self._replicas)

    async def resume(self) -> None:
        self._is_paused = False
        await self._call_all(lambda engine: engine.resume(), self._replicas)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Put all replicas to sleep, and replacements that are being started; those of later deaths start after `wake`.

        If all have died, the next `update_weights` starts one. Where some are lent, these alone sleep and wake.
        """
        while self._restarts and self._may_start.is_set():
            await asyncio.wait(self._restarts)
        self._may_start.clear()
        before = self._is_asleep, self._are_weights_asleep
        # First, because a replica that joins meanwhile is not called.
        self._set_asleep(cache=True, weights=True)
        try:
            await self._call_all(
                lambda engine: engine.sleep(keep_weights=keep_weights), self._sleepers
            )
        except Exception:
            self._set_asleep(*before)
            if not self._is_asleep:
                self._may_start.set()
            raise

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        before = self._is_asleep, self._are_weights_asleep
        # First, because a replica that joins meanwhile is not called.
        self._set_asleep(self._is_asleep and not cache, self._are_weights_asleep and not weights)
        try:
            await self._call_all(
                lambda engine: engine.wake(weights=weights, cache=cache), self._sleepers
            )
        except Exception:
            self._set_asleep(*before)
            raise
        if not self._is_asleep:
            self._may_start.set()

    def _set_asleep(self, cache: bool, weights: bool) -> None:
        self._is_asleep = cache
        self._are_weights_asleep = weights
        for replica in self._replicas:
            replica.is_asleep = replica.is_lent and cache

    def _sleeps(self, replica: Replica[RequestT, SampleT]) -> bool:
        """Return whether `sleep` and `wake` are for this replica."""
        return replica.is_lent or self._all_sleep

    @property
    def _sleepers(self) -> list[Replica[RequestT, SampleT]]:
        return [replica for replica in self._replicas if self._sleeps(replica)]

    @property
    def _with_weights(self) -> list[Replica[RequestT, SampleT]]:
        """The replicas whose weights are in memory; without lent ones all are asked, and refuse if they are asleep."""
        return [r for r in self._replicas if not (r.is_lent and self._are_weights_asleep)]

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Update all replicas; weights that cannot be read again are first written to shared memory, once for all.

        A replica that refuses what another one accepts counts as dead. If all refuse, the error is raised and nothing
        has changed. A `WrongWeightsError` of any replica is raised, because what corrupts weights is still there
        without that replica. If all replicas are dead, the first replacement takes the update. If the caller is
        cancelled, the update still completes in all replicas.
        """
        self._check_open()
        await asyncio.shield(start_task(self._updates, self._update_weights(weights, version)))

    async def _update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> None:
        async with self._updating:
            if version <= self._version:
                raise ValueError(
                    f"version is {version}; expected a version above the current {self._version}"
                )
            # Weights that any number of readers can iterate over, also later, count how often they were written.
            source: Any = weights
            if not hasattr(weights, "num_writes"):
                gpus = [get_weights_gpu(engine) for engine in self.engines]
                source = copy_weights(weights, gpus, self._in_host)
            try:
                with source.reading():
                    # Between two attempts replacements join, which needs the other lock.
                    while not await self._broadcast_weights(source, version):
                        if not self._restarts:
                            raise EngineDiedError(self._explain_none_serves())
                        self._may_start.set()
                        await asyncio.wait(self._restarts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if source not in (weights, self._in_host):
                    source.close()

    async def _broadcast_weights(self, source: Any, version: int) -> bool:
        """Update all replicas, and return whether any of them has the weights now."""
        self._homes.clear()
        async with self._changing:
            replicas = self._with_weights
            gpus = [get_weights_gpu(replica.engine) for replica in replicas]
            sources = choose_sources(source, gpus, self._in_host)
            updates = (
                r.engine.update_weights(s, version=version)
                for r, s in zip(replicas, sources, strict=True)
            )
            outcomes = await asyncio.gather(*updates, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, WrongWeightsError):
                    raise outcome
            refusals: list[Exception] = []
            agreed = None in outcomes
            for replica, outcome in zip(replicas, outcomes, strict=True):
                if outcome is None:
                    replica.has_weights = True
                elif isinstance(outcome, EngineDiedError):
                    self._bury(replica, outcome.reason)
                elif agreed:
                    self._bury(replica, str(outcome))
                elif isinstance(outcome, Exception):
                    refusals.append(outcome)
            if agreed:
                for replica in self._replicas:
                    # Lent ones that are asleep miss this update, and serve after a later one.
                    replica.has_weights &= replica in replicas
                self._version = version
                if self._in_host in sources:
                    # The copy on a GPU is freed after the update.
                    source = self._in_host
                self._current = (source, source.num_writes)
            elif refusals:
                raise refusals[0]
            return agreed

    async def check_weights(self, digests: Digests) -> None:
        """Compare the weights of all replicas, and those of replacements until the next update, with digests."""
        self._expected = self._version, digests
        await self._call_all(lambda engine: check_weights(engine, digests), self._with_weights)

    async def add(self, engine: Engine[RequestT, SampleT], *, is_lent: bool = False) -> None:
        """Add a replica; its weights must not be newer than those of the others (`ValueError`).

        It serves once it has the current weights: at once if the pool still holds them.
        """
        self._all_sleep &= not is_lent
        await self._add(Replica(engine, is_lent=is_lent))

    async def remove(self, engine: Engine[RequestT, SampleT], *, drain: bool = True) -> None:
        """Remove a replica, which stays open; return when it has no more work of this pool.

        Args:
            drain: let it finish its samples. Otherwise they are aborted, and other replicas continue them.

        Raises:
            ValueError: it is not one of the replicas, or the last one that could serve.
            EngineDiedError: it died before that; its samples are still made by other replicas.
        """
        replica = next((r for r in self._replicas if r.engine is engine), None)
        if replica is None:
            raise ValueError("the engine to be removed is not one of the replicas")
        if self.num_serving == replica.serves:
            raise ValueError(
                "the engine to be removed is the last one that serves; add another one first"
            )
        replica.leaves = True
        try:
            if not drain and replica.tasks:
                await engine.abort()
            while replica.tasks:
                await asyncio.wait(replica.tasks)
        except EngineDiedError as death:
            self._bury(replica, str(death))
            raise
        except BaseException:
            replica.leaves = False
            raise
        if replica not in self._replicas:
            raise EngineDiedError("the engine to be removed has died")
        self._depart(replica)

    def start_replacement(self, name: str, *, is_lent: bool = False) -> bool:
        """Start a replica in place of one of this name that has died or was removed; False: none can be started."""
        if self._restart is None or self._closed:
            return False
        start_task(self._restarts, self._replace(name, is_lent=is_lent))
        return True

    async def close(self) -> None:
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines))
        await asyncio.gather(*self._updates, *self._closing, return_exceptions=True)
        self._in_host.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the replicas are closed: make new ones")
        if self._fault is not None:
            raise self._fault

    async def _call_all(
        self,
        call: Callable[[Engine[RequestT, SampleT]], Awaitable[None]],
        replicas: list[Replica[RequestT, SampleT]],
    ) -> None:
        """Call these replicas: bury those that are dead, and raise what any other call raised."""
        self._check_open()
        replicas = list(replicas)  # Others may join or leave meanwhile.
        outcomes = await asyncio.gather(
            *(call(replica.engine) for replica in replicas), return_exceptions=True
        )
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, EngineDiedError):
                self._bury(replica, outcome.reason)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineDiedError):
                raise outcome

    def _depart(self, replica: Replica[RequestT, SampleT]) -> None:
        self._replicas.remove(replica)
        self._gone.append(replica.tokens())

    def _bury(self, replica: Replica[RequestT, SampleT], reason: str) -> None:
        """Remove a dead replica, and start its replacement if there is to be one. Idempotent."""
        if replica not in self._replicas:
            return
        name = name_of(replica.engine)
        self._losses.append(reason)
        self._depart(replica)
        start_task(self._closing, replica.engine.close())
        hopeless = replica.is_replacement and not replica.has_finished
        then = f"not replaced, {len(self._replicas)} of its kind are left"
        may_replace = not (replica.leaves or hopeless)
        if may_replace and self.start_replacement(name, is_lent=replica.is_lent):
            then = "a replacement is being started"
        if not self._closed:
            self._announce(f"{name} is gone: {reason}; {then}")

    async def _replace(self, name: str, *, is_lent: bool) -> None:
        assert self._restart is not None
        if is_lent or self._all_sleep:
            await self._may_start.wait()
        try:
            engine = await self._restart()
        except Exception as error:
            self._losses.append(f"a replacement could not be made: {error!r}")
            self._announce(f"no replacement of {name} could be started: {error!r}")
            return
        try:
            await self._add(Replica(engine, is_replacement=True, is_lent=is_lent))
        except Exception as error:
            if isinstance(error, WrongWeightsError):
                self._fault = error
                for run in self._runs:
                    run.finished.put_nowait(error)
            self._losses.append(f"a replacement could not be added: {error!r}")
            self._announce(f"the replacement of {name} could not be used: {error}")
            await engine.close()

    async def _add(self, replica: Replica[RequestT, SampleT]) -> None:
        self._check_open()
        engine = replica.engine
        async with self._changing:
            if engine.weight_version > self._version:
                raise ValueError(
                    f"weight version of the engine is {engine.weight_version}; expected at most {self._version}, "
                    "which the others have"
                )
            if engine.weight_version < self._version and self._current is not None:
                weights, num_writes = self._current
                if weights.num_writes == num_writes and weights.is_whole:
                    with weights.reading():
                        await engine.update_weights(weights, version=self._version)
            if self._expected is not None and self._expected[0] == engine.weight_version:
                await check_weights(engine, self._expected[1])
            if self._is_paused:
                await engine.pause()
            if self._is_asleep and self._sleeps(replica):
                replica.is_asleep = replica.is_lent
                await engine.sleep()
                if not self._are_weights_asleep:
                    await engine.wake(cache=False)
            replica.has_weights = engine.weight_version == self._version
            self._replicas.append(replica)
        if replica.serves:
            await share_queues(self._serving, replica)

    def _explain_none_serves(self) -> str:
        if self._replicas:
            return "no replica serves: those that are left have older weights, or are leaving"
        return f"no replica is left: {'; '.join(self._losses) or 'all were removed'}"

    def _submit(self, part: RequestPart[RequestT], run: PoolCall[RequestT, SampleT]) -> None:
        run.parts.add(part)
        start_task(run.tasks, self._serve(part, run))

    async def _serve(self, part: RequestPart[RequestT], run: PoolCall[RequestT, SampleT]) -> None:
        """Make a part's samples; submit those again that its replica does not finish."""
        try:
            replica = await self._replica_for(part)
            if replica is None:
                for index in sorted(part.unfinished):
                    part.unfinished.remove(index)
                    run.finished.put_nowait(part.request.aborted(index))
            else:
                await self._make(part, run, replica)
        except Exception as error:
            run.finished.put_nowait(error)
        else:
            run.parts.discard(part)

    async def _make(
        self,
        part: RequestPart[RequestT],
        run: PoolCall[RequestT, SampleT],
        replica: Replica[RequestT, SampleT],
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        replica.tasks[task] = part
        replica.work += part.work
        completions: Any = replica.engine.generate([part.request])
        cut_short: list[SampleT] = []
        try:
            async for completion in completions:
                is_unwanted = completion.finish_reason == "abort" and not part.aborted.done()
                if is_unwanted and part.moves:
                    continue
                if is_unwanted and replica.leaves:
                    cut_short.append(completion)
                else:
                    self.num_finished += 1
                    part.unfinished.remove(completion.index)
                    replica.work -= part.request.work_per_sample
                    replica.has_finished = True
                    run.finished.put_nowait(completion)
        except Exception as error:
            if isinstance(error, EngineDiedError):
                self._bury(replica, error.reason)
            if replica in self._replicas:
                raise
            part.deaths += 1
            if part.deaths >= self._max_deaths:
                raise EngineDiedError(
                    f"{self._max_deaths} replicas died with the same sample"
                ) from error
        finally:
            try:
                if hasattr(completions, "aclose"):
                    await completions.aclose()
            finally:
                del replica.tasks[task]
                replica.work -= part.work
        if part.unfinished:
            rest = part.request.continuing(cut_short).part(sorted(part.unfinished))
            self._submit(RequestPart(rest, part.aborted, part.deaths), run)

    async def _replica_for(self, part: RequestPart[RequestT]) -> Replica[RequestT, SampleT] | None:
        """Wait for a replica that serves, and return the least loaded; None if the part is aborted before that."""
        while True:
            if part.aborted.done():
                return None
            ready = self._serving
            if ready:
                least = min(ready, key=lambda r: r.work)
                session = part.request.session
                if not session:
                    return least
                home = self._homes.get(session, least)
                if home not in ready or home.work > least.work + part.work:
                    home = least
                self._homes[session] = home
                return home
            awaited = self._restarts | self._updates
            if not awaited:
                raise EngineDiedError(self._explain_none_serves())
            await asyncio.wait(awaited | {part.aborted}, return_when=asyncio.FIRST_COMPLETED)

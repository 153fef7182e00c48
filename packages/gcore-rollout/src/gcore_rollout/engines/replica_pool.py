"""The replicas that stand for one engine: which are alive, which weights they have, and how dead ones are replaced."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Generic

import torch

from gcore_rollout.engines.protocol import Digests, Engine, EngineStats, RequestT, SampleT, check_weights
from gcore_rollout.engines.replica import Replica
from gcore_rollout.errors import EngineDiedError, RolloutError, WrongWeightsError
from gcore_rollout.weight_sync.shared_weights import FirstSeen, SharedCudaWeights, SharedWeights, share_a_gpu


class ReplicaPool(Generic[RequestT, SampleT]):
    """Keeps replicas with the same weights; the base of `EngineReplicas`, which distributes requests over them."""

    def __init__(
        self,
        engines: Sequence[Engine[RequestT, SampleT]],
        *,
        restart: Callable[[], Awaitable[Engine[RequestT, SampleT]]] | None,
        announce: Callable[[str], None] | None,
        lent: Collection[Engine[RequestT, SampleT]] | None,
    ) -> None:
        versions = {engine.weight_version for engine in engines}
        if len(versions) != 1:
            raise ValueError(f"weight versions of engines are {sorted(versions)}; expected one version of one or more")
        (self._version,) = versions
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
        self._own_weights: SharedWeights | None = None
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

    @property
    def engines(self) -> list[Engine[RequestT, SampleT]]:
        return [replica.engine for replica in self._replicas]

    @property
    def num_serving(self) -> int:
        """Replicas that requests go to."""
        return sum(replica.serves for replica in self._replicas)

    @property
    def idle(self) -> list[Engine[RequestT, SampleT]]:
        """The replicas that are awake and have no work of this pool."""
        return [r.engine for r in self._replicas if r.serves and not r.tasks and not self._is_asleep]

    @property
    def is_asleep(self) -> bool:
        """True if the keys and values are asleep, with the weights or alone."""
        return self._is_asleep

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        """Sum the counters of all replicas, dead and removed ones included, over their time in the pool."""
        tokens = [*self._gone, *(replica.tokens() for replica in self._replicas)]
        stats = [engine.stats() for engine in self.engines]
        return EngineStats(
            prompt_tokens=sum(prompt for prompt, _ in tokens),
            completion_tokens=sum(completion for _, completion in tokens),
            num_running=sum(s.num_running for s in stats),
            num_waiting=sum(s.num_waiting for s in stats),
            weight_version=self._version,
        )

    async def pause(self) -> None:
        self._is_paused = True
        await self._all(lambda engine: engine.pause())

    async def resume(self) -> None:
        self._is_paused = False
        await self._all(lambda engine: engine.resume())

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
            await self._all(lambda engine: engine.sleep(keep_weights=keep_weights), self._sleepers)
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
            await self._all(lambda engine: engine.wake(weights=weights, cache=cache), self._sleepers)
        except Exception:
            self._set_asleep(*before)
            raise
        if not self._is_asleep:
            self._may_start.set()

    def _set_asleep(self, cache: bool, weights: bool) -> None:
        self._is_asleep, self._are_weights_asleep = cache, weights
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

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Update all replicas; weights that cannot be read again are first written to shared memory, once for all.

        A replica that refuses what another one accepts counts as dead. If all refuse, the error is raised and nothing
        has changed. A `WrongWeightsError` of any replica is raised, because what corrupts weights is still there
        without that replica. If all replicas are dead, the first replacement takes the update. If the caller is
        cancelled, the update still completes in all replicas.
        """
        self._check_open()
        await asyncio.shield(self._keep(self._updates, self._update_weights(weights, version)))

    async def _update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        async with self._updating:
            if version <= self._version:
                raise ValueError(f"version is {version}; expected a version above the current {self._version}")
            # Weights that any number of readers can iterate over, also later, count how often they were written.
            kept: Any = weights if hasattr(weights, "num_writes") else self._copy(weights)
            try:
                with kept.reading():
                    # Between two attempts replacements join, which needs the other lock.
                    while not await self._broadcast_weights(kept, version):
                        if not self._restarts:
                            raise EngineDiedError(self._why_none_serves())
                        self._may_start.set()
                        await asyncio.wait(self._restarts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if isinstance(kept, SharedCudaWeights) and kept is not weights:
                    kept.close()

    def _copy(self, weights: Iterable[tuple[str, torch.Tensor]]) -> "SharedCudaWeights | SharedWeights":
        """Copy weights once for all: on their GPU if a replica is there, too, until all have them; or in the host."""
        found = FirstSeen(weights)
        if any(share_a_gpu(found.gpu, getattr(engine, "weights_gpu", None)) for engine in self.engines):
            return SharedCudaWeights(found)
        return self._in_host(found)

    def _in_host(self, weights: Iterable[tuple[str, torch.Tensor]]) -> SharedWeights:
        kept = self._own_weights = self._own_weights or SharedWeights()
        kept.write(weights)
        return kept

    async def _broadcast_weights(self, kept: Any, version: int) -> bool:
        """Update all replicas, and return whether any of them has the weights now."""
        async with self._changing:
            replicas = self._with_weights
            sources = [kept] * len(replicas)
            if isinstance(kept, SharedCudaWeights):
                gpus = [getattr(replica.engine, "weights_gpu", None) for replica in replicas]
                if not all(share_a_gpu(kept.gpu, gpu) for gpu in gpus):
                    host = self._in_host(kept)
                    sources = [kept if share_a_gpu(kept.gpu, gpu) else host for gpu in gpus]
                    kept = host
            updates = (r.engine.update_weights(s, version=version) for r, s in zip(replicas, sources, strict=True))
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
                for replica in self._replicas:
                    # Lent ones that are asleep miss this update, and serve after a later one.
                    replica.has_weights &= replica in replicas
                self._version = version
                self._current = (kept, kept.num_writes)
            elif refusals:
                raise refusals[0]
            return agreed

    async def check_weights(self, digests: Digests) -> None:
        """Compare the weights of all replicas, and those of replacements until the next update, with digests."""
        self._expected = self._version, digests
        await self._all(lambda engine: check_weights(engine, digests), self._with_weights)

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
            raise ValueError("the engine to be removed is the last one that serves; add another one first")
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

    def start_replacement(self, name: str) -> None:
        """Start a replica in place of one of this name that was removed, as for one that died."""
        if self._restart is not None and not self._closed:
            self._keep(self._restarts, self._replace(self._restart, name, is_lent=False))

    async def close(self) -> None:
        self._closed = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines))
        await asyncio.gather(*self._updates, *self._closing, return_exceptions=True)
        if self._own_weights is not None:
            self._own_weights.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutError("the replicas are closed: make new ones")
        if self._fault is not None:
            raise self._fault

    def _has_fault(self, error: WrongWeightsError) -> None:
        self._fault = error

    async def _all(
        self,
        call: "Callable[[Engine[RequestT, SampleT]], Awaitable[None]]",
        called: "Sequence[Replica[RequestT, SampleT]] | None" = None,
    ) -> None:
        """Call replicas, by default all: bury those that are dead, and raise what any other call raised."""
        self._check_open()
        replicas = list(self._replicas if called is None else called)
        outcomes = await asyncio.gather(*(call(replica.engine) for replica in replicas), return_exceptions=True)
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
        name: str = getattr(replica.engine, "name", "an engine")
        self._losses.append(reason)
        self._depart(replica)
        self._keep(self._closing, replica.engine.close())
        hopeless = replica.is_replacement and not replica.has_finished
        then = f"not replaced, {len(self._replicas)} of its kind are left"
        if self._restart is not None and not (self._closed or replica.leaves or hopeless):
            self._keep(self._restarts, self._replace(self._restart, name, is_lent=replica.is_lent))
            then = "a replacement is being started"
        if not self._closed:
            self._announce(f"{name} is gone: {reason}; {then}")

    def _keep(self, tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _replace(
        self, restart: Callable[[], Awaitable[Engine[RequestT, SampleT]]], name: str, *, is_lent: bool
    ) -> None:
        if is_lent or self._all_sleep:
            await self._may_start.wait()
        try:
            engine = await restart()
        except Exception as error:
            self._losses.append(f"a replacement could not be made: {error!r}")
            self._announce(f"no replacement of {name} could be started: {error!r}")
            return
        try:
            await self._add(Replica(engine, is_replacement=True, is_lent=is_lent))
        except Exception as error:
            if isinstance(error, WrongWeightsError):
                self._has_fault(error)
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
                kept, num_writes = self._current
                if kept.num_writes == num_writes and kept.is_whole:
                    with kept.reading():
                        await engine.update_weights(kept, version=self._version)
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

    def _why_none_serves(self) -> str:
        if self._replicas:
            return "no replica serves: those that are left have older weights, or are leaving"
        return f"no replica is left: {'; '.join(self._losses) or 'all were removed'}"

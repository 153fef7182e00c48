"""Several engines as one: requests go to the least loaded replica, and others make what a dead one left unfinished."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from gcore_rollout.engines.protocol import AnySample, Engine, RequestT, SampleT
from gcore_rollout.engines.queueing import Call
from gcore_rollout.engines.registry import PRELOAD_HF
from gcore_rollout.engines.remote.process import EngineProcess
from gcore_rollout.engines.replica import Replica, fair_parts
from gcore_rollout.engines.replica_pool import ReplicaPool
from gcore_rollout.errors import EngineDiedError, WrongWeightsError

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Part(Generic[RequestT]):
    """Samples of a request that one replica makes together."""

    request: RequestT
    aborted: "asyncio.Future[None]"
    deaths: int = 0
    """Replicas that have died with it."""
    moves: bool = False
    """It is taken out of its replica's queue, for another one."""

    def __post_init__(self) -> None:
        self.unfinished = set(self.request.sample_indices)

    @property
    def work(self) -> int:
        return len(self.unfinished) * self.request.work_per_sample


class _Run(Call[SampleT], Generic[RequestT, SampleT]):
    """One `generate` call, its parts that are not done, and the tasks that serve them."""

    def __init__(self, pending: int) -> None:
        super().__init__(pending)
        self.parts: set[_Part[RequestT]] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class EngineReplicas(ReplicaPool[RequestT, SampleT]):
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
        super().__init__(engines, restart=restart, announce=announce, lent=lent)
        if max_deaths < 1:
            raise ValueError(f"max_deaths is {max_deaths}; expected at least 1")
        self._max_deaths = max_deaths
        self._runs: set[_Run[RequestT, SampleT]] = set()
        self._homes: dict[str, Replica[RequestT, SampleT]] = {}
        """The replica that has the keys and values of a session, with these weights."""
        self.num_finished = 0
        """Samples that replicas have finished."""

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        self._check_open()
        run: _Run[RequestT, SampleT] = _Run(sum(len(r.sample_indices) for r in requests))
        self._runs.add(run)
        for part in self._split(requests):
            self._submit(part, run)
        try:
            async with aclosing(run.completions()) as samples:
                async for sample in samples:
                    yield sample
        except EngineDiedError as death:
            await run.stop()
            while not run.finished.empty():
                if isinstance(late := run.finished.get_nowait(), AnySample):
                    yield late
            unfinished = tuple((p.request.request_id, i) for p in run.parts for i in sorted(p.unfinished))
            raise EngineDiedError(death.reason, unfinished=unfinished) from death
        finally:
            self._runs.discard(run)
            await run.stop()

    def spare(self) -> list[Engine[RequestT, SampleT]]:
        """Return the replicas that could leave, those with the fewest samples first; one always stays.

        Their samples, which others would continue, must find places there at once. A replica has as many places as it
        was seen to run samples at once. Where samples wait for places, or cannot be continued, idle replicas alone can
        be spared.
        """
        serving = [replica for replica in self._replicas if replica.serves and not self._is_asleep]
        samples: dict[Replica[RequestT, SampleT], int] = {}
        num_waiting = 0
        for replica in reversed(serving):
            stats = replica.engine.stats()
            replica.places = max(replica.places, stats.num_running)
            num_waiting += stats.num_waiting
            samples[replica] = sum(len(part.unfinished) for part in replica.tasks.values())
        num_free = sum(replica.places - count for replica, count in samples.items())
        found: list[Engine[RequestT, SampleT]] = []
        for replica in sorted(samples, key=lambda r: samples[r])[: len(serving) - 1]:
            num_free -= replica.places
            can_move = not num_waiting and all(part.request.can_continue for part in replica.tasks.values())
            if replica.tasks and not (can_move and num_free >= 0):
                break
            found.append(replica.engine)
        return found

    async def _broadcast_weights(self, kept: Any, version: int) -> bool:
        self._homes.clear()
        return await super()._broadcast_weights(kept, version)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        for run in self._runs:
            for part in run.parts:
                if (wanted is None or part.request.request_id in wanted) and not part.aborted.done():
                    part.aborted.set_result(None)
        await self._all(lambda engine: engine.abort(request_ids))

    async def _add(self, replica: Replica[RequestT, SampleT]) -> None:
        await super()._add(replica)
        if replica.serves:
            await self._share_queues(replica)

    async def _share_queues(self, new: Replica[RequestT, SampleT]) -> None:
        """Have other replicas give up requests that wait in their queues, the last first, as many as make work even.

        They start again, without what they may have been given meanwhile, so that samples by seeds stay the same.
        """
        load = {replica: replica.work for replica in self._replicas if replica.serves}
        for replica in sorted(load.keys() - {new}, key=lambda r: -r.work):
            num_waiting = replica.engine.stats().num_waiting
            by_id: dict[str, list[_Part[RequestT]]] = {}
            for part in reversed([part for part in replica.tasks.values() if not part.moves]):
                by_id.setdefault(part.request.request_id, []).append(part)
            moved: list[str] = []
            for request_id, parts in by_id.items():
                work = sum(part.work for part in parts)
                num_waiting -= sum(len(part.unfinished) for part in parts)
                if num_waiting < 0 or load[new] + work >= load[replica]:
                    break
                load[new] += work
                load[replica] -= work
                for part in parts:
                    part.moves = True
                moved.append(request_id)
            if moved:
                try:
                    await replica.engine.abort(moved)
                except Exception as error:
                    # Where it is dead, others make them anyway; otherwise they stay there.
                    _logger.warning("requests were not taken out of an engine's queue: %r", error)

    def _has_fault(self, error: WrongWeightsError) -> None:
        super()._has_fault(error)
        for run in self._runs:
            run.finished.put_nowait(error)

    def _split(self, requests: Sequence[RequestT]) -> Iterator[_Part[RequestT]]:
        """Yield each request as one part, or as several if it is more than a replica's fair share of all work."""
        num_replicas = max(1, sum(r.serves for r in self._replicas))
        outstanding = sum(r.work for r in self._replicas)
        for request, indices in fair_parts(requests, outstanding=outstanding, num_replicas=num_replicas):
            yield _Part(request.part(indices), asyncio.get_running_loop().create_future())

    def _submit(self, part: _Part[RequestT], run: _Run[RequestT, SampleT]) -> None:
        run.parts.add(part)
        task = asyncio.create_task(self._serve(part, run))
        run.tasks.add(task)
        task.add_done_callback(run.tasks.discard)

    async def _serve(self, part: _Part[RequestT], run: _Run[RequestT, SampleT]) -> None:
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
        self, part: _Part[RequestT], run: _Run[RequestT, SampleT], replica: Replica[RequestT, SampleT]
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
                raise EngineDiedError(f"{self._max_deaths} replicas died with the same sample") from error
        finally:
            try:
                if hasattr(completions, "aclose"):
                    await completions.aclose()
            finally:
                del replica.tasks[task]
                replica.work -= part.work
        if part.unfinished:
            rest = part.request.continuing(cut_short).part(sorted(part.unfinished))
            self._submit(_Part(rest, part.aborted, part.deaths), run)

    async def _replica_for(self, part: _Part[RequestT]) -> Replica[RequestT, SampleT] | None:
        """Wait for a replica that serves, and return the least loaded; None if the part is aborted before that."""
        while True:
            if part.aborted.done():
                return None
            ready = [r for r in self._replicas if r.serves]
            if ready:
                least = min(ready, key=lambda r: r.work)
                if not (session := part.request.session):
                    return least
                home = self._homes.get(session, least)
                if home not in ready or home.work > least.work + part.work:
                    home = least
                self._homes[session] = home
                return home
            awaited = {*self._restarts, *self._updates}
            if not awaited:
                raise EngineDiedError(self._why_none_serves())
            await asyncio.wait({*awaited, part.aborted}, return_when=asyncio.FIRST_COMPLETED)


async def start_replicas(
    factory: Callable[[int], Callable[[], Engine[Any, Any]]],
    num_replicas: int,
    *,
    num_threads: int,
    preload: tuple[str, ...] = PRELOAD_HF,
    gpus: Sequence[str] = (),
    wrap: Callable[[Engine[Any, Any], int], Engine[Any, Any]] = lambda engine, _: engine,
    announce: Callable[[str], None] | None = None,
    num_lent: int = 0,
) -> EngineReplicas[Any, Any]:
    """Start an engine in each of ``num_replicas`` processes.

    Args:
        factory: returns what makes the engine of a place, from 0 to ``num_replicas - 1``, in its process; picklable.
        num_threads: of each process; see `EngineProcess.start`, as for `preload`.
        gpus: as CUDA_VISIBLE_DEVICES names them; each process sees one, by its place. Empty: they see what this one
            sees.
        wrap: called with each engine and its place; returns the replica.
        num_lent: how many of them, the last ones, are lent; see `EngineReplicas`.

    Raises:
        Exception: a process did not start; the others are closed.
    """
    pids: dict[int, int] = {}
    """By place; a place that is being filled has none."""

    async def start(place: int) -> Engine[Any, Any]:
        env = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else None
        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            factory(place), num_threads=num_threads, env=env, preload=preload
        )
        pids[place] = engine.pid
        return wrap(engine, place)

    async def restart() -> Engine[Any, Any]:
        # Of several dead ones, one that is not lent: the replacements of these do not wait.
        place = min(pids, key=lambda place: (Path(f"/proc/{pids[place]}").exists(), place))
        dead = pids.pop(place)
        try:
            return await start(place)
        except BaseException:
            pids[place] = dead
            raise

    outcomes = await asyncio.gather(*map(start, range(num_replicas)), return_exceptions=True)
    engines = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for error in outcomes:
        if isinstance(error, BaseException):
            await asyncio.gather(*(engine.close() for engine in engines))
            raise error
    lent = engines[num_replicas - num_lent :] if num_lent else None
    return EngineReplicas(engines, restart=restart, announce=announce, lent=lent)


def visible_gpus(device: str) -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them; none for a device that is no GPU."""
    if not device.startswith("cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]

"""The parts of a pool of engines: replicas and the division of work among them, parts of requests, and calls."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from gcore_rollout.engines.protocol import Engine, RequestT, SampleT
from gcore_rollout.engines.queueing import Call

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica(Generic[RequestT, SampleT]):
    """One of the engines and its outstanding work."""

    engine: Engine[RequestT, SampleT]
    is_replacement: bool = False
    is_lent: bool = False
    """Whether it sleeps and wakes while others serve."""
    is_asleep: bool = False
    """Whether its weights, or its keys and values, are asleep while others serve."""
    has_weights: bool = True
    """Whether its weights are the current ones."""
    leaves: bool = False
    has_finished: bool = False
    work: int = 0
    capacity: int = 0
    """Largest number of samples that it was seen to run at once."""
    tasks: dict[asyncio.Task[None], Any] = field(default_factory=dict[asyncio.Task[None], Any])
    """Tasks that wait for its samples, each with the part of a request that it waits for, in order of submission."""

    def __post_init__(self) -> None:
        self.before = self.engine.stats()

    @property
    def serves(self) -> bool:
        return self.has_weights and not (self.leaves or self.is_asleep)

    def tokens(self) -> tuple[int, int]:
        """Return the numbers of prompt and completion tokens since it joined the pool."""
        now = self.engine.stats()
        return (
            now.prompt_tokens - self.before.prompt_tokens,
            now.completion_tokens - self.before.completion_tokens,
        )


@dataclass(eq=False)
class RequestPart(Generic[RequestT]):
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


class PoolCall(Call[SampleT], Generic[RequestT, SampleT]):
    """One `generate` call, its parts that are not done, and the tasks that serve them."""

    def __init__(self, pending: int) -> None:
        super().__init__(pending)
        self.parts: set[RequestPart[RequestT]] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    def take_samples(self) -> Iterator[SampleT]:
        """Yield the samples that are finished, and not handed over yet."""
        while not self.finished.empty():
            item = self.finished.get_nowait()
            if not isinstance(item, Exception):
                yield item

    def list_unfinished(self) -> tuple[tuple[str, int], ...]:
        """Return (request id, index) of the unfinished samples."""
        unfinished: list[tuple[str, int]] = []
        for part in self.parts:
            unfinished += [(part.request.request_id, index) for index in sorted(part.unfinished)]
        return tuple(unfinished)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def name_of(engine: Engine[Any, Any]) -> str:
    """Return the name of an engine, for messages."""
    return getattr(engine, "name", "an engine")


def start_task(
    tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]
) -> "asyncio.Task[None]":
    """Start a task that is among these until it is done, and whose exception need not be retrieved."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def fair_parts(
    requests: Sequence[RequestT], *, outstanding: float, num_replicas: int
) -> Iterator[tuple[RequestT, Sequence[int]]]:
    """Yield the sample indices of each request, whole or in several parts if it is more than a fair share of all work.

    Args:
        outstanding: work that the replicas have already, as `AnyRequest.work_per_sample` counts it.
    """
    new = sum(len(request.sample_indices) * request.work_per_sample for request in requests)
    fair_share = (outstanding + new) / num_replicas
    for request in requests:
        largest = max(1, int(fair_share / request.work_per_sample))
        indices = request.sample_indices
        num_parts = min(num_replicas, -(-len(indices) // largest))
        start = 0
        for number in range(1, num_parts + 1):
            end = len(indices) * number // num_parts
            yield request, indices[start:end]
            start = end


def find_spare(
    serving: Sequence[Replica[RequestT, SampleT]],
) -> list[Replica[RequestT, SampleT]]:
    """Return those of the serving replicas that could leave; see `EngineReplicas.spare`."""
    num_samples: dict[Replica[RequestT, SampleT], int] = {}
    num_waiting = 0
    num_free = 0
    for replica in reversed(serving):
        stats = replica.engine.stats()
        replica.capacity = max(replica.capacity, stats.num_running)
        num_waiting += stats.num_waiting
        num_samples[replica] = sum(len(part.unfinished) for part in replica.tasks.values())
        num_free += replica.capacity - num_samples[replica]
    spare: list[Replica[RequestT, SampleT]] = []
    for replica in sorted(num_samples, key=lambda r: num_samples[r])[: len(serving) - 1]:
        num_free -= replica.capacity
        can_move = not num_waiting and all(
            part.request.can_continue for part in replica.tasks.values()
        )
        if replica.tasks and not (can_move and num_free >= 0):
            break
        spare.append(replica)
    return spare


async def share_queues(
    serving: Sequence[Replica[RequestT, SampleT]], new: Replica[RequestT, SampleT]
) -> None:
    """Have other replicas give up requests that wait in their queues, the last first, as many as make work even.

    They start again, without what they may have been given meanwhile, so that samples by seeds stay the same.
    """
    load = {replica: replica.work for replica in serving}
    for replica in sorted(load.keys() - {new}, key=lambda r: -r.work):
        num_waiting = replica.engine.stats().num_waiting
        by_id: dict[str, list[RequestPart[RequestT]]] = {}
        for part in reversed(replica.tasks.values()):
            if not part.moves:
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

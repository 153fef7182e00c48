"""The parts of a pool of engines: a replica with its outstanding work, a part of a request, and a call."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from gcore_rollout.engines.protocol import Engine, RequestT, SampleT
from gcore_rollout.engines.queueing import Call


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

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


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

"""What `EngineReplicas` keeps of its replicas, and of what they are to make."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from gcore_rollout.engine import Engine
from gcore_rollout.types import AnySample, RequestT, SampleT


@dataclass(eq=False)
class Part(Generic[RequestT]):
    """Samples of a request, which one replica makes together."""

    request: RequestT
    """For these samples alone."""
    aborted: "asyncio.Future[None]"
    deaths: int = 0
    """Replicas that have died with it."""

    def __post_init__(self) -> None:
        self.unfinished = set(self.request.sample_indices)

    @property
    def work(self) -> int:
        return len(self.unfinished) * self.request.work_per_sample

    def left(self, begun: Sequence[AnySample], *, deaths: int) -> "Part[RequestT]":
        """What is unfinished, as a part, of which these samples have been begun."""
        return Part(self.request.going_on(begun).part(sorted(self.unfinished)), self.aborted, deaths)


@dataclass(eq=False)
class Replica(Generic[RequestT, SampleT]):
    """One of the engines, and what it has to do."""

    engine: Engine[RequestT, SampleT]
    is_replacement: bool = False
    has_weights: bool = True
    """Whether its weights are the present ones."""
    leaves: bool = False
    has_finished: bool = False
    work: int = 0
    tasks: set["asyncio.Task[None] | None"] = field(default_factory=set["asyncio.Task[None] | None"])
    """Of the parts that it makes."""

    def __post_init__(self) -> None:
        self.before = self.engine.stats()

    @property
    def serves(self) -> bool:
        return self.has_weights and not self.leaves


@dataclass(eq=False)
class Run(Generic[RequestT, SampleT]):
    """One `generate` call."""

    num_pending: int
    parts: set[Part[RequestT]] = field(default_factory=set[Part[RequestT]])
    items: asyncio.Queue[SampleT | Exception] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

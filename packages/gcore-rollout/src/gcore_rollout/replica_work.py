"""What `EngineReplicas` keeps of its replicas, and of what they are to make."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gcore_rollout.engine import Engine
from gcore_rollout.types import Completion, Request


@dataclass(eq=False)
class Part:
    """Samples of a request, which one replica makes together."""

    request: Request
    """For these samples alone."""
    aborted: "asyncio.Future[None]"
    deaths: int = 0
    """Replicas that have died with it."""

    def __post_init__(self) -> None:
        self.unfinished = set(self.request.sample_indices)

    @property
    def work(self) -> int:
        return len(self.unfinished) * self.request.sampling.max_tokens

    def left(self, begun: Sequence[Completion], *, deaths: int) -> "Part":
        """What is unfinished, as a part, of which these samples have been begun."""
        by_index = {c.index: c for c in (*self.request.begun, *begun)}
        whole = replace(self.request, begun=tuple(by_index.values()))
        return Part(part_of(whole, sorted(self.unfinished)), self.aborted, deaths)


def part_of(request: Request, indices: Sequence[int]) -> Request:
    """The request for some of its samples."""
    return replace(request, indices=tuple(indices), begun=tuple(c for c in request.begun if c.index in indices))


@dataclass(eq=False)
class Replica:
    """One of the engines, and what it has to do."""

    engine: Engine
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
class Run:
    """One `generate` call."""

    num_pending: int
    parts: set[Part] = field(default_factory=set[Part])
    items: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

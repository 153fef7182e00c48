"""One of the engines of a pool, and its outstanding work."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic

from gcore_rollout.engines.protocol import Engine, RequestT, SampleT


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
    places: int = 0
    """Most samples that it was seen to run at once."""
    tasks: dict[asyncio.Task[None], Any] = field(default_factory=dict[asyncio.Task[None], Any])
    """Tasks that wait for its samples, each with the part of a request that it waits for, in order of submission."""

    def __post_init__(self) -> None:
        self.before = self.engine.stats()

    @property
    def serves(self) -> bool:
        return self.has_weights and not (self.leaves or self.is_asleep)

    def tokens(self) -> tuple[int, int]:
        """Return the numbers of prompt and completion tokens since it joined the pool."""
        now, before = self.engine.stats(), self.before
        return now.prompt_tokens - before.prompt_tokens, now.completion_tokens - before.completion_tokens

"""A sample that a server was asked for, and the pieces in which it comes."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from gcore_rollout.engines.queueing import Sample
from gcore_rollout.engines.sampling import continued_seed
from gcore_rollout.engines.types import FinishReason


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a server sends of a sample at a time."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason | None = None
    """With the last piece."""
    version_spans: list[tuple[int, int, int]] | None = None
    """With the last piece: (version, first token, behind the last token), if the server says it."""
    ended_here: bool = False
    """With the last piece: the server would go on."""


@dataclass(eq=False)
class RunningSample:
    """A sample that the server has been asked for."""

    sample: Sample
    server_id: str
    version: int
    """Of the weights when it started."""
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    updates: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(tokens so far, new version) of each change of weights since."""
    task: "asyncio.Task[None] | None" = None

    @property
    def seed(self) -> int:
        """The seed of this sample, from 0 to 2**63 - 1."""
        return continued_seed(self.sample.request.seed, self.sample.index, self.sample.prefix_length)

    def take(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.log_probs += piece.log_probs

    def finish(self, reason: FinishReason, version_spans: list[tuple[int, int, int]] | None = None) -> None:
        """Hand over the completion.

        Args:
            version_spans: what the server says of its tokens; default: what was seen from here.
        """
        versions = np.full(len(self.token_ids), self.version, np.int32)
        if version_spans is None:
            for start, version in self.updates:
                versions[start:] = version
        else:
            for version, start, end in version_spans:
                versions[start:end] = version
        tokens, log_probs = np.array(self.token_ids, np.int64), np.array(self.log_probs, np.float32)
        self.sample.finish(tokens, log_probs, versions, reason)

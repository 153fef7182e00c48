"""A sample requested from a server, and the pieces in which it comes."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from gcore_rollout.engines.protocol import FinishReason
from gcore_rollout.engines.queueing import Sample


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a sample, as the server sends it."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason | None = None
    """Set in the last piece."""
    version_spans: list[tuple[int, int, int]] | None = None
    """Set in the last piece if the server reports it: (version, first token, one past the last token)."""
    ended_here: bool = False
    """Set in the last piece if the server would continue the sample."""


@dataclass(eq=False)
class RunningSample:
    """A sample that has been requested from the server."""

    sample: Sample
    server_id: str
    version: int
    """Version of the weights when it started."""
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    updates: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(tokens so far, new version) of each change of weights since."""
    task: "asyncio.Task[None] | None" = None

    @property
    def seed(self) -> int:
        """The seed of this sample, from 0 to 2**63 - 1."""
        return self.sample.generator_seed

    def take(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.log_probs += piece.log_probs

    def finish(self, reason: FinishReason, version_spans: list[tuple[int, int, int]] | None = None) -> None:
        """Hand over the completion.

        Args:
            version_spans: the server's record of its tokens; default: the updates seen from here.
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

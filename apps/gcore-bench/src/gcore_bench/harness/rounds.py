"""Rounds in which contenders take turns, and the runs that come of them."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

Figures = dict[str, float]
"""Figures by metric."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round."""

    part: str
    contender: str
    round: int
    load: float
    """Load average of the machine over the minute before the run."""
    rows: dict[str, Figures] = field(default_factory=dict[str, Figures])
    """Figures by row of the table; of several ranks the highest."""
    failure: str = ""
    """Why there are no figures."""


class Rounds:
    """The turns of contenders.

    Args:
        part: the part of the bench that is measured.
        count: number of rounds.
        say: prints a line of progress.
    """

    def __init__(self, part: str, count: int, *, say: Callable[[str], object]) -> None:
        self.runs: list[Run] = []
        self._part = part
        self._count = count
        self._say = say

    def turns(self, contenders: Collection[str]) -> "Iterator[Turn]":
        """Yield every contender, in the same order in every round; a list may lose entries between rounds."""
        for number in range(1, self._count + 1):
            for name in tuple(contenders):
                yield Turn(self, self._part, name, number, f"{self._part}, round {number} of {self._count}: {name}")

    def add(self, run: Run, line: str) -> None:
        """Keep a run and print a line about it."""
        self.runs.append(run)
        self._say(line)


class Turn:
    """One contender's turn; its load is the machine's as the turn starts."""

    def __init__(self, rounds: Rounds, part: str, contender: str, number: int, where: str) -> None:
        self.contender = contender
        self.round = number
        self.where = where
        self.load = os.getloadavg()[0]
        self._rounds = rounds
        self._part = part

    def done(self, rows: Mapping[str, Figures], words: str) -> None:
        """Record the figures; ``words`` are printed with the contender's name."""
        self._rounds.add(self._run(rows=dict(rows)), f"{self.where} {words}, load {self.load:.1f}")

    def failed(self, reason: str) -> None:
        """Record that the contender has no figures in this round."""
        self._rounds.add(self._run(failure=reason), f"{self.where} failed: {reason}")

    def _run(self, *, rows: dict[str, Figures] | None = None, failure: str = "") -> Run:
        return Run(
            part=self._part,
            contender=self.contender,
            round=self.round,
            load=self.load,
            rows=rows or {},
            failure=failure,
        )

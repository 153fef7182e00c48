"""Timers of the stages that a controller goes through in a step."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period of one stage, in seconds of the timer's clock."""

    stage: str
    start_s: float
    end_s: float


class StageTimer:
    """Record the periods of stages; a stage entered inside another one suspends it, so that no second counts twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stack: list[str] = []
        self._since_s = 0.0
        self._spans: list[Span] = []

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Attribute the time inside the block to ``name``."""
        self._switch()
        self._stack.append(name)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    @property
    def current(self) -> str | None:
        """Name of the running stage."""
        return self._stack[-1] if self._stack else None

    def drain(self) -> list[Span]:
        """Return the spans since the last call, in order; a running stage is cut here and continues."""
        self._switch()
        spans, self._spans = self._spans, []
        return spans

    def _switch(self) -> None:
        now_s = self._clock()
        if self._stack and now_s > self._since_s:
            self._spans.append(Span(stage=self._stack[-1], start_s=self._since_s, end_s=now_s))
        self._since_s = now_s


def seconds_by_stage(spans: list[Span]) -> dict[str, float]:
    """Return the total seconds of each stage."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.stage] = totals.get(span.stage, 0.0) + span.end_s - span.start_s
    return totals


def on_wall_clock(spans: Iterable[Span], now_s: float) -> list[Span]:
    """Return spans in seconds of UTC, so that those of controllers on different machines can be compared.

    Args:
        now_s: the present time of the spans' clock.
    """
    shift_s = time.time() - now_s
    return [Span(stage=s.stage, start_s=s.start_s + shift_s, end_s=s.end_s + shift_s) for s in spans]

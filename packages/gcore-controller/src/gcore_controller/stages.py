"""Stage timers: which stage of a step a controller is in, at every moment."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of one stage, in seconds of the timer's clock."""

    stage: str
    start_s: float
    end_s: float


class StageTimer:
    """Records which stage runs when. A stage entered inside another suspends it, so no second counts twice."""

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
        """The stage that runs now."""
        return self._stack[-1] if self._stack else None

    def drain(self) -> list[Span]:
        """The spans since the last call, in order; a stage still running is cut here and goes on."""
        self._switch()
        spans, self._spans = self._spans, []
        return spans

    def _switch(self) -> None:
        now_s = self._clock()
        if self._stack and now_s > self._since_s:
            self._spans.append(Span(stage=self._stack[-1], start_s=self._since_s, end_s=now_s))
        self._since_s = now_s


def seconds_by_stage(spans: list[Span]) -> dict[str, float]:
    """Total seconds of each stage."""
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.stage] = totals.get(span.stage, 0.0) + span.end_s - span.start_s
    return totals

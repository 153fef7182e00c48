"""`spans.jsonl`: which stage every controller and device was in, and when."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gcore_controller import Span
from gcore_runs.run_folder import append_json, read_jsonl, write_jsonl

_JOINED_BELOW_S = 1e-3
_DIGITS = 4


def on_wall_clock(spans: Iterable[Span], now_s: float) -> list[Span]:
    """The spans in seconds of UTC, so that those of controllers on different machines can be compared.

    Args:
        now_s: what the spans' clock tells now.
    """
    shift_s = time.time() - now_s
    return [Span(stage=s.stage, start_s=s.start_s + shift_s, end_s=s.end_s + shift_s) for s in spans]


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """One step. Its spans are in seconds since its start."""

    step: int
    start_s: float
    """Seconds since the run's first step. The time between two processes of a run is left out."""
    controllers: list[list[Span]]
    """By rank."""
    devices: dict[str, list[Span]] = field(default_factory=dict)
    """By name."""

    @property
    def end_s(self) -> float:
        """Seconds since the run's first step."""
        rows = [*self.controllers, *self.devices.values()]
        return self.start_s + max((span.end_s for spans in rows for span in spans), default=0.0)

    def to_row(self) -> dict[str, Any]:
        """What a line of the file holds: a span is ``[stage, start_s, end_s]``, in tenths of milliseconds."""
        row: dict[str, Any] = {"step": self.step, "start_s": round(self.start_s, _DIGITS)}
        row["controllers"] = [_to_lists(spans) for spans in self.controllers]
        if self.devices:
            row["devices"] = {name: _to_lists(spans) for name, spans in self.devices.items()}
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepSpans":
        """The opposite of `to_row`."""
        return cls(
            step=row["step"],
            start_s=row["start_s"],
            controllers=[_from_lists(spans) for spans in row["controllers"]],
            devices={name: _from_lists(spans) for name, spans in row.get("devices", {}).items()},
        )


class SpanWriter:
    """Appends one row a step, beginning behind ``last_step``: rows of steps that will be made again are removed."""

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        self._path = path
        self._zero_s: float | None = None
        self._waits: list[Span] = []
        """Since the last step, in all controllers."""
        self._truncate(last_step)

    def go_on(self, *, last_step: int, cause: str) -> None:
        """Go on behind ``last_step``; the time since its end, until the next one begins, has this cause."""
        self._truncate(last_step)
        if self._zero_s is not None:
            self._waits = [Span(stage=cause, start_s=self._zero_s + self._end_s, end_s=math.inf)]

    def waited(self, span: Span) -> None:
        """Note what all controllers waited for, in seconds of UTC: the next step begins with it."""
        self._waits.append(span)

    def write(
        self,
        step: int,
        spans_by_controller: Sequence[Sequence[Span]],
        *,
        spans_by_device: Mapping[str, Sequence[Span]] | None = None,
    ) -> None:
        """Record a step, whose spans are in seconds of one clock; see `on_wall_clock`.

        Args:
            spans_by_controller: of the step, by rank.
            spans_by_device: of the step, by the name that a device's row is to have.
        """
        devices = spans_by_device or {}
        starts_s = [s.start_s for spans in (*spans_by_controller, *devices.values()) for s in spans]
        if self._zero_s is not None and starts_s:
            waits = [replace(wait, end_s=min(wait.end_s, *starts_s)) for wait in self._waits]
            spans_by_controller = [[*waits, *own] for own in spans_by_controller]
            starts_s += [wait.start_s for wait in waits]
        self._waits = []
        if self._zero_s is None and starts_s:
            # A resumed run goes on where the process before it ended.
            self._zero_s = min(starts_s) - self._end_s
        zero_s = self._zero_s or 0.0
        start_s = min(starts_s, default=zero_s + self._end_s)
        spans = StepSpans(
            step=step,
            start_s=start_s - zero_s,
            controllers=[_relative(spans, start_s) for spans in spans_by_controller],
            devices={name: _relative(spans, start_s) for name, spans in devices.items()},
        )
        self._end_s = spans.end_s
        append_json(self._path, spans.to_row())

    def _truncate(self, last_step: int) -> None:
        rows = [row for row in read_jsonl(self._path) if row["step"] <= last_step]
        write_jsonl(self._path, rows)
        self._end_s = StepSpans.from_row(rows[-1]).end_s if rows else 0.0


def _relative(spans: Iterable[Span], zero_s: float) -> list[Span]:
    """The spans in seconds since ``zero_s``; neighbours of one stage are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        start_s, end_s = span.start_s - zero_s, span.end_s - zero_s
        last = joined[-1] if joined else None
        if last is not None and last.stage == span.stage and start_s - last.end_s < _JOINED_BELOW_S:
            joined[-1] = Span(stage=span.stage, start_s=last.start_s, end_s=max(last.end_s, end_s))
        else:
            joined.append(Span(stage=span.stage, start_s=start_s, end_s=end_s))
    return joined


def _to_lists(spans: Iterable[Span]) -> list[list[str | float]]:
    return [[s.stage, round(s.start_s, _DIGITS), round(s.end_s, _DIGITS)] for s in spans]


def _from_lists(spans: Iterable[Sequence[Any]]) -> list[Span]:
    return [Span(stage=stage, start_s=start_s, end_s=end_s) for stage, start_s, end_s in spans]

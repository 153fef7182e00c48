"""The file `spans.jsonl`: the stages of every controller and device over time."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gcore_controller import Span
from gcore_runs.run_folder import append_json, read_jsonl, write_jsonl

_JOINED_BELOW_S = 1e-3
_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """The spans of one step, in seconds since its start."""

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
        """Return a line of the file; a span is ``[stage, start_s, end_s]``, rounded to tenths of milliseconds."""
        row: dict[str, Any] = {"step": self.step, "start_s": round(self.start_s, _DIGITS)}
        row["controllers"] = [_to_lists(spans) for spans in self.controllers]
        if self.devices:
            row["devices"] = {name: _to_lists(spans) for name, spans in self.devices.items()}
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepSpans":
        """Return the step that `to_row` gave this row for."""
        return cls(
            step=row["step"],
            start_s=row["start_s"],
            controllers=[_from_lists(spans) for spans in row["controllers"]],
            devices={name: _from_lists(spans) for name, spans in row.get("devices", {}).items()},
        )


class SpanWriter:
    """Append one row per step after ``last_step``; rows of later steps, which are repeated, are removed."""

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        self._path = path
        self._zero_s: float | None = None
        self._waits: list[Span] = []
        """Waits of all controllers since the last step."""
        self._truncate(last_step)

    def resume(self, *, last_step: int, cause: str) -> None:
        """Continue after ``last_step``; the time from its end to the start of the next step has this cause."""
        self._truncate(last_step)
        if self._zero_s is not None:
            self._waits = [Span(stage=cause, start_s=self._zero_s + self._end_s, end_s=math.inf)]

    def waited(self, span: Span) -> None:
        """Record what all controllers waited for, in seconds of UTC; the next step starts with it."""
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
            spans_by_device: of the step, by device name.
        """
        devices = spans_by_device or {}
        starts_s = [s.start_s for spans in (*spans_by_controller, *devices.values()) for s in spans]
        if self._zero_s is not None and starts_s:
            waits = [replace(wait, end_s=min(wait.end_s, *starts_s)) for wait in self._waits]
            spans_by_controller = [[*waits, *own] for own in spans_by_controller]
            starts_s += [wait.start_s for wait in waits]
        self._waits = []
        if self._zero_s is None and starts_s:
            # A resumed run continues where the process before it ended.
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
    """Return the spans in seconds since ``zero_s``; neighbours of one stage are joined."""
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

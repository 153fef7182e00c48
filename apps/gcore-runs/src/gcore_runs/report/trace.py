"""A run's timeline as `trace.json`, in Chrome's trace-event format, which ui.perfetto.dev opens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_controller import Span
from gcore_runs.report.panels import kind_and_number
from gcore_runs.report.run import Row, number
from gcore_runs.run_folder import RunFolder, StepSpans, read_jsonl, write_atomically

COUNTERS = (
    "critic/score/mean",
    "response_length/mean",
    "perf/throughput",
    "sampling/acceptance",
    "placement/engines",
)
"""Metrics that have a track of their own."""
_STEPS = "steps"
_ALWAYS_BETWEEN = ("checkpoint", "failure")
_MAY_BE_BETWEEN = (*_ALWAYS_BETWEEN, "swap")
"""Stages that all controllers may wait for between two steps; spans.jsonl has them at the start of the next one."""


def write_trace(run: RunFolder, *, last: int = 0) -> Path:
    """Write `trace.json` of the ``last`` steps of a run, or with 0 of all of them, and return its path.

    Each role is a process, and each controller, engine, judge and training rank a thread of it. On a controller's row a
    step is a slice with its stages inside; a checkpoint, a move of engines or a recovery before it is one of its own.
    """
    steps = list({row["step"]: StepSpans.from_row(row) for row in read_jsonl(run.spans)}.values())[
        -last:
    ]
    metrics: dict[int, Row] = {}
    for row in read_jsonl(run.metrics):
        metrics[row["step"]] = metrics.get(row["step"], {}) | row
    trace = _Trace()
    for step in steps:
        values = metrics.get(step.step, {}).items()
        trace.add(step, {name: value for name, value in values if number(value) is not None})
    ends_s = {step.step: step.end_s for step in steps}
    for row in read_jsonl(run.warnings):
        if row["step"] in ends_s:
            trace.mark(
                "warning", ends_s[row["step"]], {"message": row["message"], "count": row["count"]}
            )
    content = {
        "traceEvents": trace.events,
        "displayTimeUnit": "ms",
        "otherData": {"run": run.path.resolve().name},
    }
    path = run.path / "trace.json"
    write_atomically(path, lambda partial: partial.write_text(json.dumps(content)))
    return path


class _Trace:
    """The events of a trace. Roles and their members are numbered as they are met, and then named by an event."""

    def __init__(self) -> None:
        self.events: list[Row] = []
        self._processes: dict[str, int] = {}
        self._threads: dict[str, Row] = {}
        self._thread(_STEPS)

    def add(self, step: StepSpans, metrics: Row) -> None:
        """Add a step; its length is the one in its ``metrics``."""
        rows: dict[str, Sequence[Span]] = {
            f"controller {rank}": spans for rank, spans in enumerate(step.controllers)
        }
        slices: list[tuple[str, Span, Row]] = []
        for name, spans in rows.items():
            inside = spans[_num_before(spans, metrics.get("timing_s/step")) :]
            if inside:
                span = Span(
                    stage=f"step {step.step}", start_s=inside[0].start_s, end_s=inside[-1].end_s
                )
                slices.append((name, span, {}))
        if slices:
            start_s = min(span.start_s for _, span, _ in slices)
            end_s = max(span.end_s for _, span, _ in slices)
            slices.append(
                (_STEPS, Span(stage=f"step {step.step}", start_s=start_s, end_s=end_s), metrics)
            )
            for name in set(COUNTERS) & metrics.keys():
                self._event("C", name, _STEPS, step.start_s + start_s, {"value": metrics[name]})
        for name in sorted(step.devices, key=kind_and_number):
            rows[name] = step.devices[name]
        for name, spans in rows.items():
            slices.extend((name, span, {"step": step.step}) for span in spans)
        for name, span, args in slices:
            start_us = _microseconds(step.start_s + span.start_s)
            end_us = _microseconds(step.start_s + span.end_s)
            self._event(
                "X", span.stage, name, step.start_s + span.start_s, args, dur=end_us - start_us
            )
        evaluation = {name: value for name, value in metrics.items() if name.startswith("val/")}
        if evaluation:
            self.mark("evaluation", step.end_s, evaluation)

    def mark(self, name: str, at_s: float, args: Row) -> None:
        """Add an event without a length to the row of steps."""
        self._event("i", name, _STEPS, at_s, args, s="t")

    def _event(self, phase: str, name: str, row: str, at_s: float, args: Row, **more: Any) -> None:
        self.events.append(
            {
                "ph": phase,
                "name": name,
                "ts": _microseconds(at_s),
                **more,
                **self._thread(row),
                "args": args,
            }
        )

    def _thread(self, row: str) -> Row:
        """Return the numbers of a row's process and thread."""
        if row not in self._threads:
            role, tid = ("run", 0) if row == _STEPS else kind_and_number(row)
            is_new = role not in self._processes
            thread = {"pid": self._processes.setdefault(role, len(self._processes)), "tid": tid}
            if is_new:
                self.events.append(
                    {"ph": "M", "name": "process_name", **thread, "args": {"name": role}}
                )
                order = {"sort_index": thread["pid"]}
                self.events.append(
                    {"ph": "M", "name": "process_sort_index", **thread, "args": order}
                )
            self.events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": row}})
            self._threads[row] = thread
        return self._threads[row]


def _num_before(spans: Sequence[Span], step_s: float | None) -> int:
    """Return how many of a controller's spans were before the step, which took ``step_s``, if that is known."""
    for index, span in enumerate(spans):
        is_early = step_s is not None and span.start_s < spans[-1].end_s - step_s
        if span.stage not in (_MAY_BE_BETWEEN if is_early else _ALWAYS_BETWEEN):
            return index
    return len(spans)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)

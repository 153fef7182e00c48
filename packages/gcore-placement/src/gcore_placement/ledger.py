"""The ledger of a run: each device-second by role, as work or as one cause of idleness."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import Ints

WORK = {"gen": "generation", "reward": "reward", "prepare": "preparation", "train": "training", "sync": "weight_sync"}
"""Columns of work by the stage of a device, in the order of a step."""

CAUSES = (
    "long_tail",
    "waiting_for_generation",
    "waiting_for_reward",
    "waiting_for_weights",
    "swap",
    "data",
    "checkpoint",
    "imbalance",
    "failure",
    "unassigned",
)
"""Columns of idleness."""

COLUMNS = (*WORK.values(), *CAUSES)

Interval = tuple[str, float, float]
"""Stage, start and end in seconds."""
Span = tuple[str, int, int]
"""Stage, start and end in nanoseconds."""

_NS = 1_000_000_000
_NAMED = ("swap", "data", "checkpoint", "failure")
"""Stages that are causes of idleness themselves, of a device or of a controller that delays all others."""

_STAGES = (*_NAMED, *WORK)
_NO_STAGE = len(_STAGES)

_AFTER_SAMPLING = dict.fromkeys(("prepare", "train", "sync"), "waiting_for_weights")
_CAUSE_BY_ROLE: dict[str, dict[str, str]] = {
    "engine": {"gen": "long_tail", "reward": "waiting_for_reward", **_AFTER_SAMPLING},
    "judge": {"gen": "waiting_for_generation", "reward": "long_tail", **_AFTER_SAMPLING},
    "trainer": {"gen": "waiting_for_generation", "reward": "waiting_for_reward", "sync": "waiting_for_weights"},
    # One that engines and training ranks share, by turns.
    "device": {"gen": "long_tail", "reward": "waiting_for_reward", "sync": "waiting_for_weights"},
}
"""The cause of idleness of a role's device, by the stage of the controllers."""


@dataclass(frozen=True, kw_only=True)
class StepIntervals:
    """A step's stages. Times are in nanoseconds of one clock, so that sums are exact."""

    step: int
    start_ns: int
    stop_ns: int
    controllers: Sequence[Sequence[Span]]
    """By rank."""
    devices: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    """By name; a device's role is its name without the number after it, as in `engine 3`. A further judge's is
    `judge_NAME`, and its stage `reward/NAME`."""

    @classmethod
    def of(
        cls,
        step: int,
        controllers: Iterable[Iterable[Interval]],
        devices: Mapping[str, Iterable[Interval]],
        *,
        offset_s: float = 0.0,
    ) -> Self:
        """Build a step from seconds since `offset_s`; it lasts from the first start to the last end."""
        offset_ns = round(offset_s * _NS)

        def exact(row: Iterable[Interval]) -> list[Span]:
            return [(name, offset_ns + round(start * _NS), offset_ns + round(end * _NS)) for name, start, end in row]

        rows = [exact(intervals) for intervals in controllers]
        named = {name: exact(intervals) for name, intervals in devices.items()}
        found = [interval for row in (*rows, *named.values()) for interval in row]
        start_ns = min((start for _, start, _ in found), default=offset_ns)
        stop_ns = max((stop for *_, stop in found), default=start_ns)
        return cls(step=step, start_ns=start_ns, stop_ns=stop_ns, controllers=rows, devices=named)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Device time by role and column, which adds up to devices x wall time exactly."""

    device_ns: Mapping[str, Mapping[str, int]]
    """Nanoseconds of each column of `COLUMNS`, by role."""
    total_ns: Mapping[str, int]
    """Devices x wall time, by role; a device counts in the steps that name it."""

    @classmethod
    def of(cls, steps: Iterable[StepIntervals]) -> Self:
        """Assign each nanosecond of each device.

        A device in a stage works; in several at once, in the one that started last. One in no stage idles for the
        earliest stage that a controller is in, for which all wait: by the table above, or for other devices of its role
        that are busy (imbalance). Stages named swap, data, checkpoint or failure are causes as they are. The rest is
        unassigned. Where no device is named, controllers stand for them.
        """
        device_ns: dict[str, dict[str, int]] = {}
        total_ns: dict[str, int] = {}
        column_of_stage = np.array([COLUMNS.index(WORK.get(stage, stage)) for stage in (*_STAGES, "unassigned")])
        for step in steps:
            rows = step.devices or {f"controller {rank}": spans for rank, spans in enumerate(step.controllers)}
            times = {time for row in (*rows.values(), *step.controllers) for _, *ends in row for time in ends}
            inside = sorted({min(max(time, step.start_ns), step.stop_ns) for time in times})
            cuts = np.array(sorted({step.start_ns, *inside, step.stop_ns}), dtype=np.int64)
            widths = np.diff(cuts)
            labels = [_stages(row, cuts) for row in step.controllers]
            held_up_by = np.min(labels, axis=0) if labels else np.full(len(widths), _NO_STAGE)
            by_role: dict[str, list[Ints]] = {}
            for name, row in rows.items():
                kind, _, number = name.rpartition(" ")
                by_role.setdefault(kind if number.isdecimal() and kind else name, []).append(_stages(row, cuts))
            for role, stages in by_role.items():
                causes = _causes(role, held_up_by, np.min(stages, axis=0) < _NO_STAGE)
                found = np.zeros(len(COLUMNS), dtype=np.int64)
                for own in stages:
                    np.add.at(found, np.where(own == _NO_STAGE, causes, column_of_stage[own]), widths)
                entry = device_ns.setdefault(role, dict.fromkeys(COLUMNS, 0))
                for column, width in zip(COLUMNS, found.tolist(), strict=True):
                    entry[column] += width
                total_ns[role] = total_ns.get(role, 0) + len(stages) * (step.stop_ns - step.start_ns)
        return cls(device_ns=device_ns, total_ns=total_ns)

    def share(self, column: str, role: str | None = None) -> float:
        """Return the share of a column in a role's device time, or in that of all; 0 where there is none."""
        roles = self.device_ns if role is None else (role,)
        total = sum(self.total_ns[name] for name in roles)
        return sum(self.device_ns[name][column] for name in roles) / total if total else 0.0

    def idle_share(self, role: str | None = None) -> float:
        """Return the share of all causes of idleness together."""
        return sum(self.share(cause, role) for cause in CAUSES)

    def shares(self) -> dict[str, float]:
        """Return `idle_share` and the share of each cause, of all roles together."""
        return {"idle_share": self.idle_share(), **{cause: self.share(cause) for cause in CAUSES}}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: seconds by role and column, and shares of all roles together."""
        return {
            "roles": {
                role: {"device_s": self.total_ns[role] / _NS, "columns_s": {c: ns / _NS for c, ns in entry.items()}}
                for role, entry in self.device_ns.items()
            },
            "shares": {column: self.share(column) for column in COLUMNS},
            "idle_share": self.idle_share(),
        }


def read_spans(path: str | Path) -> list[StepIntervals]:
    """Read the steps of a run of gcore-llm, from its folder or the `spans.jsonl` in it, or raise PlacementError.

    A step lasts until the next one starts; a torn last line, and steps that a resumed run repeated, are left out.
    """
    file = Path(path) / "spans.jsonl" if Path(path).is_dir() else Path(path)
    try:
        lines = file.read_text().rpartition("\n")[0].splitlines()
    except FileNotFoundError:
        raise refusal("run", str(path), "a folder with spans.jsonl, or that file") from None
    steps: list[StepIntervals] = []
    for number, line in enumerate(lines, start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            spans = row["controllers"], row.get("devices", {})
            found = StepIntervals.of(row["step"], *spans, offset_s=float(row["start_s"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = f"{file}, line {number} is invalid; expected a step with its spans ({error!r})"
            raise PlacementError(message) from error
        while steps and steps[-1].step >= found.step:
            steps.pop()
        steps.append(found)
    return _end_to_end(steps)


def select_steps(steps: Sequence[StepIntervals], text: str) -> list[StepIntervals]:
    """Select the steps of a range, as in `10:20`, both included; either end may be left out. One must hold any."""
    first, colon, last = text.partition(":")
    if not colon or any(end and not end.isdecimal() for end in (first, last)):
        raise refusal("steps", text, "FIRST:LAST, as in 10:20")
    chosen = [step for step in steps if int(first or 0) <= step.step and (not last or step.step <= int(last))]
    if not chosen:
        there = f"{steps[0].step}:{steps[-1].step}" if steps else "none"
        raise refusal("steps", text, f"a range that holds steps of the run ({there})")
    return chosen


def _end_to_end(steps: Sequence[StepIntervals]) -> list[StepIntervals]:
    """Extend each step to the start of the next; a span that crosses the border counts in both."""
    lasting: list[StepIntervals] = []
    for step, following in zip_longest(steps, steps[1:]):
        devices = {name: list(row) for name, row in step.devices.items()}
        for name, row in lasting[-1].devices.items() if lasting else ():
            if name in devices:
                devices[name].extend(span for span in row if span[2] > step.start_ns)
        stop_ns = step.stop_ns if following is None else max(following.start_ns, step.start_ns)
        lasting.append(replace(step, stop_ns=stop_ns, devices=devices))
    return lasting


def _stages(row: Sequence[Span], cuts: NDArray[np.int64]) -> Ints:
    """Return the stage between each two cuts, as an index into `_STAGES`; unknown stages count as none."""
    stages = np.full(len(cuts) - 1, _NO_STAGE, dtype=np.intp)
    for name, start, stop in sorted(row, key=lambda interval: interval[1]):
        stage, _, _ = name.partition("/")
        if stage in _STAGES:
            first, last = np.searchsorted(cuts, (start, stop))
            stages[first:last] = _STAGES.index(stage)
    return stages


def _causes(role: str, held_up_by: Ints, any_busy: NDArray[np.bool_]) -> Ints:
    """Return the column of a role's idle devices between each two cuts."""
    reasons = _CAUSE_BY_ROLE.get(role.partition("_")[0], {})
    causes = [stage if stage in _NAMED else reasons.get(stage, "unassigned") for stage in _STAGES]
    found = np.array([COLUMNS.index(cause) for cause in [*causes, "unassigned"]], dtype=np.intp)[held_up_by]
    return np.where((found == COLUMNS.index("unassigned")) & any_busy, COLUMNS.index("imbalance"), found)

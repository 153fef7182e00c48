"""The ledger of a run: each device-second by role, as work or as one cause of idleness."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import Ints

WORK = {
    "gen": "generation",
    "reward": "reward",
    "prepare": "preparation",
    "train": "training",
    "sync": "weight_sync",
}
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

COLUMNS = tuple(WORK.values()) + CAUSES

Interval = tuple[str, float, float]
"""Stage, start and end in seconds."""
Span = tuple[str, int, int]
"""Stage, start and end in nanoseconds."""

_NS = 1_000_000_000
_NAMED = ("swap", "data", "checkpoint", "failure")
"""Stages that are causes of idleness, of a device or of a controller that delays all others."""

_STAGES = _NAMED + tuple(WORK)
_NO_STAGE = len(_STAGES)

_AFTER_SAMPLING = dict.fromkeys(("prepare", "train", "sync"), "waiting_for_weights")
_CAUSE_BY_ROLE: dict[str, dict[str, str]] = {
    "engine": {"gen": "long_tail", "reward": "waiting_for_reward", **_AFTER_SAMPLING},
    "judge": {"gen": "waiting_for_generation", "reward": "long_tail", **_AFTER_SAMPLING},
    "trainer": {
        "gen": "waiting_for_generation",
        "reward": "waiting_for_reward",
        "sync": "waiting_for_weights",
    },
    # A device that engines and training ranks share, by turns.
    "device": {"gen": "long_tail", "reward": "waiting_for_reward", "sync": "waiting_for_weights"},
}
"""The cause of idleness of a role's device, by the stage of the controllers."""


@dataclass(frozen=True, kw_only=True)
class StepIntervals:
    """A step's stages. Times are in nanoseconds of one clock, so that sums are exact.

    Example:
        >>> step = StepIntervals.of(
        ...     1,
        ...     controllers=[[("gen", 0.0, 8.0), ("train", 8.0, 10.0)]],
        ...     devices={"engine 0": [("gen", 0.0, 8.0)], "engine 1": [("gen", 0.0, 5.0)]},
        ... )
        >>> (step.stop_ns - step.start_ns) / 1e9
        10.0
    """

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

        def to_spans(row: Iterable[Interval]) -> list[Span]:
            return [
                (name, offset_ns + round(start * _NS), offset_ns + round(end * _NS))
                for name, start, end in row
            ]

        rows = [to_spans(intervals) for intervals in controllers]
        device_rows = {name: to_spans(intervals) for name, intervals in devices.items()}
        spans = list(chain(*rows, *device_rows.values()))
        start_ns = min((start for _, start, _ in spans), default=offset_ns)
        stop_ns = max((stop for _, _, stop in spans), default=start_ns)
        return cls(
            step=step, start_ns=start_ns, stop_ns=stop_ns, controllers=rows, devices=device_rows
        )


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Device time by role and column, which adds up to devices x wall time exactly.

    Example:
        >>> step = StepIntervals.of(
        ...     1,
        ...     controllers=[[("gen", 0.0, 8.0), ("train", 8.0, 10.0)]],
        ...     devices={"engine 0": [("gen", 0.0, 8.0)], "engine 1": [("gen", 0.0, 5.0)]},
        ... )
        >>> ledger = Ledger.of([step])
        >>> ledger.share("generation")
        0.65
        >>> {name: share for name, share in ledger.shares().items() if share}
        {'idle_share': 0.35, 'long_tail': 0.15, 'waiting_for_weights': 0.2}
    """

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
        column_of_stage = np.array(
            [COLUMNS.index(WORK.get(stage, stage)) for stage in (*_STAGES, "unassigned")]
        )
        for step in steps:
            rows = step.devices or {
                f"controller {rank}": spans for rank, spans in enumerate(step.controllers)
            }
            times = {step.start_ns, step.stop_ns}
            for _, start_ns, stop_ns in chain(*rows.values(), *step.controllers):
                times.update((start_ns, stop_ns))
            cuts = np.unique(
                np.clip(np.array(list(times), dtype=np.int64), step.start_ns, step.stop_ns)
            )
            widths = np.diff(cuts)
            labels = [_stages(row, cuts) for row in step.controllers]
            held_up_by = np.min(labels, axis=0) if labels else np.full(len(widths), _NO_STAGE)
            by_role: dict[str, list[Ints]] = {}
            for name, row in rows.items():
                role, _, number = name.rpartition(" ")
                if not role or not number.isdecimal():
                    role = name
                by_role.setdefault(role, []).append(_stages(row, cuts))
            for role, stages in by_role.items():
                causes = _causes(role, held_up_by, np.min(stages, axis=0) < _NO_STAGE)
                column_ns = np.zeros(len(COLUMNS), dtype=np.int64)
                for device_stages in stages:
                    columns = np.where(
                        device_stages == _NO_STAGE, causes, column_of_stage[device_stages]
                    )
                    np.add.at(column_ns, columns, widths)
                entry = device_ns.setdefault(role, dict.fromkeys(COLUMNS, 0))
                for column, width in zip(COLUMNS, column_ns.tolist(), strict=True):
                    entry[column] += width
                total_ns[role] = total_ns.get(role, 0) + len(stages) * (
                    step.stop_ns - step.start_ns
                )
        return cls(device_ns=device_ns, total_ns=total_ns)

    def share(self, column: str, role: str | None = None) -> float:
        """Return the share of a column in the device time of a role, or of all roles; 0 without device time."""
        roles = self.device_ns if role is None else (role,)
        total = sum(self.total_ns[name] for name in roles)
        if not total:
            return 0.0
        return sum(self.device_ns[name][column] for name in roles) / total

    def idle_share(self, role: str | None = None) -> float:
        """Return the share of all causes of idleness together."""
        return sum(self.share(cause, role) for cause in CAUSES)

    def shares(self) -> dict[str, float]:
        """Return `idle_share` and the share of each cause, of all roles together."""
        return {"idle_share": self.idle_share(), **{cause: self.share(cause) for cause in CAUSES}}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: seconds by role and column, and shares of all roles together."""
        roles: dict[str, Any] = {}
        for role, entry in self.device_ns.items():
            columns_s = {column: duration_ns / _NS for column, duration_ns in entry.items()}
            roles[role] = {"device_s": self.total_ns[role] / _NS, "columns_s": columns_s}
        return {
            "roles": roles,
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
            controllers = row["controllers"]
            devices = row.get("devices", {})
            step = StepIntervals.of(
                row["step"], controllers, devices, offset_s=float(row["start_s"])
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            message = (
                f"{file}, line {number} is invalid; expected a step with its spans ({error!r})"
            )
            raise PlacementError(message) from error
        while steps and steps[-1].step >= step.step:
            steps.pop()
        steps.append(step)
    return _end_to_end(steps)


def select_steps(steps: Sequence[StepIntervals], text: str) -> list[StepIntervals]:
    """Select the steps of a range such as `10:20`, ends included and optional; PlacementError if there are none."""
    first, colon, last = text.partition(":")
    if not colon or any(end and not end.isdecimal() for end in (first, last)):
        raise refusal("steps", text, "FIRST:LAST, as in 10:20")
    first_step = int(first or 0)
    last_step = int(last) if last else float("inf")
    chosen = [step for step in steps if first_step <= step.step <= last_step]
    if not chosen:
        there = f"{steps[0].step}:{steps[-1].step}" if steps else "none"
        raise refusal("steps", text, f"a range that holds steps of the run ({there})")
    return chosen


def _end_to_end(steps: Sequence[StepIntervals]) -> list[StepIntervals]:
    """Extend each step to the start of the next; a span that crosses the border counts in both."""
    lasting: list[StepIntervals] = []
    for step, following in zip_longest(steps, steps[1:]):
        devices = {name: list(row) for name, row in step.devices.items()}
        if lasting:
            for name, row in lasting[-1].devices.items():
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
    unassigned = COLUMNS.index("unassigned")
    column_of_stage = np.full(_NO_STAGE + 1, unassigned, dtype=np.intp)
    for index, stage in enumerate(_STAGES):
        cause = stage if stage in _NAMED else reasons.get(stage, "unassigned")
        column_of_stage[index] = COLUMNS.index(cause)
    columns = column_of_stage[held_up_by]
    return np.where((columns == unassigned) & any_busy, COLUMNS.index("imbalance"), columns)

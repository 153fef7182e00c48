"""Results of parts as files, and the report of all of them: ``gpu-report.md`` and ``gpu-report.json``.

Each part has a file ``parts/NN.json`` in the output folder, from which the report is built, so that calls with some of
the parts each add to one report.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Status = Literal["met", "not met", "measured", "failed", "not run"]
"""met, not met: of the part's aims; measured: nothing was compared with an aim; failed: an error, or its time was over;
not run: the time of the whole run was over."""

_LAST_LINES = 15
"""Lines of an error in the report."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured number next to its aim."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    is_judged: bool = True
    """Whether the aim is for this device and these shapes; it is not on a CPU."""

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met; None where there is none, or none to be compared with."""
        if not self.is_judged or (self.at_least is None and self.at_most is None):
            return None
        # A comparison with NaN is False.
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)

    @property
    def aim(self) -> str:
        """The aim as text."""
        aims = ((self.at_least, "at least"), (self.at_most, "at most"))
        return ", ".join(
            f"{words} {number(bound)} {self.unit}".strip()
            for bound, words in aims
            if bound is not None
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """All that a part's process left."""

    number: int
    name: str
    status: Status = "not run"
    seconds: float = 0.0
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    errors: Sequence[str] = ()
    """Last lines of each error."""
    machine: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of_lines(
        cls, lines: Sequence[str], *, number: int, name: str, error: str = "", **others: Any
    ) -> "Result":
        """Build a result from the lines that a `Trial` wrote, and the error that ended its process, if one did."""
        figures: list[Figure] = []
        notes: list[str] = []
        errors: list[str] = []
        for line in lines:
            entry = json.loads(line)
            match entry.pop("kind"):
                case "figure":
                    figures.append(Figure(**entry))
                case "note":
                    notes.append(entry["text"])
                case _:
                    errors.append(last_lines(entry["text"]))
        if error:
            errors.append(last_lines(error))
        verdicts = [figure.is_met for figure in figures if figure.is_met is not None]
        status: Status = "measured" if not verdicts else "met" if all(verdicts) else "not met"
        found = cls(number=number, name=name, figures=figures, notes=notes, errors=errors, **others)
        return replace(found, status="failed" if errors else status)

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read what `write_result` wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        figures = [Figure(**figure) for figure in found.pop("figures")]
        return cls(figures=figures, **found)


def last_lines(text: str) -> str:
    """Return the end of an error's text."""
    return "\n".join(text.strip().splitlines()[-_LAST_LINES:])


def number(value: float) -> str:
    """Write a number with three digits, or with all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write_result(out: Path, result: Result) -> None:
    """Write a part's file and the whole report again, so that a run that is cut off leaves what it has."""
    _write(out / "parts" / f"{result.number:02}.json", json.dumps(asdict(result), indent=1))
    results = read_results(out)
    machines = [found.machine for found in results if found.machine]
    latest = max(machines, key=lambda machine: str(machine.get("date", "")), default={})
    parts = [
        {**asdict(found), "figures": [_entry(figure) for figure in found.figures]}
        for found in results
    ]
    _write(out / "gpu-report.json", json.dumps({"machine": latest, "parts": parts}, indent=1))
    _write(out / "gpu-report.md", markdown(results, latest))


def read_results(out: Path) -> list[Result]:
    """Return the results of all parts that the output folder has, by number."""
    return [Result.read(path) for path in sorted((out / "parts").glob("*.json"))]


def _entry(figure: Figure) -> dict[str, Any]:
    return asdict(figure) | {"is_met": figure.is_met}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def markdown(results: Sequence[Result], machine: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = ["# gcore on one GPU", "", "Written by `scripts/gpu/accept`.", "", "| | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {value} |" for name, value in machine.items()]
    lines += ["", "| part | | result | aims met | seconds |", "|---|---|---|---|---|"]
    for result in results:
        verdicts = [figure.is_met for figure in result.figures if figure.is_met is not None]
        met = f"{sum(verdicts)} of {len(verdicts)}" if verdicts else ""
        lines.append(
            f"| {result.number} | {result.name} | {result.status} | {met} | {result.seconds:.0f} |"
        )
    for result in results:
        lines += ["", f"## {result.number}. {result.name}: {result.status}"]
        if result.machine and _device(result.machine) != _device(machine):
            lines += ["", f"On another machine: {_device(result.machine)}."]
        if result.figures:
            lines += ["", "| figure | measured | aim | |", "|---|---|---|---|"]
        for figure in result.figures:
            verdict = {True: "met", False: "**not met**", None: ""}[figure.is_met]
            lines.append(
                f"| {figure.name} | {number(figure.value)} {figure.unit} | {figure.aim} | {verdict} |"
            )
        for note in result.notes:
            lines += ["", note]
        for error in result.errors:
            lines += ["", "```", error, "```"]
    return "\n".join(lines) + "\n"


def _device(machine: Mapping[str, Any]) -> str:
    return f"{machine.get('device')}, commit {machine.get('commit')}"

"""Read a run's folder for its page, also while the run is in progress or after it was killed; and kinds of runs."""

import base64
import math
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gcore_runs.errors import UserError
from gcore_runs.loop.best import is_due
from gcore_runs.run_folder import RunFolder, StepSpans, json_object

Row: TypeAlias = dict[str, Any]

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

MAX_SPAN_STEPS = 50
"""Steps whose spans are read: the last ones."""

_MAX_PICTURE_BYTES = 6 * 2**20

Signal = tuple[str, str, str]
"""Title, metric and unit of a chart."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The page's first chart, its held-out numbers and its signals.

    Example:
        >>> kind = Kind(
        ...     title="Training loss", unit="nats", name="nats", key="loss", measure="loss",
        ...     evaluations={"": "val/loss"}, signals=(), after_warmup="Loss of the warm-up.",
        ... )
        >>> run = RunFolder(Path("runs/small"))
        >>> write_jsonl(run.metrics, [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}])
        >>> from gcore_runs.report.page import render_report
        >>> render_report(run.path, {"train": kind}).name
        'report.html'
    """

    title: str
    unit: str
    name: str
    """Unit of the first chart."""
    key: str
    """Its metric."""
    measure: Literal["score", "reward", "loss", "accuracy"]
    """Kind of the held-out numbers; score: shares of right answers, if they are from 0 to 1."""
    evaluations: dict[str, str]
    """Their metrics, by the way of answering; empty where there is only one."""
    signals: tuple[Signal, ...]
    tiles: dict[str, str] = field(default_factory=dict[str, str])
    """Further metrics of evaluations in the page's first row, and their labels."""
    throughput_unit: str = "tokens/s"
    has_samples: bool = False
    """Texts before and after, in samples/*.jsonl."""
    has_pictures: bool = False
    """Pictures over time, in samples/step-*.png, and of each prompt, in samples/step-*/."""
    after_warmup: str
    """Caption of the warm-up's chart without a held-out score."""


class ReportedRun:
    """Content of a run's folder. A row is one step; `notes` list files that could not be read, and warnings.

    Raises:
        FileNotFoundError: it is not a run's folder.
    """

    def __init__(self, run_dir: Path, kinds: Mapping[str, Kind]) -> None:
        folder = RunFolder(run_dir)
        signs = (folder.config, folder.metrics, folder.warmup)
        if not any(path.is_file() for path in signs):
            names = ", ".join(path.name for path in signs)
            raise FileNotFoundError(
                f"{run_dir} is not a run's folder: expected one of {names} in it"
            )
        self.notes = notes = list[str]()
        self.name = run_dir.resolve().name
        self.config, self.kind, self.total_steps, self._patience = _read_config(
            folder.config, kinds, notes
        )
        spans = _by_step(_read_rows(folder.spans, "controllers", notes, last=MAX_SPAN_STEPS))
        self.spans = [StepSpans.from_row(row) for row in spans]
        self.metrics = _by_step(_read_rows(folder.metrics, "step", notes))
        self.memory = _by_step(_read_rows(folder.memory, "step", notes))
        self.warmup = _by_step(_read_rows(folder.warmup, "step", notes))
        self.before = _read_rows(folder.samples / "before.jsonl", "prompt", notes)
        self.after = _read_rows(folder.samples / "after.jsonl", "prompt", notes)
        self.samples = folder.samples
        self.training_samples = _read_rows(folder.training_samples, "step", notes)
        self.best_step = _read_best_step(folder.best / "step.json", notes)
        self.pictures = (
            _read_pictures(folder.samples, self.best_step, notes) if self.kind.has_pictures else []
        )
        self.written = (
            datetime.fromtimestamp(folder.metrics.stat().st_mtime, UTC) if self.metrics else None
        )
        notes += _warnings(_read_rows(folder.warnings, "message", notes))

    @property
    def steps_done(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def has_ended_early(self) -> bool:
        """True if the run ended early, after as many evaluations without improvement as were set."""
        return bool(self.metrics) and is_due(self.metrics[-1], self._patience)

    @property
    def has_paired_samples(self) -> bool:
        """True if samples before and after answer the same prompts."""
        return all(
            old["prompt"] == new["prompt"]
            for old, new in zip(self.before, self.after, strict=False)
        )


def _warnings(rows: list[Row]) -> list[str]:
    """Return a line for each kind of warning: its first message, and how often it occurred."""
    lines: list[str] = []
    for key in dict.fromkeys(row.get("key") for row in rows):
        warnings = [row for row in rows if row.get("key") == key]
        line = f"Step {warnings[0].get('step')}: {warnings[0]['message']}"
        times = sum(row.get("count", 1) for row in warnings)
        if times > 1:
            line += (
                f" ({times:,} times in {len(warnings):,} steps, to step {warnings[-1].get('step')})"
            )
        lines.append(f"{line}.")
    return lines


def _read_config(
    path: Path, kinds: Mapping[str, Kind], notes: list[str]
) -> tuple[str, Kind, int | None, int]:
    """Return the text of config.toml, the run's kind, its number of steps, and the patience of its early stopping."""
    values: Any = {}
    text = ""
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        notes.append(
            "config.toml is not there: the settings and the number of steps to go are unknown."
        )
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        notes.append(
            f"config.toml is not valid TOML ({error}): the number of steps to go is unknown."
        )
    kind = kinds.get(str(values.get("command", "train")), kinds["train"])
    trainer: Any = values.get("trainer")
    if not isinstance(trainer, dict):
        trainer = {}
    total: Any = trainer.get("total_training_steps")
    if not isinstance(total, int) or total <= 0:
        total = None
    patience: Any = trainer.get("early_stopping_patience")
    if not isinstance(patience, int):
        patience = 0
    return text, kind, total, patience


def _read_rows(
    path: Path, required: str, notes: list[str], *, last: int | None = None
) -> list[Row]:
    """Return the objects with the field `required` among the `last` lines of a jsonl file, which may be absent.

    The last line may be half written; any other unreadable one is noted.
    """
    if not path.is_file():
        return []
    rows: list[Row] = []
    unreadable: list[int] = []
    with path.open("rb") as file:
        lines = deque(enumerate(file, start=1), maxlen=last)
    for number, line in lines:
        with suppress(UserError):
            row = json_object(line, path.name)
            if required in row:
                rows.append(row)
                continue
        if line.strip() and line.endswith(b"\n"):
            unreadable.append(number)
    if unreadable:
        numbers = ", ".join(map(str, unreadable[:5]))
        if len(unreadable) > 5:
            numbers += ", ..."
        notes.append(
            f"{path.name}: {len(unreadable)} unreadable line(s) left out (line {numbers})."
        )
    return rows


def _read_best_step(path: Path, notes: list[str]) -> int | None:
    """Return the step whose policy is exported in place of the last one; None: there is none."""
    if not path.is_file():
        return None
    try:
        return int(json_object(path.read_text(), path.name)["step"])
    except (UserError, OSError, KeyError, TypeError, ValueError) as error:
        notes.append(f"best/{path.name} could not be read ({error}).")
        return None


def _read_pictures(folder: Path, best_step: int | None, notes: list[str]) -> list[Row]:
    """Return the first of the pictures, that of the best step, and the last."""
    files = {int(file.stem.removeprefix("step-")): file for file in folder.glob("step-*.png")}
    pictures: list[Row] = []
    for step in sorted(files):
        if step not in (min(files), best_step, max(files)):
            continue
        content = files[step].read_bytes()
        if len(content) > _MAX_PICTURE_BYTES:
            notes.append(f"{files[step].name} has {len(content) / 2**20:.0f} MiB: left out.")
            continue
        if content[:8] != _PNG_SIGNATURE or len(content) < 24:
            notes.append(f"{files[step].name} is no PNG file: left out.")
            continue
        # A PNG's header begins with its size (ISO/IEC 15948, 11.2.2).
        width = int.from_bytes(content[16:20], "big")
        height = int.from_bytes(content[20:24], "big")
        png_base64 = base64.b64encode(content).decode()
        pictures.append({"step": step, "png_base64": png_base64, "width": width, "height": height})
    return pictures


def _by_step(rows: list[Row]) -> list[Row]:
    """Return one row a step, ascending, without those that a resumed run has written again."""
    last_rows: list[Row] = []
    for row in rows:
        while last_rows and last_rows[-1]["step"] > row["step"]:
            last_rows.pop()
        if last_rows and last_rows[-1]["step"] == row["step"]:
            last_rows[-1] = last_rows[-1] | row
        else:
            last_rows.append(row)
    return last_rows


def number(value: object) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which `key` is a finite number, and its values there."""
    steps: list[float] = []
    values: list[float] = []
    for row in rows:
        value = number(row.get(key))
        if value is not None:
            steps.append(float(row["step"]))
            values.append(value)
    return steps, values


def metric_names(rows: Sequence[Row]) -> list[str]:
    """Return the keys of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(chain.from_iterable(rows)))

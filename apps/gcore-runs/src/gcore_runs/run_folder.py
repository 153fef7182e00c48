"""A run's folder: its files and who writes them, its lock, and how a run is started or resumed."""

import fcntl
import json
import math
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any
from uuid import uuid4

from gcore_ckpt import Checkpointer
from gcore_controller import Span
from gcore_placement import StepIntervals
from gcore_runs.errors import UserError
from gcore_runs.logs import describe_os_error
from gcore_runs.migration.removed import translate_removed
from gcore_runs.settings.parsing import ConfigT, differences, merge, read_toml, to_toml
from gcore_runs.settings.resources import content_fingerprints, is_of_code, resolve
from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig
from gcore_runs.trackers.base import Images, Rows, TensorBoard, Tracker, images_of

_ID = "run-id"
_JOINED_BELOW_S = 1e-3
_DIGITS = 4


class RunFolder:
    """Paths of one run.

    Example:
        >>> run = RunFolder(Path("runs/first"))
        >>> run.lock()  # until this object is gone, no other process writes this run
        >>> append_json(run.metrics, {"step": 1, "loss": 0.5})
        >>> read_jsonl(run.metrics)
        [{'step': 1, 'loss': 0.5}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_new = not path.exists()
        """Whether the folder did not exist when this object was made."""
        self.config = path / "config.toml"
        self.fingerprints = path / "fingerprints.json"
        self.metrics = path / "metrics.jsonl"
        self.spans = path / "spans.jsonl"
        self.memory = path / "memory.jsonl"
        self.placement = path / "placement.json"
        self.warnings = path / "warnings.jsonl"
        self.logs = path / "logs"
        self.warmup = path / "warmup.jsonl"
        self.samples = path / "samples"
        self.training_samples = path / "samples.jsonl"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"
        self.best = path / "best"
        self.notices: list[str] = []
        """Changes since the run was started that do not keep it from being resumed."""

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """Return the folder of an existing run; `UserError` if there is none."""
        folder = cls(Path(path))
        if not folder.config.is_file():
            reason = "it has no config.toml; the command train makes one under runs/"
            raise UserError(f"{path} is not a run's folder: {reason}")
        return folder

    def load_config(self, config_type: type[ConfigT]) -> ConfigT:
        """Return the settings of the run, as ``config_type``; `UserError` if another command made it."""
        values = translate_removed(read_toml(self.config))
        base = config_type()
        made_by = values.get("command", "train")
        expected = getattr(base, "command", "train")
        if made_by != expected:
            raise UserError(
                f"{self.path} is a run of the command {made_by}; expected one of {expected}"
            )
        # A run of an earlier version may have settings that nothing read.
        return merge(base, values, source=str(self.config), keep=())

    @classmethod
    def open_with_config(
        cls, path: str | Path, config_type: type[ConfigT]
    ) -> "tuple[RunFolder, ConfigT]":
        """Return the folder of an existing run, and its settings on this machine; see `load_config`."""
        folder = cls.existing(path)
        return folder, resolve(folder.load_config(config_type), is_local=True)

    def lock(self) -> None:
        """Keep other processes from writing this run while this object lives; `UserError` if one does already."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(
                f"run folder {self.path} cannot be made: {describe_os_error(error)}; choose another --runs-dir"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(
                f"{self.path} is in use by another process: choose another --name, or wait"
            ) from None
        weakref.finalize(self, lock.close)


def open_run(config: BaseRunConfig) -> RunFolder:
    """Lock and return the folder for this config, of a new run or of one to resume; `UserError` if that differs."""
    folder = RunFolder(Path(config.runs_dir) / config.name)
    numbers = count(2)
    while config.resume == "never" and folder.path.exists():
        folder = RunFolder(Path(config.runs_dir) / f"{config.name}-{next(numbers)}")
    folder.lock()
    fingerprints = content_fingerprints(config)
    if folder.config.is_file() and (
        folder.model.is_dir() or Checkpointer(folder.checkpoints).steps()
    ):
        _check_unchanged(folder, config, fingerprints)
    write_atomically(folder.config, lambda path: path.write_text(to_toml(config)))
    write_atomically(
        folder.fingerprints, lambda path: path.write_text(json.dumps(fingerprints, indent=2))
    )
    identity = folder.path / _ID
    is_local = isinstance(config, BaseRLConfig) and config.local_checkpoints.folder
    if (is_local or config.trainer.trackers) and not identity.exists():
        write_atomically(identity, lambda path: path.write_text(uuid4().hex[:12]))
    return folder


def _check_unchanged(
    folder: RunFolder, config: BaseRunConfig, fingerprints: Mapping[str, str]
) -> None:
    """Raise `UserError` if a run was started with other settings, or other contents of the files that they name."""
    lines = differences(folder.load_config(type(config)), config)
    before: dict[str, str] = {}
    if folder.fingerprints.is_file():
        before = json_object(folder.fingerprints.read_text(), str(folder.fingerprints))
    for name, fingerprint in fingerprints.items():
        is_renamed = any(line.startswith(f"{name}: ") for line in lines)
        if is_renamed or before.get(name, fingerprint) == fingerprint:
            continue
        line = f"{name}: the content of its files has changed"
        # A function that failed, and was corrected, is no reason to start again.
        if is_of_code(config, name):
            folder.notices.append(
                f"{line} since the run was started; it continues with the new one"
            )
        else:
            lines.append(line)
    may_change = [f"{name}*" for name in (*config.may_change, "dtype: auto ->")]
    changed = [line for line in lines if not any(fnmatchcase(line, name) for name in may_change)]
    if not changed:
        return
    hint = ""
    if all(line.endswith("has changed") for line in changed):
        hint = f"; without {folder.fingerprints} contents are not compared"
    raise UserError(
        f"{folder.path} was started with other settings ({'; '.join(changed)}); expected the same "
        f"to resume it, or --resume never, or another --name{hint}"
    )


def run_id(folder: Path) -> str:
    """Return what distinguishes a run with checkpoints on machines, or one that is tracked, from others of its name."""
    return (folder / _ID).read_text()


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file or folder, then rename it to ``target``; an `OSError` has that name."""
    partial = partial_path(target)
    try:
        if partial.is_dir():
            shutil.rmtree(partial)
        write(partial)
        if target.is_dir():
            shutil.rmtree(target)
        partial.replace(target)
    except OSError as error:
        raise _add_file_name(error, target) from error


def partial_path(target: Path) -> Path:
    """Return where a file or folder is written before it is renamed to ``target``."""
    return target.with_name(f".{target.name}.partial")


def append_json(path: Path, row: dict[str, Any]) -> None:
    """Add one line to a JSONL file; an `OSError` has its name."""
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _add_file_name(error, path) from error


def _add_file_name(error: OSError, path: Path) -> OSError:
    """Return the error with a file name, which that of a full disk lacks."""
    if error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in a text; `UserError` if it is none, which names ``where`` it is."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}; expected a JSON object")
    return row


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, which may be missing or end in half a line; raises as `json_object`."""
    if not path.is_file():
        return []
    lines = path.read_text("utf-8", errors="replace").split("\n")[:-1]
    return [json_object(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a JSONL file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        path, lambda partial: partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    )


def _keep_until(path: Path, last_step: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Remove the rows of the steps after ``last_step``, which are run again; return the others, and the removed."""
    rows = read_jsonl(path)
    remaining: list[dict[str, Any]] = []
    if last_step:
        remaining = [row for row in rows if row["step"] <= last_step]
    write_jsonl(path, remaining)
    return remaining, rows[len(remaining) :]


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Appends a row for each step after ``last_step``; rows of later steps, which are run again, are removed.

    The ``trackers`` get the same numbers; they stay open. Those that keep history get none twice.
    """

    def __init__(
        self, run: RunFolder, *, last_step: int, tensorboard: bool, trackers: Sequence[Tracker] = ()
    ) -> None:
        self._path = run.metrics
        self._samples = run.training_samples
        _, repeated = _keep_until(run.metrics, last_step)
        if run.training_samples.exists():
            _keep_until(run.training_samples, last_step)
        self._tracked: dict[int, set[str]] = {}
        """Names of the values that trackers got before the run was resumed, by step."""
        for row in repeated:
            self._tracked.setdefault(row["step"], set()).update(row)
        self._last_tracked_step = max(self._tracked, default=-1)
        self._board: TensorBoard | None = None
        self._trackers = list(trackers)
        if tensorboard:
            self._board = TensorBoard(run.tensorboard, last_step=last_step)
            self._trackers.insert(0, self._board)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row."""
        append_json(self._path, {"step": step, **metrics})
        tracked = self._tracked.get(step, ())
        new_metrics = {name: value for name, value in metrics.items() if name not in tracked}
        for tracker in self._trackers:
            values = new_metrics if tracker.keeps_history else metrics
            if values:
                tracker.write(step, values)

    def write_images(self, step: int, images: Images) -> None:
        """Pass images to the trackers that show them."""
        for tracker in self._trackers:
            if step > self._last_tracked_step or not tracker.keeps_history:
                tracker.write_images(step, images)

    def write_samples(self, step: int, samples: Rows) -> None:
        """Append rows of samples of training; TensorBoard does not hide texts of repeated steps, either."""
        for sample in samples:
            append_json(self._samples, {"step": step, **sample})
        if not samples or step <= self._last_tracked_step:
            return
        for tracker in self._trackers:
            tracker.write_samples(step, samples)
            if "image" in samples[0]:
                tracker.write_images(step, images_of(samples))

    def __exit__(self, *error: object) -> None:
        if self._board is not None:
            self._board.__exit__(*error)


class RunWarnings:
    """Writes warnings of a run to `warnings.jsonl`, and says the first one of each key."""

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        self._path = run.warnings
        self._say = say
        self._said: set[str] = set()
        self._recorded = {(row["step"], row["key"]) for row in read_jsonl(run.warnings)}

    def warn(self, step: int, message: str, *, key: str, count: int = 1) -> None:
        """Record a warning, a sentence without a full stop, once a step and key; it occurred ``count`` times there."""
        if (step, key) not in self._recorded:
            self._recorded.add((step, key))
            append_json(self._path, {"step": step, "key": key, "message": message, "count": count})
        if key not in self._said:
            self._said.add(key)
            times = f" ({count} times)" if count > 1 else ""
            self._say(f"warning: step {step}: {message}{times}")


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
        spans = chain(*self.controllers, *self.devices.values())
        return self.start_s + max((span.end_s for span in spans), default=0.0)

    def intervals(self) -> StepIntervals:
        """Return the spans for a `Ledger` of where the devices' time went."""
        return StepIntervals.of(
            self.step, **_convert_rows(_triples, self.controllers, self.devices)
        )

    def to_row(self) -> dict[str, Any]:
        """Return a line of the file; a span is ``[stage, start_s, end_s]``, rounded to tenths of milliseconds."""
        rows = _convert_rows(_round_spans, self.controllers, self.devices)
        if not self.devices:
            del rows["devices"]
        return {"step": self.step, "start_s": round(self.start_s, _DIGITS), **rows}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepSpans":
        """Return the step that `to_row` gave this row for."""
        rows = _convert_rows(_spans, row["controllers"], row.get("devices", {}))
        return cls(step=row["step"], start_s=row["start_s"], **rows)


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

    def record_wait(self, span: Span) -> None:
        """Record what all controllers waited for, in seconds of UTC; the next step starts with it."""
        self._waits.append(span)

    def write(
        self,
        step: int,
        controllers: Sequence[Sequence[Span]],
        devices: Mapping[str, Sequence[Span]] | None = None,
    ) -> None:
        """Record a step, whose spans, by rank and by device name, are in seconds of one clock; see `on_wall_clock`."""
        devices = devices or {}
        starts_s = [span.start_s for span in chain(*controllers, *devices.values())]
        if self._zero_s is None:
            # A resumed run continues where the process before it ended.
            if starts_s:
                self._zero_s = min(starts_s) - self._end_s
        elif starts_s:
            first_s = min(starts_s)
            waits = [replace(wait, end_s=min(wait.end_s, first_s)) for wait in self._waits]
            controllers = [[*waits, *spans] for spans in controllers]
            starts_s.extend(wait.start_s for wait in waits)
        self._waits = []
        zero_s = self._zero_s or 0.0
        start_s = min(starts_s, default=zero_s + self._end_s)
        rows = _convert_rows(partial(_relative, zero_s=start_s), controllers, devices)
        spans = StepSpans(step=step, start_s=start_s - zero_s, **rows)
        self._end_s = spans.end_s
        append_json(self._path, spans.to_row())

    def _truncate(self, last_step: int) -> None:
        rows, _ = _keep_until(self._path, last_step)
        self._end_s = 0.0
        if rows:
            self._end_s = StepSpans.from_row(rows[-1]).end_s


def _relative(spans: Iterable[Span], zero_s: float) -> list[Span]:
    """Return the spans in seconds since ``zero_s``; neighbours of one stage are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start_s):
        moved = Span(stage=span.stage, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.stage == moved.stage
            and moved.start_s - last.end_s < _JOINED_BELOW_S
        ):
            joined[-1] = replace(last, end_s=max(last.end_s, moved.end_s))
        else:
            joined.append(moved)
    return joined


def _convert_rows(
    convert: Callable[[Any], Any], controllers: Iterable[Any], devices: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert the spans of each controller and device."""
    return {
        "controllers": list(map(convert, controllers)),
        "devices": {name: convert(spans) for name, spans in devices.items()},
    }


def _spans(rounded: Iterable[Sequence[Any]]) -> list[Span]:
    return [Span(stage=stage, start_s=start_s, end_s=end_s) for stage, start_s, end_s in rounded]


def _triples(spans: Iterable[Span]) -> list[tuple[str, float, float]]:
    return [(s.stage, s.start_s, s.end_s) for s in spans]


def _round_spans(spans: Iterable[Span]) -> list[list[str | float]]:
    return [[s.stage, round(s.start_s, _DIGITS), round(s.end_s, _DIGITS)] for s in spans]

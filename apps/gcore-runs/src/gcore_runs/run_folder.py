"""A run's folder: its files, its lock, and how a run is started or resumed."""

import fcntl
import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_ckpt import Checkpointer
from gcore_runs.errors import UserError, said
from gcore_runs.settings.run_config import BaseRunConfig
from gcore_runs.settings.values import ConfigT, differences, merge, read_toml, to_toml


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run, with its first and last evaluation on held-out data."""

    run: Path
    """The run's folder."""
    before: dict[str, float]
    """Metrics of the first evaluation; empty: nothing was held out."""
    after: dict[str, float]
    """Metrics of the last one."""
    has_signal: bool = True
    """Whether any step had a learning signal."""


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.spans = path / "spans.jsonl"
        self.placement = path / "placement.json"
        self.warnings = path / "warnings.jsonl"
        self.logs = path / "logs"
        self.warmup = path / "warmup.jsonl"
        self.samples = path / "samples"
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.export = path / "export"

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """Return the folder of an existing run.

        Raises:
            UserError: there is no run.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise UserError(
                f"{path} is not a run's folder: it has no config.toml; the command train makes one under runs/"
            )
        return folder

    def load_config(self, kind: type[ConfigT]) -> ConfigT:
        """Return the settings of the run, as the config class ``kind``.

        Raises:
            UserError: another command made the run.
        """
        values = read_toml(self.config)
        base = kind()
        made_by, wanted = values.get("command", "train"), getattr(base, "command", "train")
        if made_by != wanted:
            raise UserError(f"{self.path} is a run of the command {made_by}; expected one of {wanted}")
        return merge(base, values, source=str(self.config))

    def lock(self) -> None:
        """Keep other processes from writing this run until this object is gone, or the process has ended in any way.

        Raises:
            UserError: another process has it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise UserError(
                f"run folder {self.path} cannot be made: {said(error)}; choose another --runs-dir"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise UserError(f"{self.path} is in use by another process: choose another --name, or wait") from None
        weakref.finalize(self, lock.close)


def open_run(config: BaseRunConfig) -> RunFolder:
    """Lock and return the folder for this config: that of the run it resumes, or a new one.

    Raises:
        UserError: the run of this name has other settings and something to resume, or is in use.
    """
    folder = RunFolder(Path(config.runs_dir) / config.name)
    if config.resume == "never":
        number = 1
        while folder.path.exists():
            number += 1
            folder = RunFolder(Path(config.runs_dir) / f"{config.name}-{number}")
    folder.lock()
    if folder.config.is_file() and (folder.model.is_dir() or Checkpointer(folder.checkpoints).steps()):
        found = differences(folder.load_config(type(config)), config)
        changed = [difference for difference in found if not difference.startswith(config.may_change)]
        if changed:
            raise UserError(
                f"{folder.path} was started with other settings ({'; '.join(changed)}); expected the same "
                "to resume it, or --resume never, or another --name"
            )
    write_atomically(folder.config, lambda path: path.write_text(to_toml(config)))
    return folder


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file or folder next to ``target``, then rename it to ``target``.

    Raises:
        OSError: it cannot be written; ``target`` is its file name, and is as it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        if partial.is_dir():
            shutil.rmtree(partial)
        write(partial)
        if target.is_dir():
            shutil.rmtree(target)
        partial.replace(target)
    except OSError as error:
        raise _named(error, target) from error


def append_json(path: Path, row: dict[str, Any]) -> None:
    """Add one line to a JSONL file.

    Raises:
        OSError: it cannot be written; ``path`` is its file name.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise _named(error, path) from error


def _named(error: OSError, path: Path) -> OSError:
    """Return the error with a file name, which that of a full disk lacks."""
    return error if error.filename is not None else OSError(error.errno, error.strerror, str(path))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file: none of a missing file, and without an incomplete last line.

    Raises:
        UserError: a complete line is no JSON object.
    """
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text("utf-8", errors="replace").split("\n")[:-1], 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number} is {type(row).__name__}; expected a JSON object")
        rows.append(row)
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a JSONL file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text("".join(json.dumps(row) + "\n" for row in rows)))

"""A run's folder: what is in it, who may write it, and how a run is resumed or begun anew."""

import fcntl
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gcore_ckpt import Checkpointer
from gcore_runs.errors import UserError
from gcore_runs.settings import ConfigT, RunConfig, differences, merge, read_toml, to_toml


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a finished run achieved on held-out data: its first evaluation and its last."""

    run: Path
    before: dict[str, float]
    after: dict[str, float]
    has_signal: bool = True
    """Whether any step had something to learn from."""


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
        self._lock: TextIO | None = None

    @classmethod
    def existing(cls, path: str | Path) -> "RunFolder":
        """The folder of a run that there is.

        Raises:
            UserError: there is none.
        """
        folder = cls(Path(path))
        if not folder.config.is_file():
            raise UserError(
                f"{path} is not a run's folder: it has no config.toml; the command train makes one under runs/"
            )
        return folder

    def load_config(self, kind: type[ConfigT]) -> ConfigT:
        """The settings of a run, of the class that its command has.

        Raises:
            UserError: another command made the run.
        """
        values = read_toml(self.config)
        base = kind()
        made_by, wanted = values.get("command", "train"), getattr(base, "command", "train")
        if made_by != wanted:
            raise UserError(f"{self.path} is a run of the command {made_by}: one of {wanted} is needed")
        return merge(base, values, source=str(self.config))

    def lock(self) -> None:
        """Keep every other process from writing this run; freed when this one ends, however it ends.

        Raises:
            UserError: another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{self.path} is in use by another process: choose another --name, or wait") from None
        self._lock = lock


def open_run(config: RunConfig, *, may_change: Sequence[str]) -> RunFolder:
    """The folder for this config, locked: that of the run it resumes, or a new one.

    Args:
        may_change: settings that a resumed run may be given anew.

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
        changed = [difference for difference in found if not difference.startswith(tuple(may_change))]
        if changed:
            raise UserError(
                f"{folder.path} was begun with other settings ({'; '.join(changed)}): "
                "give the same ones to resume it, or --resume never, or another --name"
            )
    write_atomically(folder.config, lambda path: path.write_text(to_toml(config)))
    return folder


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file or folder beside ``target``, then put it in place in one step."""
    partial = target.with_name(f".{target.name}.partial")
    if partial.is_dir():
        shutil.rmtree(partial)
    write(partial)
    if target.is_dir():
        shutil.rmtree(target)
    partial.replace(target)


def append_json(path: Path, row: dict[str, Any]) -> None:
    """Add one line to a JSONL file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file; a missing file has none, a torn last line is dropped."""
    if not path.is_file():
        return []
    complete = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in complete.splitlines()]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace a JSONL file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda partial: partial.write_text("".join(json.dumps(row) + "\n" for row in rows)))

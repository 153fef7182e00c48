"""Prompts of the user's files, or of the embedded model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DataConfig
from gcore_runs import UserError, columns, hold_out, read_lines, read_rows


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and its row in the data set."""

    text: str
    row: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """The prompts to train on, and the held-out ones."""

    train: Sequence[Prompt]
    val: Sequence[Prompt]


def load_prompts(config: DataConfig, own: Iterable[str] = ()) -> PromptSets:
    """Load the prompts of the config's files; without any, the prompts in ``own`` are both trained on and held out."""
    if not config.train_files:
        prompts = [Prompt(text=text, row={}) for text in own]
        return PromptSets(train=prompts, val=prompts)
    train = [p for file in config.train_files for p in _read(file, config.prompt_key)]
    val = [p for file in config.val_files for p in _read(file, config.prompt_key)]
    if not val:
        train, val = hold_out(train, size=config.val_size, seed=0)
    return PromptSets(train=train, val=val)


def _read(path: str, key: str) -> list[Prompt]:
    if Path(path).suffix in (".jsonl", ".parquet"):
        return [_of_row(row, key, f"data file {path}, row {n}") for n, row in enumerate(read_rows(path), start=1)]
    try:
        lines = read_lines(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {path}: {getattr(error, 'strerror', None) or error}") from None
    prompts = [Prompt(text=line.strip(), row={}) for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"data file {path} has no prompts; expected one per line")
    return prompts


def _of_row(row: Mapping[str, Any], key: str, where: str) -> Prompt:
    if key not in row:
        raise UserError(f"{where} has no column {key!r} (data.prompt_key); it has {columns(row)}")
    text = row[key]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {key} is {text!r:.80}; expected a text")
    return Prompt(text=text, row=row)

"""Prompts of the user's files, or of the embedded model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcore_diffusion.config import DataConfig
from gcore_runs.errors import UserError


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
    """Load the prompts of the config's files; without files, the prompts in ``own`` are both trained on and held out.

    Raises:
        UserError: a file is missing, empty or malformed.
    """
    if not config.train_files:
        prompts = [Prompt(text=text, row={}) for text in own]
        return PromptSets(train=prompts, val=prompts)
    train = [p for file in config.train_files for p in _read(Path(file), config.prompt_key)]
    val = [p for file in config.val_files for p in _read(Path(file), config.prompt_key)]
    if not val:
        count = min(config.val_size, len(train) // 10)
        held = set(np.random.default_rng(0).permutation(len(train))[:count].tolist())
        val = [p for i, p in enumerate(train) if i in held]
        train = [p for i, p in enumerate(train) if i not in held]
    return PromptSets(train=train, val=val)


def _read(path: Path, key: str) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {path}: {getattr(error, 'strerror', None) or error}") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"data file {path} has no prompts; expected one per line")
    if path.suffix != ".jsonl":
        return [Prompt(text=line, row={}) for _, line in numbered]
    return [_of_row(line, key, f"data file {path}, line {number}") for number, line in numbered]


def _of_row(line: str, key: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}; expected a JSON object")
    if key not in row:
        columns = ", ".join(map(repr, row)) or "none"
        raise UserError(f"{where} has no column {key!r} (data.prompt_key); it has {columns}")
    text = row[key]
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {key} is {text!r:.80}; expected a text")
    return Prompt(text=text, row=row)

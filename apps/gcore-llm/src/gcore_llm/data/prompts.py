"""Prompts of the user's files: tokenized, filtered, and split into training and held-out prompts."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np

from gcore_llm.config import DataConfig
from gcore_llm.data.images import PromptImages, images_of, vision_processor, with_parts
from gcore_rollout import RolloutError
from gcore_runs.errors import UserError

RowT = TypeVar("RowT")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine."""

    text: str
    token_ids: tuple[int, ...]
    row: Mapping[str, Any]
    """Every column of the data set, for the reward."""
    images: PromptImages | None = None

    def encoded_images(self) -> tuple[bytes, ...]:
        """Return the encoded image files, in the order of their places in the prompt."""
        return () if self.images is None else self.images.encoded()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt before it is rendered and tokenized."""

    value: object
    """Text, or a list of chat messages."""
    row: Mapping[str, Any]
    where: str
    """Name of the prompt in errors."""


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """The prompts that a run trains on, and the held-out ones that evaluate it."""

    train: list[Prompt]
    val: list[Prompt]
    num_too_long: int
    """Number of prompts left out because they exceed data.max_prompt_length."""


def read_rows(path: str) -> list[dict[str, Any]]:
    """Read the rows of a JSONL or Parquet file.

    Raises:
        UserError: the file is missing, unreadable, malformed or empty, or has another ending.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"data file {path} is a folder; expected a .jsonl or .parquet file")
    if not file.is_file():
        raise UserError(f"data file {path} does not exist")
    try:
        rows = _rows_of(file)
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror or error}") from None
    if not rows:
        raise UserError(f"data file {path} has no rows")
    return rows


def _rows_of(path: Path) -> list[dict[str, Any]]:
    match path.suffix:
        case ".jsonl":
            try:
                # JSON strings may contain other characters that splitlines takes for line ends.
                lines = path.read_text("utf-8").split("\n")
            except UnicodeDecodeError as error:
                raise UserError(f"data file {path} is not UTF-8: {error}") from None
            return [_parsed(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
        case ".parquet":
            import pyarrow.parquet

            try:
                return pyarrow.parquet.read_table(path).to_pylist()
            except pyarrow.ArrowException as error:
                raise UserError(f"data file {path} is not Parquet: {error}") from None
        case _:
            raise UserError(f"data file {path} ends in {path.suffix!r}; expected .jsonl or .parquet")


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}; expected a JSON object")
    return row


def uses_plain_text(value: object, tokenizer: Any, data: DataConfig) -> bool:
    """Return whether a prompt is given to the model without a chat template."""
    return isinstance(value, str) and (data.apply_chat_template == "never" or tokenizer.chat_template is None)


def render(value: object, tokenizer: Any, data: DataConfig, where: str) -> str:
    """Return the text that the model continues, for a prompt given as text or as chat messages.

    Raises:
        UserError: the prompt is neither, or is messages and the tokenizer has no chat template.
    """
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where} is empty")
        if uses_plain_text(value, tokenizer, data):
            return value
        value = [{"role": "user", "content": value}]
    if not are_messages(value):
        raise UserError(f"{where} is {value!r:.80}; expected text, or a list of messages with role and content")
    if tokenizer.chat_template is None:
        raise UserError(f"{where} is a list of chat messages: the model's tokenizer has no chat template to render it")
    messages = with_parts(value) if data.image_key else value
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise UserError(f"{where}: the model's chat template refuses it: {error}") from None


def are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether ``value`` is a list of at least one chat message."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def takes_special_tokens(text: str, tokenizer: Any) -> bool:
    """Return whether the tokenizer adds special tokens to plain text, which it does unless the text starts with BOS."""
    return not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def make_prompts(problems: Iterable[Problem], tokenizer: Any, data: DataConfig) -> list[Prompt]:
    """Render and tokenize prompts, for training, for evaluation and for `sample`.

    Text rendered by a chat template has only the template's special tokens, other text has the tokenizer's, as with
    ``tokenizer.apply_chat_template`` and ``tokenizer`` of transformers.

    Raises:
        UserError: see `render`.
    """
    given = list(problems)
    texts = [render(p.value, tokenizer, data, p.where) for p in given]
    adds = [
        uses_plain_text(p.value, tokenizer, data) and takes_special_tokens(text, tokenizer)
        for p, text in zip(given, texts, strict=True)
    ]
    encoded = {
        flag: iter(
            tokenizer([t for t, a in zip(texts, adds, strict=True) if a == flag], add_special_tokens=flag)["input_ids"]
        )
        for flag in set(adds)
    }
    return [
        Prompt(text=text, token_ids=tuple(next(encoded[flag])), row=p.row)
        for p, text, flag in zip(given, texts, adds, strict=True)
    ]


def load_files(data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Load the prompts of data.train-files and data.val-files.

    Raises:
        UserError: see `read_rows`, `render` and `images_of`; images do not match their prompt, or the model takes no
            images; or no prompt is left to train on.
    """
    train, val = (
        [prompt for path in paths for prompt in _load_file(path, data, tokenizer)]
        for paths in (data.train_files, data.val_files)
    )
    kept_train, kept_val = ([p for p in ps if len(p.token_ids) <= data.max_prompt_length] for ps in (train, val))
    num_too_long = len(train) + len(val) - len(kept_train) - len(kept_val)
    if not data.val_files:
        kept_train, kept_val = hold_out(kept_train, size=data.val_size, seed=seed)
    if not kept_train:
        shortest = min((len(p.token_ids) for p in train), default=0)
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: all {len(train)} prompts are longer, "
            f"the shortest has {shortest} tokens"
        )
    return PromptSets(train=kept_train, val=kept_val, num_too_long=num_too_long)


def _load_file(path: str, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    rows, key = read_rows(path), data.prompt_key
    for n, row in enumerate(rows, 1):
        if key not in row:
            raise UserError(f"{path}: row {n} has no column {key!r} (data.prompt_key); it has {columns(row)}")
    problems = (Problem(value=row[key], row=row, where=f"{path}: {key} of row {n}") for n, row in enumerate(rows, 1))
    prompts = make_prompts(problems, tokenizer, data)
    if not data.image_key:
        return prompts
    if not any(data.image_key in row for row in rows):
        raise UserError(f"{path} has no column {data.image_key!r} (data.image_key); it has {columns(rows[0])}")
    return [
        _with_images(prompt, data.image_key, tokenizer, Path(path).parent, f"{path}: {data.image_key} of row {n}")
        for n, prompt in enumerate(prompts, 1)
    ]


def columns(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns, for errors."""
    return ", ".join(map(repr, row)) or "none"


def _with_images(prompt: Prompt, image_key: str, tokenizer: Any, folder: Path, where: str) -> Prompt:
    model: str = tokenizer.name_or_path
    images = images_of(prompt.row.get(image_key), model=model, folder=folder, where=where)
    encoded = () if images is None else images.encoded()
    try:
        token_ids = vision_processor(model).expand(prompt.token_ids, encoded)
    except RolloutError as error:
        raise UserError(f"{where}: {error}") from None
    return dataclasses.replace(prompt, token_ids=token_ids, images=images)


def hold_out(rows: Sequence[RowT], *, size: int, seed: int) -> tuple[list[RowT], list[RowT]]:
    """Return the rows to train on, and ``size`` held-out ones drawn by ``seed`` (at most a tenth), in their order."""
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = set(order[: min(size, len(rows) // 10)].tolist())
    return [r for i, r in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]

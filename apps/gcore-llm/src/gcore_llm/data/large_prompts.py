"""The prompts of a file; those of a large data set are rendered and tokenized when they are read."""

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.sections import DataConfig
from gcore_rollout import Prompt
from gcore_runs import UserError
from gcore_runs.data.cache import cache_file
from gcore_runs.data.columns import values_of
from gcore_runs.data.rows import LazySequence, RowSource

MakePrompts = Callable[[RowSource, Sequence[int]], list[Prompt]]
"""Returns the prompts of some rows, by their numbers."""
_BATCH_ROWS = 1000
Progress = Callable[[str, int, int], None]
"""Called with the name of long work, and with how much of how much of it is done."""


def no_progress(name: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
    """The prompts of one file that have at most data.max_prompt_length tokens."""

    prompts: Sequence[Prompt]
    """A list, or of a large file `LargePrompts`."""
    num_too_long: int
    """Number of the others."""
    longest: int
    """Tokens of the longest prompt that was kept."""
    shortest: int
    """Tokens of the shortest one of all."""


class LargePrompts(LazySequence[Prompt]):
    """The prompts of rows that are not in memory, each made when it is indexed; ``left_out`` are numbers of rows."""

    def __init__(self, rows: RowSource, make: MakePrompts, left_out: NDArray[np.int64]) -> None:
        self._rows = rows
        self._make = make
        self._left_out = left_out
        # How many rows are kept before each one that is left out.
        self._num_kept_before = self._left_out - np.arange(self._left_out.size)

    def __len__(self) -> int:
        return len(self._rows.rows) - self._left_out.size

    def item(self, index: int) -> Prompt:
        return self._make(self._rows, [self._row(index)])[0]

    def _row(self, index: int) -> int:
        return index + int(np.searchsorted(self._num_kept_before, index, side="right"))

    def without(self, indices: Sequence[int]) -> "LargePrompts":
        """Return the prompts without those of these indices."""
        left_out = np.concatenate([self._left_out, list(map(self._row, indices))])
        return LargePrompts(self._rows, self._make, np.sort(left_out.astype(np.int64)))


def load_large(
    rows: RowSource,
    data: DataConfig,
    tokenizer: Any,
    *,
    make: MakePrompts,
    fits: int,
    progress: Progress,
) -> LoadedPrompts:
    """Return the prompts of at most data.max_prompt_length tokens of rows that are not in memory.

    Most prompts need not be tokenized for it: a token of ASCII text is at least a character (`_overhead` tests it), so
    what has no more characters than ``fits``, less what the chat template adds, is no longer. The others are tokenized
    in batches, once: the cache has the result for this content, tokenizer and settings.

    Raises:
        UserError: a row has no prompt, or one of another type.
    """
    backend = tokenizer.backend_tokenizer.to_str()
    kwargs = sorted(data.chat_template_kwargs.items())
    settings = (
        data.prompt_key,
        data.image_key,
        data.apply_chat_template,
        kwargs,
        data.max_prompt_length,
        fits,
    )
    key = (
        rows.identity,
        settings,
        backend,
        tokenizer.chat_template,
        tokenizer.name_or_path * bool(data.image_key),
    )

    def write(path: Path) -> None:
        left_out, lengths = _scan(rows, data, make, fits, progress)
        with path.open("wb") as file:
            np.savez(file, left_out=left_out, lengths=lengths)

    with np.load(cache_file("lengths.npz", key, write)) as arrays:
        left_out = arrays["left_out"]
        longest, shortest = arrays["lengths"].tolist()
    prompts = LargePrompts(rows, make, left_out)
    return LoadedPrompts(
        prompts=prompts, num_too_long=left_out.size, longest=longest, shortest=shortest
    )


def _scan(
    rows: RowSource, data: DataConfig, make: MakePrompts, fits: int, progress: Progress
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of rows that are too long, and the lengths of the longest other one and the shortest of all.

    The lengths are exact where they are above ``fits``.
    """
    most_characters = -1
    if not data.image_key:
        most_characters = fits - _overhead(data.prompt_key, make)
    left_out: list[int] = []
    longest = 0
    shortest = 2**31
    num_unsure = 0
    for batch in _unsure_batches(rows, data.prompt_key, most_characters):
        num_unsure += len(batch)
        progress(f"tokenizing {rows.name}", batch[-1] + 1, len(rows.rows))
        for number, prompt in zip(batch, make(rows, batch), strict=True):
            length = len(prompt.token_ids)
            shortest = min(shortest, length)
            if length > data.max_prompt_length:
                left_out.append(number)
            else:
                longest = max(longest, length)
    if num_unsure < len(rows.rows):
        longest = max(longest, fits)
        shortest = min(shortest, fits)
    return np.array(left_out, np.int64), [longest, shortest]


def _unsure_batches(rows: RowSource, key: str, most_characters: int) -> Iterator[list[int]]:
    """Yield, in batches, the numbers of the rows whose prompts may be too long, or are none."""
    batch: list[int] = []
    for number, value in enumerate(values_of(rows.rows, key)):
        text = value
        if isinstance(value, list) and len(value) == 1 and value[0].keys() == {"role", "content"}:
            # The same as its text alone.
            text = value[0]["content"] if value[0]["role"] == "user" else None
        if not (isinstance(text, str) and 0 < len(text) <= most_characters and text.isascii()):
            batch.append(number)
        if len(batch) == _BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _overhead(key: str, make: MakePrompts) -> int:
    """Return the most tokens that a text has beyond its characters, or more than any text may have if that is unknown.

    It is found by texts of one character, and of many: for a tokenizer or a template that makes more tokens of a text
    than it has characters, the second have more.
    """
    overheads: list[int] = []
    for count in (1, 64):
        rows = RowSource(
            name="probe",
            rows=[{key: character * count} for character in string.printable],
            folder=Path(),
        )
        try:
            prompts = make(rows, range(len(rows.rows)))
        except UserError:
            return 2**31
        overheads.append(max(len(prompt.token_ids) for prompt in prompts) - count)
    single, many = overheads
    if many > single:
        return 2**31
    return single

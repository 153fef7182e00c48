"""Prompts of large data sets: rendered and tokenized when they are read; those that are too long are found before."""

import string
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.config import DataConfig
from gcore_llm.data.loaded import LoadedPrompts, Progress
from gcore_rollout import Prompt
from gcore_runs import RowSource, UserError
from gcore_runs.data.cache import cache_file
from gcore_runs.data.columns import values_of
from gcore_runs.data.rows import LazySequence

MakePrompts = Callable[[RowSource, Sequence[int]], list[Prompt]]
"""Returns the prompts of some rows, by their numbers."""
_BATCH_ROWS = 1000
_ASCII = string.printable


class LargePrompts(LazySequence[Prompt]):
    """The prompts of rows that are not in memory, each made when it is indexed; ``left_out`` are numbers of rows."""

    def __init__(self, rows: RowSource, make: MakePrompts, left_out: NDArray[np.int64]) -> None:
        self._rows, self._make, self._left_out = rows, make, left_out
        # How many rows are kept before each one that is left out.
        self._num_kept_before = self._left_out - np.arange(self._left_out.size)

    def __len__(self) -> int:
        return len(self._rows.rows) - self._left_out.size

    def item(self, index: int) -> Prompt:
        return self._make(self._rows, [self._row(index)])[0]

    def _row(self, index: int) -> int:
        return index + int(np.searchsorted(self._num_kept_before, index, side="right"))

    def without(self, places: Sequence[int]) -> "LargePrompts":
        """Return the prompts without those of these indices."""
        left_out = np.sort(np.concatenate([self._left_out, [self._row(place) for place in places]]).astype(np.int64))
        return LargePrompts(self._rows, self._make, left_out)


def load_large(
    rows: RowSource, data: DataConfig, tokenizer: Any, *, make: MakePrompts, fits: int, progress: Progress
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
    settings = (data.prompt_key, data.image_key, data.apply_chat_template, kwargs, data.max_prompt_length, fits)
    key = (rows.identity, settings, backend, tokenizer.chat_template, tokenizer.name_or_path * bool(data.image_key))

    def write(path: Path) -> None:
        left_out, lengths = _scan(rows, data, make, fits, progress)
        with path.open("wb") as file:
            np.savez(file, left_out=left_out, lengths=lengths)

    with np.load(cache_file("lengths.npz", key, write)) as found:
        left_out, (longest, shortest) = found["left_out"], found["lengths"].tolist()
    prompts = LargePrompts(rows, make, left_out)
    return LoadedPrompts(prompts=prompts, num_too_long=left_out.size, longest=longest, shortest=shortest)


def _scan(
    rows: RowSource, data: DataConfig, make: MakePrompts, fits: int, progress: Progress
) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of rows that are too long, and the lengths of the longest other one and the shortest of all.

    The lengths are exact where they are above ``fits``.
    """
    most_characters = fits - _overhead(data.prompt_key, make) if not data.image_key else -1
    left_out: list[int] = []
    longest, shortest = 0, 2**31
    unsure = _unsure(rows, data.prompt_key, most_characters)
    num_unsure = 0
    while batch := list(islice(unsure, _BATCH_ROWS)):
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
        longest, shortest = max(longest, fits), min(shortest, fits)
    return np.array(left_out, np.int64), [longest, shortest]


def _unsure(rows: RowSource, key: str, most_characters: int) -> Iterator[int]:
    """Yield the numbers of the rows whose prompts may be too long, or are none."""
    for number, value in enumerate(values_of(rows.rows, key)):
        text = value
        if isinstance(value, list) and len(value) == 1 and value[0].keys() == {"role", "content"}:
            # The same as its text alone.
            text = value[0]["content"] if value[0]["role"] == "user" else None
        if not (isinstance(text, str) and 0 < len(text) <= most_characters and text.isascii()):
            yield number


def _overhead(key: str, make: MakePrompts) -> int:
    """Return the most tokens that a text has beyond its characters, or more than any text may have if that is unknown.

    It is found by texts of one character, and of many: for a tokenizer or a template that makes more tokens of a text
    than it has characters, the second have more.
    """
    probes = [character * count for count in (1, 64) for character in _ASCII]
    try:
        rows = RowSource(name="probe", rows=[{key: text} for text in probes], folder=Path())
        found = make(rows, range(len(probes)))
    except UserError:
        return 2**31
    extra = [len(prompt.token_ids) - len(text) for prompt, text in zip(found, probes, strict=True)]
    single, many = extra[: len(_ASCII)], extra[len(_ASCII) :]
    return max(single) if max(many) <= max(single) else 2**31

"""Stop strings and repetitions, which end a sample as an end-of-sequence token does, found a token at a time.

Shapes: B samples, T tokens, P pattern sizes 1..P.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RequestError

if TYPE_CHECKING:
    from gcore_rollout.engines.protocol import Request

_NUM_TOKENS_BEFORE = 8
"""Tokens decoded before a stop string: the first ones of a text may lose a space, or the start of a character."""


class StopStrings:
    """Finds the token with which the text of a sample first has one of the request's stop strings.

    Engines sample tokens and know no text: the tokenizer of the model's folder is loaded when a request needs it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def check(self, request: "Request") -> None:
        """Raise a `RequestError` if the request has stop strings, and the model's folder has no tokenizer."""
        if not request.sampling.stop or self._tokenizer is not None:
            return
        from transformers import AutoTokenizer

        reason = "it was not made from a folder"
        if self._folder is not None:
            # Without files transformers would make an empty one.
            if any(Path(self._folder).glob("tokenizer*")):
                self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
                return
            reason = f"{self._folder} has no file tokenizer*"
        raise RequestError(
            f"request {request.request_id!r} has stop={request.sampling.stop}; expected none, or an engine whose model "
            f"folder has a tokenizer ({reason})"
        )

    def find_end(
        self,
        new_ids: Sequence[int],
        stop: Sequence[str],
        *,
        before: Sequence[Sequence[int] | NDArray[np.int64]] = (),
    ) -> int | None:
        """Return how many new tokens of a sample there are up to the one that completes a stop string; None: none does.

        ``before`` are its earlier tokens, in one part or several, which have no stop string.
        """
        if not stop:
            return None
        # Each token is a byte or more.
        window = max(len(string.encode()) for string in stop) + _NUM_TOKENS_BEFORE
        tokens: list[int] = []
        for part in reversed(before):
            num_missing = window - len(tokens)
            if num_missing > 0:
                tokens = list(part[-num_missing:]) + tokens
        num_before = len(tokens)
        tokens += new_ids
        for end in range(1, len(new_ids) + 1):
            last_ids = tokens[: num_before + end][-window:]
            if self._is_stopped(last_ids, stop):
                return end
        return None

    def _is_stopped(self, last_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Return whether the last of some tokens completes a stop string."""
        token = int(last_ids[-1])
        if token not in self._texts:
            # Twice, because decoders may drop the space before the first one.
            self._texts[token] = self._decode([token, token])
        text = self._texts[token]
        # Most tokens cannot end a stop string; of one that is no whole character that is unknown.
        may_stop = "\ufffd" in text or any(string[-1] in text for string in stop)
        if not may_stop:
            return False
        text = self._decode(last_ids)
        return any(string in text for string in stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        ids = [int(token) for token in token_ids]
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def runs_at_end(tokens_T: NDArray[np.int64], num_sizes: int) -> NDArray[np.int64]:
    """Count, for each pattern size p, how many of the last tokens in a row equal the one p before; shape [P]."""
    runs_P = np.zeros(num_sizes, np.int64)
    for size in range(1, min(num_sizes, len(tokens_T) - 1) + 1):
        differs = np.flatnonzero(tokens_T[:-size] != tokens_T[size:])
        runs_P[size - 1] = len(tokens_T) - size - 1 - differs.max(initial=-1)
    return runs_P


def extend_runs(
    runs_BP: NDArray[np.int64], tokens_BT: NDArray[np.int64], last_B: NDArray[np.int64]
) -> None:
    """Update `runs_at_end` in place, after a token was written at column ``last_B`` of each row."""
    before_BP = last_B[:, None] - np.arange(1, runs_BP.shape[1] + 1)
    earlier_BP = np.take_along_axis(tokens_BT, np.maximum(before_BP, 0), axis=1)
    newest_B1 = np.take_along_axis(tokens_BT, last_B[:, None], axis=1)
    runs_BP[:] = np.where((before_BP >= 0) & (earlier_BP == newest_B1), runs_BP + 1, 0)


def is_repetitive(
    runs_BP: NDArray[np.int64],
    min_size_B: NDArray[np.int64],
    max_size_B: NDArray[np.int64],
    count_B: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return whether each row ends in ``count_B`` times a pattern of a size within its bounds; never for bounds of 0.

    The last tokens are c times one pattern of p tokens if and only if the last p (c - 1) tokens each equal the one p
    before them. So it is enough to count, for every p, for how many tokens in a row that has held.
    """
    sizes_P = np.arange(1, runs_BP.shape[1] + 1)
    in_bounds_BP = (sizes_P >= min_size_B[:, None]) & (sizes_P <= max_size_B[:, None])
    return (in_bounds_BP & (runs_BP >= sizes_P * (count_B[:, None] - 1))).any(axis=1)

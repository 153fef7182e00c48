"""Expected lengths of responses, from earlier samples: work is divided by them before the lengths are known."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from gcore_rollout.prompts import Prompt

_SOURCE_COLUMN = "data_source"
"""Column of a row that names the data set it comes from, as verl calls it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLength:
    """The length of the responses to one prompt, each time it is sampled."""

    key: int
    """64 bits of a digest of the prompt's tokens."""
    source: str
    """The prompt's data set; empty: its row names none."""
    mean_tokens: float

    @classmethod
    def of(cls, prompt: Prompt, lengths: Sequence[int]) -> "MeasuredLength":
        """Measure the responses to a prompt; ``lengths`` are in tokens, of one or more."""
        return cls(
            key=_key(prompt), source=_source(prompt), mean_tokens=sum(lengths) / len(lengths)
        )


class LengthHistory:
    """Keeps the lengths of responses by prompt, for the prompts sampled last, and their mean by data set.

    An expectation follows lengths as they change: a new measurement has a weight of a half against the earlier ones of
    its prompt, and of a hundredth against those of its data set.

    Args:
        max_prompts: how many prompts are kept, at 12 bytes each in a checkpoint.
        max_sources: how many data sets.
    """

    def __init__(self, *, max_prompts: int = 2**15, max_sources: int = 256) -> None:
        self._max_prompts = max_prompts
        self._max_sources = max_sources
        self._by_prompt: OrderedDict[int, float] = OrderedDict()
        self._by_source: OrderedDict[str, float] = OrderedDict()

    def expected(self, prompt: Prompt) -> int | None:
        """Return the expected length of a response in tokens; None if nothing is known of the prompt or its source."""
        mean = self._by_prompt.get(_key(prompt), self._by_source.get(_source(prompt)))
        return None if mean is None else max(1, round(mean))

    def add(self, measured: Sequence[MeasuredLength]) -> None:
        """Add measurements that were made together, in any order."""
        for length in sorted(
            measured, key=lambda length: (length.key, length.mean_tokens, length.source)
        ):
            _blend(
                self._by_prompt,
                length.key,
                length.mean_tokens,
                weight=0.5,
                max_entries=self._max_prompts,
            )
            _blend(
                self._by_source,
                length.source,
                length.mean_tokens,
                weight=0.01,
                max_entries=self._max_sources,
            )

    def state(self) -> dict[str, Any]:
        """Return plain arrays and texts for a checkpoint."""
        return {
            "keys": np.fromiter(self._by_prompt.keys(), np.uint64, len(self._by_prompt)),
            "mean_tokens": np.fromiter(self._by_prompt.values(), np.float32, len(self._by_prompt)),
            "sources": dict(self._by_source),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._by_prompt = OrderedDict(
            zip(state["keys"].tolist(), state["mean_tokens"].tolist(), strict=True)
        )
        self._by_source = OrderedDict(state["sources"])


def _key(prompt: Prompt) -> int:
    return int.from_bytes(
        blake2b(np.array(prompt.token_ids, np.int64).tobytes(), digest_size=8).digest(), "little"
    )


def _source(prompt: Prompt) -> str:
    return str(prompt.row.get(_SOURCE_COLUMN, ""))


def _blend(
    means: "OrderedDict[Any, float]", key: Any, value: float, *, weight: float, max_entries: int
) -> None:
    """Move a mean towards a value, as the last entry; the first ones leave where there are too many."""
    before = means.pop(key, value)
    # As a checkpoint holds it, so that a resumed run continues with the same number.
    means[key] = float(np.float32(before + weight * (value - before)))
    if len(means) > max_entries:
        means.popitem(last=False)

"""Options of `gcore-bench data`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import Count, NonNegative, QuickOptions

PartName = Literal["prompts", "index"]


@dataclass(frozen=True, kw_only=True)
class DataOptions(QuickOptions):
    """Measure the start of a run on many prompts, and the index of many more, against verl's way and lists."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """prompts: from a JSONL file to the first batch; index: a shuffled order of the rows of an Arrow file."""
    rounds: Count = 1
    """Number of rounds, in each of which everything is measured once, in turn."""
    rows: Count = 1_000_000
    """Rows of the part prompts, of about 280 bytes."""
    peer_rows: Count = 100_000
    """Rows of it for the contenders that tokenize every prompt, whose time and memory are proportional to them."""
    index_rows: Count = 100_000_000
    """Rows of the part index, which take 8 bytes each on disk."""
    seed: NonNegative = 0
    """Seed of the prompts and orders."""

    QUICK: ClassVar[Mapping[str, Any]] = {"rounds": 1, "rows": 40_000, "peer_rows": 300, "index_rows": 1_200_000}

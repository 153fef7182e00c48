"""Kinds of runs, by the command that made them, and what the page shows of each."""

from dataclasses import dataclass
from typing import Literal

Signal = tuple[str, str, str]
"""Title, metric and unit of a chart."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The page's first chart, its held-out numbers and its signals."""

    title: str
    unit: str
    name: str
    """Unit of the first chart."""
    key: str
    """Its metric."""
    measure: Literal["score", "reward", "loss", "accuracy"]
    """Kind of the held-out numbers; score: shares of right answers, if they are from 0 to 1."""
    evaluations: dict[str, str]
    """Their metrics, by the way of answering; empty where there is only one."""
    signals: tuple[Signal, ...]
    throughput_unit: str = "tokens/s"
    has_samples: bool = False
    """Texts before and after, in samples/*.jsonl."""
    has_pictures: bool = False
    """Pictures over time, in samples/step-*.png."""
    after_warmup: str
    """Caption of the warm-up's chart without a held-out score."""

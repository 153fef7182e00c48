"""What a run's page is about: that depends on the command that made the run."""

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
    """Of what the first chart shows."""
    key: str
    """Its metric."""
    measure: Literal["score", "reward", "loss", "accuracy"]
    """What the held-out numbers are; score: shares of right answers, where they are from 0 to 1."""
    evaluations: dict[str, str]
    """Their metrics, by the way of answering; empty where there is only one."""
    signals: tuple[Signal, ...]
    throughput_unit: str = "tokens/s"
    has_samples: bool = False
    """Texts before and after, in samples/*.jsonl."""
    has_pictures: bool = False
    """Pictures over time, in samples/step-*.png."""
    after_warmup: str
    """What the warm-up comes before."""

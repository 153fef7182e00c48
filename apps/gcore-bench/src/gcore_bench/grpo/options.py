"""Options of `gcore-bench grpo`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore_bench.grpo.errors import BenchError

Contender = Literal["gcore", "gcore-vllm", "trl", "trl-vllm"]


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """Measure GRPO steps under gcore and under TRL's GRPOTrainer, alternating, each in a process of its own."""

    workload: Literal["short", "long", "all"] = "all"
    """short: answers of about 3 tokens; long: long-tailed answers of up to 256 tokens."""
    contenders: tuple[Contender, ...] = ("gcore", "gcore-vllm", "trl", "trl-vllm")
    """Who runs, in this order, in every round."""
    rounds: int = 2
    """How often each contender runs."""
    steps: int = 0
    """Measured steps of a run; 0: the workload's own number."""
    warmup_steps: int = 3
    """Steps before those, left out of every figure."""
    threads: int = 1
    """Threads of matrix products, the same for every contender."""
    seed: int = 0
    """Seed of prompts and samples."""
    work_dir: Path = Path("runs/bench")
    """Where models and logs are kept; a model that is there is used again."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        for name, lowest in (("rounds", 1), ("steps", 0), ("warmup_steps", 1), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < lowest:
                raise BenchError(f"{name} is {getattr(self, name)}: {lowest} or more is needed")
        if not self.contenders:
            raise BenchError("contenders is empty: at least one is needed")

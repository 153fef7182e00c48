"""Options of `gcore-bench grpo`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore_bench.harness.options import BenchError, BenchOptions, Count, NonNegative

ContenderName = Literal["gcore", "gcore-vllm", "gcore-ray", "trl", "trl-vllm", "verl"]

_CONTENDERS: dict[str, tuple[ContenderName, ...]] = {
    "trl": ("gcore", "gcore-vllm", "trl", "trl-vllm"),
    "verl": ("gcore", "gcore-ray", "verl"),
}


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(BenchOptions):
    """Measure GRPO steps under gcore and under TRL's GRPOTrainer or verl, in turn, each in processes of its own."""

    workload: Literal["short", "long", "all"] = "all"
    """short: answers of about 3 tokens; long: long-tailed answers of up to 256 tokens."""
    peer: Literal["trl", "verl"] = "trl"
    """The system that gcore is compared with; verl needs an environment of its own."""
    contenders: tuple[ContenderName, ...] = ()
    """Contenders in the order in which they run in every round; none: gcore, gcore-vllm, trl and trl-vllm or, with
    verl as the peer, gcore, gcore-ray and verl."""
    verl_python: Path | None = None
    """Python of verl's environment, which scripts/verl-cpu/setup makes; None: the one that GCORE_VERL_PYTHON names."""
    rounds: Count = 2
    """Number of rounds, in each of which every contender runs once."""
    steps: NonNegative = 0
    """Measured steps of a run; 0: the workload's own number."""
    warmup_steps: Count = 3
    """Steps before those, which no figure includes."""
    threads: Count = 1
    """Threads of matrix products, the same for every contender."""
    seed: NonNegative = 0
    """Seed of prompts and samples."""
    work_dir: Path = Path("runs/bench")
    """Folder of models and logs; a model that is in it is used again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "verl" in self.running:
            self.python_of_verl()

    @property
    def running(self) -> tuple[ContenderName, ...]:
        """The contenders, or the default ones of the peer."""
        return self.contenders or _CONTENDERS[self.peer]

    def python_of_verl(self) -> Path:
        """Return the Python of verl's environment; `BenchError` if it is not given, or not a program."""
        named = self.verl_python or os.environ.get("GCORE_VERL_PYTHON")
        expected = "expected bin/python of an environment that scripts/verl-cpu/setup FOLDER makes"
        if not named:
            raise BenchError(f"verl_python is None and GCORE_VERL_PYTHON is not set; {expected}")
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise BenchError(f"verl_python is {str(named)!r}; {expected}")
        return Path(named).absolute()

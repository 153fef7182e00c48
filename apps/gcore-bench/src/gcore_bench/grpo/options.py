"""Options of `gcore-bench grpo`."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore_bench.grpo.errors import BenchError

Contender = Literal["gcore", "gcore-vllm", "gcore-ray", "trl", "trl-vllm", "verl"]

_CONTENDERS: dict[str, tuple[Contender, ...]] = {
    "trl": ("gcore", "gcore-vllm", "trl", "trl-vllm"),
    "verl": ("gcore", "gcore-ray", "verl"),
}


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """Measure GRPO steps under gcore and under TRL's GRPOTrainer or verl, alternating, each in processes of its own."""

    workload: Literal["short", "long", "all"] = "all"
    """short: answers of about 3 tokens; long: long-tailed answers of up to 256 tokens."""
    peer: Literal["trl", "verl"] = "trl"
    """Whom gcore is measured beside; verl needs an environment of its own."""
    contenders: tuple[Contender, ...] = ()
    """Who runs, in this order, in every round; none: gcore, gcore-vllm, trl and trl-vllm, or, where the peer is verl,
    gcore, gcore-ray and verl."""
    verl_python: Path | None = None
    """The Python of verl's environment, which scripts/verl-cpu/setup makes; None: what GCORE_VERL_PYTHON names."""
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
                raise BenchError(f"{name} is {getattr(self, name)}; expected {lowest} or more")
        if "verl" in self.running:
            self.python_of_verl()

    @property
    def running(self) -> tuple[Contender, ...]:
        """The contenders, the peer's own if none are named."""
        return self.contenders or _CONTENDERS[self.peer]

    def python_of_verl(self) -> Path:
        """
        Raises:
            BenchError: none is named, or it is no program.
        """
        named = self.verl_python or os.environ.get("GCORE_VERL_PYTHON")
        how = "an environment's bin/python is needed, which scripts/verl-cpu/setup FOLDER makes"
        if not named:
            raise BenchError(f"verl_python is None and GCORE_VERL_PYTHON is not set: {how}")
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise BenchError(f"verl_python is {str(named)!r}: {how}")
        return Path(named).absolute()

"""Options of `gcore-bench ckpt`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gcore_bench.ckpt.parts import PARTS
from gcore_bench.grpo.errors import BenchError

Contender = Literal[
    "gcore",
    "dcp",
    "dcp-async-thread",
    "dcp-async-process",
    "dcp-async-cached",
    "torch.save",
    "safetensors",
    "orbax",
    "tensorstore",
]


@dataclass(frozen=True, kw_only=True)
class CkptOptions:
    """Measure saves and loads of the same bytes under gcore-ckpt and its peers, alternating, each in its own process.

    The physical limits (memcpy, raw writes, raw reads) are measured in every round too.
    """

    part: Literal["all", "single", "ranks", "loop"] = "all"
    """single: one process; ranks: a sharded state over several processes; loop: training steps during a save."""
    contenders: tuple[Contender, ...] = get_args(Contender)
    """Who runs, in this order, in every round; a part leaves out those it does not measure."""
    rounds: int = 3
    """How often each contender runs."""
    size_gb: float = 2.0
    """Size of the state, in units of 10^9 bytes."""
    tensors: int = 200
    """Number of tensors of the state."""
    ranks: int = 4
    """Processes of the part ranks; half as many load."""
    dir: Path = Path(".gcore-bench")
    """Where a fresh folder for the files is made, on the disk to measure; it is removed at the end."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        for name, lowest in (("rounds", 1), ("tensors", 3), ("ranks", 2)):
            if getattr(self, name) < lowest:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {lowest} or more")
        if not self.size_gb >= 0.001:
            raise BenchError(f"size_gb is {self.size_gb}; expected 0.001 or more")
        if not self.contenders:
            raise BenchError("contenders is empty: at least one is needed")
        if not any(self.contenders_of(part) for part in self.part_names):
            names = ", ".join(PARTS[self.part].contenders)
            raise BenchError(f"contenders is {', '.join(self.contenders)}: part {self.part} measures {names}")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")

    @property
    def part_names(self) -> list[str]:
        return list(PARTS) if self.part == "all" else [self.part]

    @property
    def size_bytes(self) -> int:
        return round(self.size_gb * 1e9)

    def contenders_of(self, part: str) -> list[str]:
        """Those that the part measures."""
        known = PARTS[part].contenders
        return [name for name in dict.fromkeys(self.contenders) if not known or name in known]

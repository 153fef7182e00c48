"""Options of `gcore-bench ckpt`, and its parts that measure libraries: their contenders and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from gcore_bench.harness.options import BenchError, Count, OutputFile, QuickOptions, above, at_least
from gcore_runs import Bound

TRAINED = ("convergence", "recovery")
"""Parts that make runs of `gcore-llm train`; all others measure libraries."""

LIMITS = "limits"
"""The contender that measures memory and disk alone, in a process of its own too."""


class Aim(NamedTuple):
    """Highest ratio that a figure of gcore is to have."""

    what: str
    to: str
    most: float
    row: str = ""
    """Contender whose figure is compared; empty: the ratio in the table."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table."""

    title: str
    columns: Mapping[str, str]
    """Titles by metric."""
    contenders: tuple[str, ...] = ()
    """Contenders that can take part; empty: all."""
    ratio_to: Mapping[str, str] = field(default_factory=dict[str, str])
    """Metric of the same row that a metric's ratio is taken to; for others it is the best limit with that metric.
    Limits are measured in a part without such."""
    ratio_to_row: str = ""
    """Contender that ratios are taken to, in place of limits; a load in place is compared with its load."""
    aims: Mapping[str, Aim] = field(default_factory=dict[str, Aim])
    """Aims of gcore by metric."""


def _seconds(*metrics: str) -> dict[str, str]:
    return {metric: f"{metric.replace('_', ' ')} s" for metric in ("stall", "durable", *metrics)}


PARTS = {
    "single": Part(
        title="one process",
        columns=_seconds("load_after", "load_cold", "load_warm", "in_place_cold", "in_place_warm"),
        aims={
            "stall": Aim("the stall of a save", "a copy of memory", 1.15),
            "load_after": Aim("a load right after the save", "torch.load", 1.0, "torch.save"),
        },
    ),
    "ranks": Part(
        title="several ranks",
        contenders=("gcore", "dcp", "dcp-async-thread"),
        columns=_seconds("rows_cold", "rows_warm", "columns_cold", "columns_warm"),
        aims={
            "columns_warm": Aim("a load of columns of what was saved by rows", "dcp", 1.0, "dcp"),
            "columns_cold": Aim("such a load of cold files", "dcp", 0.5, "dcp"),
        },
    ),
    "loop": Part(
        title="training steps",
        contenders=("gcore", "dcp-async-thread", "dcp-async-process"),
        columns={
            "stall": "stall s",
            "save": "save s",
            "matmul_quiet": "matmul step s",
            "matmul_saving": "matmul, saving s",
            "python_quiet": "Python step s",
            "python_saving": "Python, saving s",
        },
        ratio_to={"matmul_saving": "matmul_quiet", "python_saving": "python_quiet"},
    ),
    "small": Part(
        title="many small tensors",
        contenders=("gcore", "torch.save"),
        columns={
            "first_stall": "first stall s",
            **_seconds("load_warm", "in_place_warm"),
            "index_mb": "index MB",
        },
        ratio_to_row="torch.save",
        aims={
            "first_stall": Aim("the stall of the first save of many small tensors", "torch.save", 0.1),
            "stall": Aim("the stall of a later save of them", "torch.save", 0.1),
            "load_warm": Aim("a load of them", "torch.load", 0.3),
            "in_place_warm": Aim("a load of them into a template", "torch.load", 0.3),
        },
    ),
}

_MODEL = Bound(lambda path: path is None or (path / "config.json").is_file(), "a model's folder")

INDEX_BYTES = 80
"""Highest size of the index for each tensor of the part small."""

ContenderName = Literal[
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
class CkptOptions(QuickOptions):
    """Measure saves and loads of the same bytes under gcore-ckpt and its peers, in turn, each in its own process.

    The physical limits (memcpy, raw writes, raw reads) are measured in every round too.
    """

    part: Literal["all", "single", "ranks", "loop", "small", "convergence", "recovery"] = "all"
    """single: one process; ranks: a sharded state over several processes; loop: training steps during a save; small:
    many tensors of 8 floats; all: these four. convergence: runs of gcore-llm train with asynchronous checkpoints, with
    synchronous ones and without; recovery: such runs that are killed at random moments and resumed."""
    contenders: tuple[ContenderName, ...] = get_args(ContenderName)
    """Contenders in the order in which they run in every round; a part leaves out those it does not measure."""
    size_gb: Annotated[float, at_least(0.001)] = 2.0
    """Size of the state, in units of 10^9 bytes."""
    tensors: Annotated[int, at_least(3)] = 200
    """Number of tensors of the state."""
    small_tensors: Annotated[int, at_least(1)] = 100_000
    """Number of tensors of 8 floats in the part small."""
    ranks: Annotated[int, at_least(2)] = 4
    """Processes of the part ranks; half as many load."""
    dir: Path = Path(".gcore-bench")
    """Folder, on the disk to measure, in which a fresh one is made for the files; it is removed at the end."""

    seeds: Count = 3
    """Runs of each kind in convergence and recovery, each with a seed of its own."""
    train_steps: Annotated[int, at_least(3)] = 32
    """Steps of each run."""
    train_batch_size: Count = 16
    """Prompts of each step."""
    held_out: Count = 64
    """Held-out problems, which are evaluated before and after training, and by which the warm-up ends."""
    warmup_steps: Count = 500
    """Most steps of the warm-up of the model that all runs start from."""
    model: Annotated[Path | None, _MODEL] = None
    """A warmed-up model to start from, such as runs/NAME/model of gcore-llm train; None: one is made."""
    save_periods: tuple[Count, ...] = (1, 4)
    """Steps between two checkpoints."""
    failure_steps: tuple[Annotated[float, above(0, "above 0")], ...] = (2.0, 5.0, 10.0)
    """Mean number of steps between two failures in recovery."""
    most_failures: Count = 60
    """Failures after which a run of recovery that has not ended is given up."""
    html: OutputFile = None
    """File to draw the curves of convergence, or the losses of recovery, to."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "size_gb": 0.01,
        "tensors": 20,
        "small_tensors": 500,
        "seeds": 1,
        "train_steps": 3,
        "train_batch_size": 2,
        "held_out": 2,
        "warmup_steps": 4,
        "save_periods": (1,),
        "failure_steps": (2.5,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part not in TRAINED and not any(self.contenders_of(part) for part in self.part_names):
            expected = ", ".join(PARTS[self.part].contenders)
            raise BenchError(f"contenders is {', '.join(self.contenders)}; expected {expected} in part {self.part}")

    @property
    def part_names(self) -> list[str]:
        """The parts to measure."""
        return list(PARTS) if self.part == "all" else [self.part]

    @property
    def size_bytes(self) -> int:
        """Size of the state."""
        return round(self.size_gb * 1e9)

    def contenders_of(self, part: str) -> list[str]:
        """Return the contenders that the part measures."""
        known = PARTS[part].contenders
        return [name for name in dict.fromkeys(self.contenders) if not known or name in known]

"""The output of `gcore-placement plan`: tables."""

import sys
from collections.abc import Iterable, Sequence

from gcore_placement.errors import MissingExtraError
from gcore_placement.planning.plan import EnginePlan, Plan

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise MissingExtraError("rich", "cli") from error

_FILE_WIDTH = 10_000  # columns where the output is not a terminal, so that nothing is cut or folded


def print_plan(plan: Plan) -> None:
    """Print a plan: devices, seconds, memory and reasons."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False, emoji=False)
    cluster, usable = plan.cluster, plan.usable_bytes
    console.print(
        Text(
            f"{plan.num_devices} of {cluster.num_devices} x {cluster.device.name}, {plan.strategy}: "
            f"{plan.step_s:.1f} s a step, {_gb(plan.peak_bytes)} of {_gb(usable)} usable"
        ),
        soft_wrap=True,
    )
    console.print()
    console.print(_table(("role", "devices", "layout"), _roles(plan)))
    console.print()
    stages = [(name.removesuffix("_s"), f"{seconds:.1f} s") for name, seconds in vars(plan.step).items()]
    console.print(_table(("stage", "seconds"), stages, right=("seconds",)))
    console.print()
    if plan.correction is not None:
        factors = [(stage, f"{factor:.2f}") for stage, factor in plan.correction.items()]
        console.print(_table(("laws of", "measured / predicted"), factors, right=("measured / predicted",)))
        console.print()
    memory = [
        (phase, _gb(sum(parts.values())), ", ".join(f"{name} {_gb(size)}" for name, size in parts.items() if size))
        for phase, parts in plan.memory.items()
    ]
    console.print(_table(("memory of a device", "peak", "of which"), memory, right=("peak",)))
    console.print()
    rows = [(other.choice, other.option, other.reason) for other in plan.alternatives]
    console.print(_table(("in the place of", "one could take", "which"), rows))


def _roles(plan: Plan) -> Iterable[tuple[str, ...]]:
    yield "policy", str(plan.policy.num_devices), _engines(plan.policy)
    if plan.judge is not None:
        yield "judge", str(plan.judge.num_devices), _engines(plan.judge)
    state = "on the host while engines work" if plan.offload else "stays on the devices"
    yield "training", str(plan.num_devices), f"{plan.training}; state {state}"


def _engines(engines: EnginePlan) -> str:
    return (
        f"{engines.num_replicas} engine{'s' * (engines.num_replicas != 1)} of TP {engines.tensor_model_parallel_size}, "
        f"{engines.max_num_seqs} sequences each"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"

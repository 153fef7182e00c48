"""The tables that the commands print, and a counter of progress; they need rich."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from gcore_placement.errors import make_extra_error
from gcore_placement.ledger import CAUSES, COLUMNS, Ledger, StepIntervals
from gcore_placement.planning.layouts import EngineLayout
from gcore_placement.planning.planner import Plan
from gcore_placement.quantities import gigabytes
from gcore_placement.simulation.simulator import IDLE, Comparison

try:
    from rich import box
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise make_extra_error("rich", "cli") from error

_FILE_WIDTH = 10_000  # columns where the output is not a terminal, so that nothing is cut or folded


def print_ledger(ledger: Ledger, steps: Sequence[StepIntervals]) -> None:
    """Print the shares of work, and of each cause of idleness, in the device time of each role and of all roles."""
    console = _open_console()
    roles = (*ledger.device_ns, None)
    device_s = sum(ledger.total_ns.values()) / 1e9
    span = (
        f"steps {steps[0].step} to {steps[-1].step}" if len(steps) > 1 else f"step {steps[0].step}"
    )
    console.print(
        f"{span}: {device_s:,.1f} device-seconds, {ledger.idle_share():.1%} idle\n", soft_wrap=True
    )
    names = [*ledger.device_ns, "all", "seconds"]
    rows: list[list[str]] = []
    for column in COLUMNS:
        seconds = sum(entry[column] for entry in ledger.device_ns.values()) / 1e9
        if seconds:
            label = f"idle: {column}" if column in CAUSES else column
            cells = [f"{ledger.share(column, role):.1%}" for role in roles]
            rows.append([label, *cells, f"{seconds:,.1f}"])
    table = _build_table(["", *names], rows, right=names)
    table.add_section()
    idle = [f"{ledger.idle_share(role):.1%}" for role in roles]
    table.add_row("idle", *idle, "")
    totals = [f"{ledger.total_ns[role] / 1e9:,.1f}" for role in ledger.device_ns]
    table.add_row("seconds", *totals, f"{device_s:,.1f}", f"{device_s:,.1f}")
    console.print(table)


def print_plan(plan: Plan) -> None:
    """Print a plan: devices, seconds, memory and reasons."""
    console = _open_console()
    text = (
        f"{plan.num_devices} of {plan.cluster.num_devices} x {plan.cluster.device.name}, {plan.strategy}: "
        f"{plan.step_s:.1f} s a step, {gigabytes(plan.peak_bytes)} of {gigabytes(plan.usable_bytes)} usable"
    )
    console.print(Text(text), soft_wrap=True)
    if plan.whole_training_bytes > plan.usable_bytes:
        least = gigabytes(plan.whole_training_bytes)
        peak = gigabytes(sum(plan.memory["training"].values()))
        millions = plan.trained_parameters / 1e6
        instead = (
            f"LoRA of rank {plan.lora_rank} trains {millions:,.1f} million parameters in {peak}"
        )
        if plan.optimizer_offload:
            instead = f"with the optimizer's state in the host's memory it takes {peak}"
        text = f"to train all parameters with all states on the devices takes at least {least} of each; {instead}"
        console.print(Text(text), soft_wrap=True)
    state = "on the host while engines work" if plan.offload else "stays on the devices"
    roles = [("policy", str(plan.policy.num_devices), _describe_engines(plan.policy))]
    if plan.judge is not None:
        roles.append(("judge", str(plan.judge.num_devices), _describe_engines(plan.judge)))
    roles.append(("training", str(plan.num_devices), f"{plan.training}; state {state}"))
    stages = [
        (name.removesuffix("_s"), f"{seconds:.1f} s") for name, seconds in vars(plan.step).items()
    ]
    memory: list[tuple[str, str, str]] = []
    for phase, parts in plan.memory.items():
        sizes = [f"{name} {gigabytes(size)}" for name, size in parts.items() if size]
        memory.append((phase, gigabytes(sum(parts.values())), ", ".join(sizes)))
    tables = [
        _build_table(("role", "devices", "layout"), roles),
        _build_table(("stage", "seconds"), stages, right=("seconds",)),
    ]
    if plan.correction is not None:
        factors = [(stage, f"{factor:.2f}") for stage, factor in plan.correction.items()]
        tables.append(
            _build_table(
                ("laws of", "measured / predicted"), factors, right=("measured / predicted",)
            )
        )
    tables.append(_build_table(("memory of a device", "peak", "of which"), memory, right=("peak",)))
    rows = [
        (alternative.choice, alternative.option, alternative.reason)
        for alternative in plan.alternatives
    ]
    tables.append(_build_table(("in the place of", "one could take", "which"), rows))
    for table in tables:
        console.print()
        console.print(table)


def print_comparison(comparison: Comparison) -> None:
    """Print a row for each strategy."""
    console = _open_console()
    steps = len(comparison["colocated"].steps)
    console.print(f"{comparison.name}: {comparison.num_devices:,} devices, {steps} steps")
    causes = [name for name in IDLE if any(run.share(name) >= 5e-4 for run in comparison.runs)]
    rows: list[list[str]] = []
    for run in comparison.runs:
        row = [
            run.strategy,
            f"{run.step_s:,.1f} s",
            f"{comparison['colocated'].seconds / run.seconds:.2f}",
            f"{comparison['split'].seconds / run.seconds:.2f}",
            str(run.num_moves),
            str(run.num_loans),
            f"{run.idle_share:.1%}",
        ]
        row += [f"{run.share(cause):.1%}" for cause in causes]
        rows.append(row)
    names = ["step", "x colocated", "x best split", "moves", "loans", "idle"]
    names += [cause.replace("_", " ") for cause in causes]
    console.print(_build_table(["strategy", *names], rows, right=names))


@contextmanager
def counting(what: str) -> Generator[Callable[[int], None]]:
    """Show a counter on the terminal during the block; print nothing elsewhere."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.completed:,.0f} {task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda number: progress.advance(task, number)


def _open_console() -> Console:
    return Console(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else _FILE_WIDTH,
        highlight=False,
        emoji=False,
    )


def _build_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _describe_engines(engines: EngineLayout) -> str:
    return (
        f"{engines.num_engines} engine{'s' * (engines.num_engines != 1)} of TP {engines.devices_per_engine}, "
        f"{engines.max_num_seqs} sequences each"
    )

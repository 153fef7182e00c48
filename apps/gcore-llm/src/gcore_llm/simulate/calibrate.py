"""The command `gcore-llm simulate --calibrate`: fit the services to real runs, and check the fit on held-out steps."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tomli_w
from numpy.typing import NDArray

from gcore_runs import UserError, check_at_least
from gcore_runs.settings.parsing import parse_over

if TYPE_CHECKING:
    from rich.table import Table

    from gcore_llm.simulate.fit import Fit
    from gcore_llm.simulate.measured import MeasuredRun

_DESCRIPTION = """Fit the costs of the simulation's services to finished runs of gcore-llm train.

The command writes a file for gcore-llm simulate --config FILE, with the sizes of the first run; options change them.
Several runs with different batch sizes and lengths separate costs that one run does not. For each stage it prints how
the simulated time compares with the measured one: for the fitted steps, the held-out steps, and the runs to --check.
"""

_STAGE_NAMES = ("generation", "reward", "preparation", "training", "weight sync", "the rest")
_UNITS = {
    "base_s": ("decoding step", "ms", 1e3),
    "per_sample_s": ("... and each running response", "us", 1e6),
    "prefill_s": ("token of a prompt", "us", 1e6),
    "latency_s": ("reward", "ms", 1e3),
    "flop_s": ("training, 10^9 FLOPs", "ms", 1e12),
    "micro_batch_s": ("... and each micro-batch", "ms", 1e3),
    "forward_share": ("pass that scores, share of one that trains", "", 1.0),
    "sync_s": ("weight sync", "ms", 1e3),
    "overhead_s": ("rest of a step", "ms", 1e3),
}


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """The choice of runs and steps."""

    calibrate: tuple[str, ...] = ()
    """Folders of runs to fit to."""
    check: tuple[str, ...] = ()
    """Folders of further runs; all their steps are held out."""
    out: str = ""
    """File to write; empty: simulate.toml in the first run's folder."""
    warmup_steps: int = 3
    """First steps of each run, which are left out because they compile and allocate."""
    max_steps: int = 100
    """Most steps to use of each run, counted from its end."""
    held_out: float = 0.5
    """Share of the steps that is not fitted to, at the end of a run."""

    def __post_init__(self) -> None:
        check_at_least("warmup_steps", self.warmup_steps, 0)
        check_at_least("max_steps", self.max_steps, 2)
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out is {self.held_out}; expected at least 0 and below 1")


def parse_calibrate(args: Sequence[str]) -> CalibrateConfig:
    """Parse the settings of the command line.

    Raises:
        UserError: a value is out of bounds.
    """
    config = parse_over(CalibrateConfig(), args, prog="gcore-llm simulate", description=_DESCRIPTION)
    if not config.calibrate:
        raise UserError("calibrate is empty; expected one or more folders of runs")
    return config


def run_calibrate(args: Sequence[str]) -> None:
    """Run the command."""
    config = parse_calibrate(args)
    from gcore_llm.simulate.fit import fit, num_simulations, simulated_seconds
    from gcore_llm.simulate.measured import read_run
    from gcore_runs.display import Display

    runs = [read_run(path, max_steps=config.max_steps) for path in (*config.calibrate, *config.check)]
    out = Path(config.out) if config.out else Path(config.calibrate[0]) / "simulate.toml"
    if not out.absolute().parent.is_dir():
        raise UserError(f"out is {str(out)!r}; expected a file in an existing folder")
    fitted = runs[: len(config.calibrate)]
    steps = [_steps(run, config, is_fitted=i < len(fitted)) for i, run in enumerate(runs)]
    with Display() as display:
        total, done = num_simulations(fitted) + len(runs), 0
        display.phase("calibrating", total=total)

        def progressed() -> None:
            nonlocal done
            done += 1
            display.progressed(done, [])

        result = fit(fitted, [used for used, _ in steps[: len(fitted)]], progressed)
        simulated: list[NDArray[np.float64]] = []
        for run in runs:
            simulated.append(simulated_seconds(run, result.parameters))
            progressed()
    display.console.print(_parameter_table(result))
    for run, seconds, (used, rest) in zip(runs, simulated, steps, strict=True):
        for name, chosen in (("fitted to", used), ("held out", rest)):
            if chosen.any():
                display.console.print(_step_table(f"{run.name}: {chosen.sum()} steps {name}", run, seconds, chosen))
    text = tomli_w.dumps(asdict(result.parameters.applied(runs[0].config)))
    out.write_text(text)
    display.say(f"settings: {out}, for gcore-llm simulate --config {out}")


def _steps(
    run: "MeasuredRun", config: CalibrateConfig, *, is_fitted: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which steps to fit to, and which to hold out: [steps] each.

    Raises:
        UserError: the run is too short.
    """
    warm = np.array([row["step"] > config.warmup_steps for row in run.rows])
    count = int(warm.sum())
    num_used = count - int(count * config.held_out) if is_fitted else 0
    fewest = 2 if is_fitted else 0
    if count == 0 or num_used < fewest:
        raise UserError(
            f"{run.name} has {count} steps after the first {config.warmup_steps} (warmup_steps), {num_used} of them to "
            f"fit to; expected at least {fewest} to fit to, and at least 1 in all"
        )
    is_used = warm & (np.cumsum(warm) <= num_used)
    return is_used, warm & ~is_used


def _parameter_table(result: "Fit") -> "Table":
    from rich.table import Table

    table = Table(title="fitted", title_justify="left")
    table.add_column("")
    for column in ("value", "standard error"):
        table.add_column(column, justify="right")
    for name, value in asdict(result.parameters).items():
        label, unit, factor = _UNITS[name]
        if name in result.errors:
            table.add_row(label, *(f"{factor * v:,.4g} {unit}" for v in (value, result.errors[name])))
    return table


def _step_table(title: str, run: "MeasuredRun", simulated: NDArray[np.float64], chosen: NDArray[np.bool_]) -> "Table":
    from rich.table import Table

    from gcore_llm.simulate.fit import measured_seconds

    table = Table(title=title, title_justify="left")
    table.add_column("seconds a step, mean")
    for column in ("measured", "simulated", "error", "of the step"):
        table.add_column(column, justify="right")
    pairs = np.stack([measured_seconds(run), simulated])[:, chosen].mean(axis=1)
    step_s = float(pairs[0].sum())
    for name, (measured_s, simulated_s) in zip((*_STAGE_NAMES, "step"), [*pairs.T, pairs.sum(axis=1)], strict=True):
        error = f"{simulated_s / measured_s - 1:+.1%}" if measured_s > 0 else ""
        share = f"{(simulated_s - measured_s) / step_s:+.1%}"
        table.add_row(name, f"{measured_s:.4g}", f"{simulated_s:.4g}", error, share, end_section=name == "the rest")
    return table

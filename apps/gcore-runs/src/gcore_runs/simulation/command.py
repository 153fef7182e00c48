"""The commands of an app that simulate its runs, and that fit the simulated services to real runs."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tomli_w
from numpy.typing import NDArray

from gcore_runs import Checked, NonNegative, at_least
from gcore_runs.errors import UserError
from gcore_runs.loop.recorder import Display
from gcore_runs.settings.checks import FractionBelow1
from gcore_runs.settings.parsing import parse_over
from gcore_runs.simulation.config import SimulateConfig

if TYPE_CHECKING:
    from rich.table import Table

    from gcore_runs.simulation.cluster import Simulation, StepSummary
    from gcore_runs.simulation.fit import MeasuredRun

_SIMULATE = """Run the program of train in simulated time, on simulated devices.

Simulated are generation with continuous batching, a reward, training by its FLOPs, and weight sync. The program, its
sampling, balancing and preparation are real, on as many controllers as are asked for.

--config FILE.toml: settings under the same names ([engine] base_s = 0.01); options override them.
--calibrate RUN [RUN ...]: write such a file from the timings of real runs; see --calibrate --help.
simulate train [options of train]: simulate a run of these settings, on the cluster of --sim.*; see train --help.
"""

SIMULATE_TRAIN = """Run the program of train in simulated time, in a run folder with metrics, timeline and report.

The settings are those of train, its prompts among them. The modelled devices of the section sim take the place of the
processes that these ask for. No model is trained, evaluated or exported, and each run starts in a new folder.
"""

_CALIBRATE = """Fit the costs of the simulation's services to finished runs of train.

The command writes a file for simulate --config FILE, with the sizes of the first run; options change them. Several runs
with different batch sizes and lengths separate costs that one run does not. For each stage it prints how the simulated
time compares with the measured one: for the fitted steps, the held-out steps, and the runs to --check.
"""

_COLUMNS = {
    "generation": "generation",
    "reward": "reward",
    "preparation": "preparation",
    "training": "training",
    "sync": "weight sync",
    "long_tail": "idle: long tail of generation",
    "waiting_for_reward": "idle: waiting for reward",
    "reward_devices": "idle: reward's devices without a call",
    "imbalance": "idle: imbalance of training",
    "barriers": "idle: waiting at barriers",
}
_STAGE_NAMES = ("generation", "reward", "preparation", "training", "weight sync", "the rest")


def parse_options(args: Sequence[str], *, prog: str) -> SimulateConfig:
    """Parse the command line, whose options override those of a TOML file; see `merge`."""
    return parse_over(SimulateConfig(), args, prog=prog, description=_SIMULATE)


def run_simulation(
    config: SimulateConfig, simulate: "Callable[[Callable[[StepSummary], None]], Simulation]"
) -> None:
    """Simulate with a display, print the table of results, and write the figures.

    ``simulate`` calls its argument after every step.
    """
    if config.json:
        _check_writable("json", Path(config.json))
    with Display() as display:
        display.phase("simulating", total=config.steps)

        def show_step(figures: "StepSummary") -> None:
            load = f"{max(figures.controller_load):.3%}"
            cells = [("simulated step", f"{figures.step_s:,.1f} s"), ("busiest controller", load)]
            display.show_progress(figures.step, cells)

        result = simulate(show_step)
    step_s = np.array([step.step_s for step in result.steps])
    total_s = float(step_s.sum())
    loads = np.average([step.controller_load for step in result.steps], axis=0, weights=step_s)
    num_tokens = sum(step.num_tokens for step in result.steps)
    columns = list(result.steps[0].device_s)
    rows = [
        ("step time, mean", f"{step_s.mean():,.1f} s"),
        ("step time, 95th percentile", f"{np.quantile(step_s, 0.95):,.1f} s"),
        ("tokens a second", f"{num_tokens / total_s:,.0f}"),
    ]
    for name in columns:
        share = sum(step.device_s[name] for step in result.steps) / (config.devices * total_s)
        rows.append((_COLUMNS[name], f"{share:.1%}"))
    rows += [
        ("busiest controller's load", f"{loads.max():.3%} of a core"),
        ("real seconds", f"{result.wall_s:,.1f} s"),
    ]
    title = f"{config.devices:,} simulated devices, {config.controllers:,} controllers, {config.steps:,} steps"
    last = ("tokens a second", _COLUMNS["sync"], _COLUMNS[columns[-1]])
    display.console.print(_table(title, rows, last=last))
    if config.token_unit > 1:
        display.say(
            f"lengths are rounded to {config.token_unit} tokens, and the work scaled (--token-unit)"
        )
    if config.json:
        Path(config.json).write_text(json.dumps(asdict(result), indent=1) + "\n")
        display.say(f"figures: {config.json}")


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Checked):
    """The choice of runs and steps."""

    calibrate: tuple[str, ...] = ()
    """Folders of runs to fit to."""
    check: tuple[str, ...] = ()
    """Folders of further runs; all their steps are held out."""
    out: str = ""
    """File to write; empty: simulate.toml in the first run's folder."""
    warmup_steps: NonNegative = 3
    """First steps of each run, which are left out because they compile and allocate."""
    max_steps: Annotated[int, at_least(2)] = 100
    """Most steps to use of each run, counted from its end."""
    held_out: FractionBelow1 = 0.5
    """Share of the steps that is not fitted to, at the end of a run."""


def parse_calibrate(args: Sequence[str], *, prog: str) -> CalibrateConfig:
    """Parse the settings of the command line. Raises UserError if a value is out of bounds."""
    config = parse_over(CalibrateConfig(), args, prog=prog, description=_CALIBRATE)
    if not config.calibrate:
        raise UserError("calibrate is empty; expected one or more folders of runs")
    return config


def run_calibrate(
    args: Sequence[str], read_run: "Callable[[str, int], MeasuredRun]", *, prog: str
) -> bool:
    """Fit the simulated services to runs, print how well they agree, and write the settings of ``prog``.

    ``read_run`` reads the last steps of a run's folder, at most so many. False: the command line has no --calibrate.
    """
    if not any(arg.split("=")[0] == "--calibrate" for arg in args):
        return False
    config = parse_calibrate(args, prog=prog)
    from gcore_runs.simulation.fit import FITTED, fit, num_simulations

    runs = [read_run(path, config.max_steps) for path in (*config.calibrate, *config.check)]
    out = Path(config.out) if config.out else Path(config.calibrate[0]) / "simulate.toml"
    _check_writable("out", out)
    fitted_runs = runs[: len(config.calibrate)]
    steps = [
        _steps(run, config, is_fitted=index < len(fitted_runs)) for index, run in enumerate(runs)
    ]
    with Display() as display:
        display.phase("calibrating", total=num_simulations(fitted_runs) + len(runs))
        done = count(1)

        def advance() -> None:
            display.show_progress(next(done), [])

        is_used = [used for used, _ in steps[: len(fitted_runs)]]
        parameters, errors = fit(fitted_runs, is_used, advance)
        seconds: list[NDArray[np.float64]] = []
        for run in runs:
            seconds.append(np.stack([run.measured_seconds(), run.simulate_seconds(parameters)]))
            advance()
    rows: list[Sequence[str]] = []
    for name, fitted in FITTED.items():
        if name in errors:
            value = fitted.factor * getattr(parameters, name)
            error = fitted.factor * errors[name]
            rows.append(
                (fitted.label, f"{value:,.4g} {fitted.unit}", f"{error:,.4g} {fitted.unit}")
            )
    display.console.print(_table("fitted", rows, ("", "value", "standard error")))
    for run, pair, (used, held_out) in zip(runs, seconds, steps, strict=True):
        for name, mask in (("fitted to", used), ("held out", held_out)):
            if mask.any():
                display.console.print(
                    _stage_table(f"{run.name}: {mask.sum()} steps {name}", pair[:, mask])
                )
    out.write_text(tomli_w.dumps(asdict(parameters.apply(runs[0].config, runs[0].workload))))
    display.say(f"settings: {out}, for {prog} --config {out}")
    return True


def _steps(
    run: "MeasuredRun", config: CalibrateConfig, *, is_fitted: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which steps to fit to, and which to hold out, [steps] each; UserError where the run is too short."""
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


def _stage_table(title: str, seconds: NDArray[np.float64]) -> "Table":
    """Return the table of measured and simulated seconds, [2, steps, stages]."""
    pairs = seconds.mean(axis=1)
    step_s = float(pairs[0].sum())
    rows: list[Sequence[str]] = []
    for name, (measured_s, simulated_s) in zip(
        (*_STAGE_NAMES, "step"), [*pairs.T, pairs.sum(axis=1)], strict=True
    ):
        error = f"{simulated_s / measured_s - 1:+.1%}" if measured_s > 0 else ""
        share = f"{(simulated_s - measured_s) / step_s:+.1%}" if step_s > 0 else ""
        rows.append((name, f"{measured_s:.4g}", f"{simulated_s:.4g}", error, share))
    columns = ("seconds a step, mean", "measured", "simulated", "error", "of the step")
    return _table(title, rows, columns, last=(_STAGE_NAMES[-1],))


def _table(
    title: str,
    rows: Iterable[Sequence[str]],
    columns: Sequence[str] = (),
    *,
    last: Sequence[str] = (),
) -> "Table":
    """Return a table; ``last`` are the labels of rows that end a section."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=bool(columns))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row, end_section=row[0] in last)
    return table


def _check_writable(field: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise UserError(f"{field} is {str(path)!r}; expected a file in an existing folder")

"""`gcore-placement simulate`: strategies of placement on the command line."""

import argparse
import os
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from gcore_bench.placement.study.studies import (
    Comparison,
    RunAll,
    break_study,
    compare,
    drift_study,
    payload_study,
    prediction_study,
)
from gcore_bench.placement.study.tables import study_text
from gcore_placement.cli.page import page
from gcore_placement.errors import MissingExtraError, PlacementError, check_positive, refusal
from gcore_placement.simulation.scenarios import JOBS, PUBLISHED, SCALES, SCENARIOS, scenario
from gcore_placement.simulation.simulator import Simulator
from gcore_placement.simulation.waves import WaveRuns, run_in_turns, run_side_by_side
from gcore_placement.workload.recorded_runs import run_trace
from gcore_placement.workload.traces import Trace

STUDY_SIZES = (
    (64, None, (*SCENARIOS, *PUBLISHED)),
    (512, None, ("curriculum", "growing", "crossing")),
    (10_000, 30, ("curriculum", "growing", "crossing")),
)
"""Devices, steps (None: the scenario's) and scenarios of the study of drift."""


def main(argv: Sequence[str]) -> int:
    """Simulates, prints and writes; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        from gcore_placement.cli.simulate_table import counting, in_processes, print_comparison
    except ModuleNotFoundError as error:
        raise MissingExtraError("rich", "cli") from error
    for option in ("html", "study", "save_trace"):
        path: Path | None = getattr(arguments, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise refusal(f"--{option.replace('_', '-')}", str(path), "a path in a folder that exists")
    if arguments.steps is not None:
        check_positive("--steps", arguments.steps)
    check_positive("--processes", arguments.processes)
    if arguments.study is not None:
        with in_processes(arguments.processes) as run_all:
            text, html = _study(arguments.steps, run_all)
        arguments.study.mkdir(exist_ok=True)
        (arguments.study / "tables.md").write_text(text)
        (arguments.study / "study.html").write_text(html)
        print(text)
        return 0
    with counting("waves simulated") as counted:
        simulator = _simulator(arguments, counted)
        comparison = compare(simulator.trace.name, simulator)
    print_comparison(comparison)
    if simulator.trace.name in PUBLISHED:
        print(f"responses: {PUBLISHED[simulator.trace.name].source}")
    if arguments.save_trace is not None:
        simulator.trace.save(arguments.save_trace)
    if arguments.html is not None:
        arguments.html.write_text(page([comparison], timelines=_timelines(simulator, comparison)))
        print(f"page: {arguments.html}")
    return 0


def _simulator(arguments: argparse.Namespace, counted: Callable[[int], None]) -> Simulator:
    trace = None if arguments.trace is None else Trace.load(arguments.trace)
    if arguments.from_run is not None:
        n, max_judge_length = _run_settings(arguments.from_run)
        trace = run_trace(
            arguments.from_run,
            n=n,
            judge_median=arguments.judge_length,
            max_judge_length=max_judge_length,
            seed=arguments.seed,
        )
    return scenario(
        arguments.scenario,
        arguments.job,
        arguments.devices,
        num_steps=arguments.steps,
        seed=arguments.seed,
        trace=trace,
        progress=counted,
    )


def _run_settings(folder: Path) -> tuple[int, float]:
    """A run's responses to a prompt, and most tokens of a judgement."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        return int(config["rollout"]["n"]), float(config["reward_model"]["judge"]["max_response_length"])
    except (OSError, KeyError, ValueError) as error:
        raise PlacementError(
            f"{str(folder)!r} is no folder of a gcore-llm run, with config.toml and metrics.jsonl: {error!r}"
        ) from error


def _timelines(simulator: Simulator, comparison: Comparison) -> list[tuple[str, WaveRuns]]:
    """The first wave of the middle step, in turns and as dynamic had it."""
    step = simulator.trace.num_steps // 2
    wave = next(simulator.trace.waves(step))
    partition = comparison.dynamic.steps[step].partitions[0]
    return [
        (f"colocated, step {step}", run_in_turns(simulator.costs, [wave], simulator.space.num_devices)),
        (f"dynamic, step {step}", run_side_by_side(simulator.costs, [wave], partition)),
    ]


def _study(num_steps: int | None, run_all: RunAll) -> tuple[str, str]:
    """Tables and page of all questions; no more than so many steps of each."""
    sizes = [
        (devices, num_steps if steps is None else min(steps, num_steps or steps), names)
        for devices, steps, names in STUDY_SIZES
    ]
    few = min(24, num_steps or 24)
    drift = drift_study(sizes, run_all=run_all)
    predictions = prediction_study(num_steps=few, run_all=run_all)
    breaks = break_study(num_steps=few, run_all=run_all)
    text = study_text(drift, payload_study(), predictions, breaks)
    return text, page([seeded[0] for seeded in (*drift, *breaks)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-placement simulate",
        description="Compares colocated, the best static split, dynamic and clairvoyant placement on one trace.",
        epilog="example: gcore-placement simulate --scenario judge_grows --devices 64 --html page.html",
    )
    parser.add_argument(
        "--scenario", choices=(*SCENARIOS, *PUBLISHED), default="growing", help="trace to make up (%(default)s)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--trace", type=Path, metavar="FILE", help="a trace in its place, as Trace.save writes it")
    instead.add_argument("--from-run", type=Path, metavar="RUN", help="the steps of a run of gcore-llm in its place")
    parser.add_argument(
        "--judge-length",
        type=float,
        default=800.0,
        metavar="TOKENS",
        help="median of the run's judgements, which it does not record (%(default)g)",
    )
    parser.add_argument("--job", choices=JOBS, default="32B", help="models and their costs (%(default)s)")
    parser.add_argument("--devices", type=int, choices=SCALES, default=64, help="of the cluster (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="of the trace, or most of each study's")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace (%(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines and idle bars")
    parser.add_argument("--save-trace", type=Path, metavar="FILE", help="write the trace, as .npz")
    parser.add_argument(
        "--study",
        type=Path,
        metavar="DIR",
        help="answer the open questions: tables.md and study.html (half an hour or so on two cores)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="of a study (as many as there are cores: %(default)s)",
    )
    return parser

"""The command `gcore-placement simulate`: compare placement strategies on a trace."""

import argparse
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from gcore_placement.cli.page import page
from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import check_positive
from gcore_placement.simulation.scenarios import JOBS, PUBLISHED, SCALES, SCENARIOS, scenario
from gcore_placement.simulation.simulator import Comparison, Simulator, compare
from gcore_placement.simulation.waves import WaveRuns, run_in_turns, run_side_by_side
from gcore_placement.workload.recorded_runs import run_trace
from gcore_placement.workload.traces import Trace


def main(argv: Sequence[str]) -> int:
    """Simulate, print and write; return the exit code."""
    arguments = _parser().parse_args(argv)
    from gcore_placement.cli.tables import counting, print_comparison

    for option in ("html", "save_trace"):
        path: Path | None = getattr(arguments, option)
        if path is not None and not path.absolute().parent.is_dir():
            raise refusal(f"--{option.replace('_', '-')}", str(path), "a path in a folder that exists")
    if arguments.steps is not None:
        check_positive("--steps", arguments.steps)
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
    """Return a run's number of responses to a prompt, and most tokens of a judgement."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        return int(config["rollout"]["n"]), float(config["reward_model"]["judge"]["max_response_length"])
    except (OSError, KeyError, ValueError) as error:
        raise PlacementError(
            f"--from-run is {str(folder)!r}; expected a gcore-llm run, with config.toml and metrics.jsonl ({error!r})"
        ) from error


def _timelines(simulator: Simulator, comparison: Comparison) -> list[tuple[str, WaveRuns]]:
    """Return the first wave of the middle step, colocated and on the partition of dynamic."""
    step = simulator.trace.num_steps // 2
    wave = next(simulator.trace.waves(step))
    partition = comparison["dynamic"].steps[step].partitions[0]
    return [
        (f"colocated, step {step}", run_in_turns(simulator.costs, [wave], simulator.space.num_devices)),
        (f"dynamic, step {step}", run_side_by_side(simulator.costs, [wave], partition)),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-placement simulate",
        description="Compare colocated, the best static split, dynamic and clairvoyant placement on one trace.",
        epilog="example: gcore-placement simulate --scenario judge_grows --devices 64 --html page.html",
    )
    parser.add_argument(
        "--scenario", choices=(*SCENARIOS, *PUBLISHED), default="growing", help="recipe of the trace (%(default)s)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--trace", type=Path, metavar="FILE", help="use a trace that Trace.save has written")
    instead.add_argument("--from-run", type=Path, metavar="RUN", help="use the steps of a run of gcore-llm")
    parser.add_argument(
        "--judge-length",
        type=float,
        default=800.0,
        metavar="TOKENS",
        help="median of the run's judgements, which it does not record (%(default)g)",
    )
    parser.add_argument("--job", choices=JOBS, default="32B", help="models and their costs (%(default)s)")
    parser.add_argument("--devices", type=int, choices=SCALES, default=64, help="of the cluster (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="of the trace")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace (%(default)s)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with timelines and idle bars")
    parser.add_argument("--save-trace", type=Path, metavar="FILE", help="write the trace, as .npz")
    return parser

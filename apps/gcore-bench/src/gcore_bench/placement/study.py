"""The part study: simulations that answer the questions which G-Core's paper leaves open.

The answers are in docs/reference/open-questions.md.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from operator import call
from statistics import fmean
from typing import Any, TypeAlias

from gcore_bench.harness.report import BenchSession, Row, format_range, verdict_on_all
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.tables import FigureTable
from gcore_placement import (
    Comparison,
    DynamicPartitionConfig,
    EngineCosts,
    JobCosts,
    Simulator,
    SwapCosts,
    TraceRecipe,
    compare,
)
from gcore_placement.costs import times
from gcore_placement.simulation.scenarios import (
    JOBS,
    PUBLISHED,
    SCALES,
    SCENARIOS,
    resize,
    scenario,
)

SIZES: dict[int, int | None] = {
    64: None,
    512: None,
    10_000: 30,
}
"""Devices of the drift study, and the steps of each trace; None: as many as the trace has."""
ERRORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Believed costs of the judge, over its true costs."""
SEEDS = (1, 2, 3)
"""Seeds of each trace. The policy was tuned on seed 0."""

_JOB = "32B"
_NUM_DEVICES = 64

COLUMNS = {
    "devices": "{devices:,}",
    "trace": "{trace}",
    "steps": "{steps}",
    "colocated, a step": "{colocated_s:,.0f} s",
    "best split": "{split_s:,.0f} s",
    "dynamic": "{dynamic_s:,.0f} s",
    "clairvoyant": "{clairvoyant_s:,.0f} s",
    "colocated / dynamic": "{colocated_over_dynamic}",
    "split / dynamic": "{split_over_dynamic}",
    "split / clairvoyant": "{split_over_clairvoyant}",
    "idle: colocated": "{colocated_idle:.1%}",
    "idle: split": "{split_idle:.1%}",
    "idle: dynamic": "{dynamic_idle:.1%}",
    "idle: clairvoyant": "{clairvoyant_idle:.1%}",
    "points over clairvoyant": "{points}",
    "moves": "{moves:.0f}",
    "waves with loans": "{loans:.0f}",
}
ERROR_COLUMNS = {
    "believed / true": "{error:.3g}",
    "split / dynamic, corrected": "{corrected}",
    "split / dynamic, not corrected": "{uncorrected}",
}

MakeSimulator: TypeAlias = Callable[..., Simulator]
"""Returns the simulator of a case for a ``seed``."""
Cases: TypeAlias = list[tuple[str, MakeSimulator]]
"""Cases with their names."""


def run(options: PlacementOptions, session: BenchSession) -> list[FigureTable]:
    """Simulate drifting loads, wrong costs of the judge, and the scheme with each of its conditions broken."""
    processes = os.cpu_count() or 1
    few_steps = 24
    sizes = SIZES
    if options.quick:
        processes = 1
        few_steps = 2
        sizes = {64: 2}
    tables: list[FigureTable] = []
    for num_devices, num_steps in sizes.items():
        rows = compare_all(list_drifts(num_devices, num_steps), SEEDS, processes)
        title = f"Drift on {num_devices:,} devices"
        aims = [check_idle_aim(rows)]
        tables.append(
            FigureTable(
                title=title,
                columns=COLUMNS,
                rows=rows,
                aims=aims,
            )
        )
        session.say(f"study: {title} is done")
    rows = compare_errors(ERRORS, few_steps, processes)
    tables.append(FigureTable(title="Wrong costs of the judge", columns=ERROR_COLUMNS, rows=rows))
    rows = compare_all(list_broken_conditions(few_steps), SEEDS, processes)
    tables.append(FigureTable(title="Conditions broken", columns=COLUMNS, rows=rows))
    return tables


def list_drifts(
    num_devices: int, num_steps: int | None, traces: Sequence[str] = (*SCENARIOS, *PUBLISHED)
) -> Cases:
    """Return the scenarios of question 1: does dynamic beat the best static split?"""
    cases: Cases = []
    for name in traces:
        make = partial(scenario, name, _JOB, num_devices, num_steps=num_steps)
        cases.append((name, make))
    return cases


def list_broken_conditions(num_steps: int) -> Cases:
    """Return the curriculum as it is, and with one condition of the scheme broken at a time."""
    costs = JOBS[_JOB]
    engine = _scale_engine(costs.policy, 4)
    curriculum = SCENARIOS["curriculum"]
    steady = SCENARIOS["steady"]
    slow_moves = replace(costs.swap, load_s=1200.0)
    conditions = {
        "as it is": (curriculum, costs),
        "load stays the same": (steady, costs),
        "load changes at random every step": (replace(steady, noise=0.6), costs),
        "one large wave a step": (SCENARIOS["large_waves"], costs),
        "four replicas in all": (curriculum, replace(costs, policy=engine, reward=engine)),
        "a move takes 20 minutes": (curriculum, replace(costs, swap=slow_moves)),
        "swaps take no time": (curriculum, replace(costs, swap=SwapCosts())),
    }
    return [(name, partial(_simulate, *case, num_steps)) for name, case in conditions.items()]


def _simulate(recipe: TraceRecipe, costs: JobCosts, num_steps: int, *, seed: int) -> Simulator:
    batch, _ = SCALES[_NUM_DEVICES]
    trace = resize(
        recipe,
        num_steps=num_steps,
        train_batch_size=batch,
        seed=seed,
    ).trace()
    return scenario(
        recipe.name,
        _JOB,
        _NUM_DEVICES,
        trace=trace,
        costs=costs,
    )


def _scale_engine(engine: EngineCosts, factor: int) -> EngineCosts:
    """Return the engine with a factor more devices per replica, as fast per device."""
    return replace(
        engine,
        devices_per_replica=engine.devices_per_replica * factor,
        max_num_seqs=engine.max_num_seqs * factor,
        decode_per_sequence_s=engine.decode_per_sequence_s / factor,
        decode_per_context_token_s=engine.decode_per_context_token_s / factor,
        prefill_per_token_s=engine.prefill_per_token_s / factor,
    )


def compare_all(cases: Cases, seeds: Sequence[int], processes: int) -> list[Row]:
    """Compare the strategies in each case with each seed, and return a row per case."""
    tasks = [partial(_compare, *case, seed) for case, seed in product(cases, seeds)]
    comparisons = run_all(tasks, processes=processes)
    size = len(seeds)
    starts = range(0, len(comparisons), size)
    return [summarize_seeds(comparisons[start : start + size]) for start in starts]


def _compare(name: str, make: MakeSimulator, seed: int) -> Comparison:
    return compare(name, make(seed=seed))


def summarize_seeds(comparisons: Sequence[Comparison]) -> Row:
    """Return a row of seconds per step, gains and idle shares: means over the seeds, and ranges of ratios."""
    row: Row = {
        "devices": comparisons[0].num_devices,
        "trace": comparisons[0].name,
        "steps": len(comparisons[0]["dynamic"].steps),
        "moves": fmean(comparison["dynamic"].num_moves for comparison in comparisons),
        "loans": fmean(comparison["dynamic"].num_loans for comparison in comparisons),
    }
    for strategy in ("colocated", "split", "dynamic", "clairvoyant"):
        runs = [comparison[strategy] for comparison in comparisons]
        row[f"{strategy}_s"] = fmean(run.step_s for run in runs)
        row[f"{strategy}_idle"] = fmean(run.idle_share for run in runs)
    for slow, fast in (("colocated", "dynamic"), ("split", "dynamic"), ("split", "clairvoyant")):
        ratios = [comparison[slow].seconds / comparison[fast].seconds for comparison in comparisons]
        row[f"{slow}_over_{fast}"] = format_range(ratios, ".2f")
    points: list[float] = []
    for comparison in comparisons:
        more_idle = comparison["dynamic"].idle_share - comparison["clairvoyant"].idle_share
        points.append(100 * more_idle)
    row["points"] = format_range(points, ".1f")
    row["most_points"] = max(points)
    return row


def check_idle_aim(rows: Sequence[Row]) -> str:
    """Compare the idle devices of dynamic with those of the clairvoyant, by the worst seed of each trace."""
    worst = max(rows, key=lambda row: row["most_points"])
    missed = [row["trace"] for row in rows if row["most_points"] > 3]
    return (
        "aim: dynamic idles at most 3 points more than the clairvoyant on every trace, with every seed; "
        f"most: {worst['most_points']:.1f} on {worst['trace']} ({verdict_on_all(missed)})"
    )


def compare_errors(errors: Sequence[float], num_steps: int, processes: int) -> list[Row]:
    """Answer question 3: the gain of dynamic over the best split if the judge's costs are believed to be wrong.

    Rows have the seconds of the best split over those of dynamic, with measurements that correct the model and without.
    """
    tasks = [partial(_measure_gains, errors, num_steps, seed) for seed in SEEDS]
    rows: list[Row] = []
    for error, *gains in zip(errors, *run_all(tasks, processes=processes), strict=True):
        columns = {name: [gain[name] for gain in gains] for name in ("corrected", "uncorrected")}
        texts = {name: format_range(values, ".2f") for name, values in columns.items()}
        rows.append({"error": error, **texts})
    return rows


def _measure_gains(errors: Sequence[float], num_steps: int, seed: int) -> list[dict[str, float]]:
    """Return for each error the best split's seconds over dynamic's, corrected and not."""
    simulator = scenario(
        "judge_grows",
        _JOB,
        _NUM_DEVICES,
        num_steps=num_steps,
        seed=seed,
    )
    split_s = simulator.best_split().seconds
    gains: list[dict[str, float]] = []
    for error in errors:
        believed = with_judge_error(JOBS[_JOB], error)
        gain: dict[str, float] = {}
        for name, is_corrected in (("corrected", True), ("uncorrected", False)):
            config = DynamicPartitionConfig(is_corrected=is_corrected)
            gain[name] = split_s / simulator.dynamic(believed=believed, config=config).seconds
        gains.append(gain)
    return gains


def with_judge_error(costs: JobCosts, error: float) -> JobCosts:
    """Return costs whose judge takes ``error`` times as long."""
    return replace(costs, reward=times(costs.reward, error))


def run_all(tasks: Sequence[Callable[[], Any]], *, processes: int) -> list[Any]:
    """Call independent tasks in so many processes, or in this one if 1."""
    if processes == 1:
        return list(map(call, tasks))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The last tasks are the largest.
        return list(pool.map(call, reversed(tasks)))[::-1]

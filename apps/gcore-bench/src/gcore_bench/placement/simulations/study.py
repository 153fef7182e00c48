"""Simulations that answer the questions which G-Core's paper leaves open, in an hour; their tables and page.

The answers are in docs/reference/open-questions.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from gcore_bench.harness.report import verdict_on_all
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.simulations.tables import markdown_table, spread, write_sections
from gcore_bench.placement.simulations.tasks import run_all
from gcore_placement import (
    Comparison,
    DynamicPartitionConfig,
    EngineCosts,
    JobCosts,
    Simulator,
    SwapCosts,
    Trace,
    TraceRecipe,
    compare,
)
from gcore_placement.cli.page import page
from gcore_placement.simulation.scenarios import JOBS, PUBLISHED, SCALES, SCENARIOS, scenario, sized

AIM_IDLE = 3.0
"""Most percentage points of all device-seconds by which dynamic should idle more than the clairvoyant."""
_JOB, _NUM_DEVICES = "32B", 64
PAYLOAD_BYTES_PER_S = 2e9
"""Rate at which a controller packs payloads; a link of 100 Gb/s is faster."""

STUDY_SIZES = {64: None, 512: None, 10_000: 30}
"""Devices of the study of drift, and the steps of each trace on so many; None: as many as it has."""
STUDY_TRACES = (*SCENARIOS, *PUBLISHED)
"""Scenarios of the study of drift."""
ERRORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Believed costs of the judge, over its true ones."""
SEEDS = (1, 2, 3)
"""Seeds of each trace in a study. The policy was tuned on seed 0."""
SeededComparison = Sequence[Comparison]
"""Comparisons on traces of one recipe with several seeds."""


def run_study(options: PlacementOptions) -> str:
    """Answer all questions, and write `tables.md` and `study.html`; return the tables."""
    num_steps, processes = options.study_steps or None, options.num_study_processes
    sizes = [
        (devices, num_steps if steps is None else min(steps, num_steps or steps), STUDY_TRACES)
        for devices, steps in STUDY_SIZES.items()
        if devices in options.study_devices
    ]
    few = min(24, num_steps or 24)
    drift = drift_study(sizes, processes=processes)
    predictions = prediction_study(num_steps=few, processes=processes)
    breaks = break_study(num_steps=few, processes=processes)
    by_devices = {devices: [seeded for seeded in drift if seeded[0].num_devices == devices] for devices, *_ in sizes}
    errors = [(f"{error:.3g}", *map(spread, gains)) for error, *gains in predictions]
    sections = {
        **{
            f"Drift on {devices:,} devices": f"{_comparison_table(found)}\n{idle_aim(found)}\n"
            for devices, found in by_devices.items()
        },
        "Payloads through controllers": _payload_table(),
        "Wrong costs of the judge": markdown_table(
            ("believed / true", "split / dynamic, corrected", "split / dynamic, not corrected"), errors
        ),
        "Conditions broken": _comparison_table(breaks),
    }
    text = write_sections(options.study_folder, "tables.md", sections)
    (options.study_folder / "study.html").write_text(page([seeded[0] for seeded in (*drift, *breaks)]))
    return text


def drift_study(
    sizes: Sequence[tuple[int, int | None, Sequence[str]]], *, seeds: Sequence[int] = SEEDS, processes: int = 1
) -> list[SeededComparison]:
    """Answer question 1: dynamic against the best static split, for devices, steps and scenarios."""
    cases = [
        (name, partial(scenario, name, _JOB, devices, num_steps=steps))
        for devices, steps, names in sizes
        for name in names
    ]
    return _compare_all(cases, seeds, processes)


def payload_load(trace: Trace, *, num_controllers: int) -> tuple[float, float, float]:
    """Return the load of a trace of one step, by its payloads, on controllers that take prompts in turn.

    Returns:
        The busiest controller's seconds to receive its payloads and send them on, the bytes that it holds at once, and
        these over the mean of all controllers; 1 is even.
    """
    payloads = trace.payload_bytes
    shares = np.bincount(np.arange(len(payloads)) % num_controllers, weights=payloads, minlength=num_controllers)
    most, mean = float(shares.max()), float(shares.mean())
    # It comes in once and goes out to the policy, to the judge and to training; packing and sending overlap.
    return (1 + 3) * most / PAYLOAD_BYTES_PER_S, most, most / mean if mean else 1.0


def prediction_study(*, num_steps: int, processes: int) -> list[tuple[float, list[float], list[float]]]:
    """Answer question 3: dynamic, for costs of the judge that are believed to be off by a factor.

    Returns:
        For each of ERRORS the seconds of the best static split over those of dynamic, with each seed: where
        measurements correct the model, and where they do not.
    """
    by_seed = run_all([partial(_gains, num_steps, seed, ERRORS) for seed in SEEDS], processes=processes)
    return [
        (error, [corrected for corrected, _ in gains], [uncorrected for _, uncorrected in gains])
        for error, *gains in zip(ERRORS, *by_seed, strict=True)
    ]


def break_study(*, num_steps: int = 24, seeds: Sequence[int] = SEEDS, processes: int = 1) -> list[SeededComparison]:
    """Break each condition of the scheme, one at a time, on the curriculum, to find where its gain ends."""
    costs = JOBS[_JOB]
    assert costs.reward is not None
    slow = replace(costs, swap=replace(costs.swap, load_s=1200.0))
    large = replace(costs, policy=_on_devices(costs.policy, 16), reward=_on_devices(costs.reward, 16))
    jump, still = SCENARIOS["curriculum"], SCENARIOS["steady"]
    cases = {
        "as it is": (jump, costs),
        "load stays the same": (still, costs),
        "load changes at random every step": (replace(still, noise=0.6), costs),
        "one large wave a step": (SCENARIOS["large_waves"], costs),
        "four replicas in all": (jump, large),
        "a move takes 20 minutes": (jump, slow),
        "swaps take no time": (jump, replace(costs, swap=SwapCosts())),
    }
    return _compare_all([(name, partial(_broken, *case, num_steps)) for name, case in cases.items()], seeds, processes)


def with_judge_error(costs: JobCosts, error: float) -> JobCosts:
    """Return costs whose judge takes `error` times as long."""
    assert costs.reward is not None
    return replace(costs, reward=_scaled(costs.reward, error, decode_base_s=costs.reward.decode_base_s * error))


def _on_devices(costs: EngineCosts, num_devices: int) -> EngineCosts:
    """Return the engine with more devices to a replica, as fast per device."""
    ratio = costs.devices_per_replica / num_devices
    num_seqs = round(costs.max_num_seqs / ratio)
    return _scaled(costs, ratio, devices_per_replica=num_devices, max_num_seqs=num_seqs)


def _scaled(costs: EngineCosts, factor: float, **changed: float) -> EngineCosts:
    """Return the engine with its costs of sequences and tokens times a factor, and other fields changed."""
    names = ("decode_per_sequence_s", "decode_per_context_token_s", "prefill_per_token_s")
    return replace(costs, **{name: getattr(costs, name) * factor for name in names}, **changed)


def _broken(recipe: TraceRecipe, costs: JobCosts, num_steps: int, *, seed: int) -> Simulator:
    batch = SCALES[_NUM_DEVICES].train_batch_size
    trace = sized(recipe, num_steps=num_steps, train_batch_size=batch, seed=seed).trace()
    return scenario(recipe.name, _JOB, _NUM_DEVICES, trace=trace, costs=costs)


def _compare_all(
    cases: Sequence[tuple[str, Callable[..., Simulator]]], seeds: Sequence[int], processes: int
) -> list[SeededComparison]:
    """Compare the strategies in the simulator that each case makes for each seed."""
    tasks = [partial(_compared, name, case, seed) for name, case in cases for seed in seeds]
    found = run_all(tasks, processes=processes)
    return [found[first : first + len(seeds)] for first in range(0, len(found), len(seeds))]


def _compared(name: str, case: Callable[..., Simulator], seed: int) -> Comparison:
    return compare(name, case(seed=seed))


def _gains(num_steps: int, seed: int, errors: Sequence[float]) -> list[tuple[float, float]]:
    """Return for each error the best split's seconds over dynamic's, corrected and not."""
    simulator = scenario("judge_grows", _JOB, _NUM_DEVICES, num_steps=num_steps, seed=seed)
    split_s = simulator.best_split().seconds

    def gain(error: float, config: DynamicPartitionConfig) -> float:
        return split_s / simulator.dynamic(believed=with_judge_error(JOBS[_JOB], error), config=config).seconds

    corrected, uncorrected = DynamicPartitionConfig(), DynamicPartitionConfig(is_corrected=False)
    return [(gain(error, corrected), gain(error, uncorrected)) for error in errors]


def idle_aim(comparisons: Sequence[SeededComparison]) -> str:
    """Return whether gcore's aim of idle devices is met."""
    over = {seeded[0].name: max(map(_points_over_clairvoyant, seeded)) for seeded in comparisons}
    worst = max(over, key=over.__getitem__)
    missed = [name for name, points in over.items() if points > AIM_IDLE]
    return (
        f"aim: dynamic idles at most {AIM_IDLE:g} points more than the clairvoyant on every trace, with every seed; "
        f"most: {over[worst]:.1f} on {worst} ({verdict_on_all(missed)})"
    )


def _points_over_clairvoyant(comparison: Comparison) -> float:
    return 100 * (comparison["dynamic"].idle_share - comparison["clairvoyant"].idle_share)


def _comparison_table(comparisons: Iterable[SeededComparison]) -> str:
    """Return a table of the seconds of a step, the gain of dynamic, and idle shares of all device-seconds."""
    head = (
        *("devices", "trace", "steps", "colocated, a step", "best split", "dynamic", "clairvoyant"),
        *("colocated / dynamic", "split / dynamic", "split / clairvoyant"),
        *("idle: colocated", "split", "dynamic", "clairvoyant", "points over clairvoyant", "moves", "waves with loans"),
    )
    rows: list[Sequence[str]] = []
    for seeded in comparisons:
        by_strategy = list(zip(*(c.runs for c in seeded), strict=True))
        ratios = (("colocated", "dynamic"), ("split", "dynamic"), ("split", "clairvoyant"))
        rows.append(
            (
                *(f"{seeded[0].num_devices:,}", seeded[0].name, str(len(seeded[0]["dynamic"].steps))),
                *(f"{fmean(run.step_s for run in runs):,.0f} s" for runs in by_strategy),
                *(spread([c[one].seconds / c[other].seconds for c in seeded]) for one, other in ratios),
                *(f"{fmean(run.idle_share for run in runs):.1%}" for runs in by_strategy),
                spread([_points_over_clairvoyant(c) for c in seeded], form=".1f"),
                f"{fmean(c['dynamic'].num_moves for c in seeded):.0f}",
                f"{fmean(c['dynamic'].num_loans for c in seeded):.0f}",
            )
        )
    return markdown_table(head, rows)


def _payload_table() -> str:
    """Answer question 2: median payload bytes of a prompt, controllers, and a step's load of the busiest of these."""
    rows: list[Sequence[str]] = []
    for size in (1e5, 8e6, 1e8):
        recipe = replace(SCENARIOS["multimodal"], num_steps=1, payload_median_bytes=size)
        trace = replace(recipe, train_batch_size=SCALES[10_000].train_batch_size).trace()
        for n in (1, 8, 64, 512):
            seconds, held_bytes, uneven = payload_load(trace, num_controllers=n)
            load = (f"{seconds:,.1f} s", f"{held_bytes / 1e9:,.1f} GB", f"{uneven:.2f}")
            rows.append((f"{size / 1e6:g} MB", str(n), *load))
    return markdown_table(("payload of a prompt", "controllers", "busiest, a step", "it holds", "max / mean"), rows)

"""Simulations that answer the questions which G-Core's paper leaves open.

The answers are in packages/gcore-placement/docs/open-questions.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from gcore_bench.placement.study.payloads import ControllerHost, PayloadLoad, payload_load
from gcore_placement import (
    Comparison,
    DynamicPartitionConfig,
    EngineCosts,
    JobCosts,
    SwapCosts,
    TraceRecipe,
    compare,
)
from gcore_placement.simulation.scenarios import JOBS, SCALES, SCENARIOS, scenario, sized

T = TypeVar("T")

ERRORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Believed costs of the judge, over its true ones."""
SEEDS = (1, 2, 3)
"""Seeds of each trace in a study. The policy was tuned on seed 0."""


SeededComparison = Sequence[Comparison]
"""Comparisons on traces of one recipe with several seeds."""


class RunAll(Protocol):
    """Calls independent tasks, for example in several processes, and returns their results in the same order."""

    def __call__(self, tasks: Sequence[Callable[[], T]], /) -> list[T]: ...


def in_turn(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Call the tasks in this process, one after the other."""
    return [task() for task in tasks]


def drift_study(
    sizes: Sequence[tuple[int, int | None, Sequence[str]]],
    *,
    job: str = "32B",
    seeds: Sequence[int] = SEEDS,
    run_all: RunAll = in_turn,
) -> list[SeededComparison]:
    """Answer question 1: dynamic against the best static split, for devices, steps and scenarios."""
    tasks = [
        partial(_compared, name, job, num_devices, num_steps, seed)
        for num_devices, num_steps, names in sizes
        for name in names
        for seed in seeds
    ]
    return _by_seeds(run_all(tasks), seeds)


def payload_study(
    controllers: Sequence[int] = (1, 8, 64, 512), *, num_devices: int = 10_000, host: ControllerHost | None = None
) -> list[tuple[float, int, PayloadLoad]]:
    """Answer question 2: median payload bytes of a prompt, controllers, and a step's load of the busiest of these."""
    rows: list[tuple[float, int, PayloadLoad]] = []
    for median_bytes in (1e5, 8e6, 1e8):
        recipe = replace(
            SCENARIOS["multimodal"],
            num_steps=1,
            train_batch_size=SCALES[num_devices].train_batch_size,
            payload_median_bytes=median_bytes,
        )
        trace = recipe.trace()
        rows += [(median_bytes, n, payload_load(trace, 0, num_controllers=n, host=host)) for n in controllers]
    return rows


def prediction_study(
    name: str = "judge_grows",
    *,
    job: str = "32B",
    num_devices: int = 64,
    num_steps: int = 24,
    seeds: Sequence[int] = SEEDS,
    run_all: RunAll = in_turn,
) -> list[tuple[float, list[float], list[float]]]:
    """Answer question 3: dynamic, for costs of the judge that are believed to be off by a factor.

    Returns:
        For each of ERRORS the seconds of the best static split over those of dynamic, with each seed: where
        measurements correct the model, and where they do not.
    """
    by_seed = run_all([partial(_gains, name, job, num_devices, num_steps, seed, ERRORS) for seed in seeds])
    return [
        (error, [corrected for corrected, _ in gains], [uncorrected for _, uncorrected in gains])
        for error, *gains in zip(ERRORS, *by_seed, strict=True)
    ]


def break_study(
    *,
    job: str = "32B",
    num_devices: int = 64,
    num_steps: int = 24,
    seeds: Sequence[int] = SEEDS,
    run_all: RunAll = in_turn,
) -> list[SeededComparison]:
    """Break each condition of the scheme, one at a time, on the curriculum, to find where its gain ends."""
    costs, batch = JOBS[job], SCALES[num_devices].train_batch_size
    assert costs.reward is not None
    slow = replace(costs, swap=replace(costs.swap, load_s=1200.0))
    large = replace(costs, policy=_on_devices(costs.policy, 16), reward=_on_devices(costs.reward, 16))
    jump, still = SCENARIOS["curriculum"], SCENARIOS["steady"]
    cases = (
        ("as it is", jump, costs),
        ("load stays the same", still, costs),
        ("load changes at random every step", replace(still, noise=0.6), costs),
        ("one large wave a step", SCENARIOS["large_waves"], costs),
        ("four replicas in all", jump, large),
        ("a move takes 20 minutes", jump, slow),
        ("swaps take no time", jump, replace(costs, swap=SwapCosts())),
    )
    tasks = [
        partial(
            _compared_recipe,
            name,
            sized(recipe, num_steps=num_steps, train_batch_size=batch, seed=seed),
            job,
            num_devices,
            changed,
        )
        for name, recipe, changed in cases
        for seed in seeds
    ]
    return _by_seeds(run_all(tasks), seeds)


def with_judge_error(costs: JobCosts, error: float) -> JobCosts:
    """Return costs whose judge takes `error` times as long."""
    assert costs.reward is not None
    reward = replace(
        costs.reward,
        decode_base_s=costs.reward.decode_base_s * error,
        decode_per_sequence_s=costs.reward.decode_per_sequence_s * error,
        decode_per_context_token_s=costs.reward.decode_per_context_token_s * error,
        prefill_per_token_s=costs.reward.prefill_per_token_s * error,
    )
    return replace(costs, reward=reward)


def _on_devices(costs: EngineCosts, num_devices: int) -> EngineCosts:
    """Return the engine with more devices to a replica, as fast per device."""
    ratio = costs.devices_per_replica / num_devices
    return replace(
        costs,
        devices_per_replica=num_devices,
        max_num_seqs=round(costs.max_num_seqs / ratio),
        decode_per_sequence_s=costs.decode_per_sequence_s * ratio,
        decode_per_context_token_s=costs.decode_per_context_token_s * ratio,
        prefill_per_token_s=costs.prefill_per_token_s * ratio,
    )


def _compared(name: str, job: str, num_devices: int, num_steps: int | None, seed: int) -> Comparison:
    return compare(name, scenario(name, job, num_devices, num_steps=num_steps, seed=seed))


def _compared_recipe(name: str, recipe: TraceRecipe, job: str, num_devices: int, costs: JobCosts) -> Comparison:
    return compare(name, scenario(recipe.name, job, num_devices, trace=recipe.trace(), costs=costs))


def _gains(
    name: str, job: str, num_devices: int, num_steps: int, seed: int, errors: Sequence[float]
) -> list[tuple[float, float]]:
    """Return for each error the best split's seconds over dynamic's, corrected and not."""
    simulator = scenario(name, job, num_devices, num_steps=num_steps, seed=seed)
    split_s = simulator.best_split().seconds
    configs = DynamicPartitionConfig(), DynamicPartitionConfig(is_corrected=False)
    gains: list[tuple[float, float]] = []
    for error in errors:
        believed = with_judge_error(JOBS[job], error)
        corrected, uncorrected = (
            split_s / simulator.dynamic(believed=believed, config=config).seconds for config in configs
        )
        gains.append((corrected, uncorrected))
    return gains


def _by_seeds(comparisons: Sequence[Comparison], seeds: Sequence[int]) -> list[SeededComparison]:
    return [comparisons[first : first + len(seeds)] for first in range(0, len(comparisons), len(seeds))]

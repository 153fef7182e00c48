"""The questions that G-Core's paper leaves open, asked of the simulator. Answers are in docs/open-questions.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from gcore_bench.placement.study.payloads import ControllerHost, PayloadLoad, payload_load
from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts
from gcore_placement.partition.dynamic_partition import DynamicPartitionConfig
from gcore_placement.simulation.scenarios import JOBS, SCALES, SCENARIOS, scenario, sized
from gcore_placement.simulation.simulator import Simulator, StrategyRun
from gcore_placement.workload.trace_recipes import TraceRecipe

T = TypeVar("T")

ERRORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""What the judge is believed to cost, over what it does."""
SEEDS = (1, 2, 3)
"""Of every trace in a study. The policy was made with seed 0 in view."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The strategies on one trace."""

    name: str
    num_devices: int
    colocated: StrategyRun
    best_split: StrategyRun
    dynamic: StrategyRun
    clairvoyant: StrategyRun

    @property
    def runs(self) -> tuple[StrategyRun, StrategyRun, StrategyRun, StrategyRun]:
        return self.colocated, self.best_split, self.dynamic, self.clairvoyant


SeededComparison = Sequence[Comparison]
"""The same, of one trace's recipe with several seeds."""


class RunAll(Protocol):
    """Calls what does not depend on each other, such as in several processes; what was returned, in the same order."""

    def __call__(self, tasks: Sequence[Callable[[], T]], /) -> list[T]: ...


def in_turn(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """`RunAll` here, one after the other."""
    return [task() for task in tasks]


def compare(name: str, simulator: Simulator) -> Comparison:
    """All strategies on a simulator's trace."""
    return Comparison(
        name=name,
        num_devices=simulator.space.num_devices,
        colocated=simulator.colocated(),
        clairvoyant=simulator.clairvoyant(),
        best_split=simulator.best_split(),
        dynamic=simulator.dynamic(),
    )


def drift_study(
    sizes: Sequence[tuple[int, int | None, Sequence[str]]],
    *,
    job: str = "32B",
    seeds: Sequence[int] = SEEDS,
    run_all: RunAll = in_turn,
) -> list[SeededComparison]:
    """Question 1: dynamic against the best static split, for devices, steps and scenarios."""
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
    """Question 2: payload bytes of a prompt (median), controllers, and what a step is to the busiest of these."""
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
    """Question 3: dynamic, for costs of the judge that are believed to be off by a factor.

    Returns:
        For each of ERRORS, what the best static split takes over what dynamic takes, with each seed: where measurements
        correct the model, and where not.
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
    """Where the scheme's gain ends: each of its conditions broken, one at a time, on the scenario of a curriculum."""
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
    """Costs whose judge takes `error` times as long."""
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
    """The same engine on more devices to a replica, as fast for each of them."""
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
    """For each error the best split's seconds over dynamic's, corrected and not."""
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

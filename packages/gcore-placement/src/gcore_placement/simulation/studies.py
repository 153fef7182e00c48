"""The questions that G-Core's paper leaves open, asked of the simulator. Answers are in docs/open-questions.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts
from gcore_placement.dynamic_partition import DynamicPartitionConfig
from gcore_placement.simulation.payloads import ControllerHost, PayloadLoad, payload_load
from gcore_placement.simulation.scenarios import JOBS, SCALES, SCENARIOS, scenario, sized
from gcore_placement.simulation.simulator import Simulator, StrategyRun
from gcore_placement.simulation.trace_recipes import TraceRecipe

Progress = Callable[[int], None]

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
    progress: Progress | None = None,
) -> list[SeededComparison]:
    """Question 1: dynamic against the best static split, for devices, steps and scenarios."""
    return [
        [
            compare(name, scenario(name, job, num_devices, num_steps=num_steps, seed=seed, progress=progress))
            for seed in seeds
        ]
        for num_devices, num_steps, names in sizes
        for name in names
    ]


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
    progress: Progress | None = None,
) -> list[tuple[float, list[float], list[float]]]:
    """Question 3: dynamic, for costs of the judge that are believed to be off by a factor.

    Returns:
        For each of ERRORS, what the best static split takes over what dynamic takes, with each seed: where measurements
        correct the model, and where not.
    """
    uncorrected = DynamicPartitionConfig(is_corrected=False)
    simulators = [scenario(name, job, num_devices, num_steps=num_steps, seed=seed, progress=progress) for seed in seeds]
    splits = [simulator.best_split().seconds for simulator in simulators]
    rows: list[tuple[float, list[float], list[float]]] = []
    for error in ERRORS:
        believed = with_judge_error(JOBS[job], error)
        runs = [
            [simulator.dynamic(believed=believed, config=config).seconds for simulator in simulators]
            for config in (None, uncorrected)
        ]
        gains = [[split / own for split, own in zip(splits, seconds, strict=True)] for seconds in runs]
        rows.append((error, gains[0], gains[1]))
    return rows


def break_study(
    *,
    job: str = "32B",
    num_devices: int = 64,
    num_steps: int = 24,
    seeds: Sequence[int] = SEEDS,
    progress: Progress | None = None,
) -> list[SeededComparison]:
    """Where the scheme's gain ends: each of its conditions broken, one at a time, on the scenario of a curriculum."""
    costs, batch = JOBS[job], SCALES[num_devices].train_batch_size
    assert costs.reward is not None
    slow = replace(costs, swap=replace(costs.swap, load_s=1200.0))
    large = replace(costs, policy=_on_devices(costs.policy, 16), reward=_on_devices(costs.reward, 16))
    jump, still = SCENARIOS["curriculum"], SCENARIOS["steady"]

    def compared(name: str, recipe: TraceRecipe, changed: JobCosts = costs) -> SeededComparison:
        traces = [sized(recipe, num_steps=num_steps, train_batch_size=batch, seed=seed).trace() for seed in seeds]
        return [
            compare(name, scenario(recipe.name, job, num_devices, trace=trace, costs=changed, progress=progress))
            for trace in traces
        ]

    return [
        compared("as it is", jump),
        compared("load stays the same", still),
        compared("load changes at random every step", replace(still, noise=0.6)),
        compared("one large wave a step", SCENARIOS["large_waves"]),
        compared("four replicas in all", jump, large),
        compared("a move takes 20 minutes", jump, slow),
        compared("swaps take no time", jump, replace(costs, swap=SwapCosts())),
    ]


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

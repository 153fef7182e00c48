"""The questions that G-Core's paper leaves open, asked of the simulator. Answers are in docs/open-questions.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts
from gcore_placement.dynamic_partition import DynamicPartitionConfig
from gcore_placement.simulation.payloads import ControllerHost, PayloadLoad, payload_load
from gcore_placement.simulation.scenarios import JOBS, SCALES, SCENARIOS, scenario
from gcore_placement.simulation.simulator import Simulator, StrategyRun

Progress = Callable[[int], None]

ERRORS = (1 / 8, 1 / 4, 1 / 2, 1 / 1.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""What the judge is believed to cost, over what it does."""


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
    sizes: Sequence[tuple[int, int, Sequence[str]]], *, job: str = "32B", progress: Progress | None = None
) -> list[Comparison]:
    """Question 1: dynamic against the best static split, for devices, steps and scenarios."""
    return [
        compare(name, scenario(name, job, num_devices, num_steps=num_steps, progress=progress))
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
    num_steps: int = 40,
    progress: Progress | None = None,
) -> tuple[StrategyRun, list[tuple[float, StrategyRun, StrategyRun]]]:
    """Question 3: dynamic, for costs of the judge that are believed to be off by a factor.

    Returns:
        The best static split, and for each of ERRORS dynamic where measurements correct the model, and where not.
    """
    simulator = scenario(name, job, num_devices, num_steps=num_steps, progress=progress)
    rows: list[tuple[float, StrategyRun, StrategyRun]] = []
    for error in ERRORS:
        believed = with_judge_error(JOBS[job], error)
        corrected = simulator.dynamic(believed=believed)
        uncorrected = simulator.dynamic(believed=believed, config=DynamicPartitionConfig(is_corrected=False))
        rows.append((error, corrected, uncorrected))
    return simulator.best_split(), rows


def break_study(
    *, job: str = "32B", num_devices: int = 64, num_steps: int = 30, progress: Progress | None = None
) -> list[Comparison]:
    """Where the scheme's gain ends: each of its conditions broken, one at a time, on the scenario of a jump."""
    costs, size = JOBS[job], SCALES[num_devices]
    assert costs.reward is not None

    def simulated(name: str, *, changed: JobCosts | None = None, noise: float = 0.03) -> Simulator:
        recipe = replace(SCENARIOS[name], num_steps=num_steps, train_batch_size=size.train_batch_size, noise=noise)
        if recipe.judge_median.jump_step is not None:
            recipe = replace(recipe, judge_median=replace(recipe.judge_median, jump_step=num_steps // 2))
        return scenario(name, job, num_devices, trace=recipe.trace(), costs=changed, progress=progress)

    slow = replace(costs, swap=replace(costs.swap, load_s=1200.0))
    large = replace(costs, policy=_on_devices(costs.policy, 16), reward=_on_devices(costs.reward, 16))
    return [
        compare("as it is", simulated("jump")),
        compare("load stays the same", simulated("steady")),
        compare("load changes at random every step", simulated("steady", noise=0.6)),
        compare("four replicas in all", simulated("jump", changed=large)),
        compare("a move takes 20 minutes", simulated("jump", changed=slow)),
        compare("swaps take no time", simulated("jump", changed=replace(costs, swap=SwapCosts()))),
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

"""Where a simulated step's seconds and device-seconds go."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_placement.costs import JobCosts, TrainingCosts
from gcore_placement.partition import Partition
from gcore_placement.role_load import RoleLoad, engine_load
from gcore_placement.simulation.waves import WaveOutcome, reward_costs

WORK = ("generation", "reward", "preparation", "training", "weight_sync")
IDLE = ("long_tail", "waiting_for_reward", "waiting_for_weights", "swap", "imbalance", "unassigned")
"""Causes of idleness that a simulation knows, by the ledger's names."""

_HELD_UP = 0.05
"""A reward that is done later than without any contention, by more than this share, held up the step itself."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step under a strategy."""

    seconds: float
    stage_s: dict[str, float]
    """Of its stages: swap, generation (with reward), preparation, training and weight_sync."""
    device_s: dict[str, float]
    """Device-seconds of each of WORK and IDLE; they add up to devices * seconds."""
    partition: Partition | None
    """None: the roles take turns on all devices."""
    num_moved_devices: int = 0
    """That changed their role before it."""


def whole_step(
    costs: JobCosts,
    waves: Sequence[WaveOutcome],
    *,
    num_devices: int,
    tokens_and_pairs: tuple[float, float],
    partition: Partition | None,
    num_moved_devices: int = 0,
) -> SimulatedStep:
    """A step of waves, and what all devices do together after them: preparation, training and weight sync.

    Engines wake before the waves and sleep after them; where roles take turns, also between waves.
    """
    swap_s = (costs.swap.sleep_s + costs.swap.wake_s) * (len(waves) if partition is None else 1)
    prepare_s, train_s = training_seconds(costs.training, tokens_and_pairs, num_devices)
    stage_s = {
        "swap": swap_s,
        "generation": sum(wave.seconds for wave in waves),
        "preparation": prepare_s,
        "training": train_s,
        "weight_sync": costs.training.sync_s,
    }
    policy_devices = num_devices if partition is None else partition.policy_devices
    device_s = {name: sum(wave.device_s.get(name, 0.0) for wave in waves) for name in (*WORK, *IDLE)}
    device_s["swap"] += num_devices * swap_s
    device_s["preparation"] += num_devices * prepare_s
    device_s["training"] += num_devices * train_s
    device_s["weight_sync"] += policy_devices * costs.training.sync_s
    device_s["waiting_for_weights"] += (num_devices - policy_devices) * costs.training.sync_s
    return SimulatedStep(
        seconds=sum(stage_s.values()),
        stage_s=stage_s,
        device_s=device_s,
        partition=partition,
        num_moved_devices=num_moved_devices,
    )


def training_seconds(
    costs: TrainingCosts, tokens_and_pairs: tuple[float, float], num_devices: int
) -> tuple[float, float]:
    """Seconds of preparation and of training, by the law of `TrainingCosts`."""
    tokens, pairs = tokens_and_pairs
    pass_s = (costs.per_token_s * tokens + costs.per_pair_s * pairs) / num_devices
    return costs.num_forward_passes * costs.forward_share * pass_s, costs.base_s + pass_s


def step_loads(believed: JobCosts, waves: Sequence[WaveOutcome]) -> tuple[RoleLoad, RoleLoad]:
    """What the live policy would be told of a step: of the policy, and of the reward.

    Args:
        believed: the costs as a model has them, which need not be those of the simulation.
        waves: of the step, side by side.
    """
    policy = [engine_load(believed.policy, wave.policy_work) for wave in waves]
    reward = [engine_load(reward_costs(believed), wave.reward_work) for wave in waves]
    uncontended_s = sum(wave.uncontended_s for wave in waves)
    generation_s = sum(wave.generation_s for wave in waves)
    total_s = sum(wave.seconds for wave in waves)
    return (
        RoleLoad(
            work_device_s=sum(work for work, _ in policy),
            # The last response has yet to be judged.
            floor_s=sum(floor for _, floor in policy) + uncontended_s - generation_s,
            busy_device_s=sum(wave.device_s["generation"] for wave in waves),
            finish_s=uncontended_s,
            was_waiting=False,
        ),
        RoleLoad(
            work_device_s=sum(work for work, _ in reward),
            floor_s=sum(floor for _, floor in reward) + sum(wave.first_response_s for wave in waves),
            busy_device_s=sum(wave.device_s["reward"] for wave in waves),
            finish_s=total_s,
            was_waiting=total_s <= uncontended_s * (1 + _HELD_UP),
        ),
    )

"""The account of a simulated step: its seconds by stage, and its device-seconds by work and cause of idleness."""

from collections.abc import Sequence
from dataclasses import dataclass

from gcore_placement.costs import JobCosts
from gcore_placement.ledger import WORK as _WORK_OF_STAGE
from gcore_placement.partition.role_load import RoleLoad, engine_load
from gcore_placement.partition.space import Partition
from gcore_placement.simulation.waves import WaveOutcome, reward_costs

WORK = tuple(_WORK_OF_STAGE.values())
"""Columns of work, as in the ledger of a run."""
IDLE = ("long_tail", "waiting_for_reward", "waiting_for_weights", "swap", "imbalance", "unassigned")
"""Causes of idleness that a simulation distinguishes, by the ledger's names."""

_HELD_UP = 0.1
"""A reward that is done later than without any contention, by more than this share, held up the wave itself. Where both
roles take about as long, the last judgements of a wave meet a full engine, and that is not work."""


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """The account of one step under a strategy."""

    seconds: float
    stage_s: dict[str, float]
    """Seconds by stage: swap, generation (with reward), preparation, training and weight_sync."""
    device_s: dict[str, float]
    """Device-seconds of each of WORK and IDLE; they add up to devices * seconds."""
    partitions: tuple[Partition, ...] = ()
    """The partitions of its waves; empty: the roles take turns on all devices."""
    moved_devices: tuple[int, ...] = ()
    """Devices that changed their role before each wave."""


def whole_step(
    costs: JobCosts,
    waves: Sequence[WaveOutcome],
    *,
    num_devices: int,
    tokens_and_pairs: tuple[float, float],
    partitions: Sequence[Partition] = (),
    moved_devices: Sequence[int] = (),
) -> SimulatedStep:
    """Combine waves into a step, with the preparation, training and weight sync of all devices after them.

    Engines wake before the waves and sleep after them; where roles take turns, also between waves.
    """
    swap_s = (costs.swap.sleep_s + costs.swap.wake_s) * (1 if partitions else len(waves))
    prepare_s, train_s = costs.training.seconds(*tokens_and_pairs, num_devices)
    stage_s = {
        "swap": swap_s,
        "generation": sum(wave.seconds for wave in waves),
        "preparation": prepare_s,
        "training": train_s,
        "weight_sync": costs.training.sync_s,
    }
    policy_devices = partitions[-1].policy_devices if partitions else num_devices
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
        partitions=tuple(partitions),
        moved_devices=tuple(moved_devices),
    )


def wave_loads(believed: JobCosts, wave: WaveOutcome) -> tuple[RoleLoad, RoleLoad]:
    """Return the loads of a wave that a live run would observe: of the policy, and of the reward.

    Args:
        believed: the costs of the model in use, which need not be those of the simulation.
        wave: a wave on a partition.
    """
    policy_work, policy_floor_s = engine_load(believed.policy, wave.policy_work)
    reward_work, reward_floor_s = engine_load(reward_costs(believed), wave.reward_work)
    return (
        RoleLoad(
            work_device_s=policy_work,
            # The last response has yet to be judged.
            floor_s=policy_floor_s + wave.uncontended_s - wave.generation_s,
            busy_device_s=wave.device_s["generation"],
            finish_s=wave.uncontended_s,
            was_waiting=False,
        ),
        RoleLoad(
            work_device_s=reward_work,
            floor_s=reward_floor_s + wave.first_response_s,
            busy_device_s=wave.device_s["reward"],
            finish_s=wave.seconds,
            was_waiting=wave.seconds <= wave.uncontended_s * (1 + _HELD_UP),
        ),
    )

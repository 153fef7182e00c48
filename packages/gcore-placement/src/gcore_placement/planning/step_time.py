"""Predict the seconds of a step by stage, from a job's costs, a strategy and a partition."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.errors import PlacementError, refusal
from gcore_placement.planning.engine_costs import EngineLaws
from gcore_placement.strategies import PLANNED, Strategy, strategy_traits
from gcore_placement.workload.job import Job
from gcore_placement.workload.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by stage, one after the other."""

    generation_s: float
    reward_s: float
    """Seconds after generation, where both co-exist."""
    swap_s: float
    """Seconds in which engines sleep and wake."""
    preparation_s: float
    training_s: float
    weight_sync_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def predict_step(
    costs: JobCosts, job: Job, *, strategy: Strategy, num_devices: int, policy_devices: int, reward_devices: int
) -> StepTime:
    """Predict the mean time of a step.

    Colocated: each wave of sampling wakes the policy, generates, swaps it for the judge, and rewards. Split and
    dynamic: both run at the same time, a wave takes as long as the slower one, and the last response is judged after
    that; one sleep and one wake-up a step free memory for training. A dynamic partition is taken where it settles.

    Args:
        costs: of the policy's engine, the judge's, and training.
        num_devices: all devices; they train together.
        policy_devices: devices that generate; all in colocated.
        reward_devices: devices of the judge; all in colocated, 0 without a judge.

    Raises:
        PlacementError: the strategy is not planned, or devices do not hold one replica.
    """
    check_planned(strategy)
    _check_holds("policy_devices", policy_devices, costs.policy, num_devices)
    generation = generation_seconds(costs.policy, job, _replicas(policy_devices, costs.policy))
    reward = np.zeros_like(generation)
    if costs.reward is not None:
        _check_holds("reward_devices", reward_devices, costs.reward, num_devices)
        judging = reward_seconds(costs.reward, job, _replicas(reward_devices, costs.reward))
        last_s = last_judgement_s(costs.reward, job)
        reward = added_by_reward(generation, judging, strategy=strategy, last_s=last_s)
    swaps = num_swaps(job, strategy=strategy)
    preparation_s, training_s = costs.training.seconds(job.training_tokens, job.training_pairs, num_devices)
    return StepTime(
        generation_s=float(job.wave_chances @ generation[:, 0]),
        reward_s=float(job.wave_chances @ reward[:, 0]),
        swap_s=swaps * (costs.swap.sleep_s + costs.swap.wake_s),
        preparation_s=preparation_s,
        training_s=training_s,
        weight_sync_s=costs.training.sync_s,
    )


def check_planned(strategy: Strategy) -> None:
    """Raise PlacementError unless the strategy is one that plans choose among."""
    if strategy not in PLANNED:
        raise refusal("strategy", strategy, f"one of {', '.join(PLANNED)}")


def added_by_reward(
    generation: NDArray[np.float64], judging: NDArray[np.float64], *, strategy: Strategy, last_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds by which judging makes each wave longer than its generation: [num_waves, ...]."""
    if strategy_traits(strategy).is_time_shared:
        return judging
    return np.maximum(judging - generation, 0.0) + last_s


def num_swaps(job: Job, *, strategy: Strategy) -> float:
    """Return the mean number of times that engines sleep and wake in a step."""
    return (
        2 * float(job.wave_chances.sum()) if job.judge is not None and strategy_traits(strategy).is_time_shared else 1.0
    )


def generation_seconds(
    engine: EngineCosts | EngineLaws, job: Job, num_replicas: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of each wave on each number of replicas, a prompt read once: [num_waves, num_replicas]."""
    return np.stack(
        [
            _engine_seconds(
                engine,
                num_replicas,
                num_sequences=prompts * job.n,
                read_tokens=prompts * job.prompt_lengths.mean,
                prompt_mean=job.prompt_lengths.mean,
                lengths=job.response_lengths,
            )
            for prompts in job.wave_prompts.tolist()
        ]
    )


def reward_seconds(
    engine: EngineCosts | EngineLaws, job: Job, num_replicas: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the seconds of judging each wave on each number of replicas: [num_waves, num_replicas]."""
    read, written = _judge_lengths(job)
    return np.stack(
        [
            _engine_seconds(
                engine,
                num_replicas,
                num_sequences=prompts * job.n,
                read_tokens=prompts * job.n * read.mean,
                prompt_mean=read.mean,
                lengths=written,
            )
            for prompts in job.wave_prompts.tolist()
        ]
    )


def last_judgement_s(engine: EngineCosts | EngineLaws, job: Job) -> NDArray[np.float64]:
    """Return the seconds of the last judgement, which nothing hides, of a response read and judged alone."""
    read, written = _judge_lengths(job)
    return np.asarray(engine.prefill_per_token_s * read.longest + engine.decode_base_s * written.mean)


def _engine_seconds(
    engine: EngineCosts | EngineLaws,
    num_replicas: NDArray[np.float64],
    *,
    num_sequences: float,
    read_tokens: float,
    prompt_mean: float,
    lengths: Lengths,
) -> NDArray[np.float64]:
    """Sum the law of `EngineCosts` over the decoding steps of the replica with the longest sequence.

    Each sequence adds its share to as many steps as it has tokens. There are as many steps as the longest has tokens;
    or, where sequences wait, as many as pass until the last has started and all that then run have ended.
    """
    each = np.maximum(num_sequences / num_replicas, min(1.0, num_sequences))
    steps = np.full(each.shape, lengths.expected_longest(num_sequences))
    waiting = each > engine.max_num_seqs
    if waiting.any():
        left = lengths.remaining()
        # Where some laws make sequences wait, all are for the most sequences that memory holds.
        most = float(np.max(engine.max_num_seqs))
        last_begins = each * lengths.mean / engine.max_num_seqs - left.mean
        drained = last_begins + left.expected_longest(most)
        steps = np.where(waiting, np.maximum(steps, drained), steps)
    context_tokens = prompt_mean * lengths.mean + (lengths.mean_square + lengths.mean) / 2
    return (
        engine.decode_base_s * steps
        + engine.decode_per_sequence_s * each * lengths.mean
        + engine.decode_per_context_token_s * each * context_tokens
        + engine.prefill_per_token_s * each * (read_tokens / num_sequences)
    )


def _judge_lengths(job: Job) -> tuple[Lengths, Lengths]:
    if job.judge_prompt_lengths is None or job.judge_lengths is None:
        raise PlacementError("job.judge is None; expected a model where costs.reward is given")
    return job.judge_prompt_lengths, job.judge_lengths


def _replicas(devices: int, engine: EngineCosts) -> NDArray[np.float64]:
    return np.array([devices // engine.devices_per_replica], dtype=np.float64)


def _check_holds(field: str, devices: int, engine: EngineCosts, num_devices: int) -> None:
    if not engine.devices_per_replica <= devices <= num_devices:
        raise refusal(field, devices, f"at least a replica ({engine.devices_per_replica}), at most all ({num_devices})")

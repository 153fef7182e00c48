"""Seconds of a step under a strategy and a partition, by stage, from a job's costs."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.errors import PlacementError, refusal
from gcore_placement.planning.engine_costs import EngineLaws
from gcore_placement.workload.job import Job
from gcore_placement.workload.lengths import Lengths

Strategy = Literal["colocated", "split", "dynamic"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by stage, one after the other."""

    generation_s: float
    reward_s: float
    """Beyond generation, where the two co-exist."""
    swap_s: float
    """Engines sleep and wake."""
    preparation_s: float
    training_s: float
    weight_sync_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def predict_step(
    costs: JobCosts, job: Job, *, strategy: Strategy, num_devices: int, policy_devices: int, reward_devices: int
) -> StepTime:
    """The step's mean time.

    Colocated: every wave of sampling wakes the policy, generates, swaps it for the judge, and rewards. Split and
    dynamic: the two run beside each other, a wave takes what the slower takes, and the last response is still judged;
    one sleep and one waking a step make room for training. A dynamic partition is taken where it settles.

    Args:
        costs: of the policy's engine, the judge's, and training.
        num_devices: all; they train together.
        policy_devices: that generate; all of them in colocated.
        reward_devices: of the judge; all of them in colocated, 0 without one.

    Raises:
        PlacementError: a strategy that is not known, or devices that do not hold one replica.
    """
    if strategy not in STRATEGIES:
        raise refusal("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
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


def added_by_reward(
    generation: NDArray[np.float64], judging: NDArray[np.float64], *, strategy: Strategy, last_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds by which judging makes each wave longer than its generation, of the arrays' shape [num_waves, ...]."""
    if strategy == "colocated":
        return judging
    return np.maximum(judging - generation, 0.0) + last_s


def num_swaps(job: Job, *, strategy: Strategy) -> float:
    """How often engines sleep and wake in a step, in the mean."""
    return 2 * float(job.wave_chances.sum()) if job.judge is not None and strategy == "colocated" else 1.0


def generation_seconds(
    engine: EngineCosts | EngineLaws, job: Job, num_replicas: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of each wave of sampling on each number of replicas, [num_waves, num_replicas]; a group's prompt is read once."""
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
    """Of judging each wave's responses on each number of replicas, [num_waves, num_replicas]."""
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
    """Of the last response, whose judgement nothing hides: it is read and judged alone; [num_laws], or a scalar."""
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
    """The sum of `EngineCosts`' law over the decoding steps of the replica with the longest sequence.

    Each sequence adds its share to as many steps as it has tokens. There are as many steps as the longest has tokens;
    or, where sequences wait, as it takes until the last has begun and what is then running has ended.
    """
    each = np.maximum(num_sequences / num_replicas, min(1.0, num_sequences))
    steps = np.full(each.shape, lengths.expected_longest(num_sequences))
    waiting = each > engine.max_num_seqs
    if waiting.any():
        left = lengths.remaining()
        # Laws of which some make sequences wait are all for the most that memory holds.
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

"""Simulate waves of sampling: generated and judged side by side on a partition, or in turns on all devices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.partition.space import EngineWork, Partition
from gcore_placement.simulation.continuous_batching import EngineRun, Requests, run_replicas
from gcore_placement.workload.traces import Wave


def policy_requests(waves: Sequence[Wave], num_replicas: int) -> Requests:
    """Return the responses in order of groups, from second 0: each replica gets an equal run of neighbours.

    So most groups stay together, and on each replica a group's prompt is computed once.
    """
    parts: list[tuple[NDArray[np.float64], ...]] = []
    replicas: list[NDArray[np.intp]] = []
    for number, wave in enumerate(waves):
        num_groups, n = wave.response_length.shape
        index = np.arange(num_groups * n)
        replica = index * num_replicas // len(index)
        prompt = np.repeat(wave.prompt_length, n)
        is_first = (index % n == 0) | (np.diff(replica, prepend=-1) > 0)
        replicas.append(number * num_replicas + replica)
        parts.append((np.where(is_first, prompt, 0.0), prompt, wave.response_length.ravel()))
    prefill, context, length = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Requests(
        replica=np.concatenate(replicas),
        arrival=np.zeros(len(length)),
        prefill=prefill,
        context=context,
        length=length,
    )


def judge_requests(waves: Sequence[Wave], ready_Q: NDArray[np.float64], num_replicas: int) -> Requests:
    """Return the judgements, dealt in turn to a wave's replicas as responses finish; each reads prompt and response."""
    wave_Q = np.repeat(np.arange(len(waves)), [wave.response_length.size for wave in waves])
    read = np.concatenate([(w.prompt_length[:, None] + w.response_length).ravel() for w in waves])
    length = np.concatenate([wave.judge_length.ravel() for wave in waves])
    order = np.lexsort((ready_Q, wave_Q))
    turn = np.arange(len(order)) - wave_starts(waves)[wave_Q]
    return Requests(
        replica=wave_Q * num_replicas + turn % num_replicas,
        arrival=ready_Q[order],
        prefill=read[order],
        context=read[order],
        length=length[order],
    )


def wave_starts(waves: Sequence[Wave]) -> NDArray[np.intp]:
    """Return the index of the first request of each wave: [W]."""
    sizes = np.array([wave.response_length.size for wave in waves])
    return np.cumsum(sizes) - sizes


def context_tokens(requests: Requests) -> NDArray[np.float64]:
    """Return the sum over a request's tokens of the tokens that its sequence holds: [Q]."""
    return requests.context * requests.length + requests.length**2 / 2


_MAX_SLOTS = 4_000_000
"""Most running sequences to simulate at once, which bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class WaveOutcome:
    """The outcome of one wave."""

    seconds: float
    device_s: dict[str, float]
    """Device-seconds of work and idleness by the ledger's names; they add up to devices * seconds."""
    generation_s: float
    """Seconds until all was generated."""
    first_response_s: float
    """Seconds until a first response could be judged."""
    uncontended_s: float
    """Seconds until all would have been judged, had each judgement had a replica to itself."""
    policy_work: EngineWork
    reward_work: EngineWork


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Replicas that have just changed their role, the last of their new role: they start late in the first wave."""

    policy_replicas: int = 0
    reward_replicas: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WaveRuns:
    """Both engines' runs of the same waves, in seconds from each wave's start."""

    responses: Requests
    generated: EngineRun
    judgements: Requests
    judged: EngineRun


def side_by_side(
    costs: JobCosts, waves: Sequence[Wave], partition: Partition, moved: Moved | None = None
) -> list[WaveOutcome]:
    """Simulate waves with policy and reward on disjoint devices; each response is judged once it is done."""
    outcomes: list[WaveOutcome] = []
    reward = reward_costs(costs)
    for chunk in _chunks(waves, costs, partition.policy_replicas, partition.reward_replicas):
        late = (moved if not outcomes else None) or Moved()
        runs = run_side_by_side(costs, chunk, partition, late)
        starts = wave_starts(chunk)
        generation_W = np.maximum.reduceat(runs.generated.finish, starts)
        end_W = np.maximum.reduceat(runs.judged.finish, starts)
        late_W = np.zeros(len(chunk))
        late_W[0] = late.load_s
        after_W, late_before_W = end_W - generation_W, np.minimum(late_W, generation_W)
        late_after_W = np.minimum(late_W, end_W) - late_before_W
        late_policy = late.policy_replicas * costs.policy.devices_per_replica
        late_reward = late.reward_replicas * reward.devices_per_replica

        replicas = partition.policy_replicas, partition.reward_replicas
        generating_W = _busy_s(runs.generated, replicas[0], end_W) * costs.policy.devices_per_replica
        judging_W = _busy_s(runs.judged, replicas[1], end_W) * reward.devices_per_replica
        judging_before_W = _busy_s(runs.judged, replicas[1], generation_W) * reward.devices_per_replica
        policy_tail_W = generation_W * partition.policy_devices - generating_W - late_policy * late_before_W
        reward_tail_W = after_W * partition.reward_devices - (judging_W - judging_before_W) - late_reward * late_after_W
        columns = {
            "generation": generating_W,
            "reward": judging_W,
            "swap": (late_policy + late_reward) * (late_before_W + late_after_W),
            "long_tail": policy_tail_W + reward_tail_W,
            "waiting_for_reward": after_W * partition.policy_devices - late_policy * late_after_W,
            "imbalance": generation_W * partition.reward_devices - judging_before_W - late_reward * late_before_W,
            "unassigned": end_W * partition.unassigned_devices,
        }
        alone_Q = runs.judgements.arrival + _alone_s(reward, runs.judgements)
        outcomes += _outcomes(
            runs,
            starts,
            columns,
            end_W=end_W,
            generation_W=generation_W,
            uncontended_W=np.maximum.reduceat(alone_Q, starts),
        )
    return outcomes


def in_turns(costs: JobCosts, waves: Sequence[Wave], num_devices: int) -> list[WaveOutcome]:
    """Simulate waves in which all devices generate, swap, and judge. The swap back is not part of the wave."""
    outcomes: list[WaveOutcome] = []
    reward = reward_costs(costs)
    replicas = num_devices // costs.policy.devices_per_replica, num_devices // reward.devices_per_replica
    swap_s = costs.swap.sleep_s + costs.swap.wake_s
    for chunk in _chunks(waves, costs, *replicas):
        runs = run_in_turns(costs, chunk, num_devices)
        starts = wave_starts(chunk)
        generation_W = np.maximum.reduceat(runs.generated.finish, starts)
        end_W = np.maximum.reduceat(runs.judged.finish, starts)
        judging_s_W = end_W - generation_W - swap_s
        held = replicas[0] * costs.policy.devices_per_replica, replicas[1] * reward.devices_per_replica
        generating_W = _busy_s(runs.generated, replicas[0], end_W) * costs.policy.devices_per_replica
        judging_W = _busy_s(runs.judged, replicas[1], end_W) * reward.devices_per_replica
        columns = {
            "generation": generating_W,
            "reward": judging_W,
            "swap": np.full(len(chunk), swap_s * num_devices),
            "long_tail": generation_W * held[0] - generating_W + judging_s_W * held[1] - judging_W,
            "unassigned": generation_W * (num_devices - held[0]) + judging_s_W * (num_devices - held[1]),
        }
        outcomes += _outcomes(runs, starts, columns, end_W=end_W, generation_W=generation_W, uncontended_W=end_W)
    return outcomes


def run_side_by_side(
    costs: JobCosts, waves: Sequence[Wave], partition: Partition, late: Moved | None = None
) -> WaveRuns:
    """Run both engines on a partition; `side_by_side` accounts for the result."""
    late = late or Moved()
    responses = policy_requests(waves, partition.policy_replicas)
    _delay(responses, partition.policy_replicas, late.policy_replicas, late.load_s)
    generated = run_replicas(costs.policy, len(waves) * partition.policy_replicas, responses)
    judgements = judge_requests(waves, generated.finish, partition.reward_replicas)
    _delay(judgements, partition.reward_replicas, late.reward_replicas, late.load_s)
    judged = run_replicas(reward_costs(costs), len(waves) * partition.reward_replicas, judgements)
    return WaveRuns(responses=responses, generated=generated, judgements=judgements, judged=judged)


def run_in_turns(costs: JobCosts, waves: Sequence[Wave], num_devices: int) -> WaveRuns:
    """Run both engines in turns; `in_turns` accounts for the result."""
    policy_replicas = num_devices // costs.policy.devices_per_replica
    responses = policy_requests(waves, policy_replicas)
    generated = run_replicas(costs.policy, len(waves) * policy_replicas, responses)
    starts = wave_starts(waves)
    sizes = np.diff(np.append(starts, len(responses.length)))
    ready_W = np.maximum.reduceat(generated.finish, starts) + costs.swap.sleep_s + costs.swap.wake_s
    reward = reward_costs(costs)
    reward_replicas = num_devices // reward.devices_per_replica
    judgements = judge_requests(waves, np.repeat(ready_W, sizes), reward_replicas)
    judged = run_replicas(reward, len(waves) * reward_replicas, judgements)
    return WaveRuns(responses=responses, generated=generated, judgements=judgements, judged=judged)


def reward_costs(costs: JobCosts) -> EngineCosts:
    """Return the costs of the reward's engine, which must be given."""
    assert costs.reward is not None
    return costs.reward


def _chunks(
    waves: Sequence[Wave], costs: JobCosts, policy_replicas: int, reward_replicas: int
) -> Iterator[Sequence[Wave]]:
    """Yield as many waves at once as fit into `_MAX_SLOTS`."""
    largest = max(wave.response_length.size for wave in waves)
    slots = max(
        replicas * min(engine.max_num_seqs, -(-largest // replicas))
        for engine, replicas in ((costs.policy, policy_replicas), (reward_costs(costs), reward_replicas))
    )
    size = max(1, _MAX_SLOTS // slots)
    return (waves[first : first + size] for first in range(0, len(waves), size))


def _delay(requests: Requests, num_replicas: int, num_late: int, late_s: float) -> None:
    """Delay the requests of the first wave's last replicas until these have moved."""
    if num_late:
        is_late = (requests.replica < num_replicas) & (requests.replica >= num_replicas - num_late)
        requests.arrival[is_late] = np.maximum(requests.arrival[is_late], late_s)


def _busy_s(run: EngineRun, replicas_per_wave: int, until_W: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the busy seconds of each wave's replicas up to a moment, summed: [W]."""
    wave_I = run.busy_replica // replicas_per_wave
    seconds_I = np.maximum(np.minimum(run.busy_to, until_W[wave_I]) - run.busy_from, 0.0)
    return np.asarray(np.bincount(wave_I, weights=seconds_I, minlength=len(until_W)), dtype=np.float64)


def _alone_s(costs: EngineCosts, requests: Requests) -> NDArray[np.float64]:
    """Return the seconds of each request if nothing else ran: [Q]."""
    return (
        (costs.decode_base_s + costs.decode_per_sequence_s) * requests.length
        + costs.decode_per_context_token_s * context_tokens(requests)
        + costs.prefill_per_token_s * requests.prefill
    )


def _works(requests: Requests, starts: NDArray[np.intp]) -> list[EngineWork]:
    """Return the work of each wave; requests are in order of waves."""
    sums = [
        np.add.reduceat(values, starts).tolist()
        for values in (requests.length, context_tokens(requests), requests.prefill)
    ]
    longest = np.maximum.reduceat(requests.length, starts).tolist()
    return [
        EngineWork(num_tokens=tokens, num_context_tokens=context, num_prefill_tokens=prefill, longest=most)
        for tokens, context, prefill, most in zip(*sums, longest, strict=True)
    ]


def _outcomes(
    runs: WaveRuns,
    starts: NDArray[np.intp],
    columns: Mapping[str, NDArray[np.float64]],
    *,
    end_W: NDArray[np.float64],
    generation_W: NDArray[np.float64],
    uncontended_W: NDArray[np.float64],
) -> list[WaveOutcome]:
    # Values below 0 come from rounding.
    rounded = {name: np.maximum(column_W, 0.0).tolist() for name, column_W in columns.items()}
    policy, reward = _works(runs.responses, starts), _works(runs.judgements, starts)
    return [
        WaveOutcome(
            seconds=float(end_W[wave]),
            device_s={name: column[wave] for name, column in rounded.items()},
            generation_s=float(generation_W[wave]),
            first_response_s=float(runs.judgements.arrival[starts[wave]]),
            uncontended_s=float(uncontended_W[wave]),
            policy_work=policy[wave],
            reward_work=reward[wave],
        )
        for wave in range(len(starts))
    ]

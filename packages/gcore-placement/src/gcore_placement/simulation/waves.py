"""Simulate waves of sampling: generated and judged side by side on a partition, or in turns on all devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.partition.space import Partition, engine_load
from gcore_placement.quantities import Floats
from gcore_placement.simulation.live import ReplicaRequest
from gcore_placement.simulation.loans import EngineLoan, judge_with_loans
from gcore_placement.simulation.role_run import RoleRun
from gcore_placement.workload.traces import TraceWave

_BOUND = 1 - 1e-9
"""Factor that keeps lower bounds valid under rounding."""


@dataclass(frozen=True, kw_only=True)
class WaveOutcome:
    """The outcome of one wave. Seconds count from its start."""

    seconds: float
    device_s: dict[str, float]
    """Device-seconds by the ledger's names of work and idleness; they add up to devices * seconds."""
    generation_s: float
    """Seconds until all was generated."""
    first_response_s: float
    """Seconds until the first response can be judged."""
    uncontended_s: float
    """Seconds until all is judged if each judgement has a replica to itself."""
    spare_s: float
    """Seconds until the first replica of the policy is done."""
    queued_until_s: float
    """Seconds until no judgement waits."""
    replicas: tuple[int, ...]
    """The replicas of the policy and of the reward at the end."""
    lent_devices: float = 0.0
    """Devices of the policy that judged, on average over the wave."""
    late_s: float = 0.0
    """Seconds by which a role's last replicas started late."""


def simulate_wave(
    costs: JobCosts,
    wave: TraceWave,
    layout: Partition | int,
    *,
    before: tuple[int, ...] | None = None,
    late_s: float = 0.0,
    lends: bool = False,
) -> WaveOutcome:
    """Simulate a wave: side by side on a partition, or in turns on `layout` devices.

    Side by side, each response is judged once it is done; in turns, all devices generate, swap, and judge. The swap
    back is not part of the wave.

    Args:
        before: the previous replicas of the policy and of the reward; a role's new replicas, its last ones, start late.
        late_s: seconds by which new replicas are late.
        lends: engines that are done become judges while judgements wait, as in `judge_with_loans`; only side by side.
    """
    replicas = _replicas(costs, layout)
    late = (0, 0)
    if before is not None:
        late = (max(0, replicas[0] - before[0]), max(0, replicas[1] - before[1]))
    generated, judged, ready_Q = assign_wave(costs, wave, layout, late, late_s)
    loans: list[EngineLoan] = []
    if lends:
        loans = judge_with_loans(costs, generated, judged)
    else:
        judged.run()
    generation_s = max(generated.finish_s)
    end_s = max(judged.finish_s)
    per_engine = generated.costs.devices_per_replica
    per_judge = judged.costs.devices_per_replica
    device_s = {
        "generation": generated.busy_s() * per_engine,
        "reward": judged.busy_s() * per_judge,
    }
    if isinstance(layout, int):
        idle = _idle_in_turns(costs, layout, generation_s, end_s, device_s)
    else:
        late_devices = (late[0] * per_engine, late[1] * per_judge)
        judged_s = judged.busy_s(generation_s) * per_judge
        idle = _idle_side_by_side(
            layout, late_devices, late_s, loans, generation_s, end_s, device_s, judged_s
        )
    for name, seconds in idle.items():
        device_s[name] = max(0.0, seconds)  # below 0 by rounding
    num_lent = sum(loan.num_devices for loan in loans)
    return WaveOutcome(
        seconds=end_s,
        device_s=device_s,
        generation_s=generation_s,
        first_response_s=float(ready_Q.min()),
        uncontended_s=float((ready_Q + _judged_alone_s(costs, wave)).max()),
        spare_s=min(generated.done_s()),
        queued_until_s=judged.queued_until_s,
        replicas=(replicas[0] - num_lent // per_engine, replicas[1] + num_lent // per_judge),
        lent_devices=_lent_s(loans, end_s) / end_s,
        late_s=late_s if any(late) else 0.0,
    )


def _idle_in_turns(
    costs: JobCosts,
    num_devices: int,
    generation_s: float,
    end_s: float,
    work_s: dict[str, float],
) -> dict[str, float]:
    """Return the idle device-seconds by cause of a wave whose roles take turns on all devices."""
    swap_s = costs.swap.sleep_s + costs.swap.wake_s
    num_engines, num_judges = _replicas(costs, num_devices)
    used_s = num_engines * costs.policy.devices_per_replica * generation_s
    judging_s = end_s - generation_s - swap_s
    used_s += num_judges * reward_costs(costs).devices_per_replica * judging_s
    return {
        "swap": swap_s * num_devices,
        "long_tail": used_s - sum(work_s.values()),
        "unassigned": (end_s - swap_s) * num_devices - used_s,
    }


def _idle_side_by_side(
    partition: Partition,
    late_devices: tuple[int, int],
    late_s: float,
    loans: Sequence[EngineLoan],
    generation_s: float,
    end_s: float,
    work_s: dict[str, float],
    judged_s: float,
) -> dict[str, float]:
    """Return the idle device-seconds by cause of a wave on a partition.

    Args:
        late_devices: devices of each role that only come after `late_s`.
        work_s: device-seconds of generation and of judging, of the latter `judged_s` while others generated.
    """

    def policy_s(until_s: float) -> float:
        """Return the device-seconds that the policy has until then."""
        late = late_devices[0] * min(late_s, until_s)
        gone = sum(loan.num_devices * max(0.0, until_s - loan.start_s) for loan in loans)
        return partition.devices[0] * until_s - late - gone

    def reward_s(until_s: float) -> float:
        late = late_devices[1] * min(late_s, until_s)
        return partition.devices[1] * until_s - late + _lent_s(loans, until_s)

    generating_tail = policy_s(generation_s) - work_s["generation"]
    judging_tail = reward_s(end_s) - reward_s(generation_s) - (work_s["reward"] - judged_s)
    moving_s = sum(
        loan.num_devices * (min(loan.arrive_s, end_s) - min(loan.start_s, end_s)) for loan in loans
    )
    return {
        "swap": sum(late_devices) * min(late_s, end_s) + moving_s,
        "long_tail": generating_tail + judging_tail,
        "waiting_for_reward": policy_s(end_s) - policy_s(generation_s),
        "imbalance": reward_s(generation_s) - judged_s,
        "unassigned": partition.unassigned_devices * end_s,
    }


def _lent_s(loans: Sequence[EngineLoan], until_s: float) -> float:
    """Return the device-seconds that lent devices judge."""
    return sum(loan.num_devices * max(0.0, until_s - loan.arrive_s) for loan in loans)


def run_wave(costs: JobCosts, wave: TraceWave, layout: Partition | int) -> tuple[RoleRun, RoleRun]:
    """Return the runs of the policy's and of the judge's replicas, in seconds from the wave's start."""
    generated, judged, _ = assign_wave(costs, wave, layout)
    judged.run()
    return generated, judged


def assign_wave(
    costs: JobCosts,
    wave: TraceWave,
    layout: Partition | int,
    late: tuple[int, int] = (0, 0),
    late_s: float = 0.0,
) -> tuple[RoleRun, RoleRun, Floats]:
    """Generate a wave, and assign its judgements to the judge's replicas in turn as responses finish.

    `late` replicas of each role, the last ones, start late. The last result is the second at which each response can
    be judged: [Q].
    """
    num_engines, num_judges = _replicas(costs, layout)
    responses, judgements = _requests(costs, wave)
    generated = _generate(costs.policy, responses, num_engines, late[0], late_s)
    ready_Q = np.array(generated.finish_s)
    if isinstance(layout, int):
        ready_Q[:] = ready_Q.max() + costs.swap.sleep_s + costs.swap.wake_s
    order = np.argsort(ready_Q, kind="stable")
    for number in range(num_judges - late[1], num_judges):
        assigned = order[number::num_judges]
        ready_Q[assigned] = np.maximum(ready_Q[assigned], late_s)
    in_order = [judgements[index] for index in order.tolist()]
    judged = RoleRun(reward_costs(costs), num_judges, ready_Q.tolist())
    for number in range(num_judges):
        judged.assign(number, in_order[number::num_judges])
    return generated, judged, ready_Q


@lru_cache(maxsize=1)
def _requests(
    costs: JobCosts, wave: TraceWave
) -> tuple[list[ReplicaRequest], list[ReplicaRequest]]:
    """Return the responses of a wave, of which the first of a group computes its prompt, and their judgements."""
    n = wave.response_length.shape[1]
    prompt_Q = np.repeat(wave.prompt_length, n)
    computed_Q = np.where(np.arange(len(prompt_Q)) % n == 0, prompt_Q, 0.0)
    read_Q = wave.judged_length.ravel()
    return (
        _engine_requests(costs.policy, prompt_Q, computed_Q, wave.response_length.ravel()),
        _engine_requests(reward_costs(costs), read_Q, read_Q, wave.judge_length.ravel()),
    )


def _engine_requests(
    costs: EngineCosts, context_Q: Floats, computed_Q: Floats, length_Q: Floats
) -> list[ReplicaRequest]:
    prefill_Q = costs.prefill_per_token_s * computed_Q
    rows = zip(context_Q.tolist(), prefill_Q.tolist(), length_Q.tolist(), strict=True)
    requests: list[ReplicaRequest] = []
    for index, (context, prefill_s, length) in enumerate(rows):
        request = ReplicaRequest(index=index, context=context, prefill_s=prefill_s, length=length)
        requests.append(request)
    return requests


def _generate(
    policy: EngineCosts,
    responses: list[ReplicaRequest],
    num_replicas: int,
    num_late: int,
    late_s: float,
) -> RoleRun:
    """Generate all responses; the last replicas are late."""
    starts = _first_responses(len(responses), num_replicas)
    arrival_s = [0.0] * len(responses)
    generated = RoleRun(policy, num_replicas, arrival_s)
    for number, (first, end) in enumerate(pairwise([*starts, len(responses)])):
        assigned = responses[first:end]
        if assigned:
            prefill_s = policy.prefill_per_token_s * assigned[0].context
            assigned[0] = replace(assigned[0], prefill_s=prefill_s)
        if number >= num_replicas - num_late:
            arrival_s[first:end] = [late_s] * len(assigned)
        generated.assign(number, assigned)
    generated.run()
    return generated


def _first_responses(num_responses: int, num_replicas: int) -> list[int]:
    """Return the first response of each replica: [num_replicas].

    Each replica gets an equal run of neighbours, so that most groups stay together; on each replica a group's prompt
    is computed once.
    """
    return [-(-number * num_responses // num_replicas) for number in range(num_replicas)]


def least_seconds(costs: JobCosts, wave: TraceWave, partitions: Sequence[Partition]) -> Floats:
    """Return lower bounds of the seconds of a wave on partitions: [num_partitions].

    An engine takes the time of its work, and of its longest response; judging starts with the first response, and takes
    all judges the time of its work; no response is judged faster than alone.
    """
    policy = costs.policy
    length_Q = wave.response_length.ravel()
    alone_Q = policy.decode_s(
        length_Q,
        np.ones_like(length_Q),
        np.repeat(wave.prompt_length, wave.response_length.shape[1]),
    )
    judged_Q = _judged_alone_s(costs, wave)
    alone_s = (alone_Q + judged_Q).max()
    _, (judging_device_s, _) = engine_loads(costs, wave)
    bounds: list[float] = []
    for partition in partitions:
        generating_s = _least_generation_s(policy, wave, partition.replicas[0])
        judging_s = alone_Q.min() + judging_device_s / partition.devices[1]
        bounds.append(max(alone_s, generating_s + judged_Q.min(), judging_s))
    return np.array(bounds) * _BOUND


def _least_generation_s(policy: EngineCosts, wave: TraceWave, num_replicas: int) -> float:
    """Return a lower bound of the seconds of generation, exact where no response waits for its place."""
    n = wave.response_length.shape[1]
    length_Q = wave.response_length.ravel()
    prompt_Q = np.repeat(wave.prompt_length, n)
    starts = np.unique(_first_responses(len(length_Q), min(num_replicas, len(length_Q))))
    computes_prompt = np.arange(len(length_Q)) % n == 0
    computes_prompt[starts] = True
    prefill_Q = np.where(computes_prompt, prompt_Q, 0.0)
    tokens_R = np.add.reduceat(length_Q, starts)
    steps_R = np.maximum(np.maximum.reduceat(length_Q, starts), tokens_R / policy.max_num_seqs)
    context_R = np.add.reduceat(prompt_Q * length_Q + length_Q**2 / 2, starts)
    seconds_R = (
        policy.decode_base_s * steps_R
        + policy.decode_per_sequence_s * tokens_R
        + policy.decode_per_context_token_s * context_R
        + policy.prefill_per_token_s * np.add.reduceat(prefill_Q, starts)
    )
    return float(seconds_R.max())


def _judged_alone_s(costs: JobCosts, wave: TraceWave) -> Floats:
    """Return the seconds of judgements that have a replica each to themselves: [Q]."""
    reward = reward_costs(costs)
    read_Q = wave.judged_length.ravel()
    length_Q = wave.judge_length.ravel()
    decoding_s = reward.decode_s(length_Q, np.ones_like(length_Q), read_Q)
    return reward.prefill_per_token_s * read_Q + decoding_s


def reward_costs(costs: JobCosts) -> EngineCosts:
    """Return the costs of the reward's engine, which must not be None."""
    assert costs.reward is not None
    return costs.reward


def _replicas(costs: JobCosts, layout: Partition | int) -> tuple[int, int]:
    """Return the replicas of the policy and of the reward."""
    if isinstance(layout, Partition):
        policy, reward = layout.replicas
        return policy, reward
    per_judge = reward_costs(costs).devices_per_replica
    return layout // costs.policy.devices_per_replica, layout // per_judge


def engine_loads(
    costs: JobCosts, wave: TraceWave
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the `engine_load` of the policy and of the judge in a wave, whatever the partition."""
    prompts = wave.prompt_length[:, None]
    policy = engine_load(
        costs.policy,
        num_tokens=float(wave.response_length.sum()),
        num_context_tokens=_context_tokens(prompts, wave.response_length),
        num_prefill_tokens=float(prompts.sum()),
        longest=float(wave.response_length.max()),
    )
    judge = engine_load(
        reward_costs(costs),
        num_tokens=float(wave.judge_length.sum()),
        num_context_tokens=_context_tokens(wave.judged_length, wave.judge_length),
        num_prefill_tokens=float(wave.judged_length.sum()),
        longest=float(wave.judge_length.max()),
    )
    return policy, judge


def _context_tokens(read: Floats, written: Floats) -> float:
    """Return the sum, over all written tokens, of the tokens that their sequences hold."""
    return float((read * written + written**2 / 2).sum())

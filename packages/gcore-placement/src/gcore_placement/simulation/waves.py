"""Simulate waves of sampling: generated and judged side by side on a partition, or in turns on all devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.partition.space import EngineWork, Partition
from gcore_placement.quantities import Floats, Ints
from gcore_placement.simulation.continuous_batching import EngineRun, Requests, run_replicas
from gcore_placement.simulation.loans import EngineLoan, judge_with_loans, replicas_done_s
from gcore_placement.workload.traces import TraceWave


def policy_requests(waves: Sequence[TraceWave], num_replicas: int) -> Requests:
    """Return the responses in order of groups, from second 0: each replica gets an equal run of neighbours.

    Most groups stay together; on each replica a group's prompt is computed once.
    """
    n = waves[0].response_length.shape[1]
    sizes = np.array([wave.response_length.size for wave in waves])
    wave_Q = np.repeat(np.arange(len(waves)), sizes)
    index_Q = np.arange(len(wave_Q)) - wave_starts(waves)[wave_Q]
    replica = wave_Q * num_replicas + index_Q * num_replicas // sizes[wave_Q]
    prompt = np.repeat(np.concatenate([wave.prompt_length for wave in waves]), n)
    is_first = (index_Q % n == 0) | (np.diff(replica, prepend=-1) > 0)
    return Requests(
        replica=replica,
        arrival=np.zeros(len(prompt)),
        prefill=np.where(is_first, prompt, 0.0),
        context=prompt,
        length=np.concatenate([wave.response_length.ravel() for wave in waves]),
    )


def judge_requests(waves: Sequence[TraceWave], ready_Q: Floats, num_replicas: int) -> Requests:
    """Return the judgements, assigned in turn to a wave's replicas as responses finish."""
    wave_Q = np.repeat(np.arange(len(waves)), [wave.response_length.size for wave in waves])
    read, length = _judgements(waves)
    order = np.lexsort((ready_Q, wave_Q))
    turn = np.arange(len(order)) - wave_starts(waves)[wave_Q]
    return Requests(
        replica=wave_Q * num_replicas + turn % num_replicas,
        arrival=ready_Q[order],
        prefill=read[order],
        context=read[order],
        length=length[order],
    )


def _judgements(waves: Sequence[TraceWave]) -> tuple[Floats, Floats]:
    """Return the tokens that each judgement reads, and its length, in order of responses: [Q] each."""
    read = np.concatenate([(w.prompt_length[:, None] + w.response_length).ravel() for w in waves])
    return read, np.concatenate([wave.judge_length.ravel() for wave in waves])


def wave_starts(waves: Sequence[TraceWave]) -> Ints:
    """Return the index of the first request of each wave: [W]."""
    sizes = np.array([wave.response_length.size for wave in waves])
    return np.cumsum(sizes) - sizes


def context_tokens(requests: Requests) -> Floats:
    """Return the sum over a request's tokens of the tokens that its sequence holds: [Q]."""
    return requests.context * requests.length + requests.length**2 / 2


_MAX_SEQUENCES = 4_000_000
"""Most responses to simulate at once, which bounds the memory."""


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
    policy_work: EngineWork
    reward_work: EngineWork
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


def simulate_waves(
    costs: JobCosts,
    waves: Sequence[TraceWave],
    layout: Partition | int,
    *,
    before: tuple[int, ...] | None = None,
    late_s: float = 0,
    lends: bool = False,
) -> list[WaveOutcome]:
    """Simulate waves: side by side on a partition, or in turns on `layout` devices.

    Side by side, each response is judged once it is done; in turns, all devices generate, swap, and judge. The swap
    back is not part of the wave.

    Args:
        before: the previous replicas of the policy and of the reward; a role's new replicas, its last ones, start
            the first wave late.
        late_s: seconds by which new replicas are late.
        lends: engines become judges within the wave, as in `judge_with_loans`; only for one wave side by side.
    """
    assert not lends or (len(waves) == 1 and isinstance(layout, Partition)), (
        "loans are those of one wave side by side"
    )
    outcomes: list[WaveOutcome] = []
    policy = costs.policy
    reward = reward_costs(costs)
    replicas = _replicas(costs, layout)
    for chunk in _chunks(waves):
        late = (0, 0)
        if before is not None and not outcomes:
            late = (max(0, replicas[0] - before[0]), max(0, replicas[1] - before[1]))
        generated, judged = run_waves(costs, chunk, layout, late, late_s)
        loans: list[EngineLoan] = []
        if lends:
            judged, loans = judge_with_loans(costs, replicas, generated, judged)
        responses = generated.requests
        judgements = judged.requests
        starts = wave_starts(chunk)
        generation_W = np.maximum.reduceat(generated.finish, starts)
        end_W = np.maximum.reduceat(judged.finish, starts)
        generating_W = _busy_s(generated, replicas[0], end_W) * policy.devices_per_replica
        judging_W = _busy_s(judged, replicas[1], end_W) * reward.devices_per_replica
        if isinstance(layout, int):
            swap_s = costs.swap.sleep_s + costs.swap.wake_s
            judging_s_W = end_W - generation_W - swap_s
            policy_devices = replicas[0] * policy.devices_per_replica
            reward_devices = replicas[1] * reward.devices_per_replica
            idle = {
                "swap": np.full(len(chunk), swap_s * layout),
                "long_tail": generation_W * policy_devices
                - generating_W
                + judging_s_W * reward_devices
                - judging_W,
                "unassigned": generation_W * (layout - policy_devices)
                + judging_s_W * (layout - reward_devices),
            }
            uncontended_W = end_W
            lent_devices = 0.0
        else:
            policy_devices, reward_devices = layout.devices
            late_W = np.zeros(len(chunk))
            late_W[0] = late_s
            after_W = end_W - generation_W
            late_before_W = np.minimum(late_W, generation_W)
            late_after_W = np.minimum(late_W, end_W) - late_before_W
            late_policy = late[0] * policy.devices_per_replica
            late_reward = late[1] * reward.devices_per_replica
            judging_before_W = (
                _busy_s(judged, replicas[1], generation_W) * reward.devices_per_replica
            )
            judging_after_W = judging_W - judging_before_W
            moving_before, lent_before = _loan_device_s(loans, generation_W[0])
            moving, lent = _loan_device_s(loans, end_W[0])
            lent_devices = float(lent / end_W[0])
            policy_tail_W = (
                generation_W * policy_devices - generating_W - late_policy * late_before_W
            )
            reward_tail_W = after_W * reward_devices - judging_after_W - late_reward * late_after_W
            gone_before = moving_before + lent_before
            gone = moving + lent
            idle = {
                "swap": (late_policy + late_reward) * (late_before_W + late_after_W) + moving,
                "long_tail": policy_tail_W - gone_before + reward_tail_W + lent - lent_before,
                "waiting_for_reward": after_W * policy_devices
                - late_policy * late_after_W
                - (gone - gone_before),
                "imbalance": generation_W * reward_devices
                - judging_before_W
                - late_reward * late_before_W
                + lent_before,
                "unassigned": end_W * layout.unassigned_devices,
            }
            alone_Q = _judged_alone_s(reward, judgements.prefill, judgements.length)
            uncontended_W = np.maximum.reduceat(judgements.arrival + alone_Q, starts)
        columns = {"generation": generating_W, "reward": judging_W, **idle}
        # Values below 0 come from rounding.
        rounded = {name: np.maximum(column_W, 0.0).tolist() for name, column_W in columns.items()}
        policy_work = engine_works(responses, starts)
        reward_work = engine_works(judgements, starts)
        spare_W = (
            replicas_done_s(generated, len(chunk) * replicas[0]).reshape(len(chunk), -1).min(axis=1)
        )
        queued_W = np.maximum.reduceat(
            np.where(judged.start > judgements.arrival, judged.start, 0.0), starts
        )
        num_lent = sum(loan.num_devices for loan in loans)
        at_end = (
            replicas[0] - num_lent // policy.devices_per_replica,
            replicas[1] + num_lent // reward.devices_per_replica,
        )
        first_late_s = late_s if any(late) else 0.0
        for wave in range(len(chunk)):
            outcome = WaveOutcome(
                seconds=float(end_W[wave]),
                device_s={name: column[wave] for name, column in rounded.items()},
                generation_s=float(generation_W[wave]),
                first_response_s=float(judgements.arrival[starts[wave]]),
                uncontended_s=float(uncontended_W[wave]),
                policy_work=policy_work[wave],
                reward_work=reward_work[wave],
                spare_s=float(spare_W[wave]),
                queued_until_s=float(queued_W[wave]),
                replicas=at_end,
                lent_devices=lent_devices,
                late_s=0.0 if wave else first_late_s,
            )
            outcomes.append(outcome)
    return outcomes


def _loan_device_s(loans: Sequence[EngineLoan], until_s: float) -> tuple[float, float]:
    """Return the device-seconds of loans up to a time: on their way to judging, and judging."""
    moving = 0.0
    lent = 0.0
    for loan in loans:
        moving += loan.num_devices * max(0.0, min(loan.arrive_s, until_s) - loan.start_s)
        lent += loan.num_devices * max(0.0, until_s - loan.arrive_s)
    return moving, lent


def _chunks(waves: Sequence[TraceWave]) -> Iterator[Sequence[TraceWave]]:
    """Yield as many waves as may be simulated at once."""
    largest = max(wave.response_length.size for wave in waves)
    at_once = max(1, _MAX_SEQUENCES // largest)
    for first in range(0, len(waves), at_once):
        yield waves[first : first + at_once]


def run_waves(
    costs: JobCosts,
    waves: Sequence[TraceWave],
    layout: Partition | int,
    late: tuple[int, int] = (0, 0),
    late_s: float = 0.0,
) -> tuple[EngineRun, EngineRun]:
    """Return the runs of the policy's and of the judge's engines, in seconds from each wave's start.

    `late` replicas of each role are late; `simulate_waves` accounts for the result.
    """
    policy_replicas, reward_replicas = _replicas(costs, layout)
    responses = policy_requests(waves, policy_replicas)
    _delay(responses, policy_replicas, late[0], late_s)
    generated = run_replicas(costs.policy, len(waves) * policy_replicas, responses)
    ready_Q = generated.finish
    if isinstance(layout, int):
        starts = wave_starts(waves)
        ready_W = np.maximum.reduceat(ready_Q, starts) + costs.swap.sleep_s + costs.swap.wake_s
        ready_Q = np.repeat(ready_W, np.diff(np.append(starts, len(ready_Q))))
    judgements = judge_requests(waves, ready_Q, reward_replicas)
    _delay(judgements, reward_replicas, late[1], late_s)
    return generated, run_replicas(reward_costs(costs), len(waves) * reward_replicas, judgements)


def _judged_alone_s(costs: EngineCosts, read_Q: Floats, length_Q: Floats) -> Floats:
    """Return the seconds of judgements that have a replica each to themselves: [Q]."""
    return (
        (costs.decode_base_s + costs.decode_per_sequence_s) * length_Q
        + costs.decode_per_context_token_s * (read_Q * length_Q + length_Q**2 / 2)
        + costs.prefill_per_token_s * read_Q
    )


def reward_costs(costs: JobCosts) -> EngineCosts:
    """Return the costs of the reward's engine, which must not be None."""
    assert costs.reward is not None
    return costs.reward


def _replicas(costs: JobCosts, layout: Partition | int) -> tuple[int, int]:
    """Return the replicas of the policy and of the reward."""
    if isinstance(layout, int):
        return layout // costs.policy.devices_per_replica, layout // reward_costs(
            costs
        ).devices_per_replica
    policy, reward = layout.replicas
    return policy, reward


def _delay(requests: Requests, num_replicas: int, num_late: int, late_s: float) -> None:
    """Delay the requests of the first wave's last replicas until these have moved."""
    if num_late:
        is_late = (requests.replica < num_replicas) & (requests.replica >= num_replicas - num_late)
        requests.arrival[is_late] = np.maximum(requests.arrival[is_late], late_s)


def _busy_s(run: EngineRun, replicas_per_wave: int, until_W: Floats) -> Floats:
    """Return the busy seconds of each wave's replicas up to a moment, summed: [W]."""
    # Lent replicas are numbered after all others.
    replica_I, from_I, to_I = run.busy
    wave_I = np.minimum(replica_I // replicas_per_wave, len(until_W) - 1)
    seconds_I = np.maximum(np.minimum(to_I, until_W[wave_I]) - from_I, 0.0)
    return np.asarray(
        np.bincount(wave_I, weights=seconds_I, minlength=len(until_W)), dtype=np.float64
    )


def engine_works(requests: Requests, starts: Ints) -> list[EngineWork]:
    """Return the work of each wave; requests are in order of waves."""
    tokens_W = np.add.reduceat(requests.length, starts).tolist()
    context_W = np.add.reduceat(context_tokens(requests), starts).tolist()
    prefill_W = np.add.reduceat(requests.prefill, starts).tolist()
    longest_W = np.maximum.reduceat(requests.length, starts).tolist()
    return [
        EngineWork(
            num_tokens=tokens,
            num_context_tokens=context,
            num_prefill_tokens=prefill,
            longest=longest,
        )
        for tokens, context, prefill, longest in zip(
            tokens_W, context_W, prefill_W, longest_W, strict=True
        )
    ]

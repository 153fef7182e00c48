"""Simulate waves of sampling: generated and judged side by side on a partition, or in turns on all devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gcore_placement.costs import EngineCosts, JobCosts
from gcore_placement.partition.space import Partition, engine_load
from gcore_placement.quantities import Floats, Ints
from gcore_placement.simulation.continuous_batching import EngineRun, Requests, run_replicas
from gcore_placement.simulation.loans import EngineLoan, judge_with_loans, replicas_done_s
from gcore_placement.workload.traces import TraceWave

_MAX_SEQUENCES = 4_000_000
"""Most responses to simulate at once, which bounds the memory."""
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
        lends: engines that are done become judges while judgements wait, as in `judge_with_loans`; only for one wave
            side by side.
    """
    assert not lends or (len(waves) == 1 and isinstance(layout, Partition)), (
        "loans are those of one wave side by side"
    )
    outcomes: list[WaveOutcome] = []
    policy = costs.policy
    reward = reward_costs(costs)
    replicas = _replicas(costs, layout)
    for first, chunk in _chunks(waves):
        late = (0, 0)
        if before is not None and not first:
            late = (max(0, replicas[0] - before[0]), max(0, replicas[1] - before[1]))
        generated, judged = run_waves(costs, chunk, layout, late, late_s)
        starts = wave_starts(chunk)
        done_R = replicas_done_s(generated, len(chunk) * replicas[0])
        spare_W = done_R.reshape(len(chunk), -1).min(axis=1)
        loans: list[EngineLoan] = []
        queued_W = _queued_until_s(judged, starts)
        if lends and queued_W[0] > spare_W[0]:
            judged, loans = judge_with_loans(costs, replicas, generated, judged)
            queued_W = _queued_until_s(judged, starts)
        arrival = judged.requests.arrival
        generation_W = np.maximum.reduceat(generated.finish, starts)
        end_W = np.maximum.reduceat(judged.finish, starts)
        generating_W = _busy_s(generated, replicas[0], end_W) * policy.devices_per_replica
        judging_W = _busy_s(judged, replicas[1], end_W) * reward.devices_per_replica
        judged_W = _busy_s(judged, replicas[1], generation_W) * reward.devices_per_replica
        alone_Q = _judged_alone_s(reward, judged.requests)
        uncontended_W = np.maximum.reduceat(arrival + alone_Q, starts)
        num_lent = sum(loan.num_devices for loan in loans)
        at_end = (
            replicas[0] - num_lent // policy.devices_per_replica,
            replicas[1] + num_lent // reward.devices_per_replica,
        )
        for wave in range(len(chunk)):
            if first + wave:
                late = (0, 0)
            generation_s = float(generation_W[wave])
            end_s = float(end_W[wave])
            work_s = (float(generating_W[wave]), float(judging_W[wave]))
            if isinstance(layout, int):
                idle = _idle_in_turns(costs, layout, generation_s, end_s, work_s)
            else:
                late_devices = (
                    late[0] * policy.devices_per_replica,
                    late[1] * reward.devices_per_replica,
                )
                judged_s = float(judged_W[wave])
                idle = _idle_side_by_side(
                    layout, late_devices, late_s, loans, generation_s, end_s, work_s, judged_s
                )
            device_s = {"generation": work_s[0], "reward": work_s[1]}
            for name, seconds in idle.items():
                device_s[name] = max(0.0, seconds)  # below 0 by rounding
            outcome = WaveOutcome(
                seconds=end_s,
                device_s=device_s,
                generation_s=generation_s,
                first_response_s=float(arrival[starts[wave]]),
                uncontended_s=float(uncontended_W[wave]),
                spare_s=float(spare_W[wave]),
                queued_until_s=float(queued_W[wave]),
                replicas=at_end,
                lent_devices=_lent_s(loans, end_s) / end_s,
                late_s=late_s if any(late) else 0.0,
            )
            outcomes.append(outcome)
    return outcomes


def _queued_until_s(run: EngineRun, starts: Ints) -> Floats:
    """Return the seconds until no request of each wave waits: [W]."""
    queued_Q = np.where(run.start > run.requests.arrival, run.start, 0.0)
    return np.maximum.reduceat(queued_Q, starts)


def _idle_in_turns(
    costs: JobCosts,
    num_devices: int,
    generation_s: float,
    end_s: float,
    work_s: tuple[float, float],
) -> dict[str, float]:
    """Return the idle device-seconds by cause of a wave whose roles take turns on all devices."""
    swap_s = costs.swap.sleep_s + costs.swap.wake_s
    used_s = 0.0
    replicas = _replicas(costs, num_devices)
    turns = (generation_s, end_s - generation_s - swap_s)
    for count, engine, seconds in zip(
        replicas, (costs.policy, reward_costs(costs)), turns, strict=True
    ):
        used_s += count * engine.devices_per_replica * seconds
    return {
        "swap": swap_s * num_devices,
        "long_tail": used_s - sum(work_s),
        "unassigned": (end_s - swap_s) * num_devices - used_s,
    }


def _idle_side_by_side(
    partition: Partition,
    late_devices: tuple[int, int],
    late_s: float,
    loans: Sequence[EngineLoan],
    generation_s: float,
    end_s: float,
    work_s: tuple[float, float],
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
        gone = _moving_s(loans, until_s) + _lent_s(loans, until_s)
        return partition.devices[0] * until_s - late - gone

    def reward_s(until_s: float) -> float:
        late = late_devices[1] * min(late_s, until_s)
        return partition.devices[1] * until_s - late + _lent_s(loans, until_s)

    generating_tail = policy_s(generation_s) - work_s[0]
    judging_tail = reward_s(end_s) - reward_s(generation_s) - (work_s[1] - judged_s)
    return {
        "swap": sum(late_devices) * min(late_s, end_s) + _moving_s(loans, end_s),
        "long_tail": generating_tail + judging_tail,
        "waiting_for_reward": policy_s(end_s) - policy_s(generation_s),
        "imbalance": reward_s(generation_s) - judged_s,
        "unassigned": partition.unassigned_devices * end_s,
    }


def _moving_s(loans: Sequence[EngineLoan], until_s: float) -> float:
    """Return the device-seconds that lent devices are on their way to judging."""
    total = 0.0
    for loan in loans:
        total += loan.num_devices * max(0.0, min(loan.arrive_s, until_s) - loan.start_s)
    return total


def _lent_s(loans: Sequence[EngineLoan], until_s: float) -> float:
    """Return the device-seconds that lent devices judge."""
    return sum(loan.num_devices * max(0.0, until_s - loan.arrive_s) for loan in loans)


def _chunks(waves: Sequence[TraceWave]) -> Iterator[tuple[int, Sequence[TraceWave]]]:
    """Yield as many waves as may be simulated at once, with the number of the first."""
    at_once = max(1, _MAX_SEQUENCES // max(wave.response_length.size for wave in waves))
    for first in range(0, len(waves), at_once):
        yield first, waves[first : first + at_once]


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
    starts = wave_starts(waves)
    responses = _policy_requests(waves, policy_replicas)
    _delay(responses, policy_replicas, late[0], late_s)
    generated = run_replicas(costs.policy, len(waves) * policy_replicas, responses)
    ready_Q = generated.finish
    if isinstance(layout, int):
        ready_W = np.maximum.reduceat(ready_Q, starts) + costs.swap.sleep_s + costs.swap.wake_s
        ready_Q = np.repeat(ready_W, np.diff(np.append(starts, len(ready_Q))))
    judgements = _judge_requests(waves, ready_Q, reward_replicas)
    _delay(judgements, reward_replicas, late[1], late_s)
    return generated, run_replicas(reward_costs(costs), len(waves) * reward_replicas, judgements)


def least_seconds(costs: JobCosts, waves: Sequence[TraceWave], partition: Partition) -> Floats:
    """Return lower bounds of the seconds of waves on a partition, by simulating generation alone: [W].

    Judging starts with the first response, and takes all judges the time of its work; and no response is judged faster
    than alone.
    """
    reward = reward_costs(costs)
    bounds: list[float] = []
    for _, chunk in _chunks(waves):
        responses = _policy_requests(chunk, partition.replicas[0])
        generated = run_replicas(costs.policy, len(chunk) * partition.replicas[0], responses)
        judgements = _judge_requests(chunk, generated.finish, 1)
        starts = wave_starts(chunk)
        first_W = judgements.arrival[starts].tolist()
        alone_Q = judgements.arrival + _judged_alone_s(reward, judgements)
        alone_W = np.maximum.reduceat(alone_Q, starts).tolist()
        for wave, first_s, alone_s in zip(chunk, first_W, alone_W, strict=True):
            _, (judging_device_s, _) = engine_loads(costs, wave)
            bounds.append(max(first_s + judging_device_s / partition.devices[1], alone_s) * _BOUND)
    return np.array(bounds)


def _policy_requests(waves: Sequence[TraceWave], num_replicas: int) -> Requests:
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


def _judge_requests(waves: Sequence[TraceWave], ready_Q: Floats, num_replicas: int) -> Requests:
    """Return the judgements, assigned in turn to a wave's replicas as responses finish."""
    wave_Q = np.repeat(np.arange(len(waves)), [wave.response_length.size for wave in waves])
    read = np.concatenate([wave.judged_length.ravel() for wave in waves])
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


def wave_starts(waves: Sequence[TraceWave]) -> Ints:
    """Return the index of the first request of each wave: [W]."""
    sizes = np.array([wave.response_length.size for wave in waves])
    return np.cumsum(sizes) - sizes


def _delay(requests: Requests, num_replicas: int, num_late: int, late_s: float) -> None:
    """Delay the requests of the first wave's last replicas until these have moved."""
    if num_late:
        is_late = (requests.replica < num_replicas) & (requests.replica >= num_replicas - num_late)
        requests.arrival[is_late] = np.maximum(requests.arrival[is_late], late_s)


def _judged_alone_s(costs: EngineCosts, requests: Requests) -> Floats:
    """Return the seconds of judgements that have a replica each to themselves: [Q]."""
    alone = np.ones_like(requests.length)
    decoding_s = costs.decode_s(requests.length, alone, requests.context)
    return costs.prefill_per_token_s * requests.prefill + decoding_s


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


def _busy_s(run: EngineRun, replicas_per_wave: int, until_W: Floats) -> Floats:
    """Return the busy seconds of each wave's replicas up to a moment, summed: [W]."""
    replica_I, from_I, to_I = run.busy
    # Lent replicas are numbered after all others.
    wave_I = np.minimum(replica_I // replicas_per_wave, len(until_W) - 1)
    seconds_I = np.maximum(np.minimum(to_I, until_W[wave_I]) - from_I, 0.0)
    return np.asarray(
        np.bincount(wave_I, weights=seconds_I, minlength=len(until_W)), dtype=np.float64
    )


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

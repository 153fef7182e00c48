"""Parts of a simulation that runs in step with a program: draws, replicas, and a ledger."""

import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import NormalDist
from typing import Generic, Literal, TypeVar

from gcore_placement.costs import EngineCosts

_NORMAL = NormalDist()
_INVERSE = _NORMAL.inv_cdf
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def uniform(*key: int) -> float:
    """Return a number in (0, 1): splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over the key's hash."""
    x = hash(key) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52


def log_normal(u: float, *, median: float, sigma: float) -> float:
    """Return the ``u`` quantile of a log-normal distribution."""
    return median * math.exp(sigma * _INVERSE(u))


def blend(u_shared: float, u_own: float, share: float) -> float:
    """Mix two uniform numbers into one: ``share`` of the variance of its normal quantile comes from the first."""
    return _NORMAL.cdf(
        math.sqrt(share) * _INVERSE(u_shared) + math.sqrt(1 - share) * _INVERSE(u_own)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaRequest:
    """A sequence to decode: a response, or a judgement; a subclass may add the purpose of the sequence.

    Example:
        >>> costs = EngineCosts(devices_per_replica=1, max_num_seqs=2, decode_base_s=0.01, decode_per_sequence_s=0.0)
        >>> replica = SimulatedReplica(costs)
        >>> replica.submit([ReplicaRequest(length=100, prefill_s=0.5)], now_s=0.0)
        >>> replica.next_end_s
        1.5
    """

    length: float
    """Tokens to decode."""
    prefill_s: float = 0.0
    """Seconds in which its prompt is computed when it starts."""
    context: float = 0.0
    """Tokens that it holds when it starts."""
    index: int = 0
    """Its number among those of its caller."""


SequenceT = TypeVar("SequenceT", bound=ReplicaRequest)


class SimulatedReplica(Generic[SequenceT]):
    """A replica that decodes by the law of `EngineCosts`, moved forward by its caller.

    Methods take the present time ``now_s``, which never falls. The caller calls `complete` at `next_end_s`. At most
    `max_num_seqs` sequences run; the others wait in order. While a prompt is computed, running sequences stand still.
    Between two events the count of decoding steps grows evenly, so that a sequence may start or end within a step.

    Example:
        >>> costs = EngineCosts(devices_per_replica=1, max_num_seqs=2, decode_base_s=0.01, decode_per_sequence_s=0.0)
        >>> replica = SimulatedReplica(costs)
        >>> replica.submit([ReplicaRequest(length=length) for length in (100, 400, 200)], now_s=0.0)
        >>> replica.num_running, replica.num_waiting
        (2, 1)
        >>> while replica.next_end_s is not None:
        ...     now_s = replica.next_end_s
        ...     print(f"{now_s:.1f} s: {[ended.length for ended in replica.complete(now_s)]}")
        1.0 s: [100]
        3.0 s: [200]
        4.0 s: [400]
    """

    def __init__(self, costs: EngineCosts) -> None:
        self._costs = costs
        self._waiting: deque[SequenceT] = deque()
        self._running: list[tuple[float, int, float, SequenceT]] = []
        """A heap: the step at which a sequence ends, its number in order of starting, the step at which it started."""
        self._num_started = 0
        self._steps = 0.0
        """Decoding steps since the replica was last idle, up to ``_since_s``."""
        self._held = 0.0
        """Tokens that running sequences hold."""
        self._since_s = 0.0
        """The time up to which steps are counted; ahead of the present while a prompt is computed."""
        self._is_held = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_end_s(self) -> float | None:
        """The time at which the next sequence ends, if nothing changes until then; None if none runs, or when held."""
        if self._is_held or not self._running:
            return None
        steps = self._running[0][0] - self._steps
        return self._since_s + self._costs.decode_s(steps, float(len(self._running)), self._held)

    def submit(self, sequences: Iterable[SequenceT], now_s: float) -> None:
        """Add sequences after those that wait."""
        self._waiting.extend(sequences)
        # Nothing changes for those that run unless others join them.
        if len(self._running) < self._costs.max_num_seqs:
            self._advance(now_s)
            self._admit()

    def complete(self, now_s: float) -> list[SequenceT]:
        """Take out the sequences that end next; ``now_s`` is `next_end_s`."""
        end = self._running[0][0]
        self._count(end - self._steps)
        self._steps = end
        self._since_s = now_s
        ended: list[SequenceT] = []
        while self._running and self._running[0][0] <= end:
            ended.append(heappop(self._running)[3])
        for sequence in ended:
            self._held -= sequence.context + sequence.length
        self._admit()
        return ended

    def withdraw(
        self, which: Callable[[SequenceT], bool], now_s: float
    ) -> list[tuple[SequenceT, float]]:
        """Take sequences out, waiting or running; return each with the number of its decoded tokens."""
        waiting = self.withdraw_waiting()
        withdrawn = [(sequence, 0.0) for sequence in waiting if which(sequence)]
        self._waiting.extend(sequence for sequence in waiting if not which(sequence))
        chosen = [entry for entry in self._running if which(entry[3])]
        if chosen:
            self._advance(now_s)
            for _, _, start, sequence in chosen:
                withdrawn.append((sequence, self._steps - start))
                self._held -= sequence.context + self._steps - start
            self._running = sorted(entry for entry in self._running if not which(entry[3]))
            self._admit()
        return withdrawn

    def withdraw_waiting(self) -> list[SequenceT]:
        """Take out all sequences that wait, in order."""
        waiting = list(self._waiting)
        self._waiting.clear()
        return waiting

    def hold(self, now_s: float) -> None:
        """Stop decoding until `release`."""
        self._advance(now_s)
        self._is_held = True

    def release(self, now_s: float) -> None:
        """Continue after `hold`."""
        self._is_held = False
        self._since_s = max(self._since_s, now_s)
        self._admit()

    def _advance(self, now_s: float) -> None:
        if now_s > self._since_s:
            if self._running and not self._is_held:
                passed_s = now_s - self._since_s
                self._count(self._costs.steps_within(passed_s, len(self._running), self._held))
            self._since_s = now_s

    def _count(self, steps: float) -> None:
        self._steps += steps
        self._held += steps * len(self._running)

    def _admit(self) -> None:
        if self._is_held:
            return
        if not self._running:
            # Small counts are exact.
            self._steps = self._held = 0.0
        while self._waiting and len(self._running) < self._costs.max_num_seqs:
            sequence = self._waiting.popleft()
            self._since_s += sequence.prefill_s
            self._held += sequence.context
            self._num_started += 1
            heappush(
                self._running,
                (self._steps + sequence.length, self._num_started, self._steps, sequence),
            )


WORK = ("generation", "reward", "preparation", "training", "sync")
IDLE = ("long_tail", "waiting_for_reward", "reward_devices", "imbalance", "barriers")


class RunningLedger:
    """Adds up device-seconds: each goes to work, or to one cause of idleness.

    Either all devices do one thing, as in training, where devices with a smaller share wait for the slowest
    (imbalance), or they generate and score. Then reward devices without a call are idle for that reason
    (reward_devices), and idle engine devices are divided evenly among the controllers: the part of one counts as the
    long tail while it generates, as waiting for the reward while it waits for scores alone, and as barriers while it
    waits for other controllers. `Ledger` assigns the time of a run that has ended.

    Args:
        clock: returns the simulated time in seconds.

    Example:
        >>> now_s = 0.0
        >>> ledger = RunningLedger(num_devices=8, num_reward_devices=0, num_controllers=1, clock=lambda: now_s)
        >>> ledger.enter(0, "gen")
        >>> ledger.change("generation", 6)
        >>> now_s = 10.0
        >>> {name: seconds for name, seconds in ledger.cut().items() if seconds}
        {'generation': 60.0, 'long_tail': 20.0}
    """

    def __init__(
        self,
        *,
        num_devices: int,
        num_reward_devices: int,
        num_controllers: int,
        clock: Callable[[], float],
    ) -> None:
        self._num_devices = num_devices
        self._num_reward_devices = num_reward_devices
        self._clock = clock
        self._num_busy = {"generation": 0, "reward": 0}
        self._stages: list[str | None] = [None] * num_controllers
        self._num_in: Counter[str | None] = Counter(self._stages)
        self._whole: tuple[str, float] | None = None
        self._since_s = 0.0
        self._seconds: dict[str, float] = dict.fromkeys(WORK + IDLE, 0.0)

    def change(self, work: Literal["generation", "reward"], num_devices: int) -> None:
        """Count more devices as doing this work, or fewer if negative."""
        self._advance()
        self._num_busy[work] += num_devices

    def enter(self, rank: int, stage: str | None) -> None:
        """Note the present stage of a controller; None: it is in no stage."""
        self._advance()
        self._num_in[self._stages[rank]] -= 1
        self._num_in[stage] += 1
        self._stages[rank] = stage

    @contextmanager
    def occupy_all(self, work: str, busy_share: float) -> Generator[None]:
        """Count all devices as doing ``work`` inside the block, busy for a share of the time on average."""
        self._advance()
        assert self._whole is None, f"{work} started during {self._whole}"
        assert not any(self._num_busy.values()), f"{work} started while responses were generated"
        self._whole = work, busy_share
        try:
            yield
        finally:
            self._advance()
            self._whole = None

    def cut(self) -> dict[str, float]:
        """Return the device-seconds of each of WORK and IDLE since the last call."""
        self._advance()
        seconds = self._seconds
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _advance(self) -> None:
        now_s = self._clock()
        passed_s = now_s - self._since_s
        self._since_s = now_s
        if not passed_s:
            return
        seconds = self._seconds
        if self._whole is not None:
            work, share = self._whole
            seconds[work] += self._num_devices * passed_s * share
            seconds["imbalance"] += self._num_devices * passed_s * (1 - share)
            return
        generating, rewarding = self._num_busy.values()
        seconds["generation"] += generating * passed_s
        seconds["reward"] += rewarding * passed_s
        seconds["reward_devices"] += (self._num_reward_devices - rewarding) * passed_s
        part_s = (
            (self._num_devices - self._num_reward_devices - generating)
            * passed_s
            / len(self._stages)
        )
        seconds["long_tail"] += part_s * self._num_in["gen"]
        seconds["waiting_for_reward"] += part_s * self._num_in["reward"]
        seconds["barriers"] += part_s * (
            len(self._stages) - self._num_in["gen"] - self._num_in["reward"]
        )

"""One replica with continuous batching, for requests that arrive and are withdrawn while it runs.

`run_replicas` is the same for many replicas whose requests are known in advance.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from gcore_placement.costs import EngineCosts

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaRequest(Generic[ItemT]):
    """A sequence to decode, on behalf of an item of the caller's."""

    item: ItemT
    length: float
    """Tokens to decode."""
    prefill_s: float = 0.0
    """Seconds in which its prompt is computed when it starts."""
    context: float = 0.0
    """Tokens that it holds when it starts."""


class Replica(Generic[ItemT]):
    """A replica that decodes by the law of `EngineCosts`, moved forward by its caller.

    Methods take the present time ``now_s``, which never falls. The caller calls `complete` at `next_end_s`. At most
    `max_num_seqs` sequences run; the others wait in order. While a prompt is computed, running sequences stand still.
    Between two events the count of decoding steps grows evenly, so that a sequence may start or end within a step.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self._costs = costs
        self._waiting: deque[ReplicaRequest[ItemT]] = deque()
        self._running: list[tuple[float, int, float, ReplicaRequest[ItemT]]] = []
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
        """Sequences that are decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return len(self._waiting)

    @property
    def next_end_s(self) -> float | None:
        """The time at which the next sequence ends, if nothing changes until then; None if none runs, or when held."""
        if self._is_held or not self._running:
            return None
        return self._since_s + self._costs.decode_s(
            self._running[0][0] - self._steps, float(len(self._running)), self._held
        )

    def submit(self, sequences: Iterable[ReplicaRequest[ItemT]], now_s: float) -> None:
        """Add sequences after those that wait."""
        self._waiting.extend(sequences)
        self._advance(now_s)
        self._admit()

    def complete(self, now_s: float) -> list[ItemT]:
        """Take out the sequences that end next; ``now_s`` is `next_end_s`."""
        end = self._running[0][0]
        self._count(end - self._steps)
        self._steps, self._since_s = end, now_s
        ended: list[ReplicaRequest[ItemT]] = []
        while self._running and self._running[0][0] <= end:
            ended.append(heappop(self._running)[3])
        self._held -= sum(sequence.context + sequence.length for sequence in ended)
        self._admit()
        return [sequence.item for sequence in ended]

    def withdraw(self, which: Callable[[ItemT], bool], now_s: float) -> list[tuple[ItemT, float]]:
        """Take sequences out, waiting or running; each with the tokens that it has been given."""
        taken = [(sequence.item, 0.0) for sequence in self._waiting if which(sequence.item)]
        if taken:
            self._waiting = deque(sequence for sequence in self._waiting if not which(sequence.item))
        chosen = [entry for entry in self._running if which(entry[3].item)]
        if chosen:
            self._advance(now_s)
            for _, _, start, sequence in chosen:
                taken.append((sequence.item, self._steps - start))
                self._held -= sequence.context + self._steps - start
            self._running = sorted(entry for entry in self._running if not which(entry[3].item))
            self._admit()
        return taken

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
                running = float(len(self._running))
                self._count(float(self._costs.steps_within(now_s - self._since_s, running, self._held)))
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
            heappush(self._running, (self._steps + sequence.length, self._num_started, self._steps, sequence))

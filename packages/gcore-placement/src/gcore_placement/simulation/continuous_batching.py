"""Continuous batching on many replicas at once, for requests whose arrivals are known in advance."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gcore_placement.costs import EngineCosts
from gcore_placement.quantities import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests to many replicas, each of which serves its requests in order of arrival."""

    replica: Ints
    arrival: Floats
    """Seconds."""
    prefill: Floats
    """Tokens to compute before the first is decoded."""
    context: Floats
    """Tokens that the sequence holds when it starts."""
    length: Floats
    """Tokens to decode, at least 1."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRun:
    """Seconds at which requests got a place on their replica, and at which they were done."""

    requests: Requests
    start: Floats
    """The prompt may be computed later, after those of others."""
    finish: Floats

    @cached_property
    def busy(self) -> tuple[Ints, Floats, Floats]:
        """The stretches in which replicas run any sequence: the replica, start and end of each, [num_stretches]."""
        order = np.lexsort((self.start, self.requests.replica))
        replica = self.requests.replica[order]
        start = self.start[order]
        finish = self.finish[order]
        if not len(order):
            return replica, start, finish
        # Replicas follow one another in time, so that one running maximum serves all.
        offset = replica * (float(finish.max()) + 1.0)
        done = np.maximum.accumulate(finish + offset)
        is_first = np.ones(len(order), dtype=np.bool_)
        is_first[1:] = (start + offset)[1:] > done[:-1]
        firsts = np.flatnonzero(is_first)
        return replica[firsts], start[firsts], np.maximum.reduceat(finish, firsts)


def run_replicas(costs: EngineCosts, num_replicas: int, requests: Requests) -> EngineRun:
    """Simulate continuous batching on replicas, from one start or end of a sequence to the next.

    Between two such events running sequences get tokens at the same rate (`EngineCosts.decode_s`). A request that
    arrives starts at once if fewer than `max_num_seqs` run, and otherwise when one ends; running sequences stand still
    while its prompt is computed. Waiting requests are served in order.
    """
    if not len(requests.replica):
        return EngineRun(requests=requests, start=requests.arrival, finish=requests.arrival)
    return _Batch(costs, num_replicas, requests).run()


class _Batch:
    """The state of all replicas, mutable. Requests are held in order of replica, then of arrival."""

    def __init__(self, costs: EngineCosts, num_replicas: int, requests: Requests) -> None:
        order = np.lexsort((requests.arrival, requests.replica))
        counts = np.bincount(requests.replica, minlength=num_replicas)
        self._costs = costs
        self._requests = requests
        self._order = order
        # After the last request stands one that never arrives.
        self._arrival = np.append(requests.arrival[order], np.inf)
        self._prefill_s = requests.prefill[order] * costs.prefill_per_token_s
        self._context = requests.context[order]
        self._length = requests.length[order]
        self._end = np.cumsum(counts)
        self._next = self._end - counts
        self._start = np.empty(len(order))
        self._finish = np.empty(len(order))
        """Seconds at which requests get a place and are done."""

        self._num_slots = min(costs.max_num_seqs, int(counts.max()))
        self._time = np.zeros(num_replicas)
        self._steps = np.zeros(num_replicas)
        """Decoding steps since the replica was last idle."""
        self._held = np.zeros(num_replicas)
        """Tokens that running sequences hold."""
        self._running = np.zeros(num_replicas, dtype=np.intp)
        """Running sequences, in a replica's first slots."""
        self._freed = np.zeros(num_replicas)
        """Seconds at which a sequence last ended on a full replica."""
        self._slot_end = np.full((num_replicas, self._num_slots), np.inf)
        """The step at which the sequence in a slot ends; infinite in a free one."""
        self._slot_item = np.zeros((num_replicas, self._num_slots), dtype=np.intp)
        self._first = np.zeros(num_replicas, dtype=np.intp)
        """The slot whose sequence ends next."""

    def run(self) -> EngineRun:
        """Advance each replica to its next event, the start or the end of one sequence, until none is left."""
        while True:
            is_running = self._running > 0
            has_next = (self._next < self._end) & (self._running < self._num_slots)
            if not (is_running | has_next).any():
                break
            first_end = self._slot_end[np.arange(len(self._first)), self._first]
            to_end = np.where(is_running, first_end - self._steps, 0.0)
            duration = self._costs.decode_s(to_end, self._running.astype(np.float64), self._held)
            arrival = np.where(has_next, self._arrival[self._next], np.inf)
            # A request that arrives just as another ends comes second, and takes its place.
            # Nor does a request that waits delay others that end at the very step at which its place becomes free.
            is_next_start = has_next & (
                ~is_running | ((to_end > 0) & (arrival < self._time + duration))
            )
            ending = np.flatnonzero(is_running & ~is_next_start)
            starting = np.flatnonzero(is_next_start)
            if len(ending):
                self._end_sequences(ending, to_end[ending], duration[ending])
            if len(starting):
                self._start_sequences(starting, arrival[starting])
        start = np.empty_like(self._start)
        finish = np.empty_like(self._finish)
        start[self._order] = self._start
        finish[self._order] = self._finish
        return EngineRun(requests=self._requests, start=start, finish=finish)

    def _end_sequences(self, replicas: Ints, steps: Floats, duration: Floats) -> None:
        slot = self._first[replicas]
        item = self._slot_item[replicas, slot]
        self._time[replicas] += duration
        self._finish[item] = self._time[replicas]
        self._steps[replicas] = self._slot_end[replicas, slot]
        self._held[replicas] += (
            self._running[replicas] * steps - self._context[item] - self._length[item]
        )
        full = replicas[self._running[replicas] == self._num_slots]
        self._freed[full] = self._time[full]
        self._running[replicas] -= 1
        # The last running sequence takes the free slot.
        last = self._running[replicas]
        self._slot_end[replicas, slot] = self._slot_end[replicas, last]
        self._slot_item[replicas, slot] = self._slot_item[replicas, last]
        self._slot_end[replicas, last] = np.inf
        self._first[replicas] = self._slot_end[replicas, : int(last.max()) + 1].argmin(axis=1)
        # Small counts are exact ones.
        idle = replicas[self._running[replicas] == 0]
        self._steps[idle] = 0.0
        self._held[idle] = 0.0

    def _start_sequences(self, replicas: Ints, arrival: Floats) -> None:
        item = self._next[replicas]
        time = self._time[replicas]
        running = self._running[replicas].astype(np.float64)
        held_tokens = self._held[replicas]
        begin = np.maximum(time, arrival)
        steps = np.zeros_like(time)
        has_passed = (running > 0) & (arrival > time)
        steps[has_passed] = self._costs.steps_within(
            (begin - time)[has_passed], running[has_passed], held_tokens[has_passed]
        )
        self._steps[replicas] += steps
        self._held[replicas] = held_tokens + running * steps + self._context[item]
        self._start[item] = np.maximum(self._freed[replicas], arrival)
        self._time[replicas] = begin + self._prefill_s[item]
        slot = self._running[replicas]
        end = self._steps[replicas] + self._length[item]
        is_first = end < self._slot_end[replicas, self._first[replicas]]
        self._first[replicas[is_first]] = slot[is_first]
        self._slot_end[replicas, slot] = end
        self._slot_item[replicas, slot] = item
        self._running[replicas] += 1
        self._next[replicas] += 1

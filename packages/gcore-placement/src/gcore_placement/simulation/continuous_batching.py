"""Continuous batching on many replicas at once, for requests whose arrivals are known in advance."""

from dataclasses import dataclass

import numpy as np

from gcore_placement.costs import EngineCosts
from gcore_placement.quantities import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    """Requests to many replicas, each replica's in order of arrival."""

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
    """Seconds at which requests started and were done, and the stretches in which replicas were busy."""

    requests: Requests
    start: Floats
    finish: Floats
    busy_replica: Ints
    busy_from: Floats
    busy_to: Floats


def run_replicas(costs: EngineCosts, num_replicas: int, requests: Requests) -> EngineRun:
    """Simulate continuous batching on replicas, from one start or end of a sequence to the next.

    Between two such events running sequences get tokens at the same rate (`EngineCosts.decode_s`). A request that
    arrives starts at once if fewer than `max_num_seqs` run, and otherwise when one ends; running sequences stand still
    while its prompt is computed. Waiting requests are served in order.
    """
    counts = np.bincount(requests.replica, minlength=num_replicas)
    if not len(requests.replica):
        none = np.empty(0)
        return EngineRun(
            requests=requests,
            start=none,
            finish=none,
            busy_replica=counts[:0],
            busy_from=none,
            busy_to=none,
        )
    order = np.argsort(requests.replica, kind="stable")
    arrival = requests.arrival[order]
    ends = np.cumsum(counts)
    if (
        counts.max() <= costs.max_num_seqs
        and (arrival == np.repeat(arrival[ends - 1], counts)).all()
    ):
        return _run_together(costs, counts, requests)
    return _Batch(costs, requests, order, counts).run()


def _run_together(costs: EngineCosts, counts: Ints, requests: Requests) -> EngineRun:
    """Simulate in closed form requests that all start together on their replica, without waiting."""
    order = np.lexsort((requests.length, requests.replica))
    used = np.flatnonzero(counts)
    ends = np.cumsum(counts[used])
    starts = ends - counts[used]
    length = requests.length[order]

    def up_to(values: Floats) -> Floats:
        """Sum over the requests of the same replica that end no later: [Q]."""
        total = np.cumsum(values)
        return total - np.repeat(total[starts] - values[starts], counts[used])

    def from_here(values: Floats) -> Floats:
        """Sum over the requests of the same replica that end no earlier: [Q]."""
        return np.repeat(np.add.reduceat(values, starts), counts[used]) - up_to(values) + values

    running = from_here(np.ones(len(order)))
    done = np.concatenate([[0.0], length[:-1]])
    done[starts] = 0.0
    held_tokens = from_here(requests.context[order]) + running * done
    prefill_s = np.add.reduceat(requests.prefill[order] * costs.prefill_per_token_s, starts)
    arrival = requests.arrival[order]
    finish = np.empty(len(order))
    # Sequences that end at the same step end at the very same second.
    decoded_s = up_to(costs.decode_s(length - done, running, held_tokens))
    finish[order] = arrival + np.repeat(prefill_s, counts[used]) + decoded_s
    busy_to = finish[order[ends - 1]]
    return EngineRun(
        requests=requests,
        start=requests.arrival,
        finish=finish,
        busy_replica=used,
        busy_from=arrival[starts],
        busy_to=busy_to,
    )


class _Batch:
    """The state of all replicas, mutable. Requests are held in order of replica, then of arrival."""

    def __init__(self, costs: EngineCosts, requests: Requests, order: Ints, counts: Ints) -> None:
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
        self._num_unfinished = len(order)

        num_replicas = len(counts)
        self._num_slots = min(costs.max_num_seqs, int(counts.max()))
        self._time = np.zeros(num_replicas)
        self._steps = np.zeros(num_replicas)
        """Decoding steps since the replica was last idle."""
        self._held = np.zeros(num_replicas)
        """Tokens that running sequences hold."""
        self._running = np.zeros(num_replicas, dtype=np.intp)
        """Running sequences, in a replica's first slots."""
        self._slot_end = np.full((num_replicas, self._num_slots), np.inf)
        """The step at which the sequence in a slot ends; infinite in a free one."""
        self._slot_item = np.zeros((num_replicas, self._num_slots), dtype=np.int32)
        self._first = np.zeros(num_replicas, dtype=np.intp)
        """The slot whose sequence ends next."""
        self._begin = np.empty(len(order))
        self._finish = np.empty(len(order))
        """Seconds at which requests start and are done."""
        self._busy_since = np.zeros(num_replicas)
        self._stretches: list[tuple[Ints, Floats, Floats]] = []

    def run(self) -> EngineRun:
        """Advance until no request is unfinished."""
        while self._num_unfinished:
            self._advance()
        start = np.empty_like(self._finish)
        finish = np.empty_like(self._finish)
        start[self._order] = self._begin
        finish[self._order] = self._finish
        replicas, since, until = (
            np.concatenate(part) for part in zip(*self._stretches, strict=True)
        )
        return EngineRun(
            requests=self._requests,
            start=start,
            finish=finish,
            busy_replica=replicas,
            busy_from=since,
            busy_to=until,
        )

    def _advance(self) -> None:
        """Advance each replica to its next event: the start or the end of one sequence."""
        is_running = self._running > 0
        first_end = self._slot_end[np.arange(len(self._first)), self._first]
        to_end = np.where(is_running, first_end - self._steps, 0.0)
        duration = self._costs.decode_s(to_end, self._running.astype(np.float64), self._held)
        has_next = (self._next < self._end) & (self._running < self._num_slots)
        arrival = np.where(has_next, self._arrival[self._next], np.inf)
        # A request that arrives just as another ends comes second, and takes its place.
        # Nor does a request that waits delay others that end at the very step at which its place becomes free.
        starts_next = has_next & (~is_running | ((to_end > 0) & (arrival < self._time + duration)))
        ends = np.flatnonzero(is_running & ~starts_next)
        started = np.flatnonzero(starts_next)
        if len(ends):
            self._complete(ends, to_end[ends], duration[ends])
        if len(started):
            self._start(started, arrival[started])

    def _complete(self, replicas: Ints, steps: Floats, duration: Floats) -> None:
        running = self._running[replicas]
        slot = self._first[replicas]
        time = self._time[replicas] + duration
        self._time[replicas] = time
        self._steps[replicas] = self._slot_end[replicas, slot]
        item = self._slot_item[replicas, slot].astype(np.intp)
        # The last running sequence takes the free slot.
        last = running - 1
        self._slot_end[replicas, slot] = self._slot_end[replicas, last]
        self._slot_item[replicas, slot] = self._slot_item[replicas, last]
        self._slot_end[replicas, last] = np.inf
        self._running[replicas] = last
        self._first[replicas] = self._slot_end[replicas, : int(running.max())].argmin(axis=1)
        self._held[replicas] += running * steps - self._context[item] - self._length[item]
        self._finish[item] = time
        self._num_unfinished -= len(replicas)

        is_empty = running == 1
        empty = replicas[is_empty]
        time = time[is_empty]
        # Small counts are exact ones.
        self._steps[empty] = self._held[empty] = 0.0
        after = self._next[empty]
        is_idle = (after == self._end[empty]) | (self._arrival[after] >= time)
        self._stretches.append((empty[is_idle], self._busy_since[empty[is_idle]], time[is_idle]))

    def _start(self, replicas: Ints, arrival: Floats) -> None:
        slot = self._running[replicas]
        held_tokens = self._held[replicas]
        time = self._time[replicas]
        running = slot.astype(np.float64)
        was_idle = (slot == 0) & (arrival >= time)
        self._busy_since[replicas[was_idle]] = arrival[was_idle]
        passed = np.where(slot > 0, np.maximum(arrival - time, 0.0), 0.0)
        steps = np.zeros_like(passed)
        has_passed = passed > 0
        steps[has_passed] = self._costs.steps_within(
            passed[has_passed], running[has_passed], held_tokens[has_passed]
        )

        item = self._next[replicas]
        self._steps[replicas] += steps
        self._held[replicas] = held_tokens + running * steps + self._context[item]
        self._begin[item] = np.maximum(time, arrival)
        self._time[replicas] = self._begin[item] + self._prefill_s[item]
        end = self._steps[replicas] + self._length[item]
        is_first = end < self._slot_end[replicas, self._first[replicas]]
        self._first[replicas[is_first]] = slot[is_first]
        self._slot_end[replicas, slot] = end
        self._slot_item[replicas, slot] = item
        self._running[replicas] = slot + 1
        self._next[replicas] += 1

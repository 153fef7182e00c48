"""Collectives over Python objects: the protocol, and the checks and the log of calls that all runtimes share.

Controllers exchange small objects and references here; bulk bytes travel between the roles that make and use them.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from numbers import Integral, Real
from operator import add, index, itemgetter
from typing import Any, Self, TypeVar

from gcore_controller.errors import (
    CollectiveError,
    ControllerError,
)

T = TypeVar("T")

_LARGEST_EXACT = 2**53
_SAME_CALLS = "every controller must make the same calls in the same order"


@dataclass(frozen=True)
class CollectiveCall:
    """One controller's part in one collective."""

    channel: str
    sequence: int
    """Number of the collective on its channel, from 0."""
    op: str
    """The operation, with the arguments that must be the same on every rank."""

    def __str__(self) -> str:
        return f"{self.op} ({self.place})"

    @property
    def place(self) -> str:
        text = f"collective {self.sequence}"
        if self.channel:
            text += f" on channel {self.channel!r}"
        return text


@dataclass
class _Channel:
    num_calls: int = 0
    current: CollectiveCall | None = None
    abandoned: CollectiveCall | None = None
    error: ControllerError | None = None


class CallLog:
    """The calls of one rank on all channels; its owner updates ``returned``, those of ranks that have returned."""

    def __init__(self, rank: int, returned: Mapping[int, Mapping[str, int]]) -> None:
        self._rank = rank
        self._returned = returned
        self._channels: defaultdict[str, _Channel] = defaultdict(_Channel)
        self._is_closed = False

    @property
    def num_calls(self) -> dict[str, int]:
        """Collectives called so far, by channel."""
        return {name: channel.num_calls for name, channel in self._channels.items()}

    @property
    def waiting(self) -> tuple[CollectiveCall, ...]:
        """Calls that have not returned."""
        return tuple(
            channel.current for channel in self._channels.values() if channel.current is not None
        )

    def whereabouts(self, stage: str | None) -> "Whereabouts":
        """Return the collectives that the rank is in; the stage is that of its timer."""
        return Whereabouts(stage, self.num_calls, self.waiting, has_returned=self._is_closed)

    def close(self) -> None:
        """Refuse further calls: the program has returned."""
        self._is_closed = True

    def check_open(self, op: str) -> None:
        """Raise `CollectiveError` if the program has returned: the call comes from a task that it left."""
        if self._is_closed:
            raise CollectiveError(
                f"rank {self._rank} called {op} after its program had returned: await or cancel tasks that use "
                "collectives before the program returns"
            )

    def begin(self, channel_name: str, op: str) -> CollectiveCall:
        """Count a call, unless it cannot complete, or the channel has failed before."""
        self.check_open(op)
        channel = self._channels[channel_name]
        if channel.error is not None:
            raise copy_error(channel.error)
        call = CollectiveCall(channel_name, channel.num_calls, op)
        if channel.current is not None:
            raise CollectiveError(
                f"rank {self._rank} called {op} while its {channel.current} was in flight: a channel carries one "
                "collective at a time; give each concurrent task a channel of its own with ctx.group.channel(name)"
            )
        if channel.abandoned is not None:
            raise CollectiveError(
                f"rank {self._rank} called {call} after its {channel.abandoned} was cancelled, by a timeout or with "
                "its task: its calls no longer correspond to those of the other ranks, so the channel cannot be used "
                "any more; limit the whole run with timeout_s instead, or use a new channel on every rank"
            )
        error = self.missing(call)
        if error is not None:
            raise error
        channel.num_calls += 1
        channel.current = call
        return call

    def missing(self, call: CollectiveCall) -> CollectiveError | None:
        """Return the error of a call that cannot complete because another rank's program has returned, if so."""
        for rank, num_calls in self._returned.items():
            count = num_calls.get(call.channel, 0)
            if count <= call.sequence:
                return CollectiveError(
                    f"rank {self._rank} waits in {call} for rank {rank}, whose program has returned after {count} "
                    f"collective{'s' * (count != 1)} on that channel; {_SAME_CALLS}"
                )
        return None

    def end(self, call: CollectiveCall, *, abandoned: bool = False) -> None:
        """Record that a call has returned, raised or, if ``abandoned``, was cancelled before its result is known."""
        channel = self._channels[call.channel]
        channel.current = None
        if abandoned:
            channel.abandoned = call

    def fail(self, channel_name: str, error: ControllerError) -> None:
        """Refuse further calls on a channel with this error, unless it has failed before."""
        channel = self._channels[channel_name]
        channel.error = channel.error or error

    def is_abandoned(self, channel_name: str) -> bool:
        """Return whether the program has left a call of the channel, and still runs."""
        return not self._is_closed and self._channels[channel_name].abandoned is not None

    def has_failed(self, channel_name: str) -> bool:
        return self._channels[channel_name].error is not None


@dataclass(frozen=True)
class Whereabouts:
    """The stage and the collectives that one controller is in; can be sent to other processes."""

    stage: str | None
    num_calls: Mapping[str, int]
    waiting: tuple[CollectiveCall, ...]
    has_returned: bool

    def __str__(self) -> str:
        return "has returned" if self.has_returned else f"in {self.stage or 'no stage'}"


def describe(whereabouts: Mapping[int, Whereabouts | None]) -> str:
    """Return in words where each controller is, and which ranks collectives wait for; None: it does not answer."""
    stages: list[str] = []
    waiting: defaultdict[CollectiveCall, list[int]] = defaultdict(list)
    for rank, where in whereabouts.items():
        stages.append(f"controller {rank} {where or 'does not answer'}")
        if where is not None:
            for call in where.waiting:
                waiting[call].append(rank)
    texts = [", ".join(stages)]
    for call, present in waiting.items():
        text = f"{_ranks(present)} in {call}"
        absent: list[int] = []
        for rank, where in whereabouts.items():
            if where is None or where.num_calls.get(call.channel, 0) <= call.sequence:
                absent.append(rank)
        if absent:
            text += f" waiting for {_ranks(absent)}"
        texts.append(text)
    return "; ".join(texts)


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words, consecutive ones as a range."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda entry: entry[1] - entry[0])
    spans: list[str] = []
    for _, run in runs:
        consecutive = [rank for _, rank in run]
        span = str(consecutive[0])
        if len(consecutive) > 1:
            span += f"-{consecutive[-1]}"
        spans.append(span)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def mismatch(calls: Mapping[int, CollectiveCall]) -> CollectiveError:
    """Return the error for ranks whose calls in the same collective differ."""
    called = ", ".join(f"rank {rank} called {call.op}" for rank, call in sorted(calls.items()))
    (collective,) = {call.place for call in calls.values()}
    return CollectiveError(f"{collective}: {called}; {_SAME_CALLS}")


def copy_error(error: ControllerError) -> ControllerError:
    """Return a copy of an error, to be raised once more with a traceback of its own."""
    return type(error)(*error.args)


def take_tickets(counters: Counter[str], count: int, counter: str, limit: int | None) -> range:
    """Take from one rank's counters, the next numbers by name; see `Collectives.take_tickets`."""
    start = counters[counter]
    end = start + count
    if limit is not None:
        end = max(start, min(end, limit))
    counters[counter] = end
    return range(start, end)


class Collectives(ABC):
    """Communication between the controllers, which must all make the same calls in the same order.

    A call returns when every controller has made it. Calls that differ raise `CollectiveError` on every rank
    that takes part, as does a call that waits for a controller whose program has returned. After an error the channel
    cannot be used any more: every later call on it raises the same error.

    A call that is cancelled on one rank, for instance by a timeout, still counts: the other ranks complete theirs. That
    rank's next call on the channel raises `CollectiveError`, because its calls no longer correspond to those
    of the others.

    Values belong to all ranks that receive them: in one process (runtimes inline and sim) objects are passed by
    reference, on Ray they are copied. Do not modify a value after it was sent or received.

    This class makes all checks; subclasses exchange the values. All channels of a rank share its log.

    Example:
        >>> async def program(ctx: Context) -> float:
        ...     loads = await ctx.group.all_gather(10 * ctx.rank)
        ...     return await ctx.group.all_reduce(max(loads) - loads[ctx.rank])
        >>> asyncio.run(run_inline(program, roles=None, world_size=3))
        [30.0, 30.0, 30.0]
    """

    def __init__(self, rank: int, world_size: int, log: CallLog) -> None:
        self.rank = rank
        self.world_size = world_size
        self._log = log
        self._channel = ""

    def channel(self, name: str) -> Self:
        """Return the same controllers for a concurrent task: calls are ordered within a channel, not between channels.

        Channels nest like folders: ``channel("x").channel("y")`` is ``channel("x/y")``, and no other task's
        ``channel("y")``. All channels share the counters of tickets.
        """
        channel = copy(self)
        channel._channel = f"{self._channel}/{name}".strip("/")
        return channel

    async def all_gather(self, value: T) -> list[T]:
        """Return every controller's value, by rank."""
        with self._call("all_gather") as call:
            return list(await self._gather(call, value, list))

    async def gather(self, value: T, *, dst: int = 0) -> list[T]:
        """Return every controller's value, by rank, on rank ``dst``, and an empty list on the others.

        Raises:
            ValueError: ``dst`` is not a rank.
        """
        dst = self._checked_rank("dst", dst)
        with self._call(f"gather(dst={dst})") as call:
            values = await self._gather(call, value, list, dst=dst)
        return values if self.rank == dst else []

    async def all_reduce(self, value: float) -> float:
        """Return the sum over all controllers as a float, added in rank order.

        Raises:
            TypeError: ``value`` is not a number; use `all_gather` for arrays.
            ValueError: ``value`` is an integer that a float cannot represent exactly.
        """
        number = _as_float(value)
        with self._call("all_reduce") as call:
            return await self._gather(call, number, _sum_in_order)

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        """Return the value that rank ``src`` passed.

        Raises:
            ValueError: ``src`` is not a rank.
        """
        src = self._checked_rank("src", src)
        with self._call(f"broadcast(src={src})") as call:
            return await self._gather(call, value if self.rank == src else None, itemgetter(src))

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        """Send ``parts[r]`` to rank r, and return what every rank has sent to this one, by rank.

        Empty lists take no message of their own.
        """
        if len(parts) != self.world_size:
            raise ValueError(
                f"parts has {len(parts)} entries; expected {self.world_size}, one for each rank"
            )
        with self._call("all_to_all") as call:
            return await self._exchange(call, parts)

    async def barrier(self) -> None:
        """Wait for every controller."""
        with self._call("barrier") as call:
            await self._gather(call, None, list)

    async def take_tickets(
        self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None
    ) -> range:
        """Return the next ``count`` numbers of a counter that all controllers share; each number goes to one of them.

        The counter starts at 0. This is no collective: a controller may call it at any time, and numbers go to
        controllers in the order of their calls.

        Args:
            at: the rank whose counter is used; every rank has counters of its own.
            limit: return only numbers below it, so there may be fewer; the next call continues after them.
        """
        if count < 0:
            raise ValueError(f"count is {count}; expected 0 or more")
        at = self._checked_rank("at", at)
        self._log.check_open("take_tickets")
        return await self._take_tickets(count, counter, at, limit)

    @contextmanager
    def _call(self, op: str) -> Generator[CollectiveCall]:
        """Count a call, and leave the channel in a state that later calls can be checked against."""
        call = None
        abandoned = False
        try:
            call = self._log.begin(self._channel, op)
            yield call
        except asyncio.CancelledError:
            abandoned = True
            raise
        except ControllerError as error:
            is_refused = call is None and not self._log.is_abandoned(self._channel)
            if not is_refused and not self._log.has_failed(self._channel):
                self._fail_everywhere(self._channel, error)
            raise
        except Exception as error:
            what = (
                f"rank {self.rank} called a collective after its {call} had failed: {error!r:.300}"
            )
            self._fail(self._channel, CollectiveError(what))
            raise
        finally:
            if call is not None:
                self._log.end(call, abandoned=abandoned)

    def _checked_rank(self, name: str, value: int) -> int:
        rank = index(value)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{name} is {rank}; expected a rank from 0 to {self.world_size - 1}")
        return rank

    @abstractmethod
    async def _gather(
        self,
        call: CollectiveCall,
        value: Any,
        combine: Callable[[list[Any]], T],
        *,
        dst: int | None = None,
    ) -> T:
        """Return what ``combine`` makes of the values of all ranks, which it must not modify.

        With ``dst``, other ranks than that one may lack values: they have None there.
        """

    @abstractmethod
    async def _exchange(self, call: CollectiveCall, parts: Sequence[T]) -> list[T]:
        """Send a part to each rank, and return the received ones by rank."""

    @abstractmethod
    async def _take_tickets(
        self, count: int, counter: str, at: int, limit: int | None
    ) -> range: ...

    def _fail(self, channel: str, error: ControllerError) -> None:
        """Make this rank's calls on a channel raise an error, those in flight and later ones."""
        self._log.fail(channel, error)

    @abstractmethod
    def _fail_everywhere(self, channel: str, error: ControllerError) -> None:
        """Make the calls of all ranks on a channel raise an error, those in flight and later ones."""


def _sum_in_order(values: list[float]) -> float:
    """Add one value after the other; Python's own sum of floats differs between versions."""
    return reduce(add, values, 0.0)


def _as_float(value: object) -> float:
    if not isinstance(value, Real):
        type_name = type(value).__name__
        raise TypeError(
            f"all_reduce value is of type {type_name}; expected a number (gather arrays with all_gather)"
        )
    if isinstance(value, Integral) and abs(int(value)) > _LARGEST_EXACT:
        raise ValueError(
            f"all_reduce value is {value}; expected an integer of at most 2**53, which is exact as a float"
        )
    return float(value)

"""The log of each rank's collectives, from which calls that differ or that cannot complete are found."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gcore_controller.errors import (
    CollectiveAbandonedError,
    CollectiveMismatchError,
    ConcurrentCollectivesError,
    ControllerError,
)

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
        """The collective's number and channel, in words."""
        return f"collective {self.sequence}" + (f" on channel {self.channel!r}" if self.channel else "")


@dataclass
class _Channel:
    """State of one channel on one rank."""

    num_calls: int = 0
    current: CollectiveCall | None = None
    abandoned: CollectiveCall | None = None
    error: ControllerError | None = None


class CallLog:
    """The calls of one rank on all channels.

    Args:
        returned: Calls per channel of the ranks whose programs have returned. The owner of the log updates it.
    """

    def __init__(self, rank: int, returned: Mapping[int, Mapping[str, int]]) -> None:
        self._rank = rank
        self._returned = returned
        self._channels: dict[str, _Channel] = {}
        self._is_closed = False

    @property
    def num_calls(self) -> dict[str, int]:
        """Collectives called so far, by channel."""
        return {name: channel.num_calls for name, channel in self._channels.items()}

    @property
    def waiting(self) -> list[CollectiveCall]:
        """Calls that have not returned."""
        return [channel.current for channel in self._channels.values() if channel.current is not None]

    @property
    def whereabouts(self) -> "Whereabouts":
        return Whereabouts(num_calls=self.num_calls, waiting=tuple(self.waiting), has_returned=self._is_closed)

    def close(self) -> None:
        """Refuse further calls: the program has returned."""
        self._is_closed = True

    def check_open(self, op: str) -> None:
        """Check that the program is still running.

        Raises:
            CollectiveMismatchError: The program has returned, so the call comes from a task that it left running.
        """
        if self._is_closed:
            raise CollectiveMismatchError(
                f"rank {self._rank} called {op} after its program had returned: await or cancel tasks that use "
                "collectives before the program returns"
            )

    def begin(self, channel_name: str, op: str) -> CollectiveCall:
        """Count a call.

        Raises:
            ConcurrentCollectivesError: Another call of this rank is in flight on the channel. The call is not counted.
            CollectiveMismatchError: A rank that would have to take part has returned from its program.
            CollectiveAbandonedError: The previous call on the channel was cancelled.
            ControllerError: The channel has failed before; the same error again.
        """
        self.check_open(op)
        channel = self._channels.setdefault(channel_name, _Channel())
        if channel.error is not None:
            raise again(channel.error)
        call = CollectiveCall(channel_name, channel.num_calls, op)
        if channel.current is not None:
            raise ConcurrentCollectivesError(
                f"rank {self._rank} called {op} while its {channel.current} was in flight: a channel carries one "
                "collective at a time; give each concurrent task a channel of its own with ctx.group.channel(name)"
            )
        if channel.abandoned is not None:
            raise CollectiveAbandonedError(
                f"rank {self._rank} called {call} after its {channel.abandoned} was cancelled, by a timeout or with "
                "its task: its calls no longer correspond to those of the other ranks, so the channel cannot be used "
                "any more; limit the whole run with timeout_s instead, or use a new channel on every rank"
            )
        if error := self.missing(call):
            raise error
        channel.num_calls += 1
        channel.current = call
        return call

    def missing(self, call: CollectiveCall) -> CollectiveMismatchError | None:
        """Return the error of a call that cannot complete because another rank's program has returned, if so."""
        for rank, num_calls in self._returned.items():
            if (count := num_calls.get(call.channel, 0)) <= call.sequence:
                return CollectiveMismatchError(
                    f"rank {self._rank} waits in {call} for rank {rank}, whose program has returned after {count} "
                    f"collective{'s' * (count != 1)} on that channel; {_SAME_CALLS}"
                )
        return None

    def end(self, call: CollectiveCall, *, abandoned: bool = False) -> None:
        """Note that a call has returned or raised.

        Args:
            abandoned: It was cancelled, so this rank does not know the result.
        """
        channel = self._channels[call.channel]
        channel.current = None
        if abandoned:
            channel.abandoned = call

    def fail(self, channel_name: str, error: ControllerError) -> None:
        """Refuse further calls on a channel with this error, unless it has failed before."""
        channel = self._channels.setdefault(channel_name, _Channel())
        channel.error = channel.error or error

    def has_failed(self, channel_name: str) -> bool:
        return self._channels.get(channel_name, _Channel()).error is not None


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """The stage and the collectives that one controller is in; can be sent to other processes."""

    stage: str | None = None
    num_calls: Mapping[str, int]
    waiting: tuple[CollectiveCall, ...] = ()
    has_returned: bool = False

    def during(self, stage: str | None) -> "Whereabouts":
        return replace(self, stage=stage)


def describe(whereabouts: Mapping[int, Whereabouts | None]) -> str:
    """Return in words where each controller is, and which ranks collectives wait for.

    Args:
        whereabouts: of each rank; None: the controller does not answer.
    """
    stages = [f"controller {rank} {_stage(where)}" for rank, where in whereabouts.items()]
    waiting: dict[CollectiveCall, list[int]] = {}
    for rank, where in whereabouts.items():
        for call in where.waiting if where else ():
            waiting.setdefault(call, []).append(rank)
    waits = [f"{_ranks(present)} in {call}{_absent(call, whereabouts)}" for call, present in waiting.items()]
    return "; ".join([", ".join(stages), *waits])


def _stage(where: Whereabouts | None) -> str:
    if where is None:
        return "does not answer"
    return "has returned" if where.has_returned else f"in {where.stage or 'no stage'}"


def _absent(call: CollectiveCall, whereabouts: Mapping[int, Whereabouts | None]) -> str:
    absent = [r for r, w in whereabouts.items() if w is None or w.num_calls.get(call.channel, 0) <= call.sequence]
    return f" waiting for {_ranks(absent)}" if absent else ""


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words, consecutive ones as a range."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def mismatch(calls: Mapping[int, CollectiveCall]) -> CollectiveMismatchError:
    """Return the error for ranks whose calls in the same collective differ."""
    called = ", ".join(f"rank {rank} called {call.op}" for rank, call in sorted(calls.items()))
    (place,) = {call.place for call in calls.values()}
    return CollectiveMismatchError(f"{place}: {called}; {_SAME_CALLS}")


def again(error: ControllerError) -> ControllerError:
    """Return a copy of an error, to be raised once more with a traceback of its own."""
    return type(error)(*error.args)

"""Collectives between controllers that share no memory, over messages that they send each other directly."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gcore_controller.collectives.base import (
    CallLog,
    CollectiveCall,
    Collectives,
    Whereabouts,
    copy_error,
    mismatch,
)
from gcore_controller.errors import ControllerError, UnpicklableValueError

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A value that one controller sends to another in one collective."""

    call: CollectiveCall
    src: int
    hop: int
    payload: Any


@dataclass(frozen=True)
class PeerFailed:
    """A notice that a channel has failed on another controller."""

    channel: str
    error: ControllerError
    since: int
    """Number of the first collective that failed; earlier ones may still be completing."""


@dataclass(frozen=True)
class Returned:
    """A notice that the program of another controller has returned, after so many calls on each channel."""

    rank: int
    num_calls: Mapping[str, int]


Message = Part | PeerFailed | Returned


class _Box:
    """The parts of one collective by source and hop, arrived or expected."""

    def __init__(self) -> None:
        self.call: CollectiveCall | None = None
        """This rank's own, once it has been made."""
        self.parts: dict[tuple[int, int], asyncio.Future[Part]] = {}
        self._error: ControllerError | None = None

    def part_of(self, src: int, hop: int) -> "asyncio.Future[Part]":
        if (src, hop) not in self.parts:
            self.parts[src, hop] = asyncio.get_running_loop().create_future()
            if self._error is not None:
                self.fail(self._error)
        return self.parts[src, hop]

    def fail(self, error: ControllerError) -> None:
        self._error = error
        for future in self.parts.values():
            if not future.done():
                future.set_exception(copy_error(error))
                # The call that waits here may have been cancelled.
                future.exception()


class PeerCollectives(Collectives):
    """One controller's end of `Collectives` over messages.

    Values travel by dissemination (Bruck et al., IEEE TPDS 8(11), 1997) in ceil(log2(N)) hops, those of a broadcast
    included, and those of a gather along a binomial tree of the same messages. The parts of an all-to-all are sent
    directly, once it is disseminated who receives any. Every collective completes on a rank only after all ranks have
    called it, so a completed one has been called alike everywhere.

    Args:
        send: gives a message to the controller of a rank, where the runtime calls `deliver`. It raises
            `UnpicklableValueError` if the message cannot be sent.
        take_tickets: has the controller of a rank take so many numbers of a counter, below a limit.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        send: Callable[[int, Message], Awaitable[None]],
        take_tickets: Callable[[int, int, str, int | None], Awaitable[range]],
    ) -> None:
        self._returned: dict[int, Mapping[str, int]] = {}
        super().__init__(rank, world_size, CallLog(rank, self._returned))
        self._transport = send
        self._tickets_of = take_tickets
        # All of this is shared by the channels, which are shallow copies.
        self._boxes: dict[tuple[str, int], _Box] = {}
        self._failed_since: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def deliver(self, message: Message) -> None:
        """Process a message from another controller, for any channel."""
        match message:
            case Part():
                self._take(message)
            case PeerFailed():
                self._fail(message.channel, message.error, since=message.since)
            case Returned():
                self._returned[message.rank] = message.num_calls
                for call in self._log.waiting:
                    error = self._log.missing(call)
                    if error is not None:
                        self._fail(call.channel, error, since=call.sequence)

    def finish(self) -> None:
        """Notify the other ranks that the program of this one has returned, so that none waits for it."""
        num_calls = self._log.num_calls
        self._log.close()
        # A notice that another rank sent when it returned usually covers this one already.
        for counts in self._returned.values():
            if all(count <= num_calls.get(channel, 0) for channel, count in counts.items()):
                return
        self._notify_all(Returned(self.rank, num_calls))

    def whereabouts(self, stage: str | None) -> Whereabouts:
        return self._log.whereabouts(stage)

    async def close(self) -> None:
        """Cancel the calls in flight, and refuse further ones."""
        self._log.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, part: Part) -> None:
        if part.call.sequence >= self._failed_since.get(part.call.channel, math.inf):
            return
        box = self._box(part.call)
        if box.call is not None and box.call.op != part.call.op:
            # After programs have diverged, the awaited parts may never come.
            error = mismatch({self.rank: box.call, part.src: part.call})
            self._fail_everywhere(part.call.channel, error, since=part.call.sequence)
            return
        box.part_of(part.src, part.hop).set_result(part)

    async def _gather(
        self,
        call: CollectiveCall,
        value: Any,
        combine: Callable[[list[Any]], T],
        *,
        dst: int | None = None,
    ) -> T:
        return combine(await self._to_the_end(call, partial(self._disseminate, call, value, dst)))

    async def _exchange(self, call: CollectiveCall, parts: Sequence[T]) -> list[T]:
        return await self._to_the_end(call, partial(self._send_parts, call, parts))

    async def _take_tickets(self, count: int, counter: str, at: int, limit: int | None) -> range:
        return await self._tickets_of(at, count, counter, limit)

    async def _to_the_end(
        self, call: CollectiveCall, exchange: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Complete a collective for the sake of the other ranks even if the caller is cancelled."""
        box = self._box(call)
        box.call = call
        for part in [future.result() for future in box.parts.values() if future.done()]:
            if part.call.op != call.op:
                raise mismatch({self.rank: call, part.src: part.call})
        task = self._in_background(exchange())
        task.add_done_callback(lambda _: self._boxes.pop((call.channel, call.sequence), None))
        return await asyncio.shield(task)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The caller may have been cancelled, and then does not ask for the error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _disseminate(
        self, call: CollectiveCall, value: Any, dst: int | None = None
    ) -> list[Any]:
        """Return the values of all ranks; with ``dst``, ranks other than that one have None in place of some."""
        size = self.world_size
        # Of this rank and those after it: twice as many with each hop.
        values = [value]
        while len(values) < size:
            distance = len(values)
            count = min(distance, size - distance)
            sent = values[:count]
            # In the binomial tree of dst, a rank at an odd multiple of the distance hands its values on.
            if dst is not None and (self.rank - dst) % size % (2 * distance) != distance:
                sent = [None] * count
            _, further = await asyncio.gather(
                self._send(call, (self.rank - distance) % size, sent, hop=distance),
                self._receive(call, (self.rank + distance) % size, hop=distance),
            )
            values += further
        return [values[(rank - self.rank) % size] for rank in range(size)]

    async def _send_parts(self, call: CollectiveCall, parts: Sequence[Any]) -> list[Any]:
        targets: list[int] = []
        for rank, part in enumerate(parts):
            is_empty = isinstance(part, list) and not part
            if rank != self.rank and not is_empty:
                targets.append(rank)
        sends = [self._send(call, rank, parts[rank]) for rank in targets]
        all_targets, _ = await asyncio.gather(
            self._disseminate(call, targets), asyncio.gather(*sends)
        )
        sources = [rank for rank, ranks in enumerate(all_targets) if self.rank in ranks]
        received = await asyncio.gather(*[self._receive(call, rank) for rank in sources])
        result: list[Any] = [[] for _ in range(self.world_size)]
        result[self.rank] = parts[self.rank]
        for rank, part in zip(sources, received, strict=True):
            result[rank] = part
        return result

    async def _send(self, call: CollectiveCall, rank: int, payload: Any, *, hop: int = 0) -> None:
        try:
            await self._transport(rank, Part(call, self.rank, hop, payload))
        except UnpicklableValueError as error:
            raise UnpicklableValueError(
                f"rank {self.rank} called {call} with a value that cannot be sent to another process: {error}; "
                "pass plain data, or a reference made by ctx.put"
            ) from error

    async def _receive(self, call: CollectiveCall, src: int, *, hop: int = 0) -> Any:
        return (await self._box(call).part_of(src, hop)).payload

    def _box(self, call: CollectiveCall) -> _Box:
        return self._boxes.setdefault((call.channel, call.sequence), _Box())

    def _fail(self, channel: str, error: ControllerError, *, since: int | None = None) -> None:
        if self._log.has_failed(channel):
            return
        self._log.fail(channel, error)
        if since is None:
            # This rank's last call.
            since = max(0, self._log.num_calls.get(channel, 0) - 1)
        self._failed_since[channel] = since
        for (name, sequence), box in self._boxes.items():
            if name == channel and sequence >= since:
                box.fail(error)

    def _fail_everywhere(
        self, channel: str, error: ControllerError, *, since: int | None = None
    ) -> None:
        self._fail(channel, error, since=since)
        self._notify_all(PeerFailed(channel, error, self._failed_since[channel]))

    def _notify_all(self, message: Message) -> None:
        async def notify(rank: int) -> None:
            # A rank that cannot be reached has died, which the runtime reports.
            await asyncio.gather(self._transport(rank, message), return_exceptions=True)

        for rank in range(self.world_size):
            if rank != self.rank:
                self._in_background(notify(rank))

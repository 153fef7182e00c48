"""Collectives between controllers that share no memory: messages from one to another, with nobody in the middle."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gcore_controller.collectives import check_count, check_parts, mismatch, sum_in_order
from gcore_controller.errors import CollectiveMismatchError

T = TypeVar("T")

TakeTickets = Callable[[int, int, str, int | None], Awaitable[range]]


@dataclass(frozen=True)
class Message:
    """What one controller sends another in one collective."""

    sequence: int
    op: str
    src: int
    hop: int
    payload: Any
    channel: str = ""


class PeerCollectives:
    """One controller's end of `Collectives` over messages.

    Values that all gather take ceil(log2(N)) hops, by dissemination (Bruck et al., IEEE TPDS 8(11), 1997); a broadcast
    takes as many down a binomial tree; the parts of an all-to-all go straight to whom they are for.

    Args:
        send: gives a message to the controller of a rank, where the runtime calls `deliver`.
        take_tickets: has the controller of a rank take so many numbers of a counter, below a limit.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        send: Callable[[int, Message], Awaitable[None]],
        take_tickets: TakeTickets,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._transport = send
        self._tickets_of = take_tickets
        self._channel = ""
        # Of all channels, this one's included.
        self._channels: dict[str, PeerCollectives] = {"": self}
        self._sequence = -1
        self._op = ""
        # Of this collective and later ones: messages that came before they were waited for, or who waits for them.
        self._mail: dict[tuple[int, int, int], asyncio.Future[Message]] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def deliver(self, message: Message) -> None:
        """Take in a message from another controller, for any channel."""
        self.channel(message.channel)._take(message)

    def channel(self, name: str) -> "PeerCollectives":
        if name not in self._channels:
            # Its messages may come before this controller asks for it.
            made = PeerCollectives(self._rank, self._world_size, send=self._transport, take_tickets=self._tickets_of)
            made._channel = name
            made._channels = self._channels
            self._channels[name] = made
        return self._channels[name]

    def _take(self, message: Message) -> None:
        place = self._place(message.sequence, message.src, message.hop)
        if place.done():
            return  # whoever waited has gone
        place.set_result(message)
        if message.sequence == self._sequence and message.op != self._op:
            # Where programs part, what is waited for may never come.
            for waiting in self._mail.values():
                if not waiting.done():
                    waiting.set_exception(self._mismatch(message))

    async def all_gather(self, value: T) -> list[T]:
        return await self._gather("all_gather", value)

    async def all_reduce(self, value: float) -> float:
        return sum_in_order(await self._gather("all_reduce", value))

    async def broadcast(self, value: T | None, *, src: int = 0) -> T:
        self._begin(f"broadcast from {src}")
        # Ranks counted from the source: a place's parent is it without its highest bit.
        place = (self._rank - src) % self._world_size
        found: Any = value
        if place:
            parent = place - (1 << place.bit_length() - 1)
            found = await self._receive((parent + src) % self._world_size)
        children = (place + (1 << bit) for bit in range(place.bit_length(), self._world_size.bit_length()))
        sends = (self._send((child + src) % self._world_size, found) for child in children if child < self._world_size)
        await asyncio.gather(*sends)
        return found

    async def all_to_all(self, parts: Sequence[T]) -> list[T]:
        check_parts(parts, self._world_size)
        self._begin("all_to_all")
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        sends = [self._send(rank, parts[rank]) for rank in others]
        receives = [self._receive(rank) for rank in others]
        received: list[Any] = (await asyncio.gather(*sends, *receives))[len(others) :]
        by_rank = dict(zip(others, received, strict=True)) | {self._rank: parts[self._rank]}
        return [by_rank[rank] for rank in range(self._world_size)]

    async def barrier(self) -> None:
        await self._gather("barrier", None)

    async def take_tickets(self, count: int, *, counter: str = "", at: int = 0, limit: int | None = None) -> range:
        check_count(count)
        return await self._tickets_of(at, count, counter, limit)

    async def _gather(self, op: str, value: Any) -> list[Any]:
        self._begin(op)
        size = self._world_size
        # Of this rank and those after it: twice as many with each hop.
        known = [value]
        while (distance := len(known)) < size:
            count = min(distance, size - distance)
            _, further = await asyncio.gather(
                self._send((self._rank - distance) % size, known[:count], hop=distance),
                self._receive((self._rank + distance) % size, hop=distance),
            )
            known += further
        return [known[(rank - self._rank) % size] for rank in range(size)]

    def _begin(self, op: str) -> None:
        self._sequence += 1
        self._op = op
        for (sequence, _, _), place in self._mail.items():
            if sequence == self._sequence and place.result().op != op:
                raise self._mismatch(place.result())

    async def _send(self, rank: int, payload: Any, *, hop: int = 0) -> None:
        await self._transport(rank, Message(self._sequence, self._op, self._rank, hop, payload, self._channel))

    async def _receive(self, src: int, *, hop: int = 0) -> Any:
        sequence = self._sequence
        try:
            message = await self._place(sequence, src, hop)
        finally:
            del self._mail[sequence, src, hop]
        if message.op != self._op:
            raise self._mismatch(message)
        return message.payload

    def _mismatch(self, message: Message) -> CollectiveMismatchError:
        return mismatch(self._sequence, rank=self._rank, op=self._op, other_op=message.op)

    def _place(self, sequence: int, src: int, hop: int) -> "asyncio.Future[Message]":
        key = (sequence, src, hop)
        if key not in self._mail:
            self._mail[key] = asyncio.get_running_loop().create_future()
        return self._mail[key]

"""Conformance: what collectives do and refuse is the same under every runtime, in nearly the same words."""

import asyncio
import functools
import operator
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from runtimes import Ctx, Run, inline, over_messages, simulated

from gcore_controller import Collectives, InlineCollectives, run_inline
from gcore_controller.collectives.peer import Message, Part, PeerCollectives, PeerFailed
from gcore_controller.errors import (
    CollectiveError,
    ControllerError,
    StuckError,
    UnpicklableValueError,
)
from gcore_controller.runtimes.inline import InlineGroup

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")

SIZE = 4
"""Controllers of most tests, so that Ray starts them once."""


@pytest.fixture(params=["inline", "sim", "messages", pytest.param("ray", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> Run:
    here: dict[str, Run] = {"inline": inline, "sim": simulated, "messages": over_messages}
    return here.get(request.param) or request.getfixturevalue("on_ray")


@pytest.fixture(params=["inline", "sim", pytest.param("ray", marks=pytest.mark.slow)])
def run_until(request: pytest.FixtureRequest) -> Run:
    """A runtime that has a deadline."""
    here: dict[str, Run] = {"inline": inline, "sim": simulated}
    return here.get(request.param) or request.getfixturevalue("on_ray")


async def every_collective(ctx: Ctx) -> None:
    everyone = range(ctx.world_size)
    assert await ctx.group.all_gather(ctx.rank) == list(everyone)
    assert await ctx.group.all_reduce(float(ctx.rank)) == sum(everyone)
    for src in everyone:
        said = await ctx.group.broadcast(f"from {ctx.rank}", src=src)
        assert said == f"from {src}"
    sent = [(ctx.rank, to) for to in everyone]
    assert await ctx.group.all_to_all(sent) == [(source, ctx.rank) for source in everyone]
    for dst in everyone:
        gathered = await ctx.group.gather(f"from {ctx.rank}", dst=dst)
        expected = [f"from {source}" for source in everyone]
        assert gathered == (expected if ctx.rank == dst else [])
    # Every other rank sends, and to some.
    parts = [[ctx.rank] * (ctx.rank % 2 * to) for to in everyone]
    expected_parts = [[source] * (source % 2 * ctx.rank) for source in everyone]
    assert await ctx.group.all_to_all(parts) == expected_parts
    await ctx.group.barrier()


def test_every_collective(run: Run) -> None:
    assert run(every_collective, SIZE) == [None] * SIZE


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("run", [simulated, over_messages])
def test_every_collective_of_any_number_of_controllers(run: Run, world_size: int) -> None:
    assert run(every_collective, world_size) == [None] * world_size


def test_collectives_keep_their_order_however_late_a_controller_is(run: Run) -> None:
    """A fast controller's next call never mixes with a slow one's last."""

    async def program(ctx: Ctx) -> list[list[tuple[int, int]]]:
        rounds: list[list[tuple[int, int]]] = []
        for i in range(20):
            for _ in range((ctx.rank * 7 + i) % 5):
                await asyncio.sleep(0)
            rounds.append(await ctx.group.all_gather((i, ctx.rank)))
        return rounds

    expected = [[(i, rank) for rank in range(SIZE)] for i in range(20)]
    assert run(program, SIZE) == [expected] * SIZE


def test_sums_are_added_in_rank_order(run: Run) -> None:
    """Floating-point sums are the same on every controller and in every run, whichever arrives first."""
    values = [1e16, 1.0, -1e16, 1.0]

    async def program(ctx: Ctx) -> float:
        for _ in range(3 - ctx.rank):
            await asyncio.sleep(0)
        return await ctx.group.all_reduce(values[ctx.rank])

    # Not `sum`, which compensates for rounding from Python 3.12 on.
    assert run(program, SIZE) == [functools.reduce(operator.add, values)] * SIZE


def test_what_is_gathered_belongs_to_the_caller(run: Run) -> None:
    async def program(ctx: Ctx) -> list[int]:
        gathered = await ctx.group.all_gather(ctx.rank)
        gathered.append(99)
        await ctx.group.barrier()
        return gathered

    assert run(program, SIZE) == [[0, 1, 2, 3, 99]] * SIZE


def test_values_are_shared_in_one_process_and_copied_on_ray(run: Run) -> None:
    """Why a value must not be modified after it was sent or received."""

    async def program(ctx: Ctx) -> dict[str, int]:
        received = await ctx.group.broadcast({"rank": ctx.rank})
        if ctx.rank == 1:
            received["rank"] = 99
        await ctx.group.barrier()
        return received

    one_object = run in (inline, simulated)
    assert [found["rank"] for found in run(program, SIZE)] == (
        [99] * SIZE if one_object else [0, 99, 0, 0]
    )


def test_a_channel_of_a_channel_is_another_one(run: Run) -> None:
    """The second task's first collective is ordered before or after the first task's, which has the same last name."""

    async def program(ctx: Ctx) -> list[list[str]]:
        nested = ctx.group.channel("x").channel("y")
        calls = [nested.all_gather("x/y"), ctx.group.channel("y").all_gather("y")]
        if ctx.rank % 2:
            calls.reverse()
        found = await asyncio.gather(*calls)
        return sorted(found)

    assert run(program, SIZE) == [[["x/y"] * SIZE, ["y"] * SIZE]] * SIZE


def test_channels_keep_their_own_order(run: Run) -> None:
    """Two tasks of each controller, in the one order or the other, with different collectives."""

    async def program(ctx: Ctx) -> tuple[list[list[int]], list[float]]:
        async def gathers() -> list[list[int]]:
            return [await ctx.group.all_gather(10 * n + ctx.rank) for n in range(3)]

        async def sums() -> list[float]:
            # Asking for a channel again does not start it over.
            return [await ctx.group.channel("x").all_reduce(n * (ctx.rank + 1)) for n in range(4)]

        if ctx.rank % 2:
            added = asyncio.create_task(sums())
            await asyncio.sleep(0)
            return await gathers(), await added
        gathered = asyncio.create_task(gathers())
        await asyncio.sleep(0)
        added_here = await sums()
        return await gathered, added_here

    for gathered, added in run(program, SIZE):
        assert gathered == [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]]
        assert added == [0, 10, 20, 30]


def test_tickets_go_to_one_controller_each(run: Run) -> None:
    async def program(ctx: Ctx) -> list[int]:
        mine: list[int] = []
        for i in range(5):
            await asyncio.sleep(0.001 * ((ctx.rank + i) % 3))
            mine += await ctx.group.take_tickets(ctx.rank + 1)
            assert await ctx.group.take_tickets(1, counter=f"own {ctx.rank}") == range(i, i + 1)
        with pytest.raises(ValueError, match="count is -1; expected 0 or more"):
            await ctx.group.take_tickets(-1)
        assert await ctx.group.take_tickets(ctx.rank, counter="elsewhere", at=ctx.rank) == range(
            ctx.rank
        )
        return mine

    taken = run(program, SIZE)
    assert [len(tickets) for tickets in taken] == [5, 10, 15, 20]
    assert sorted(t for tickets in taken for t in tickets) == list(range(50))


def test_tickets_below_a_limit(run: Run) -> None:
    """A counter stops there, and continues after it under a higher one."""

    async def program(ctx: Ctx) -> list[int]:
        mine: list[int] = []
        for limit in (7, 12):
            while taken := await ctx.group.take_tickets(3, counter="waves", at=1, limit=limit):
                mine += taken
            await ctx.group.barrier()
        return mine

    assert sorted(ticket for mine in run(program, SIZE) for ticket in mine) == list(range(12))


Calls = Callable[[Collectives], Awaitable[Any]]

SAME_CALLS = "every controller must make the same calls in the same order$"


async def texts_of_failures(
    ctx: Ctx, call: Calls, *, channel: str = ""
) -> tuple[type[Exception], str]:
    """The error of a call; a later call on the channel raises the same one."""
    group = ctx.group.channel(channel)
    with pytest.raises(ControllerError) as first:
        await call(group)
    with pytest.raises(ControllerError) as second:
        await group.barrier()
    assert (type(second.value), str(second.value)) == (type(first.value), str(first.value))
    # Other channels are as before.
    assert await ctx.group.channel("unharmed").all_reduce(1) == ctx.world_size
    return type(first.value), str(first.value)


@pytest.mark.parametrize(
    ("ops", "usual", "odd"),
    [
        (
            ("barrier", "all_gather"),
            lambda group: group.barrier(),
            lambda group: group.all_gather(1),
        ),
        (
            ("all_reduce", "all_gather"),
            lambda group: group.all_reduce(1),
            lambda group: group.all_gather(1),
        ),
        (
            ("all_to_all", "all_gather"),
            lambda group: group.all_to_all([1] * 4),
            lambda group: group.all_gather(1),
        ),
        (
            ("all_gather", "all_to_all"),
            lambda group: group.all_gather(1),
            lambda group: group.all_to_all([1] * 4),
        ),
        (
            (r"broadcast\(src=0\)", r"broadcast\(src=1\)"),
            lambda group: group.broadcast(1, src=0),
            lambda group: group.broadcast(1, src=1),
        ),
        (
            (r"broadcast\(src=0\)", r"broadcast\(src=2\)"),
            lambda group: group.broadcast(1, src=0),
            lambda group: group.broadcast(1, src=2),
        ),
    ],
    ids=["barrier", "all_reduce", "all_to_all", "all_gather", "src", "two sources"],
)
@pytest.mark.parametrize("channel", ["", "x"])
def test_different_calls_are_refused_on_every_rank(
    run: Run, ops: tuple[str, str], usual: Calls, odd: Calls, channel: str
) -> None:
    async def program(ctx: Ctx) -> tuple[type[Exception], str]:
        await ctx.group.channel(channel).barrier()
        return await texts_of_failures(ctx, odd if ctx.rank == 2 else usual, channel=channel)

    where = "collective 1 on channel 'x'" if channel else "collective 1"
    first, second = ops
    pattern = (
        f"{where}: (rank [01] called {first}, rank 2 called {second}|rank 2 called {second}, rank 3 called {first}); "
        + SAME_CALLS
    )
    for kind, text in run(program, SIZE):
        assert kind is CollectiveError
        assert_matches(pattern, text)


async def test_a_later_failure_leaves_an_earlier_collective_alone() -> None:
    """The notice of a failure may overtake the last part of the collective before."""
    sent: list[Message] = []

    async def send(rank: int, message: Message) -> None:
        assert rank == 1
        sent.append(message)

    async def take_tickets(at: int, count: int, counter: str, limit: int | None) -> range:
        raise AssertionError

    peer = PeerCollectives(0, 2, send=send, take_tickets=take_tickets)
    barrier = asyncio.create_task(peer.barrier())
    while not sent:
        await asyncio.sleep(0)
    (part,) = sent
    assert isinstance(part, Part)
    peer.deliver(PeerFailed("", CollectiveError("the next one"), 1))
    peer.deliver(Part(part.call, 1, part.hop, [None]))
    await barrier
    with pytest.raises(CollectiveError, match="the next one"):
        await peer.barrier()


def assert_matches(pattern: str, text: str) -> None:
    assert re.match(pattern, text), text


def test_every_rank_its_own_source(run: Run) -> None:
    """Each would send and none receive."""

    async def program(ctx: Ctx) -> None:
        await ctx.group.broadcast(ctx.rank, src=ctx.rank)

    with pytest.raises(
        CollectiveError, match=r"collective 0: rank \d called broadcast\(src=\d\), rank \d"
    ):
        run(program, SIZE)


def test_two_collectives_at_once_on_a_channel(run: Run) -> None:
    """The second is refused, and does not count."""

    async def program(ctx: Ctx) -> str:
        """Rank 0 makes two calls before any other rank has arrived."""
        if ctx.rank:
            await ctx.group.channel("refused").barrier()
            return str(await ctx.group.all_gather(ctx.rank))
        first = asyncio.create_task(ctx.group.all_gather(ctx.rank))
        await asyncio.sleep(0)
        with pytest.raises(CollectiveError) as raised:
            await ctx.group.barrier()
        await ctx.group.channel("refused").barrier()
        assert await first == [0, 1, 2, 3]
        return str(raised.value)

    refused, *others = run(program, SIZE)
    assert refused.startswith(
        "rank 0 called barrier while its all_gather (collective 0) was in flight: a channel "
    )
    assert "ctx.group.channel(name)" in refused
    assert others == ["[0, 1, 2, 3]"] * 3


def test_a_rank_that_gives_up_does_not_break_the_others(run: Run) -> None:
    """A timeout around a collective: the others complete it, and the next call on the channel is refused everywhere."""

    async def program(ctx: Ctx) -> tuple[list[int] | None, type[Exception], str]:
        group, signal = ctx.group.channel("x"), ctx.group.channel("signal")
        found: list[int] | None = None
        if ctx.rank == 1:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(group.all_gather(ctx.rank), 0.05)
            await signal.barrier()
            await signal.all_gather("done")
        elif ctx.rank == 2:
            await signal.barrier()
            found = await group.all_gather(ctx.rank)
        else:
            found, _ = await asyncio.gather(group.all_gather(ctx.rank), signal.barrier())
        if ctx.rank != 1:
            await signal.all_gather("done")
        return (found, *await texts_of_failures(ctx, lambda group: group.barrier(), channel="x"))

    for rank, (found, kind, text) in enumerate(run(program, SIZE)):
        assert found == (None if rank == 1 else [0, 1, 2, 3])
        assert kind is CollectiveError
        assert text.startswith(
            "rank 1 called barrier (collective 1 on channel 'x') after its all_gather (collective 0 on channel 'x') "
            "was cancelled, by a timeout or with its task"
        )


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_returns_early_is_named(run: Run, when: str) -> None:
    """At once, whether the others wait already or call later; each says in which collective."""

    async def program(ctx: Ctx) -> tuple[type[Exception], str] | None:
        group = ctx.group.channel("x")
        await group.barrier()
        if ctx.rank == 1:
            if when == "after":
                await asyncio.sleep(0.1)
            return None
        if when == "before":
            await asyncio.sleep(0.1)
        with pytest.raises(ControllerError) as raised:
            await group.all_reduce(1.0)
        return type(raised.value), str(raised.value)

    found = run(program, SIZE)
    assert found[1] is None
    for rank in (0, 2, 3):
        kind, text = found[rank]
        assert kind is CollectiveError
        assert_matches(
            rf"rank {rank} waits in all_reduce \(collective 1 on channel 'x'\) for rank \d, whose program has returned "
            rf"after \d collectives? on that channel; {SAME_CALLS}",
            text,
        )
    # Ranks that were notified have returned, too, and others may have waited for them.
    assert any(
        "for rank 1, whose program has returned after 1 collective on" in found[rank][1]
        for rank in (0, 2, 3)
    )


def test_a_broadcast_to_ranks_that_have_returned(run: Run) -> None:
    """Its source would need no answer."""

    async def program(ctx: Ctx) -> None:
        if ctx.rank == 0:
            await ctx.group.broadcast("weights")

    with pytest.raises(
        CollectiveError,
        match=r"^rank 0 waits in broadcast\(src=0\) \(collective 0\) for rank [123], whose program has returned after "
        r"0 collectives on that channel; every controller must",
    ):
        run(program, SIZE)


class OneOfUsFailedError(Exception):
    pass


def test_an_error_surfaces_as_itself(run: Run) -> None:
    async def program(ctx: Ctx) -> None:
        if ctx.rank == 1:
            await asyncio.sleep(0.01)
            raise OneOfUsFailedError("the third prompt")
        await (ctx.group.barrier() if ctx.rank else asyncio.sleep(600))

    with pytest.raises(OneOfUsFailedError, match="the third prompt") as raised:
        run(program, SIZE)
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    if run is not over_messages:
        assert raised.value.__notes__[0].startswith("raised by controller 1")


def test_an_error_is_not_masked_by_those_that_follow_from_it(run: Run) -> None:
    """Rank 1 fails and cancels a task that is in a collective, which others wait for; its clean-up takes time."""

    async def program(ctx: Ctx) -> None:
        background = asyncio.create_task(ctx.group.channel("background").barrier())
        try:
            await ctx.group.barrier()
            if ctx.rank == 1:
                raise OneOfUsFailedError
            await background
            await ctx.group.channel("background").barrier()
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            await asyncio.sleep(0.2)

    with pytest.raises(OneOfUsFailedError):
        run(program, SIZE)


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_that_exits_is_named(run: Run, code: int) -> None:
    """Neither this process nor another controller's ends with it."""

    async def program(ctx: Ctx) -> None:
        if ctx.rank == 1:
            sys.exit(code)
        await ctx.group.barrier()

    with pytest.raises(
        ControllerError,
        match=rf"^the program of controller 1 called sys.exit\({code}\); a program",
    ):
        run(program, SIZE)


def test_a_program_that_cancels_itself_is_named(run: Run) -> None:
    """It would pass for one that the runtime has cancelled, and the others would wait for it."""

    async def program(ctx: Ctx) -> None:
        if ctx.rank == 1:
            helper = asyncio.create_task(asyncio.sleep(600))
            helper.cancel()
            await helper
        await ctx.group.barrier()

    with pytest.raises(
        ControllerError,
        match=r"^the program of controller 1 was cancelled from within: it awaited",
    ):
        run(program, SIZE)


async def test_a_cancelled_run_raises_that() -> None:
    """Whatever a program raises as it ends."""

    async def program(ctx: Ctx) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            raise OSError

    running = asyncio.create_task(run_inline(program, roles=list[str](), world_size=SIZE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_collectives_end_with_the_program(run: Run) -> None:
    """What a program leaves running may not reach into the next run on the same controllers."""

    async def program(ctx: Ctx) -> None:
        async def late() -> None:
            await returned.wait()
            with pytest.raises(
                CollectiveError,
                match=r"rank . called barrier after its program had returned",
            ):
                await ctx.group.barrier()
            with pytest.raises(
                CollectiveError,
                match=r"rank . called take_tickets after its program had ret",
            ):
                await ctx.group.take_tickets(1)

        returned = asyncio.Event()
        task = asyncio.create_task(late())
        asyncio.get_running_loop().call_soon(returned.set)
        del task

    run(program, SIZE)
    assert run(every_collective, SIZE) == [None] * SIZE


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda group: group.broadcast(1, src=4),
            ValueError,
            "src is 4; expected a rank from 0 to 3",
        ),
        (
            lambda group: group.broadcast(1, src=-1),
            ValueError,
            "src is -1; expected a rank from 0 to 3",
        ),
        (
            lambda group: group.broadcast(1, src=1.0),
            TypeError,
            "'float' object cannot be interpreted as an integer",
        ),
        (
            lambda group: group.take_tickets(1, at=-1),
            ValueError,
            "at is -1; expected a rank from 0 to 3",
        ),
        (
            lambda group: group.all_to_all([1, 2]),
            ValueError,
            "parts has 2 entries; expected 4, one for each rank",
        ),
        (
            lambda group: group.all_reduce(np.ones(2)),
            TypeError,
            "all_reduce value is of type ndarray; expected a number (gather arrays with all_gather)",
        ),
        (
            lambda group: group.all_reduce(Decimal(1)),
            TypeError,
            "all_reduce value is of type Decimal; expected a number (gather arrays with all_gather)",
        ),
        (
            lambda group: group.all_reduce(2**53 + 1),
            ValueError,
            f"all_reduce value is {2**53 + 1}; expected an integer of at most 2**53, which is exact as a float",
        ),
    ],
    ids=["src", "negative src", "float src", "at", "parts", "array", "decimal", "large integer"],
)
def test_wrong_arguments_are_refused_at_once_and_do_not_count(
    run: Run, call: Calls, kind: type[Exception], text: str
) -> None:
    async def program(ctx: Ctx) -> str:
        with pytest.raises(kind) as raised:
            await call(ctx.group)
        assert await ctx.group.all_gather(ctx.rank) == [0, 1, 2, 3]
        return str(raised.value)

    assert run(program, SIZE) == [text] * SIZE


def test_sums_of_numpy_scalars_are_python_floats(run: Run) -> None:
    """Added in float32 they would be 16,777,216."""

    async def program(ctx: Ctx) -> tuple[bool, float]:
        total = await ctx.group.all_reduce(np.float32(2**24 if ctx.rank == 0 else 1))  # pyright: ignore[reportArgumentType]
        return type(total) is float, total

    assert run(program, SIZE) == [(True, 2.0**24 + 3)] * SIZE


@pytest.mark.parametrize(
    "run", ["messages", pytest.param("ray", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "broadcast", "gather"])
def test_a_value_that_cannot_be_pickled(run: Run, operation: str) -> None:
    async def program(ctx: Ctx) -> tuple[type[Exception], str]:
        value = threading.Lock() if ctx.rank == 1 else None
        calls: dict[str, Calls] = {
            "all_gather": lambda group: group.all_gather(value),
            "all_to_all": lambda group: group.all_to_all([value] * SIZE),
            "broadcast": lambda group: group.broadcast(value, src=1),
            "gather": lambda group: group.gather(value),
        }
        return await texts_of_failures(ctx, calls[operation])

    for kind, text in run(program, SIZE):
        assert kind is UnpicklableValueError
        assert_matches(
            rf"rank 1 called {operation}\S* \(collective 0\) with a value that cannot be sent to another process: .*"
            r"cannot pickle '_thread.lock' object.*; pass plain data, or a reference made by ctx.put$",
            text,
        )


class OnlyLeaves:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


@pytest.mark.parametrize(
    "run", ["messages", pytest.param("ray", marks=pytest.mark.slow)], indirect=True
)
def test_a_value_that_cannot_be_unpickled(run: Run) -> None:
    async def program(ctx: Ctx) -> tuple[type[Exception], str]:
        return await texts_of_failures(ctx, lambda group: group.broadcast(OnlyLeaves()))

    for kind, text in run(program, SIZE):
        assert kind is UnpicklableValueError
        assert_matches(
            r"rank 0 called broadcast\(src=0\) \(collective 0\) with a value that .* rank \d cannot",
            text,
        )
        assert "invalid literal for int" in text


def test_a_deadline_names_who_has_not_arrived(run_until: Run) -> None:
    async def program(ctx: Ctx) -> None:
        with ctx.timer.stage("gen"):
            await asyncio.sleep(0.0 if ctx.rank in (0, 1, 3) else 600)
        if ctx.rank == 1:
            await ctx.group.channel("x").all_gather(1)
        await ctx.group.barrier()

    with pytest.raises(
        ControllerError,
        match=r"^the run is not done after 2 s: controller 0 in no stage, controller 1 in no stage, controller 2 in "
        r"gen, controller 3 in no stage; ranks 0, 3 in barrier \(collective 0\) waiting for ranks 1-2; "
        r"rank 1 in all_gather \(collective 0 on channel 'x'\) waiting for ranks 0, 2-3$",
    ):
        run_until(program, SIZE, timeout_s=2)


def test_a_run_after_one_that_failed(run: Run) -> None:
    """Nothing of the first is left: neither counts, nor values, nor failed channels."""

    async def fails(ctx: Ctx) -> None:
        await ctx.group.all_gather("of the first run")
        await ctx.group.take_tickets(7)
        await (ctx.group.barrier() if ctx.rank else ctx.group.all_reduce(1))

    async def succeeds(ctx: Ctx) -> tuple[list[int], float]:
        await every_collective(ctx)
        tickets = await ctx.group.take_tickets(1)
        return await ctx.group.all_gather(ctx.rank), await ctx.group.all_reduce(tickets.start)

    for _ in range(2):
        with pytest.raises(CollectiveError):
            run(fails, SIZE)
        assert run(succeeds, SIZE) == [([0, 1, 2, 3], 6.0)] * SIZE


OPERATIONS: tuple[str, ...] = (
    "all_gather",
    "all_reduce",
    "broadcast 0",
    "broadcast last",
    "all_to_all",
    "gather",
    "barrier",
)

Step = tuple[str, str]
"""Channel and operation."""


async def do(ctx: Ctx, step: Step, number: int) -> Any:
    group, own = ctx.group.channel(step[0]), 100 * number + ctx.rank
    match step[1]:
        case "all_gather":
            return await group.all_gather(own)
        case "all_reduce":
            return await group.all_reduce(own)
        case "broadcast 0":
            return await group.broadcast(own)
        case "broadcast last":
            return await group.broadcast(own, src=ctx.world_size - 1)
        case "gather":
            return await group.gather(own)
        case "all_to_all":
            return await group.all_to_all([(own, to) for to in range(ctx.world_size)])
        case _:
            return await group.barrier()


def expected_of(step: Step, number: int, rank: int, size: int) -> Any:
    own = [100 * number + r for r in range(size)]
    outcomes = {
        "all_gather": own,
        "all_reduce": float(sum(own)),
        "broadcast 0": own[0],
        "broadcast last": own[-1],
        "all_to_all": [(value, rank) for value in own],
        "gather": own if rank == 0 else [],
        "barrier": None,
    }
    return outcomes[step[1]]


def expected_errors(programs: list[list[Step]]) -> tuple[type[Exception], ...]:
    """Every rank blocks in every call, so all are in their calls of the same number where they first differ.

    Ranks that compare their calls with neighbours only may all wait for neighbours that are on another channel.
    """
    for number in range(max(map(len, programs))):
        steps = [steps[number] if number < len(steps) else None for steps in programs]
        if len(set(steps)) == 1:
            continue
        called = [step for step in steps if step is not None]
        channels = {channel for channel, _ in called}
        if None in steps or len(channels) == 1:
            return (CollectiveError,)
        return (CollectiveError, StuckError) if len(set(called)) > len(channels) else (StuckError,)
    return ()


STEPS: st.SearchStrategy[Step] = st.tuples(st.sampled_from(["", "x"]), st.sampled_from(OPERATIONS))


@pytest.mark.parametrize("run", [simulated, over_messages])
@given(data=st.data())
def test_any_sequence_of_calls(run: Run, data: st.DataObject) -> None:
    """Either all ranks make the same calls and have the right results, or there is the right error; never a hang."""
    size = data.draw(st.integers(2, 5))
    steps = data.draw(st.lists(STEPS, min_size=1, max_size=6))
    programs = [list(steps) for _ in range(size)]
    for _ in range(data.draw(st.integers(0, 2))):
        changed = programs[data.draw(st.integers(0, size - 1))]
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        changed[at : at + 1] = data.draw(st.lists(STEPS, max_size=2))
    pauses = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))

    async def program(ctx: Ctx) -> list[Any]:
        results: list[Any] = []
        for number, step in enumerate(programs[ctx.rank]):
            await asyncio.sleep(pauses[(ctx.rank + number) % size])
            results.append(await do(ctx, step, number))
        return results

    if kinds := expected_errors(programs):
        with pytest.raises(kinds):
            run(program, size)
    else:
        assert run(program, size) == [
            [expected_of(step, number, rank, size) for number, step in enumerate(programs[rank])]
            for rank in range(size)
        ]


@pytest.mark.parametrize("run", [inline, over_messages])
def test_every_program_has_ended_when_the_run_has(run: Run) -> None:
    ended: list[int] = []

    async def program(ctx: Ctx) -> None:
        try:
            if ctx.rank == 2:
                await asyncio.sleep(0.01)
                raise OneOfUsFailedError
            await (ctx.group.barrier() if ctx.rank % 2 else asyncio.sleep(60))
        finally:
            ended.append(ctx.rank)

    with pytest.raises(OneOfUsFailedError):
        run(program, SIZE)
    assert sorted(ended) == [0, 1, 2, 3]


def test_results_are_by_rank_and_roles_are_shared() -> None:
    async def program(ctx: Ctx) -> tuple[int, list[str]]:
        await asyncio.sleep(0.001 * (4 - ctx.rank))
        ctx.roles.append(f"controller {ctx.rank}")
        return ctx.rank**2, ctx.roles

    results = inline(program, 4)
    assert [result for result, _ in results] == [0, 1, 4, 9]
    assert all(roles is results[0][1] for _, roles in results)
    assert sorted(results[0][1]) == [f"controller {rank}" for rank in range(4)]


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="world_size is 0; expected at least 1"):
        InlineGroup(0)
    alone = InlineCollectives(InlineGroup(1), 0)
    assert asyncio.run(alone.all_gather(1)) == [1]

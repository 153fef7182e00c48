"""Messages, and their bytes, of collectives among 64 controllers; `-s` prints them."""

import asyncio
import math
import pickle
import time
from dataclasses import dataclass

import numpy as np
import pytest
from runtimes import AnyProgram, Ctx, run_over_messages
from tones import Take

from gcore_controller import VirtualTimeLoop
from gcore_controller.collectives.peer import Message, Part
from gcore_controller.rlhf.dynamic_sampling import exchange

SIZE = 64
NUM_HOPS = int(math.log2(SIZE))
PAYLOAD = b"x" * 10_000


@dataclass
class Traffic:
    """What collectives of a program have sent."""

    num_messages: int = 0
    num_bytes: int = 0

    def count(self, message: Message) -> None:
        # Notices that a program has returned are not among them.
        if not isinstance(message, Part):
            return
        self.num_messages += 1
        self.num_bytes += len(pickle.dumps(message))


def measure(program: AnyProgram) -> Traffic:
    traffic = Traffic()
    start_s = time.process_time()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run_over_messages(program, SIZE, on_message=traffic.count))
    cpu_s = time.process_time() - start_s
    print(f"{traffic.num_messages:,} messages, {traffic.num_bytes:,} bytes, {cpu_s:.2f} s of CPU")
    return traffic


def test_gathered_values_go_to_one_controller() -> None:
    async def program(ctx: Ctx) -> None:
        parts = await ctx.group.gather(PAYLOAD, dst=3)
        assert len(parts) == (SIZE if ctx.rank == 3 else 0)

    traffic = measure(program)
    assert traffic.num_messages == SIZE * NUM_HOPS
    # In a binomial tree a value is sent once on each level above it, three times in the mean. Within a message, pickle
    # refers back to values that are the same, but these are not: each was unpickled on its own.
    assert traffic.num_bytes < SIZE * NUM_HOPS / 2 * len(PAYLOAD) * 1.2


def make_take(prompt_index: int) -> Take:
    return Take(prompt_index, np.arange(3), np.zeros(3), 0)


def split_evenly(costs: list[float], num_parts: int) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(np.arange(len(costs)), num_parts)]


@pytest.mark.parametrize("shift", [0, 1])
def test_only_groups_that_change_owners_take_messages(shift: int) -> None:
    async def program(ctx: Ctx) -> None:
        first = (ctx.rank + shift) % SIZE
        groups = [make_take(2 * first), make_take(2 * first + 1)]
        owned = await exchange(groups, [1.0, 1.0], balance=split_evenly, group=ctx.group)
        assert [group.prompt_index for group in owned] == [2 * ctx.rank, 2 * ctx.rank + 1]

    traffic = measure(program)
    # One dissemination each of costs, owners and receivers.
    assert traffic.num_messages == 3 * SIZE * NUM_HOPS + shift * SIZE

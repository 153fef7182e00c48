"""gcore's contender: controllers that see metadata, and hand on references."""

import asyncio
import time
from functools import partial
from typing import Any

from gcore_bench.controller.figures import WARMUP_STEPS, ControlFigures
from gcore_bench.controller.memory import anonymous_bytes, anonymous_peak
from gcore_bench.controller.services import Sample
from gcore_bench.controller.workload import Payload, by_index, check_read
from gcore_controller import Context
from gcore_controller.runtimes.ray import run_ray
from gcore_placement import balance


async def run_controllers(
    workers: list[Any], payload: Payload, *, num_controllers: int, num_steps: int
) -> list[ControlFigures]:
    """Steps under so many controllers, after those that do not count.

    Raises:
        BenchError: features did not arrive as they were made.
    """
    program = partial(dispatch_program, payload=payload, num_steps=WARMUP_STEPS + num_steps)
    return await run_ray(program, roles=workers, world_size=num_controllers)


async def dispatch_program(ctx: Context[list[Any]], *, payload: Payload, num_steps: int) -> ControlFigures:
    """What every controller runs; ``ctx.roles`` are handles of `BenchWorker`s.

    Raises:
        BenchError: features did not arrive as they were made.
    """
    idle_bytes = anonymous_bytes()
    steps: list[tuple[float, float]] = []
    with anonymous_peak() as peak:
        for _ in range(num_steps):
            await ctx.group.barrier()
            start_s = time.monotonic()
            await _step(ctx, payload)
            steps.append((start_s, time.monotonic()))
    return ControlFigures(steps=steps, idle_bytes=idle_bytes, peak_bytes=peak.nbytes)


async def _step(ctx: Context[list[Any]], payload: Payload) -> None:
    # Every worker is somebody's, and everybody has a share, whichever there are more of.
    num_parts = max(ctx.world_size, len(ctx.roles))
    mine = _parts_of(ctx.rank, ctx.world_size, num_parts)
    slices = payload.parts(num_parts)
    made = await asyncio.gather(*(_worker(ctx, part).make.remote(payload, slices[part]) for part in mine))
    samples: list[Sample] = [sample for found in made for sample in found]
    baseline = await ctx.group.all_reduce(sum(sample.reward for sample in samples)) / payload.num_samples
    seen = [(s.index, s.length, s.checksum, s.reward - baseline) for s in samples]
    everyone = sorted(row for rows in await ctx.group.all_gather(seen) for row in rows)
    balanced = balance([length for _, length, _, _ in everyone], num_parts, equal_count=True)
    part_of = {index: part for part, indices in enumerate(balanced) for index in indices.tolist()}
    outgoing = [
        [s for s in samples if part_of[s.index] in _parts_of(rank, ctx.world_size, num_parts)]
        for rank in range(ctx.world_size)
    ]
    incoming = [s for received in await ctx.group.all_to_all(outgoing) for s in received]
    batches = [[s for s in incoming if part_of[s.index] == part] for part in mine]
    reads = [_worker(ctx, part).read.remote(batch) for part, batch in zip(mine, batches, strict=True)]
    read = [row for rows in await asyncio.gather(*reads) for row in rows]
    check_read({index: made for index, _, made, _ in everyone if part_of[index] in mine}, by_index(read))


def _parts_of(rank: int, world_size: int, num_parts: int) -> range:
    return range(rank, num_parts, world_size)


def _worker(ctx: Context[list[Any]], part: int) -> Any:
    return ctx.roles[part % len(ctx.roles)]

"""gcore's contender: controllers that see metadata and pass references on, and the Ray actors that they command."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray

from gcore_bench.controller.figures import WARMUP_STEPS, ControlFigures, anonymous_bytes, anonymous_peak
from gcore_bench.controller.workload import FeatureMaker, Features, Payload, by_index, check_read, checksum
from gcore_controller import Context, Reference
from gcore_controller.runtimes.ray import put, run_ray
from gcore_placement import balance


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Metadata of a sample, which controllers see."""

    index: int
    length: int
    """Tokens of the response."""
    reward: float
    checksum: int
    features: Reference[Features]


def start_workers(count: int) -> list[Any]:
    """Start workers and return their handles."""
    remote: Any = ray.remote(BenchWorker)
    workers = [remote.options(num_cpus=1).remote() for _ in range(count)]
    ray.get([worker.ready.remote() for worker in workers])
    return workers


class BenchWorker:
    """Rollout worker and trainer rank of the same devices."""

    def __init__(self) -> None:
        self._kept: dict[int, Features] = {}

    async def ready(self) -> None:
        """Return once the actor has started."""

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[Sample]:
        """Make samples whose features are in the object store."""
        maker = FeatureMaker.of(payload)
        samples: list[Sample] = []
        for index in indices:
            features = np.empty_like(maker.base)
            maker.fill(index, features)
            sample = Sample(
                index=index,
                length=payload.length(index),
                reward=payload.reward(index),
                checksum=checksum(features),
                features=put(features),
            )
            samples.append(sample)
        return samples

    async def read(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Return the index and the checksum of each sample."""
        values = await asyncio.gather(*(sample.features.get() for sample in samples))
        return [(sample.index, checksum(value)) for sample, value in zip(samples, values, strict=True)]

    async def only_make(self, payload: Payload, indices: Sequence[int]) -> list[int]:
        """Make the same features in memory that is kept between steps; return checksums."""
        maker = FeatureMaker.of(payload)
        if [*self._kept] != [*indices]:
            self._kept = {index: np.empty_like(maker.base) for index in indices}
        for index, features in self._kept.items():
            maker.fill(index, features)
        return self._sums()

    async def only_read(self) -> list[int]:
        """Read all bytes of these features; return checksums."""
        return self._sums()

    async def forget(self) -> None:
        """Release the features."""
        self._kept = {}

    def _sums(self) -> list[int]:
        return [checksum(features) for features in self._kept.values()]


async def run_controllers(
    workers: list[Any], payload: Payload, *, num_controllers: int, num_steps: int
) -> list[ControlFigures]:
    """Make steps under ``num_controllers`` controllers, after the warm-up steps.

    Raises:
        BenchError: features arrived with other bytes.
    """
    program = partial(dispatch_program, payload=payload, num_steps=WARMUP_STEPS + num_steps)
    return await run_ray(program, roles=workers, world_size=num_controllers)


async def dispatch_program(ctx: Context[list[Any]], *, payload: Payload, num_steps: int) -> ControlFigures:
    """Run on every controller; ``ctx.roles`` are handles of `BenchWorker`s.

    Raises:
        BenchError: features arrived with other bytes.
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
    # Every worker has a controller and every controller a part, whichever of them are more.
    num_parts = max(ctx.world_size, len(ctx.roles))
    mine = _parts_of(ctx.rank, ctx.world_size, num_parts)
    slices = payload.parts(num_parts)
    made = await asyncio.gather(*(_worker(ctx, part).make.remote(payload, slices[part]) for part in mine))
    samples: list[Sample] = [sample for found in made for sample in found]
    baseline = await ctx.group.all_reduce(sum(sample.reward for sample in samples)) / payload.num_samples
    seen = [(s.index, s.length, s.checksum, s.reward - baseline) for s in samples]
    everything = sorted(row for rows in await ctx.group.all_gather(seen) for row in rows)
    balanced = balance([length for _, length, _, _ in everything], num_parts, equal_count=True)
    part_of = {index: part for part, indices in enumerate(balanced) for index in indices.tolist()}
    outgoing = [
        [s for s in samples if part_of[s.index] in _parts_of(rank, ctx.world_size, num_parts)]
        for rank in range(ctx.world_size)
    ]
    incoming = [s for received in await ctx.group.all_to_all(outgoing) for s in received]
    batches = [[s for s in incoming if part_of[s.index] == part] for part in mine]
    reads = [_worker(ctx, part).read.remote(batch) for part, batch in zip(mine, batches, strict=True)]
    read = [row for rows in await asyncio.gather(*reads) for row in rows]
    check_read({index: made for index, _, made, _ in everything if part_of[index] in mine}, by_index(read))


def _parts_of(rank: int, world_size: int, num_parts: int) -> range:
    return range(rank, num_parts, world_size)


def _worker(ctx: Context[list[Any]], part: int) -> Any:
    return ctx.roles[part % len(ctx.roles)]

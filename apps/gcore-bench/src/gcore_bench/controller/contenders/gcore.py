"""gcore's contender: controllers that see metadata and pass references on, and the Ray actors that they command."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from gcore_bench.controller.workload import WARMUP_STEPS, Features, Payload, StepFigures, check_read, checksum
from gcore_controller import Context, Reference
from gcore_controller.runtimes.ray import put
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


@dataclass(frozen=True)
class Carried:
    """Features that travel inside of a sample's metadata, through every process that these pass."""

    value: Features

    @property
    def nbytes(self) -> int:
        """Size of the features."""
        return self.value.nbytes

    async def get(self) -> Features:
        """Return the features, which are in this process."""
        return self.value


class BenchWorker:
    """Rollout worker and trainer rank of the same devices."""

    def __init__(self) -> None:
        self._kept: dict[int, Features] = {}

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[Sample]:
        """Make samples whose features are in the object store."""
        return self._made(payload, indices, put)

    async def make_carried(self, payload: Payload, indices: Sequence[int]) -> list[Sample]:
        """Make samples that hold their features."""
        return self._made(payload, indices, Carried)

    def _made(
        self, payload: Payload, indices: Sequence[int], keep: Callable[[Features], Reference[Features]]
    ) -> list[Sample]:
        samples: list[Sample] = []
        for index in indices:
            features = payload.features(index)
            facts = payload.response(index) | {"checksum": checksum(features)}
            samples.append(Sample(index=index, features=keep(features), **facts))
        return samples

    async def read(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Return the index and the checksum of each sample."""
        values = await asyncio.gather(*(sample.features.get() for sample in samples))
        return [(sample.index, checksum(value)) for sample, value in zip(samples, values, strict=True)]

    async def only_make(self, payload: Payload, indices: Sequence[int]) -> list[int]:
        """Make the same features in memory that is kept between steps of the same samples; return checksums."""
        if [*self._kept] != [*indices]:
            self._kept = {index: payload.empty() for index in indices}
        for index, features in self._kept.items():
            payload.features(index, out=features)
        return await self.only_read()

    async def only_read(self) -> list[int]:
        """Read all bytes of these features; return checksums."""
        return [checksum(features) for features in self._kept.values()]


async def run_alone(workers: Sequence[Any], payload: Payload, *, num_steps: int) -> float:
    """Return the median seconds of a step that makes the features and reads them where they are."""
    parts = payload.parts(len(workers))
    seconds: list[float] = []
    for _ in range(WARMUP_STEPS + num_steps):
        start_s = time.perf_counter()
        pairs = zip(workers, parts, strict=True)
        await asyncio.gather(*(worker.only_make.remote(payload, part) for worker, part in pairs))
        await asyncio.gather(*(worker.only_read.remote() for worker in workers))
        seconds.append(time.perf_counter() - start_s)
    # Release the memory.
    await asyncio.gather(*(worker.only_make.remote(payload, []) for worker in workers))
    return median(seconds[WARMUP_STEPS:])


async def dispatch_program(
    ctx: Context[list[Any]], *, payload: Payload, num_steps: int, is_carried: bool = False
) -> StepFigures:
    """Make steps on every controller; ``ctx.roles`` are handles of `BenchWorker`s.

    Features stay in the object store; if they are carried they pass through the controllers instead.
    """
    figures = StepFigures()
    with figures.watched():
        for _ in range(num_steps):
            await ctx.group.barrier()
            with figures.step():
                await _step(ctx, payload, is_carried=is_carried)
    return figures


async def _step(ctx: Context[list[Any]], payload: Payload, *, is_carried: bool) -> None:
    # Every worker has a controller and every controller a part, whichever of them are more.
    num_parts = max(ctx.world_size, len(ctx.roles))
    mine = range(ctx.rank, num_parts, ctx.world_size)
    workers = [ctx.roles[part % len(ctx.roles)] for part in mine]
    slices = payload.parts(num_parts)
    methods = [worker.make_carried if is_carried else worker.make for worker in workers]
    makes = [make.remote(payload, slices[part]) for make, part in zip(methods, mine, strict=True)]
    samples: list[Sample] = [sample for found in await asyncio.gather(*makes) for sample in found]
    baseline = await ctx.group.all_reduce(sum(sample.reward for sample in samples)) / payload.num_samples
    seen = [(s.index, s.length, s.checksum, s.reward - baseline) for s in samples]
    everything = sorted(row for rows in await ctx.group.all_gather(seen) for row in rows)
    balanced = balance([length for _, length, _, _ in everything], num_parts, equal_count=True)
    part_of = {index: part for part, indices in enumerate(balanced) for index in indices.tolist()}
    outgoing: list[list[Sample]] = [[] for _ in range(ctx.world_size)]
    for sample in samples:
        outgoing[part_of[sample.index] % ctx.world_size].append(sample)
    incoming = [s for received in await ctx.group.all_to_all(outgoing) for s in received]
    batches = [[s for s in incoming if part_of[s.index] == part] for part in mine]
    reads = [worker.read.remote(batch) for worker, batch in zip(workers, batches, strict=True)]
    read = [row for rows in await asyncio.gather(*reads) for row in rows]
    check_read({index: made for index, _, made, _ in everything if part_of[index] in mine}, read)

"""Workers behind gcore's controllers, as Ray actors, and the same work on a payload that goes nowhere."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from gcore_bench.controller.workload import FeatureMaker, Features, Payload, checksum
from gcore_controller import Reference
from gcore_controller.runtimes.ray import put


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What controllers see of a sample."""

    index: int
    length: int
    """Tokens of the response."""
    reward: float
    checksum: int
    features: Reference[Features]


def start_workers(count: int) -> list[Any]:
    """Handles of `BenchWorker`s that are there."""
    remote: Any = ray.remote(BenchWorker)
    workers = [remote.options(num_cpus=1).remote() for _ in range(count)]
    ray.get([worker.ready.remote() for worker in workers])
    return workers


class BenchWorker:
    """Rollout worker and trainer rank of the same devices."""

    def __init__(self) -> None:
        self._kept: dict[int, Features] = {}

    async def ready(self) -> None:
        """Answered once the actor is there."""

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[Sample]:
        """Samples whose features lie in the object store."""
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
        """Indices and checksums of all their bytes."""
        values = await asyncio.gather(*(sample.features.get() for sample in samples))
        return [(sample.index, checksum(value)) for sample, value in zip(samples, values, strict=True)]

    async def only_make(self, payload: Payload, indices: Sequence[int]) -> list[int]:
        """The same features where they will be read, in memory that is kept from step to step: checksums."""
        maker = FeatureMaker.of(payload)
        if [*self._kept] != [*indices]:
            self._kept = {index: np.empty_like(maker.base) for index in indices}
        for index, features in self._kept.items():
            maker.fill(index, features)
        return self._sums()

    async def only_read(self) -> list[int]:
        """All bytes of these."""
        return self._sums()

    async def forget(self) -> None:
        """Keep nothing."""
        self._kept = {}

    def _sums(self) -> list[int]:
        return [checksum(features) for features in self._kept.values()]

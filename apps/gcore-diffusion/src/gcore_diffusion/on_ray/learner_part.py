"""A controller's part in an image model whose ranks are actors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gcore_rollout import Engine, ImageRequest, ImageSample
from gcore_runs.on_ray.ranks_part import BaseRanksPart
from gcore_trainer import DiffusionMicroBatch


class RanksPart(BaseRanksPart[DiffusionMicroBatch]):
    """See `LearnerPart`. Images go from their controllers to the ranks by reference."""

    async def reference_means(self, samples: DiffusionMicroBatch) -> list[NDArray[np.float32]]:
        """See `LearnerPart.reference_means`."""
        return await self.asked_alone("reference_means", samples)

    async def train_step(self, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """See `LearnerPart.train_step`."""
        return await self.updated("actor", [], micro_batches)

    async def update_policy(
        self, policy: Engine[ImageRequest, ImageSample], *, version: int, averaged: bool = False
    ) -> None:
        """See `LearnerPart.update_policy`."""
        await self.hand_out(policy, version=version, averaged=averaged)

    async def check_policy(self, policy: Engine[ImageRequest, ImageSample]) -> None:
        """See `LearnerPart.check_policy`."""
        await self.compare(policy)

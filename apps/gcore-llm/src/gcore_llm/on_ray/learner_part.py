"""A controller's part in language models whose ranks are actors."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gcore_llm.learner import Role
from gcore_rollout import Engine
from gcore_runs.on_ray.ranks_part import BaseRanksPart
from gcore_trainer import MicroBatch


class RanksPart(BaseRanksPart[MicroBatch]):
    """See `LearnerPart`."""

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See `ComputingLearner.score`."""
        return await self.scored("score", role, [role], micro_batches)

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """See `ComputingLearner.score_and_route`."""
        return await self.scored("score_and_route", "actor", [], micro_batches)

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """See `ComputingLearner.train_step`."""
        return await self.updated(role, [role], micro_batches)

    async def update_policy(self, policy: Engine, *, version: int) -> None:
        """See `LearnerPart.update_policy`."""
        await self.hand_out(policy, version=version)

    async def check_policy(self, policy: Engine) -> None:
        """See `LearnerPart.check_policy`."""
        await self.compare(policy)

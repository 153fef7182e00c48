"""One controller's part in the models in training."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives, DeviceTimers, rank_name
from gcore_llm.learner import ComputingLearner, Learner, Role
from gcore_rollout import Engine, all_digests, check_weights
from gcore_trainer import MicroBatch


class LearnerPart(ComputingLearner, Protocol):
    """What a controller's program asks of the models in training, wherever they run.

    Every controller makes the same calls in the same order, each with micro-batches of its own: scores are of these,
    and an update is on all controllers' together.
    """

    async def update_policy(self, policy: Engine, *, version: int) -> None:
        """Give every controller's ``policy`` the present weights, at least as this version."""
        ...

    async def check_policy(self, policy: Engine) -> None:
        """Compare every tensor of every controller's ``policy`` with the present weights.

        Raises:
            WrongWeightsError: an engine has others.
        """
        ...


class SharedLearner:
    """The part of a controller in a learner, and with a policy, that all controllers of this process share.

    Args:
        devices: what notes when the learner's ranks work: all of them in every call.
        num_ranks: of which it notes that.
    """

    def __init__(
        self, learner: Learner, group: Collectives, devices: DeviceTimers | None = None, *, num_ranks: int = 0
    ) -> None:
        self._learner = learner
        self._group = group
        self._devices = devices or DeviceTimers()
        self._ranks = [rank_name(rank) for rank in range(num_ranks)]

    @property
    def num_replicas(self) -> int:
        return self._learner.num_replicas

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See `ComputingLearner.score`."""
        with self._devices.stage("prepare", *self._ranks):
            return await self._learner.score(role, micro_batches)

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """See `ComputingLearner.score_and_route`."""
        with self._devices.stage("prepare", *self._ranks):
            return await self._learner.score_and_route(micro_batches)

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """See `ComputingLearner.train_step`."""
        everyones = await self._group.all_gather(micro_batches)
        metrics = None
        if self._group.rank == 0:
            with self._devices.stage("train", *self._ranks):
                metrics = await self._learner.train_step(role, [m for part in everyones for m in part])
        return await self._group.broadcast(metrics)

    async def update_policy(self, policy: Engine, *, version: int) -> None:
        """See `LearnerPart.update_policy`."""
        if self._group.rank == 0:
            with self._devices.stage("sync", *self._ranks):
                await policy.update_weights(self._learner.export_weights(), version=version)
        await self._group.barrier()

    async def check_policy(self, policy: Engine) -> None:
        """See `LearnerPart.check_policy`."""
        if self._group.rank == 0:
            await check_weights(policy, all_digests(self._learner.export_weights()))
        await self._group.barrier()

"""Trainer groups in the process of the controllers, and what each of these controllers is given of one."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import Context, Program
from gcore_controller.devices import DeviceTimers, rank_name
from gcore_controller.trainer_group import (
    BatchT,
    Close,
    Computation,
    Message,
    MessageTrainerGroup,
    PolicyEngine,
    Score,
    SharedTrainerGroup,
    TrainerWorker,
    TrainStep,
    Weights,
    answer,
    check_weights,
    digests_of,
)


class ComputingTrainerGroup(MessageTrainerGroup, Generic[BatchT]):
    """A `SharedTrainerGroup` whose ranks answer messages."""

    async def score(self, role: str, micro_batches: Sequence[BatchT]) -> list[list[Any]]:
        """See `TrainerClient.score`."""
        return await self._compute(Score(role=role, micro_batches=micro_batches))

    async def score_and_route(self, micro_batches: Sequence[BatchT]) -> list[list[tuple[Any, Any]]]:
        """See `TrainerClient.score_and_route`."""
        return await self._compute(Score(role="actor", micro_batches=micro_batches, with_routing=True))

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """See `TrainerWorker.train_step`."""
        return await self._compute(TrainStep(role=role, micro_batches=micro_batches))

    @abstractmethod
    async def _compute(self, message: Computation) -> Any:
        """Return what the ranks compute for the micro-batches of a message."""


class InProcessTrainerGroup(ComputingTrainerGroup[BatchT]):
    """The one rank of a group, in this process.

    Args:
        worker: its models.
        in_thread: compute in a thread, while the event loop runs.
    """

    def __init__(self, worker: TrainerWorker[BatchT], *, in_thread: bool = False) -> None:
        self._worker = worker
        self._in_thread = in_thread

    @property
    def num_replicas(self) -> int:
        """See `TrainerClient.num_replicas`."""
        return self._worker.replica("actor")[1]

    def export_weights(self, *, averaged: bool = False) -> Weights:
        """See `TrainerWorker.export_weights`."""
        return self._worker.export_weights(averaged=averaged)

    def close(self) -> None:
        """See `TrainerGroup.close`."""
        self._ask_all(Close())

    def _ask_all(self, message: Message) -> Any:
        return answer(self._worker, message)

    async def _compute(self, message: Computation) -> Any:
        if self._in_thread:
            return await asyncio.to_thread(answer, self._worker, message)
        return answer(self._worker, message)


class SharedTrainerClient(Generic[BatchT]):
    """A `TrainerClient` of a group, and of an engine, that all controllers of this process share.

    Args:
        trainer: the group.
        group: the controllers.
        devices: records when the ranks work: all of them in every call.
        num_ranks: number of ranks whose work is recorded.
    """

    def __init__(
        self, trainer: SharedTrainerGroup[BatchT], group: Collectives, devices: DeviceTimers, *, num_ranks: int = 0
    ) -> None:
        self._trainer = trainer
        self._group = group
        self._devices = devices
        self._ranks = [rank_name(rank) for rank in range(num_ranks)]

    @property
    def num_replicas(self) -> int:
        """See `TrainerClient.num_replicas`."""
        return self._trainer.num_replicas

    async def score(self, role: str, micro_batches: Sequence[BatchT]) -> list[list[Any]]:
        """See `TrainerClient.score`."""
        with self._devices.stage("prepare", *self._ranks):
            return await self._trainer.score(role, micro_batches)

    async def score_and_route(self, micro_batches: Sequence[BatchT]) -> list[list[tuple[Any, Any]]]:
        """See `TrainerClient.score_and_route`."""
        with self._devices.stage("prepare", *self._ranks):
            return await self._trainer.score_and_route(micro_batches)

    async def score_alone(self, role: str, micro_batch: BatchT) -> list[Any]:
        """See `TrainerClient.score_alone`."""
        [outputs] = await self.score(role, [micro_batch])
        return outputs

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """See `TrainerClient.train_step`."""
        everyones = [batch for part in await self._group.all_gather(micro_batches) for batch in part]
        metrics: dict[str, float] = {}
        if self._group.rank == 0 and everyones:
            with self._devices.stage("train", *self._ranks):
                metrics = await self._trainer.train_step(role, everyones)
        return await self._group.broadcast(metrics)

    async def update_policy(self, policy: PolicyEngine, *, version: int, averaged: bool = False) -> None:
        """See `TrainerClient.update_policy`."""
        if self._group.rank == 0:
            with self._devices.stage("sync", *self._ranks):
                await policy.update_weights(self._trainer.export_weights(averaged=averaged), version=version)
        await self._group.barrier()

    async def check_policy(self, policy: PolicyEngine) -> None:
        """See `TrainerClient.check_policy`."""
        if self._group.rank == 0:
            await check_weights(policy, digests_of(self._trainer.export_weights()))
        await self._group.barrier()


class RecordedRoles(Protocol):
    """Role services whose work is recorded."""

    @property
    def devices(self) -> DeviceTimers: ...


SharedRolesT = TypeVar("SharedRolesT", bound=RecordedRoles)
OwnRolesT = TypeVar("OwnRolesT")


def share_trainer(
    trainer: SharedTrainerGroup[Any],
    program: Program[OwnRolesT, None],
    *,
    roles: Callable[..., OwnRolesT],
    num_ranks: int = 0,
) -> Callable[[Context[SharedRolesT]], Coroutine[Any, Any, None]]:
    """Return the program for controllers of this process that share a trainer group.

    Args:
        trainer: the group.
        program: the program for a controller that has a `TrainerClient`.
        roles: class of that controller's roles: the fields of the shared roles, and ``learner``, the client.
        num_ranks: number of ranks whose work is recorded.
    """

    async def run(ctx: Context[SharedRolesT]) -> None:
        client = SharedTrainerClient(trainer, ctx.group, ctx.roles.devices, num_ranks=num_ranks)
        await program(ctx.with_roles(roles(**vars(ctx.roles), learner=client)))

    return run

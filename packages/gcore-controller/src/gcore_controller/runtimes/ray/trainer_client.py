"""A controller's access to training ranks that are Ray actors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic

from gcore_controller.collectives.base import Collectives
from gcore_controller.devices import DeviceTimers, rank_name
from gcore_controller.runtimes.ray.references import put
from gcore_controller.runtimes.ray.training_rank import RankHandles
from gcore_controller.trainer_group import (
    BatchT,
    Computation,
    ExportWeights,
    PolicyEngine,
    Score,
    TrainStep,
    check_weights,
    deal,
)


class RayTrainerClient(Generic[BatchT]):
    """A `TrainerClient`: controller r asks the replicas, and the ranks, whose number modulo the controllers is r.

    The micro-batches of all controllers are dealt out to the replicas by their cost. They stay in the object store of
    their controller's node until a rank reads them.

    Args:
        ranks: of the trainer group.
        group: the controllers.
        devices: records when the ranks work that this controller asks.
        cost_of: work of a micro-batch, in any unit.
    """

    def __init__(
        self, ranks: RankHandles, group: Collectives, devices: DeviceTimers, *, cost_of: Callable[[BatchT], float]
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._devices = devices
        self._cost_of = cost_of
        self._num_alone = 0

    @property
    def num_replicas(self) -> int:
        """See `TrainerClient.num_replicas`."""
        return -(-self._ranks.num_replicas("actor") // self._group.world_size)

    async def score(self, role: str, micro_batches: Sequence[BatchT]) -> list[list[Any]]:
        """See `TrainerClient.score`."""
        return await self._scored(Score(role=role, micro_batches=micro_batches))

    async def score_and_route(self, micro_batches: Sequence[BatchT]) -> list[list[tuple[Any, Any]]]:
        """See `TrainerClient.score_and_route`."""
        return await self._scored(Score(role="actor", micro_batches=micro_batches, with_routing=True))

    async def score_alone(self, role: str, micro_batch: BatchT) -> list[Any]:
        """See `TrainerClient.score_alone`; each call asks the next rank."""
        rank = (self._group.rank + self._num_alone) % len(self._ranks.actors)
        self._num_alone += 1
        message = Score(role=role, micro_batches=[put(list(micro_batch))])
        with self._devices.stage("prepare", rank_name(rank)):
            [outputs] = (await self._ranks.answers({rank: self._ranks.actors[rank].ask.remote(message)}))[rank]
        return outputs

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """See `TrainerClient.train_step`."""
        answers, _, owners = await self._computed(TrainStep(role=role, micro_batches=micro_batches))
        return await self._group.broadcast(answers.get(0)) if owners else {}

    async def update_policy(self, policy: PolicyEngine, *, version: int, averaged: bool = False) -> None:
        """See `TrainerClient.update_policy`; weights go from rank 0 to the engines by reference."""
        newest = max(await self._group.all_gather(policy.weight_version))
        references = await self._exported(ExportWeights(averaged=averaged))
        # A run that went back to an earlier step has engines with later weights.
        await policy.update_weights(references, version=max(version, newest + 1))
        await self._group.barrier()

    async def check_policy(self, policy: PolicyEngine) -> None:
        """See `TrainerClient.check_policy`."""
        await check_weights(policy, await self._exported(ExportWeights(averaged=False, digests_only=True)))
        await self._group.barrier()

    async def _exported(self, message: ExportWeights) -> Any:
        """Return what rank 0 answers; all ranks gather the policy's weights."""
        exports = {
            rank: self._ranks.actors[rank].export_weights.remote(message)
            for rank in range(self._group.rank, len(self._ranks.actors), self._group.world_size)
        }
        with self._devices.stage("sync", *map(rank_name, exports)):
            exported = await self._ranks.answers(exports)
        return await self._group.broadcast(exported.get(0))

    async def _scored(self, message: Score) -> list[Any]:
        """Return what the replicas answer for each of this controller's micro-batches."""
        answers, parts, owners = await self._computed(message)
        back: list[list[tuple[int, Any]]] = [[] for _ in range(self._group.world_size)]
        for replica, outputs in answers.items():
            for i, of_batch in zip(parts[replica], outputs, strict=True):
                owner, place = owners[i]
                back[owner].append((place, of_batch))
        received = [entry for part in await self._group.all_to_all(back) for entry in part]
        return [outputs for _, outputs in sorted(received, key=lambda entry: entry[0])]

    async def _computed(self, message: Computation) -> tuple[dict[int, Any], list[list[int]], list[tuple[int, int]]]:
        """Have all replicas compute.

        Returns:
            the answers of the replicas that this controller asks; the indices of each replica's micro-batches; and the
            controller of each micro-batch, with its index there.
        """
        own = [(put(list(batch)), self._cost_of(batch)) for batch in message.micro_batches]
        everyones = await self._group.all_gather(own)
        owners = [(owner, place) for owner, part in enumerate(everyones) for place in range(len(part))]
        if not owners:
            return {}, [], []
        batches = [entry for part in everyones for entry in part]
        parts = deal([cost for _, cost in batches], self._ranks.num_replicas(message.role))
        asked = range(self._group.rank, len(parts), self._group.world_size)
        ranks_of = {replica: self._ranks.of_replica(message.role, replica) for replica in asked}
        calls: dict[int, Any] = {}
        for replica, ranks in ranks_of.items():
            part = replace(message, micro_batches=[batches[i][0] for i in parts[replica]])
            calls |= {rank: self._ranks.actors[rank].ask.remote(part) for rank in ranks}
        stage = "train" if isinstance(message, TrainStep) else "prepare"
        with self._devices.stage(stage, *map(rank_name, calls)):
            answers = await self._ranks.answers(calls)
        return {replica: answers[ranks[0]] for replica, ranks in ranks_of.items()}, parts, owners

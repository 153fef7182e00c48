"""A controller's part in models whose ranks are actors: it puts its micro-batches, and asks ranks of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gcore_controller import Collectives
from gcore_controller.runtimes.ray import put
from gcore_rollout import Engine
from gcore_rollout.weight_report import check_weights
from gcore_runs.devices import DeviceTimers, rank_name
from gcore_runs.on_ray.training_ranks import RankHandles
from gcore_runs.ranks import deal

BatchT = TypeVar("BatchT", bound=Sequence[Any])


class BaseRanksPart(Generic[BatchT]):
    """Replica r of the models, and rank r of them, are asked by controller r modulo their number.

    All controllers' micro-batches are dealt out to the replicas by simulated work; a replica reads those it gets where
    their controllers have put them. Every controller makes the same calls in the same order.

    Args:
        devices: what notes when the ranks that this controller asks work.
        cost_of: simulated work of a micro-batch, in any unit.
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
        """A number of micro-batches that this divides loads the policy's data-parallel replicas evenly."""
        return -(-self._ranks.num_replicas("actor") // self._group.world_size)

    async def hand_out(self, policy: Engine[Any, Any], *, version: int, **options: Any) -> None:
        """Give every controller's ``policy`` the present weights. They go from rank 0 to the engines, by reference.

        Args:
            policy: this controller's.
            version: least version that they are to have.
            options: of the learner's ``export_weights``.
        """
        newest = max(await self._group.all_gather(policy.weight_version))
        references = await self._exported("export_weights", options)
        # A run that went back to an earlier step has engines with later weights.
        await policy.update_weights(references, version=max(version, newest + 1))
        await self._group.barrier()

    async def compare(self, policy: Engine[Any, Any], **options: Any) -> None:
        """Compare every tensor of every controller's ``policy`` with the present weights.

        Args:
            policy: this controller's.
            options: of the learner's ``export_weights``.

        Raises:
            WrongWeightsError: an engine has others.
        """
        await check_weights(policy, await self._exported("digest_weights", options))
        await self._group.barrier()

    async def _exported(self, method: str, options: Mapping[str, Any]) -> Any:
        """What rank 0 answers, of all ranks that gather the policy's weights."""
        exports = {
            rank: getattr(self._ranks.actors[rank], method).remote(is_kept=rank == 0, options=options)
            for rank in range(self._group.rank, len(self._ranks.actors), self._group.world_size)
        }
        with self._devices.stage("sync", *map(rank_name, exports)):
            exported = await self._ranks.ask(exports)
        return await self._group.broadcast(exported.get(0))

    async def scored(
        self, method: str, role: str, arguments: Sequence[Any], micro_batches: Sequence[BatchT]
    ) -> list[Any]:
        """What the replicas answer for each of this controller's micro-batches.

        Args:
            method: of the learner; it returns one value for each micro-batch.
            role: whose replicas.
            arguments: of the method, before the micro-batches.
            micro_batches: this controller's.
        """
        answers, parts, owners = await self._computed(method, role, arguments, micro_batches)
        back: list[list[tuple[int, Any]]] = [[] for _ in range(self._group.world_size)]
        for replica, values in answers.items():
            for i, of_batch in zip(parts[replica], values, strict=True):
                owner, place = owners[i]
                back[owner].append((place, of_batch))
        received = [entry for part in await self._group.all_to_all(back) for entry in part]
        return [values for _, values in sorted(received, key=lambda entry: entry[0])]

    async def asked_alone(self, method: str, micro_batch: BatchT) -> Any:
        """What one rank answers for a micro-batch, of whatever this controller wants; the ranks are asked in turn.

        Args:
            method: of the learner, without collectives; it returns one value for each micro-batch.
            micro_batch: any.
        """
        rank = (self._group.rank + self._num_alone) % len(self._ranks.actors)
        self._num_alone += 1
        call = self._ranks.actors[rank].compute.remote(method, [], [put(list(micro_batch))])
        with self._devices.stage("prepare", rank_name(rank)):
            [value] = (await self._ranks.ask({rank: call}))[rank]
        return value

    async def updated(self, role: str, arguments: Sequence[Any], micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """The metrics of one update, ``train_step``, on all controllers' micro-batches together."""
        answers, _, _ = await self._computed("train_step", role, arguments, micro_batches)
        return await self._group.broadcast(answers.get(0))

    async def _computed(
        self, method: str, role: str, arguments: Sequence[Any], micro_batches: Sequence[BatchT]
    ) -> tuple[dict[int, Any], list[list[int]], list[tuple[int, int]]]:
        """Have all replicas compute.

        Returns:
            the answers of the replicas that this controller asks; which micro-batches each replica has; and whose each
            micro-batch is, and which of that controller's.
        """
        own = [(put(list(batch)), self._cost_of(batch)) for batch in micro_batches]
        everyones = await self._group.all_gather(own)
        owners = [(owner, place) for owner, part in enumerate(everyones) for place in range(len(part))]
        batches = [entry for part in everyones for entry in part]
        parts = deal([cost for _, cost in batches], self._ranks.num_replicas(role))
        asked = range(self._group.rank, len(parts), self._group.world_size)
        ranks_of = {replica: self._ranks.of_replica(role, replica) for replica in asked}
        calls = {
            rank: self._ranks.actors[rank].compute.remote(method, arguments, [batches[i][0] for i in parts[replica]])
            for replica, ranks in ranks_of.items()
            for rank in ranks
        }
        stage = "train" if method == "train_step" else "prepare"
        with self._devices.stage(stage, *map(rank_name, calls)):
            answers = await self._ranks.ask(calls)
        return {replica: answers[ranks[0]] for replica, ranks in ranks_of.items()}, parts, owners

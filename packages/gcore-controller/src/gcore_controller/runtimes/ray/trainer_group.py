"""A trainer group whose ranks are actors of a Ray cluster: for the process of the run, and for controllers."""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import Any

import ray

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import DeviceTimers, Reference, rank_name
from gcore_controller.errors import ClusterError, ControllerError, DeviceError, RankError
from gcore_controller.runtimes.ray.actors import ActorGroup, cause_of
from gcore_controller.runtimes.ray.cluster import free_resources, put
from gcore_controller.runtimes.ray.devices import ReservedDevice
from gcore_controller.trainer_client import (
    DeviceTurns,
    Lending,
    PolicyEngine,
    TrainerClient,
    Turn,
    check_weights,
    digests_of,
)
from gcore_controller.trainer_group import (
    BatchT,
    Joined,
    Message,
    Replica,
    TrainerGroup,
    TrainerSpec,
    TrainerWorker,
    deal,
    join_ranks,
    rank_failure,
)

_OTHER_DEVICE_S = 60.0
"""Longest wait for ranks to start without the devices that failed."""


class TrainingRank:
    """The actor of one rank, which answers one message after the other, in the working folder of the run."""

    def __init__(self, spec: TrainerSpec, folder: Path, gpus: Sequence[str] | None = None) -> None:
        os.chdir(folder)
        if gpus is not None:
            # Those of another actor: Ray hides what a process has not reserved.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._spec = spec
        self._worker: TrainerWorker[Any] | None = None

    @ray.method(concurrency_group="news")
    def is_alive(self) -> None:
        """Return at once, whatever the rank does."""

    def place(self) -> tuple[str, tuple[str, int], ReservedDevice]:
        """Return this process and its node in words, the host and port where it listens, and what it has reserved."""
        host = ray.util.get_node_ip_address()
        # Open from here on, so that no other process takes the port before the ranks meet there.
        self._listener = socket.create_server((host, 0))
        address = host, self._listener.getsockname()[1]
        return f"process {os.getpid()} on {host}", address, ReservedDevice.of_actor(self)

    def join(self, rank: int, host: str, port: int, num_here: int) -> Joined:
        """See `join_ranks`; ranks meet where rank 0 listens. Ray shows each actor its own GPUs only."""
        self._spec.enter_process(rank)
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__

        with self._listener as listener:
            descriptor = listener.detach() if rank == 0 else None
        store = TCPStore(
            host,
            port,
            is_master=rank == 0,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        device = "cuda:0" if self._spec.device.startswith("cuda") else self._spec.device
        self._worker, joined = join_ranks(self._spec, rank, store, device, num_here=num_here)
        return joined

    def ask(self, message: Message) -> Any:
        """Answer a message."""
        assert self._worker is not None
        return message(self._worker)

    def compute(
        self, method: str, role: str, micro_batches: Sequence[Reference[Any]], **options: Any
    ) -> Any:
        """Call a method of the worker with micro-batches, which are read where they lie."""
        assert self._worker is not None
        batches = ray.get([batch.value for batch in micro_batches])
        return getattr(self._worker, method)(role, batches, **options)

    def send_weights(self, *, averaged: bool, version: int, base_version: int | None) -> Any:
        """Return a reference to this rank's part of the policy's weights; see `TrainerSpec.put_weights`."""
        assert self._worker is not None
        assert self._spec.put_weights is not None, "put_weights is None; expected a function on Ray"
        weights = self._worker.export_weights(averaged=averaged)
        return self._spec.put_weights(weights, version=version, base_version=base_version)

    def digests(self) -> Mapping[str, Any]:
        """Return digests of this rank's part of the policy's weights."""
        assert self._worker is not None
        return digests_of(self._worker.export_weights(averaged=False))


@dataclass(frozen=True)
class RankHandles(ActorGroup):
    """The ranks of a group, for the processes that ask them."""

    noun: str = "training rank"
    death_error: type[ControllerError] = RankError
    replicas: Mapping[str, Sequence[Replica]] = field(default_factory=dict[str, Sequence[Replica]])
    """The replica of each rank, by role."""
    expected_errors: tuple[type[Exception], ...] = ()
    """See `TrainerSpec.expected_errors`."""

    def failure(self, rank: int, error: BaseException) -> BaseException:
        message = f"{self.name(rank)} failed:\n{error}"
        return rank_failure(cause_of(error), rank, message, self.expected_errors)


class RayTrainerGroup(TrainerGroup):
    """A `TrainerGroup` on Ray; made by `start`. Controllers ask its ranks through `RayTrainerClient`."""

    def __init__(self) -> None:
        self.ranks = RankHandles()
        """The handles that controllers are given."""
        self.loss: RankError | None = None
        """Why the ranks do not answer any more, until they are started again; every call raises it."""
        self.failed: list[Any] = []
        """Former ranks whose devices failed: they stay, so that Ray gives these devices to no other process."""
        self._num_sharing = 0
        """Ranks on devices that other actors have reserved, the first ones."""

    async def start(
        self,
        spec: TrainerSpec,
        *,
        num_cpus: float,
        num_gpus: float,
        timeout_s: float,
        devices: Sequence[ReservedDevice] = (),
    ) -> None:
        """Start all ranks from the model that the run starts with; end those of before.

        The first ranks are on ``devices``, at most one for each rank, that other actors have reserved; each of the rest
        reserves ``num_cpus`` and ``num_gpus``. These are numbered by node and GPU once they have started, so that
        groups of neighbours, such as those of tensor parallelism, are on one node.

        After a `DeviceError` the rank's device is left out if the rank had reserved it, and there are others.

        Raises:
            RankError: a rank died.
            RankCodeError: a rank failed.
            ClusterError: the cluster lacks the capacity for the ranks, or they have not started in time.
        """
        loss = self.loss
        if isinstance(loss, DeviceError) and loss.rank >= self._num_sharing:
            failed = self.ranks.actors[loss.rank]
            self.failed.append(failed)
            self.ranks = replace(
                self.ranks, actors=[actor for actor in self.ranks.actors if actor is not failed]
            )
        self.kill()
        self._num_sharing = len(devices)
        remote: Any = ray.remote
        make = remote(concurrency_groups={"news": 1})(TrainingRank)
        default_options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "scheduling_strategy": "SPREAD",
        }
        folder = Path.cwd()
        actors = [make.options(**d.options).remote(spec, folder, d.gpus) for d in devices]
        while len(actors) < spec.num_ranks:
            actors.append(make.options(**default_options).remote(spec, folder))
        self.ranks = RankHandles(
            actors,
            expected_errors=spec.expected_errors,
            heartbeat_timeout_s=spec.heartbeat_timeout_s,
        )
        try:
            async with asyncio.timeout(timeout_s):
                placed = await self._place()
                order = sorted(placed, key=lambda i: (i >= len(devices), placed[i][2].sort_key))
                self.ranks = replace(
                    self.ranks,
                    actors=[actors[i] for i in order],
                    locations=[placed[i][0] for i in order],
                )
                address = placed[order[0]][1]
                nodes = [placed[i][2].node for i in order]
                calls: dict[int, Any] = {}
                for rank, actor in enumerate(self.ranks.actors):
                    calls[rank] = actor.join.remote(rank, *address, nodes.count(nodes[rank]))
                joined = [*(await self.ranks.answers(calls)).values()]
        except TimeoutError:
            raise ClusterError(
                f"{spec.num_ranks} training ranks did not start within {timeout_s} s: free are {free_resources()}"
            ) from None
        replicas = {role: [of_rank[role] for of_rank, _ in joined] for role in joined[0][0]}
        self.ranks = replace(self.ranks, replicas=replicas, logs=[log for _, log in joined])

    def close(self) -> None:
        try:
            if self.ranks.replicas:
                self._ask_all("close", methodcaller("close"))
        finally:
            self.kill()
            self._release_failed()

    async def _place(self) -> dict[int, Any]:
        """Return where the ranks are; if they find no capacity, they get the devices that failed."""
        placing = asyncio.ensure_future(self.ranks.call("place"))
        try:
            if self.failed:
                await asyncio.wait([placing], timeout=_OTHER_DEVICE_S)
            if not placing.done():
                self._release_failed()
            return await placing
        finally:
            placing.cancel()

    def _release_failed(self) -> None:
        for actor in self.failed:
            ray.kill(actor)
        self.failed.clear()

    def _ask_all(self, stage: str, message: Message) -> Any:
        if self.loss is not None:
            raise self.loss
        # In a thread, because this one may run an event loop. An interrupt does not wait for it.
        asking = self.ranks.call("ask", message, stage=stage)
        answers = ThreadPoolExecutor(1).submit(asyncio.run, asking)
        return answers.result()[0]

    def kill(self) -> None:
        """End all ranks at once: one that has failed leaves the others waiting in a collective."""
        for actor in self.ranks.actors:
            ray.kill(actor)
        self.ranks = RankHandles()
        self.loss = None


class RayTrainerClient(TrainerClient[BatchT]):
    """A `TrainerClient`: controller r asks the replicas, and the ranks, whose number modulo the controllers is r.

    The micro-batches of all controllers are dealt out to the replicas by their cost. They stay in the object store of
    their controller's node until a rank reads them.

    Args:
        cost_of: work of a micro-batch, in any unit.
        sharing: this controller's engines, the policy's first, where engines and ranks share devices and take turns.

    Example:
        >>> replicas = {"actor": [(0, 2), (1, 2)]}
        >>> ranks = RankHandles(actors=["rank 0", "rank 1"], replicas=replicas)  # in a run, actors of Ray
        >>> client = RayTrainerClient(ranks, InlineCollectives(), DeviceTimers(), cost_of=len)
        >>> client.num_replicas, client.can_score_alone
        (2, False)
    """

    def __init__(
        self,
        ranks: RankHandles,
        group: Collectives,
        devices: DeviceTimers,
        *,
        cost_of: Callable[[BatchT], float],
        sharing: Sequence[PolicyEngine] = (),
        lending: Lending | None = None,
    ) -> None:
        # Those that this controller asks to do what all do.
        self._own_ranks = range(group.rank, len(ranks.actors), group.world_size)
        turns = None
        if sharing:
            turns = DeviceTurns(
                sharing[0],
                sharing[1:],
                sleep_models=partial(self._ask_own_ranks, "sleep"),
                wake_models=partial(self._ask_own_ranks, "wake"),
                devices=devices,
                ranks=self._own_ranks,
                current=None,
                lending=lending,
            )
        super().__init__(group, devices, turns=turns)
        self._ranks = ranks
        self._cost_of = cost_of
        self._sent: Any = None
        """The weights that were sent last."""

    @property
    def num_replicas(self) -> int:
        return -(-self._ranks.replicas["actor"][0][1] // self.group.world_size)

    @property
    def can_score_alone(self) -> bool:
        return len(self._ranks.actors) == 1 and self.turns is None

    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        answers, parts, owners = await self._compute_together(
            "score", role, micro_batches, with_routing=with_routing
        )
        back: list[list[tuple[int, Any]]] = [[] for _ in range(self.group.world_size)]
        for replica, outputs in answers.items():
            for i, of_batch in zip(parts[replica], outputs, strict=True):
                owner, position = owners[i]
                back[owner].append((position, of_batch))
        received = chain.from_iterable(await self.group.all_to_all(back))
        return [outputs for _, outputs in sorted(received, key=lambda entry: entry[0])]

    async def score_alone(self, role: str, micro_batch: BatchT) -> list[Any]:
        batches = {0: [put(list(micro_batch))]}
        answers = await self._compute("score", role, batches, with_routing=False)
        [outputs] = answers[0]
        return outputs

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        answers, _, owners = await self._compute_together("train_step", role, micro_batches)
        if not owners:
            return {}
        return await self.group.broadcast(answers.get(0))

    async def update_weights(
        self, policy: PolicyEngine, *, version: int, averaged: bool = False
    ) -> None:
        """Send the weights from all ranks to the engines, by reference."""
        newest = max(await self.group.all_gather(policy.weight_version))
        # A run that went back to an earlier step has engines with later weights.
        version = max(version, newest + 1)
        base_version = self._sent and self._sent.next_base
        parts = await self._call_all_ranks(
            "send_weights", averaged=averaged, version=version, base_version=base_version
        )
        self._sent = parts[0].join(parts).after(self._sent)
        await policy.update_weights(self._sent, version=version)
        await self.group.barrier()

    async def check_policy(self, policy: PolicyEngine) -> None:
        parts = await self._call_all_ranks("digests")
        all_digests: dict[str, Any] = {}
        for digests in parts:
            all_digests.update(digests)
        await check_weights(policy, all_digests)
        await self.group.barrier()

    async def _swap(self, turns: DeviceTurns, turn: Turn) -> None:
        """Take a turn with this controller's engines and ranks, as all controllers do at once."""
        await turns.take(turn, all_asleep=self.group.barrier)

    async def _ask_own_ranks(self, method: str, **options: Any) -> None:
        """Have this controller's ranks do something."""
        message = methodcaller(method, **options)
        await self._ranks.call("ask", message, ranks=self._own_ranks, stage=method)

    async def _call_all_ranks(self, method: str, **options: Any) -> list[Any]:
        """Return the answers of all ranks, of which this controller asks its own."""
        with self.devices.stage("sync", *map(rank_name, self._own_ranks)):
            answers = await self._ranks.call(method, ranks=self._own_ranks, stage=method, **options)
        return list(chain.from_iterable(await self.group.all_gather(list(answers.values()))))

    async def _compute(
        self, method: str, role: str, batches_by_rank: Mapping[int, Sequence[Any]], **options: Any
    ) -> dict[int, Any]:
        """Return the answers of ranks that compute on micro-batches, given as references."""
        stage = "train" if method == "train_step" else "prepare"
        with self.devices.stage(stage, *map(rank_name, batches_by_rank)):
            calls: dict[int, Any] = {}
            for rank, batches in batches_by_rank.items():
                actor = self._ranks.actors[rank]
                calls[rank] = actor.compute.remote(method, role, batches, **options)
            # A single rank waits for no other, and other calls of it may come first.
            return await self._ranks.answers(calls, "" if self.can_score_alone else method)

    async def _compute_together(
        self, method: str, role: str, micro_batches: Sequence[BatchT], **options: Any
    ) -> tuple[dict[int, Any], list[list[int]], list[tuple[int, int]]]:
        """Have all replicas compute, and return the answers of those that this controller asks.

        Also return the indices of each replica's micro-batches, and each one's controller, with its index there.
        """
        size = self.group.world_size
        owners: list[tuple[int, int]] = []
        costs: list[float] = []
        all_costs = await self.group.all_gather([self._cost_of(batch) for batch in micro_batches])
        for owner, owner_costs in enumerate(all_costs):
            costs += owner_costs
            owners += [(owner, position) for position in range(len(owner_costs))]
        if not owners:
            return {}, [], []
        replicas = self._ranks.replicas[role]
        parts = deal(costs, replicas[0][1])
        # A reference goes to the one controller that asks its replica.
        outgoing: list[list[tuple[int, Any]]] = [[] for _ in range(size)]
        for replica, part in enumerate(parts):
            for i in part:
                owner, position = owners[i]
                if owner == self.group.rank:
                    reference = put(list(micro_batches[position]))
                    outgoing[replica % size].append((i, reference))
        batches = dict(chain.from_iterable(await self.group.all_to_all(outgoing)))
        batches_by_rank: dict[int, list[Any]] = {}
        for rank, (replica, _) in enumerate(replicas):
            if replica % size == self.group.rank:
                batches_by_rank[rank] = [batches[i] for i in parts[replica]]
        answers: dict[int, Any] = {}
        for rank, answer in (await self._compute(method, role, batches_by_rank, **options)).items():
            # All ranks of a replica have the same answer.
            answers.setdefault(replicas[rank][0], answer)
        return answers, parts, owners

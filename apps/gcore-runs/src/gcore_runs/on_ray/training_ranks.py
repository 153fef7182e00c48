"""Training ranks as actors: the controllers ask them, and the process of the run starts, saves and ends them."""

import asyncio
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gcore_controller.errors import ClusterError
from gcore_controller.runtimes.ray import RayReference, free_resources, reason_of
from gcore_rollout.weight_report import Digests, all_digests
from gcore_rollout.weight_sync.weight_references import WeightReferences
from gcore_runs.errors import RankError
from gcore_runs.logs import log_to
from gcore_runs.ranks import RankLearner, Replica, sendable
from gcore_runs.sizes import SizedConfig

_NEWS_S = 5.0
"""How long a rank's error waits for news of another rank's death."""

State = dict[str, Any]

ConfigT = TypeVar("ConfigT", bound=SizedConfig)

MakeLearner = Callable[[ConfigT, str], RankLearner]
"""A rank's learner for given settings and a device; called in its process, where torch.distributed runs."""


class _Rank:
    """The actor of one rank: a learner, called with references, one call after the other."""

    def __init__(self, config: SizedConfig, make: MakeLearner[Any], rank: int, folder: Path, logs: Path) -> None:
        import torch

        os.chdir(folder)
        log_to(logs, "trainer", rank, redirect=True)
        torch.set_num_threads(max(1, config.threads // config.sizes.ranks))
        self._config = config
        self._make = make
        self._learner: RankLearner | None = None

    @ray.method(concurrency_group="news")
    def is_alive(self) -> None:
        """Answered beside all else."""

    def place(self) -> tuple[str, str]:
        """Process and node, and an address there that is free."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((address, 0))
            return f"process {os.getpid()} on {address}", f"tcp://{address}:{listener.getsockname()[1]}"

    def join(self, address: str, rank: int, size: int) -> dict[str, Replica]:
        """Make the models, together with all ranks; this one's replica in each role."""
        import torch.distributed as dist

        is_on_gpu = self._config.device.startswith("cuda")
        dist.init_process_group("nccl" if is_on_gpu else "gloo", init_method=address, rank=rank, world_size=size)
        # Ray shows each actor its own GPUs alone.
        self._learner = self._make(self._config, "cuda:0" if is_on_gpu else self._config.device)
        return {role: self._learner.replicas(role) for role in self._learner.roles}

    def compute(self, method: str, arguments: Sequence[Any], batches: Sequence[RayReference[Any]]) -> Any:
        """A call of the learner that computes, on micro-batches that are read where they lie."""
        micro_batches = ray.get([batch.object_ref for batch in batches])
        found = getattr(self._learner, method)(*arguments, micro_batches)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    def call(self, method: str, *arguments: Any) -> Any:
        """Any other call of the learner."""
        try:
            return getattr(self._learner, method)(*arguments)
        except Exception as error:
            raise sendable(error) from error

    def num_updates(self) -> int:
        assert self._learner is not None
        return self._learner.num_updates

    def export_weights(self, *, is_kept: bool, options: Mapping[str, Any]) -> WeightReferences | None:
        """Have all ranks gather the policy's weights; where this one has put them, if they are to be kept."""
        assert self._learner is not None
        weights = self._learner.export_weights(**options)
        if is_kept:
            return WeightReferences.put(weights)
        for _ in weights:
            pass
        return None

    def digest_weights(self, *, is_kept: bool, options: Mapping[str, Any]) -> Digests | None:
        """Have all ranks gather the policy's weights; their digests, if they are to be kept."""
        assert self._learner is not None
        digests = all_digests(self._learner.export_weights(**options))
        return digests if is_kept else None


@dataclass(frozen=True)
class RankHandles:
    """The ranks of a group, for those who ask them.

    Attributes:
        actors: By rank.
        places: Process and node of each.
        replicas: In each role, the replica of each rank.
    """

    actors: Sequence[Any]
    places: Sequence[str]
    replicas: Mapping[str, Sequence[Replica]]

    def num_replicas(self, role: str) -> int:
        """Data-parallel replicas in a role."""
        return self.replicas[role][0][1]

    def of_replica(self, role: str, replica: int) -> list[int]:
        """The ranks that make up one."""
        return [rank for rank, (own, _) in enumerate(self.replicas[role]) if own == replica]

    async def ask(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """The answers to calls of some ranks' actors.

        Raises:
            RankError: a rank failed or died; it says which, where, and of what.
        """
        asked = {rank: asyncio.ensure_future(_answer(call)) for rank, call in calls.items()}
        try:
            await asyncio.gather(*asked.values())
        except RayError as error:
            raise await self._explained(asked, error) from None
        finally:
            for answer in asked.values():
                # Of those that fail later, nobody asks.
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return {rank: answer.result() for rank, answer in asked.items()}

    def death(self, rank: int, error: RayActorError) -> RankError:
        """How a rank died."""
        return RankError(f"training rank {rank}, {self.places[rank]}, died: {reason_of(error)}")

    async def _explained(self, asked: "Mapping[int, asyncio.Future[Any]]", error: RayError) -> Exception:
        """A rank that misses another in a collective may say so before it is known that the other has died."""
        news = [asyncio.ensure_future(_answer(actor.is_alive.remote())) for actor in self.actors]
        await asyncio.wait(news, timeout=_NEWS_S)
        for rank, alive in enumerate(news):
            if alive.done() and isinstance(death := alive.exception(), RayActorError):
                return self.death(rank, death)
        rank = next((rank for rank, a in asked.items() if a.done() and a.exception() is error), 0)
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, Exception) and sendable(cause) is cause:
            return cause
        return RankError(f"training rank {rank}, {self.places[rank]}, failed:\n{error}")


class RayLearner(Generic[ConfigT]):
    """The models in training on ranks that are actors, as the process of the run sees them; made by `start`.

    Args:
        make: what is in each rank's process; a function that Ray can pickle.
        logs: folder of the files that ranks log to.

    Attributes:
        ranks: What controllers are given.
    """

    def __init__(self, make: MakeLearner[ConfigT], *, logs: Path) -> None:
        self._make = make
        self._logs = logs
        self.ranks = RankHandles([], [], {})

    async def start(self, config: ConfigT) -> None:
        """Start all ranks of a config, from the model that the run begins with; those of before are ended.

        Raises:
            RankError: one failed or died.
            ClusterError: they found no room, or have not started, in time.
        """
        self._kill()
        timeout_s = config.ray.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._start(config)
        except TimeoutError:
            raise ClusterError(
                f"{config.sizes.ranks} training ranks did not start within {timeout_s} s: free are {free_resources()}"
            ) from None

    async def _start(self, config: ConfigT) -> None:
        size = config.sizes.ranks
        remote: Any = ray.remote
        make = remote(concurrency_groups={"news": 1})(_Rank).options(
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_rank if config.device.startswith("cuda") else 0,
            scheduling_strategy="SPREAD",
        )
        actors = [make.remote(config, self._make, rank, Path.cwd(), self._logs) for rank in range(size)]
        self.ranks = RankHandles(actors, ["which had not started"] * size, {})
        found = await self.ranks.ask({rank: actor.place.remote() for rank, actor in enumerate(actors)})
        self.ranks = RankHandles(actors, [place for place, _ in found.values()], {})
        address = found[0][1]
        joined = await self.ranks.ask({r: actor.join.remote(address, r, size) for r, actor in enumerate(actors)})
        replicas = {role: [joined[rank][role] for rank in range(size)] for role in joined[0]}
        self.ranks = replace(self.ranks, replicas=replicas)

    @property
    def num_updates(self) -> int:
        return self._ask_all("num_updates")[0]

    def save_pretrained(self, path: Path) -> None:
        """See `SavedLearner.save_pretrained`."""
        self._ask_all("call", "save_pretrained", path.absolute())

    def save(self, step: int, rest: State) -> None:
        """See `SavedLearner.save`."""
        self._ask_all("call", "save", step, rest)

    def load(self) -> State:
        """See `SavedLearner.load`."""
        return self._ask_all("call", "load")[0]

    def close(self) -> None:
        """See `SavedLearner.close`."""
        try:
            if self.ranks.replicas:
                self._ask_all("call", "close")
        finally:
            self._kill()

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        ranks = {getattr(actor, method).remote(*arguments): rank for rank, actor in enumerate(self.ranks.actors)}
        answers: dict[int, Any] = {}
        failure: RayTaskError | None = None
        waiting = list(ranks)
        while waiting:
            # Whoever answers first: one that waits for a dead rank may never do.
            (call, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                answers[ranks[call]] = ray.get(call)
            except RayTaskError as error:
                # It may be that of a rank that misses a dead one.
                failure = failure or error
            except RayActorError as error:
                raise self.ranks.death(ranks[call], error) from None
        if failure is not None:
            raise failure.cause from None
        return [answers[rank] for rank in sorted(answers)]

    def _kill(self) -> None:
        """End all ranks: one that has failed leaves the others waiting in a collective."""
        for actor in self.ranks.actors:
            ray.kill(actor)
        self.ranks = RankHandles([], [], {})


def _answer(call: Awaitable[Any]) -> Awaitable[Any]:
    async def wait() -> Any:
        return await call

    return wait()

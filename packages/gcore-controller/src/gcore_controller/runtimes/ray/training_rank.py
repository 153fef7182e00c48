"""The actor of one training rank, and the handles through which all ranks of a group are asked."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from gcore_controller.errors import RankError
from gcore_controller.runtimes.ray.replies import reason_of
from gcore_controller.trainer_group import (
    ExportWeights,
    Message,
    Replica,
    Score,
    TrainerSpec,
    TrainerWorker,
    TrainStep,
    answer,
    digests_of,
)

_NEWS_S = 5.0
"""How long a rank's error waits for news of another rank's death."""


class TrainingRank:
    """The actor of one rank, which answers one message after the other.

    Args:
        spec: of the group.
        rank: of this actor.
        folder: working folder of the run.
    """

    def __init__(self, spec: TrainerSpec, rank: int, folder: Path) -> None:
        import torch

        os.chdir(folder)
        spec.enter_process(rank)
        torch.set_num_threads(spec.num_threads)
        self._spec = spec
        self._rank = rank
        self._worker: TrainerWorker[Any] | None = None

    @ray.method(concurrency_group="news")
    def is_alive(self) -> None:
        """Return at once, whatever the rank does."""

    def place(self) -> tuple[str, str]:
        """Return this process and its node in words, and an address on it that is free."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((address, 0))
            return f"process {os.getpid()} on {address}", f"tcp://{address}:{listener.getsockname()[1]}"

    def join(self, address: str) -> dict[str, Replica]:
        """Build the models together with all ranks, and return this rank's replica in each role."""
        import torch.distributed as dist

        is_on_gpu = self._spec.device.startswith("cuda")
        dist.init_process_group(
            "nccl" if is_on_gpu else "gloo", init_method=address, rank=self._rank, world_size=self._spec.num_ranks
        )
        # Ray shows each actor its own GPUs only.
        self._worker = self._spec.make_worker("cuda:0" if is_on_gpu else self._spec.device)
        return {role: self._worker.replica(role) for role in self._worker.roles}

    def ask(self, message: Message) -> Any:
        """Answer a message, whose micro-batches are references."""
        assert self._worker is not None
        if isinstance(message, Score | TrainStep):
            # They are read where they lie.
            batches = ray.get([batch.object_ref for batch in message.micro_batches])
            message = replace(message, micro_batches=batches)
        return answer(self._worker, message)

    def export_weights(self, message: ExportWeights) -> Any:
        """Gather the policy's weights; on rank 0 return a reference to them, or their digests, elsewhere None."""
        assert self._worker is not None
        assert self._spec.put_weights is not None, "put_weights is None; expected a function on Ray"
        weights = self._worker.export_weights(averaged=message.averaged)
        if self._rank == 0 and not message.digests_only:
            return self._spec.put_weights(weights)
        digests = digests_of(weights)
        return digests if self._rank == 0 else None


@dataclass(frozen=True)
class RankHandles:
    """The ranks of a group, for the processes that ask them.

    Attributes:
        actors: By rank.
        places: Process and node of each rank, in words.
        replicas: The replica of each rank, by role.
        expected_errors: See `TrainerSpec.expected_errors`.
    """

    actors: Sequence[Any] = ()
    places: Sequence[str] = ()
    replicas: Mapping[str, Sequence[Replica]] = field(default_factory=dict[str, Sequence[Replica]])
    expected_errors: tuple[type[Exception], ...] = ()

    def num_replicas(self, role: str) -> int:
        """Return the number of data-parallel replicas of a role."""
        return self.replicas[role][0][1]

    def of_replica(self, role: str, replica: int) -> list[int]:
        """Return the ranks that a replica consists of."""
        return [rank for rank, (own, _) in enumerate(self.replicas[role]) if own == replica]

    async def answers(self, calls: Mapping[int, Any]) -> dict[int, Any]:
        """Wait for the answers to calls of some ranks' actors.

        Raises:
            RankError: a rank failed or died; the message says which one, where, and of what.
        """
        asked = {rank: asyncio.ensure_future(_awaited(call)) for rank, call in calls.items()}
        try:
            await asyncio.gather(*asked.values())
        except RayError as error:
            raise await self._explained(asked, error) from None
        finally:
            for reply in asked.values():
                # Nothing waits for those that fail later.
                reply.add_done_callback(lambda done: done.cancelled() or done.exception())
        return {rank: reply.result() for rank, reply in asked.items()}

    def death(self, rank: int, error: RayActorError) -> RankError:
        """Return the error that says how a rank died."""
        return RankError(f"training rank {rank}, {self.places[rank]}, died: {reason_of(error)}")

    def failure(self, rank: int, error: RayError) -> Exception:
        """Return the error that a rank raised if callers expect its kind, and else one that holds its traceback."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, (RankError, *self.expected_errors)):
            return cause
        return RankError(f"training rank {rank}, {self.places[rank]}, failed:\n{error}")

    async def _explained(self, asked: "Mapping[int, asyncio.Future[Any]]", error: RayError) -> Exception:
        """Return the first cause: a rank that misses another one may report it before that one's death is known."""
        news = [asyncio.ensure_future(_awaited(actor.is_alive.remote())) for actor in self.actors]
        await asyncio.wait(news, timeout=_NEWS_S)
        for rank, alive in enumerate(news):
            if alive.done() and isinstance(death := alive.exception(), RayActorError):
                return self.death(rank, death)
        rank = next((rank for rank, a in asked.items() if a.done() and a.exception() is error), 0)
        return self.failure(rank, error)


async def _awaited(call: Awaitable[Any]) -> Any:
    return await call

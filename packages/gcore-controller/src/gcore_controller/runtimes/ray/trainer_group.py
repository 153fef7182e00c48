"""A trainer group whose ranks are actors of a Ray cluster."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from gcore_controller.errors import ClusterError
from gcore_controller.runtimes.ray.resources import free_resources
from gcore_controller.runtimes.ray.training_rank import RankHandles, TrainingRank
from gcore_controller.trainer_group import Close, Message, MessageTrainerGroup, TrainerSpec


class RayTrainerGroup(MessageTrainerGroup):
    """A `TrainerGroup` on Ray; made by `start`. Controllers ask its ranks through `RayTrainerClient`.

    Attributes:
        ranks: The handles that controllers are given.
    """

    def __init__(self) -> None:
        self.ranks = RankHandles()

    async def start(self, spec: TrainerSpec, *, num_cpus: float, num_gpus: float, timeout_s: float) -> None:
        """Start all ranks from the model that the run starts with; end those of before.

        Args:
            spec: the ranks.
            num_cpus: CPUs that each rank reserves.
            num_gpus: GPUs that each rank reserves.
            timeout_s: how long it may take.

        Raises:
            RankError: a rank failed or died.
            ClusterError: the cluster lacks the capacity for the ranks, or they have not started in time.
        """
        self._kill()
        try:
            async with asyncio.timeout(timeout_s):
                await self._start(spec, num_cpus=num_cpus, num_gpus=num_gpus)
        except TimeoutError:
            raise ClusterError(
                f"{spec.num_ranks} training ranks did not start within {timeout_s} s: free are {free_resources()}"
            ) from None

    def close(self) -> None:
        """See `TrainerGroup.close`."""
        try:
            if self.ranks.replicas:
                self._ask_all(Close())
        finally:
            self._kill()

    async def _start(self, spec: TrainerSpec, *, num_cpus: float, num_gpus: float) -> None:
        remote: Any = ray.remote
        make = remote(concurrency_groups={"news": 1})(TrainingRank).options(
            num_cpus=num_cpus, num_gpus=num_gpus, scheduling_strategy="SPREAD"
        )
        actors = [make.remote(spec, rank, Path.cwd()) for rank in range(spec.num_ranks)]
        self.ranks = RankHandles(
            actors, ["which had not started"] * spec.num_ranks, expected_errors=spec.expected_errors
        )
        found = await self.ranks.answers({rank: actor.place.remote() for rank, actor in enumerate(actors)})
        self.ranks = replace(self.ranks, places=[place for place, _ in found.values()])
        address = found[0][1]
        joined = await self.ranks.answers({rank: actor.join.remote(address) for rank, actor in enumerate(actors)})
        replicas = {role: [joined[rank][role] for rank in range(spec.num_ranks)] for role in joined[0]}
        self.ranks = replace(self.ranks, replicas=replicas)

    def _ask_all(self, message: Message) -> Any:
        ranks = {actor.ask.remote(message): rank for rank, actor in enumerate(self.ranks.actors)}
        answers: dict[int, Any] = {}
        failure: Exception | None = None
        waiting = list(ranks)
        while waiting:
            # In the order in which they come: a rank that waits for a dead one may never answer.
            (call, *_), waiting = ray.wait(waiting, num_returns=1)
            try:
                answers[ranks[call]] = ray.get(call)
            except RayTaskError as error:
                # It may be that of a rank that misses a dead one.
                failure = failure or self.ranks.failure(ranks[call], error)
            except RayActorError as error:
                raise self.ranks.death(ranks[call], error) from None
        if failure is not None:
            raise failure
        return answers[0]

    def _kill(self) -> None:
        """End all ranks: one that has failed leaves the others waiting in a collective."""
        for actor in self.ranks.actors:
            ray.kill(actor)
        self.ranks = RankHandles()

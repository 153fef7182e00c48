"""What a controller does in its own process before and after the program: it makes the roles that are its own."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gcore_controller import Context, Span
from gcore_llm.evaluate import Evaluation
from gcore_llm.exchange import sample_flops
from gcore_llm.on_ray.learner_part import RanksPart
from gcore_llm.on_ray.training_ranks import RankHandles
from gcore_llm.program import Job, rlhf_program
from gcore_llm.rewards import Rewards
from gcore_llm.roles import Roles, build_world
from gcore_llm.sampling import State
from gcore_llm.watched import Watched
from gcore_rollout import Engine
from gcore_rollout.ray_engine import EngineHandle, RayEngine
from gcore_rollout.replicas import EngineReplicas
from gcore_rollout.turns import Turns
from gcore_runs.devices import DeviceTimers
from gcore_runs.logs import log_to


@dataclass(frozen=True, kw_only=True)
class Handles:
    """What every controller is given of the services."""

    engines: Sequence[EngineHandle]
    """The policy's actors; controller r has every ``world_size``-th from the r-th."""
    judges: Sequence[EngineHandle]
    """The judge's actors, if the run has one; they are shared out likewise, or several controllers have one."""
    ranks: RankHandles
    tokenizer: Any
    folder: Path
    """The working folder, from which the user's paths are to be read."""
    logs: Path


@dataclass(frozen=True)
class Report:
    """A call of `Recorder`, made in the process of the run."""

    method: str
    arguments: tuple[Any, ...]


def controller_program(job: Job) -> Callable[[Context[Handles]], Awaitable[None]]:
    """The program of a job, for controllers that make their roles themselves."""

    async def program(ctx: Context[Handles]) -> None:
        import torch

        os.chdir(ctx.roles.folder)
        log_to(ctx.roles.logs, "controller", ctx.rank, redirect=True)
        config = job.config
        torch.set_num_threads(max(1, config.threads // ctx.world_size))
        devices = DeviceTimers()
        in_turns = config.placement.strategy == "colocated"
        connected = partial(_connected, devices, start_timeout_s=config.ray.timeout_s)
        own = dict(list(enumerate(ctx.roles.engines))[ctx.rank :: ctx.world_size])
        judges = dict(enumerate(ctx.roles.judges))
        judges = dict(list(judges.items())[ctx.rank % len(judges) :: ctx.world_size]) if judges else {}
        async with AsyncExitStack() as to_close:
            judge = None
            if judges:
                judge = await connected("judge", judges, device="engine" if in_turns else None)
                to_close.push_async_callback(judge.close)
                if in_turns:
                    await judge.sleep()
            policy = await connected("engine", own)
            to_close.push_async_callback(policy.close)
            if in_turns and judge is not None:
                await policy.wake()
                policy, judge = Turns([policy, judge]).engines
            rewards = await Rewards.start(config, judge=judge)
            to_close.push_async_callback(rewards.close)
            roles = Roles(
                policy=policy,
                reward=rewards.runner,
                comparison=rewards.comparison,
                tokenizer=ctx.roles.tokenizer,
                world=build_world(config, ctx.roles.tokenizer, rewards.runner),
                policy_slots=len(own) * config.rollout.max_num_seqs,
                learner=RanksPart(
                    ctx.roles.ranks, ctx.group, devices, cost_of=lambda batch: sample_flops(job.workload, batch)
                ),
                devices=devices,
                owns_process=True,
            )
            await rlhf_program(job, _Reports(ctx.report))(ctx.with_roles(roles))

    return program


async def _connected(
    devices: DeviceTimers,
    role: Literal["engine", "judge"],
    actors: Mapping[int, EngineHandle],
    *,
    device: Literal["engine"] | None = None,
    start_timeout_s: float,
) -> Engine:
    """The engines of some actors, by number, as one; one that dies is connected to again after Ray has restarted it.

    Args:
        device: whose devices they are on, if not their own.
    """
    watched = Watched(role=role, devices=devices, device=device)

    async def connect(number: int) -> Engine:
        return watched.timed(await RayEngine.connect(actors[number], start_timeout_s=start_timeout_s), number)

    clients = await asyncio.gather(*map(connect, actors))
    of_client = {id(client): number for client, number in zip(clients, actors, strict=True)}
    replaced: set[int] = set()

    async def again() -> Engine:
        alive = {id(engine) for engine in replicas.engines}
        dead = next(client for client in of_client if client not in alive | replaced)
        replaced.add(dead)
        try:
            client = await connect(of_client[dead])
        except BaseException:
            replaced.discard(dead)
            raise
        of_client[id(client)] = of_client[dead]
        clients.append(client)
        return client

    newest = max(client.weight_version for client in clients)
    replicas = EngineReplicas([c for c in clients if c.weight_version == newest], restart=again)
    for client in clients:
        # Of engines that a run before this one has left with older weights.
        if client.weight_version < newest:
            await replicas.add(client)
    return replicas


class _Reports:
    """A `Recorder` in another process than the run's."""

    def __init__(self, report: Callable[[Report], Awaitable[None]]) -> None:
        self._report = report

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        await self._report(Report("evaluated", (step, evaluation)))

    async def updating(self) -> None:
        await self._report(Report("updating", ()))

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        await self._report(Report("stepped", (step, metrics, spans, devices)))

    async def reached(self, step: int, controllers: list[State]) -> None:
        await self._report(Report("reached", (step, controllers)))

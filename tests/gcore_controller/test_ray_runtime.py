"""The `ray` runtime on a real cluster of several nodes, all on this machine."""

import asyncio
import os
import signal
import socket
import time
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from runtimes import AnyProgram, Ctx

from gcore_controller.errors import (
    ClusterError,
    ControllerDiedError,
    ControllerError,
    RankError,
)
from gcore_controller.runtimes.ray import RayControllers, RayTrainerGroup, check_token, run_ray
from gcore_controller.trainer_group import TrainerSpec

NUM_NODES = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.usefixtures("cluster"),
]


class OneOfUsFailedError(Exception):
    pass


async def on_ray(program: AnyProgram, world_size: int) -> list[Any]:
    return await run_ray(program, roles=list[str](), world_size=world_size)


async def test_controllers_are_processes_on_all_nodes() -> None:
    async def program(ctx: Ctx) -> tuple[int, str, int]:
        return ctx.rank, ray.get_runtime_context().get_node_id(), os.getpid()

    found = await on_ray(program, NUM_NODES)
    assert [rank for rank, _, _ in found] == list(range(NUM_NODES))
    assert len({node for _, node, _ in found}) == NUM_NODES
    assert len({pid for _, _, pid in found} | {os.getpid()}) == NUM_NODES + 1


@pytest.mark.parametrize("world_size", [1, 3])
async def test_controllers_meet(world_size: int) -> None:
    async def program(ctx: Ctx) -> list[int]:
        return await ctx.group.all_gather(await ctx.group.broadcast(ctx.rank, src=world_size - 1))

    assert await on_ray(program, world_size) == [[world_size - 1] * world_size] * world_size


async def test_large_parts_arrive_whole() -> None:
    async def program(ctx: Ctx) -> bool:
        parts = [np.full(1 << 20, 10 * ctx.rank + to) for to in range(ctx.world_size)]
        received = await ctx.group.all_to_all(parts)
        return all(
            int(part[0]) == int(part[-1]) == 10 * src + ctx.rank
            for src, part in enumerate(received)
        )

    assert await on_ray(program, 3) == [True] * 3


async def test_an_error_comes_back_as_it_was_raised(tmp_path: Path) -> None:
    """Once every other program has cleaned up."""

    async def program(ctx: Ctx) -> None:
        try:
            if ctx.rank == 1:
                await asyncio.sleep(0.2)
                raise OneOfUsFailedError("the third prompt")
            await (ctx.group.barrier() if ctx.rank else asyncio.sleep(600))
        finally:
            (tmp_path / f"{ctx.rank} ended").touch()

    with pytest.raises(OneOfUsFailedError, match="the third prompt") as info:
        await on_ray(program, 3)
    assert info.value.__notes__[0].startswith("raised by controller 1, process ")
    assert "test_ray_runtime.py" in info.value.__notes__[0]
    assert len(list(tmp_path.iterdir())) == 3


async def test_a_killed_controller_is_named(tmp_path: Path) -> None:
    async def program(ctx: Ctx) -> None:
        if ctx.rank == 2:
            (tmp_path / "pid.partial").write_text(str(os.getpid()))
            (tmp_path / "pid.partial").rename(tmp_path / "pid")
        while True:
            await ctx.group.all_gather(ctx.rank)

    running = asyncio.create_task(on_ray(program, 4))
    while not (tmp_path / "pid").exists():
        await asyncio.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    died = rf"controller 2, process {pid} on [\d.]+, died: it was killed, ran out of memory, or crashed"
    with pytest.raises(ControllerDiedError, match=died):
        await asyncio.wait_for(running, 300)


async def test_a_stopped_controller_is_named(tmp_path: Path) -> None:
    async def program(ctx: Ctx) -> None:
        if ctx.rank == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        await ctx.group.barrier()

    with pytest.raises(ControllerDiedError) as info:
        await run_ray(program, roles=list[str](), world_size=2, heartbeat_timeout_s=4.0)
    pid = (tmp_path / "pid").read_text()
    assert str(info.value).startswith(f"controller 1, process {pid} on ")
    state = f"it is stopped on {socket.gethostname()}, by /proc/{pid}/stat; its log is /"
    assert f", gave no sign of life for 4 s in the program: {state}" in str(info.value)


class Worker:
    """A rank without models, which waits for the others, or for ever."""

    roles = ("actor",)

    def replica(self, role: str) -> tuple[int, int]:
        del role
        return dist.get_rank(), dist.get_world_size()

    def compute(self, hangs: bool) -> None:
        while hangs and dist.get_rank() == 0:
            time.sleep(0.1)
        dist.barrier()


async def test_ranks_that_hang_are_named(tmp_path: Path) -> None:
    """All of them are alive: one hangs, and the other waits for it."""

    def enter(rank: int) -> None:
        os.dup2(os.open(tmp_path / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT), 2)

    spec = TrainerSpec(
        make_worker=lambda _: Worker(),  # pyright: ignore[reportArgumentType] - it is asked to compute alone
        num_ranks=2,
        device="cpu",
        num_threads=1,
        enter_process=enter,
        heartbeat_timeout_s=4.0,
    )
    group = RayTrainerGroup()
    await group.start(spec, num_cpus=0.5, num_gpus=0.0, timeout_s=120.0)
    try:
        await group.ranks.call("ask", methodcaller("compute", hangs=False), stage="compute")
        start_s = time.monotonic()
        with pytest.raises(RankError) as info:
            await group.ranks.call("ask", methodcaller("compute", hangs=True), stage="compute")
        assert 20.0 <= time.monotonic() - start_s < 90.0
    finally:
        group.kill()
    problem = f"gave no answer to compute within 20 s: its stacks are on {socket.gethostname()} in "
    for rank, line in enumerate(str(info.value).split("; training rank 1")):
        log = tmp_path / f"rank-{rank}.log"
        assert f"{problem}{log}" in line
        assert ["in compute", "in barrier"][rank] in log.read_text()


async def test_the_others_stay_when_one_is_replaced(tmp_path: Path) -> None:
    """One process is killed in the first run; the second has a new one in its place, and nothing of the first."""

    async def first(ctx: Ctx) -> None:
        (tmp_path / f"{ctx.rank} {os.getpid()}").touch()
        while True:
            if ctx.rank == 1 and len(list(tmp_path.iterdir())) == ctx.world_size:
                os.kill(os.getpid(), signal.SIGKILL)
            await ctx.group.all_gather("of the first run")

    async def second(ctx: Ctx) -> tuple[int, list[int]]:
        return os.getpid(), await ctx.group.all_gather(ctx.rank)

    controllers = await RayControllers.start(world_size=3)
    try:
        with pytest.raises(ControllerDiedError, match="controller 1, "):
            await controllers.run(first, roles=list[str]())
        found = await controllers.run(second, roles=list[str]())
    finally:
        await controllers.close()
    before = dict(path.name.split() for path in tmp_path.iterdir())
    assert [rank for rank, (pid, _) in enumerate(found) if before[str(rank)] == str(pid)] == [0, 2]
    assert [ranks for _, ranks in found] == [[0, 1, 2]] * 3


async def test_reports_are_heard_in_order() -> None:
    heard: list[tuple[int, int]] = []

    async def program(ctx: Ctx) -> None:
        for n in range(3):
            await ctx.report(n)

    async def reported(rank: int, value: int) -> None:
        await asyncio.sleep(0)
        heard.append((rank, value))

    await run_ray(program, roles=list[str](), world_size=2, reported=reported)
    assert sorted(heard) == [(rank, n) for rank in range(2) for n in range(3)]
    assert [n for rank, n in heard if rank == 1] == [0, 1, 2]


async def test_notices_reach_every_controller() -> None:
    """Of its own run: what an earlier one has not read is gone."""
    controllers = await RayControllers.start(world_size=2)

    async def program(ctx: Ctx) -> list[str]:
        await ctx.report(ctx.roles)
        return [await ctx.notices.get() for _ in ctx.roles]

    async def reported(rank: int, value: list[str]) -> None:
        if rank == 0:
            for notice in value or ["unread"]:
                await controllers.notify(notice)

    try:
        assert await controllers.run(program, roles=list[str](), reported=reported) == [[], []]
        assert (
            await controllers.run(program, roles=["a", "b"], reported=reported) == [["a", "b"]] * 2
        )
    finally:
        await controllers.close()


async def test_what_a_listener_raises_ends_the_run() -> None:
    async def program(ctx: Ctx) -> None:
        await ctx.report("the disk")
        await asyncio.sleep(600)

    async def reported(rank: int, value: str) -> None:
        raise OSError(f"{value} of {rank} is full")

    with pytest.raises(OSError, match="the disk of 0 is full"):
        await run_ray(program, roles=list[str](), reported=reported)


async def test_controllers_of_a_lost_node_start_on_another(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The error names one of them; the node that takes over is there already."""
    node = cluster.add_node(num_cpus=4, resources={"lost": 2}, object_store_memory=100 << 20)

    async def program(ctx: Ctx) -> None:
        (tmp_path / str(ctx.rank)).touch()
        await asyncio.sleep(600)

    async def later(ctx: Ctx) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), await ctx.group.all_gather(ctx.rank)

    controllers = await RayControllers.start(world_size=2, resources={"lost": 1})
    spare = cluster.add_node(num_cpus=4, resources={"lost": 2}, object_store_memory=100 << 20)
    try:
        running = asyncio.create_task(controllers.run(program, roles=list[str]()))
        while len(list(tmp_path.iterdir())) < 2:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        with pytest.raises(
            ControllerDiedError,
            match=r"controller [01], process \d+ on [\d.]+, died: (it|its node) ",
        ):
            await asyncio.wait_for(running, 300)
        found = await asyncio.wait_for(controllers.run(later, roles=list[str]()), 300)
    finally:
        await controllers.close()
    assert found == [(spare.node_id, [0, 1])] * 2
    await asyncio.to_thread(cluster.remove_node, spare)
    while ray.cluster_resources()["CPU"] > 4 * NUM_NODES:
        await asyncio.sleep(0.1)


async def test_deadline_when_a_controller_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that blocks its event loop neither keeps a run from ending nor a later one from starting."""
    monkeypatch.setattr("gcore_controller.runtimes.ray.actors._ANSWER_TIMEOUT_S", 3.0)

    async def program(ctx: Ctx) -> None:
        if ctx.rank:
            time.sleep(600)
        await ctx.group.barrier()

    async def later(ctx: Ctx) -> list[int]:
        return await ctx.group.all_gather(ctx.rank)

    controllers = await RayControllers.start(world_size=2)
    try:
        expected = (
            r"not done after 3 s: controller 0 in no stage, controller 1 does not answer; "
            r"rank 0 in barrier \(collective 0\) waiting for rank 1$"
        )
        with pytest.raises(ControllerError, match=expected):
            await controllers.run(program, roles=list[str](), timeout_s=3)
        assert await controllers.run(later, roles=list[str]()) == [[0, 1]] * 2
    finally:
        await controllers.close()


@pytest.mark.parametrize("code", [0, 3])
async def test_a_process_that_ends_is_named(code: int) -> None:
    """The others find it gone, and may be first to say so."""

    async def program(ctx: Ctx) -> None:
        await ctx.group.barrier()
        if ctx.rank == 1:
            os._exit(code)
        while True:
            await ctx.group.barrier()

    with pytest.raises(ControllerDiedError, match=r"^controller 1, process \d+ on [\d.]+, died: "):
        await on_ray(program, 4)


class Service:
    """An actor of a program's own."""

    def end(self) -> None:
        os._exit(1)


async def test_the_death_of_a_service_is_not_that_of_a_controller() -> None:
    """Its error surfaces at once, while others wait for the controller that found it."""

    async def program(ctx: Ctx) -> None:
        if ctx.rank == 1:
            remote: Any = ray.remote(Service)
            await remote.options(num_cpus=0).remote().end.remote()
        await ctx.group.barrier()

    with pytest.raises(RayActorError) as raised:
        await on_ray(program, 2)
    assert raised.value.__notes__[0].startswith("raised by controller 1, process ")


async def test_no_cluster_answers() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with pytest.raises(
        ConnectionError, match=rf"no Ray cluster answers at '127.0.0.1:{port}': .*refused"
    ):
        check_token(f"127.0.0.1:{port}")


async def test_one_program_at_a_time() -> None:
    async def program(ctx: Ctx) -> list[int]:
        await asyncio.sleep(0.2)
        return await ctx.group.all_gather(ctx.rank)

    controllers = await RayControllers.start(world_size=2)
    try:
        first = asyncio.create_task(controllers.run(program, roles=list[str]()))
        await asyncio.sleep(0)
        with pytest.raises(
            ClusterError,
            match="these controllers run another program; wait for it, or start others",
        ):
            await controllers.run(program, roles=list[str]())
        assert await first == [[0, 1]] * 2
    finally:
        await controllers.close()


async def test_cancellation_reaches_every_controller(tmp_path: Path) -> None:
    async def program(ctx: Ctx) -> None:
        (tmp_path / f"{ctx.rank} began").touch()
        try:
            await asyncio.sleep(600)
        finally:
            (tmp_path / f"{ctx.rank} ended").touch()

    task = asyncio.create_task(on_ray(program, 2))
    while len(list(tmp_path.iterdir())) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(list(tmp_path.iterdir())) == 4


async def test_too_few_resources_are_refused_before_anything_starts() -> None:
    async def program(ctx: Ctx) -> None:
        raise AssertionError("it started")

    with pytest.raises(
        ClusterError, match="99 controllers need 99 CPU: the cluster has 8; start more"
    ):
        await on_ray(program, 99)
    with pytest.raises(ClusterError, match="2 controllers need 2 TPU: the cluster has 0"):
        await run_ray(program, roles=list[str](), world_size=2, resources={"TPU": 1})
    with pytest.raises(ValueError, match="world_size is 0; expected at least 1"):
        await on_ray(program, 0)


async def test_no_room_in_time() -> None:
    async def holder(ctx: Ctx) -> None:
        await asyncio.sleep(600)

    holding = asyncio.create_task(run_ray(holder, roles=list[str](), world_size=2, num_cpus=4))
    while ray.available_resources().get("CPU"):
        await asyncio.sleep(0.05)
    with pytest.raises(
        ClusterError,
        match=r"2 controllers, each with \{'CPU': 1.0\}, found no capacity within 0.5 s",
    ):
        await run_ray(holder, roles=list[str](), world_size=2, start_timeout_s=0.5)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    began = time.monotonic()
    while ray.available_resources().get("CPU") != 8:
        assert time.monotonic() - began < 300, "what a run had reserved is not free"
        await asyncio.sleep(0.05)

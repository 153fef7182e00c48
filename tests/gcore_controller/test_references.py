"""References to values, the same under every runtime; on Ray, on a real cluster of two nodes on this machine."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import ray.cloudpickle as cloudpickle
from ray.cluster_utils import Cluster
from ray.experimental import get_object_locations
from runtimes import AnyProgram, Ctx, Run, inline, over_messages

from gcore_controller import Context, Reference, run_simulated
from gcore_controller.context import nbytes_of
from gcore_controller.errors import ControllerError
from gcore_controller.runtimes.ray import RayReference, put, run_ray

pytestmark = pytest.mark.filterwarnings("ignore:.*:FutureWarning")

LARGE = 1 << 22
"""Elements of an array that no message would hold."""


async def on_ray(program: AnyProgram, world_size: int) -> list[Any]:
    return await run_ray(
        program, roles=list[str](), world_size=world_size, resources={"controllers": 1}
    )


async def exchange(ctx: Ctx) -> tuple[list[int], list[int], float]:
    """References go through an all-to-all, alone and inside other objects; then their values are read."""
    own = [
        ctx.put(np.full(1000 * (ctx.rank + 1), 10 * ctx.rank + to)) for to in range(ctx.world_size)
    ]
    received = await ctx.group.all_to_all(own)
    described = await ctx.group.all_gather({"first": own[0]})
    values = [await reference.get() for reference in received]
    first = [float((await one["first"].get())[0]) for one in described]
    return (
        [reference.nbytes for reference in received],
        [int(value[-1]) for value in values],
        sum(first),
    )


def exchanged(world_size: int) -> list[tuple[list[int], list[int], float]]:
    ranks = range(world_size)
    nbytes = [8000 * (src + 1) for src in ranks]
    return [
        (nbytes, [10 * src + rank for src in ranks], float(sum(10 * src for src in ranks)))
        for rank in ranks
    ]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("run", [inline, over_messages])
def test_references_are_exchanged(run: Run, world_size: int) -> None:
    assert run(exchange, world_size) == exchanged(world_size)


def test_references_are_exchanged_in_simulated_time() -> None:
    assert run_simulated(exchange, roles=list[str](), world_size=2) == exchanged(2)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
async def test_references_are_exchanged_on_ray() -> None:
    assert await on_ray(exchange, 3) == exchanged(3)


def test_in_one_process_a_reference_is_the_value() -> None:
    value = {"pixels": np.zeros(3)}

    async def program(ctx: Ctx) -> bool:
        return await ctx.put(value).get() is value

    assert inline(program, 2) == [True, True]


@dataclass(frozen=True)
class Image:
    """What a reference may stand for."""

    pixels: np.ndarray[Any, np.dtype[np.float32]]
    name: str


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (np.zeros((2, 3), np.float32), 24),
        (np.zeros(100)[::2], 400),
        ([np.zeros(2), (b"123", bytearray(4))], 23),
        ({"a": [np.zeros(1, np.int8)], "b": None}, 1),
        (Image(np.zeros(5, np.float32), "five"), 20),
        (7, 0),
        ([], 0),
    ],
)
def test_the_size_is_that_of_the_bytes_in_it(value: object, nbytes: int) -> None:
    assert nbytes_of(value) == nbytes
    assert Reference(value).nbytes == nbytes


class Service:
    """An actor of an app's, which has no context."""

    def make(self, fill: int) -> list[Reference[np.ndarray[Any, Any]]]:
        return [put(np.full(LARGE, fill, np.int32))]

    def pid(self) -> int:
        return os.getpid()

    async def read(self, batch: dict[str, Reference[Any]]) -> tuple[int, bool, bool]:
        """The last element; whether the array is someone else's memory; whether it may be written."""
        value = await batch["images"].get()
        return int(value[-1]), bool(value.flags.owndata), bool(value.flags.writeable)


def start_service(node: str) -> Any:
    remote: Any = ray.remote(Service)
    return remote.options(resources={node: 1}, num_cpus=0).remote()


@pytest.fixture
def producer(cluster: Cluster) -> Iterator[Any]:
    actor = start_service("services")
    yield actor
    ray.kill(actor)


@pytest.fixture
def consumer(cluster: Cluster) -> Iterator[Any]:
    actor = start_service("controllers")
    yield actor
    ray.kill(actor)


@pytest.mark.slow
async def test_bytes_move_only_to_who_gets_them(producer: Any, consumer: Any) -> None:
    """Controllers hand on what one service made to another one on their own node."""

    async def program(
        ctx: Context[list[Any]],
    ) -> tuple[int, set[str], tuple[int, bool, bool], set[str]] | None:
        make, use = ctx.roles
        made = await make.make.remote(7) if ctx.rank == 0 else None
        [reference] = await ctx.group.broadcast(made)
        if ctx.rank == 0:
            return None
        before = await places_of(reference)
        read = await use.read.remote({"images": reference})
        return reference.nbytes, before, read, await places_of(reference)

    _, found = await run_ray(
        program, roles=[producer, consumer], world_size=2, resources={"controllers": 1}
    )
    assert found is not None
    nbytes, before, read, after = found
    assert nbytes == 4 * LARGE
    assert read == (7, False, False)
    assert len(before) == 1
    assert before < after
    assert len(after) == 2


async def places_of(reference: Any) -> set[str]:
    """Ids of the nodes whose object store holds the value."""
    assert isinstance(reference, RayReference)
    [found] = (await asyncio.to_thread(get_object_locations, [reference.value])).values()
    return set(found["node_ids"])


@pytest.mark.slow
async def test_a_handle_is_small(producer: Any) -> None:
    [reference] = await producer.make.remote(1)
    assert len(cloudpickle.dumps(reference)) < 2000  # pyright: ignore[reportPrivateImportUsage]
    value = await reference.get()
    assert not value.flags.writeable


@pytest.mark.slow
async def test_a_value_is_lost_with_who_put_it(producer: Any) -> None:
    [reference] = await producer.make.remote(1)
    os.kill(await producer.pid.remote(), signal.SIGKILL)
    with pytest.raises(
        ControllerError,
        match=rf"a value of {4 * LARGE} bytes is lost, for the process that put it",
    ):
        await asyncio.wait_for(reference.get(), 300)

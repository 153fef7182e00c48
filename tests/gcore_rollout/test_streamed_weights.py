"""Weights are read bucket by bucket: a node needs space for a few of them, not for all.

Without GPUs, NIXL reads the host's memory of another process, by the same calls.
"""

import asyncio
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import ray
import torch
from fake_engine import FakeEngine
from ray import cloudpickle
from ray._private.internal_api import node_stats
from ray.exceptions import OwnerDiedError
from ray_cluster import ray_cluster

from gcore_rollout import EngineDiedError, EngineHandle, RayEngine, WeightReferences

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]

BUCKET_BYTES = 16 << 20
NUM_BUCKETS = 15
STORE_MB = {"here": 400, "elsewhere": 80}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportPrivateImportUsage]
    with ray_cluster(*STORE_MB, store_mb=STORE_MB):
        yield


class CopyingEngine(FakeEngine):
    """It keeps one number of each tensor, as an engine copies what it needs."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        numbers = [(name, tensor[:1].clone()) for name, tensor in weights]
        await super().update_weights(numbers, version=version)


async def connect() -> RayEngine[Any, Any]:
    handle = EngineHandle.start(CopyingEngine, num_cpus=0, resources={"elsewhere": 0.01})
    return await RayEngine.connect(handle)


async def watch_store(node: str, peaks: dict[str, int]) -> None:
    """Note the most that the store of a node has used, and what it has put into files because it was full."""
    [found] = [entry for entry in ray.nodes() if node in entry["Resources"]]
    address = found["NodeManagerAddress"], found["NodeManagerPort"]
    while True:
        store = (await asyncio.to_thread(node_stats, *address)).store_stats
        for name, size_bytes in (
            ("used", store.object_store_bytes_used),
            ("in files", store.object_store_bytes_fallback),
            ("spilled", store.spilled_bytes_total),
        ):
            peaks[name] = max(peaks.get(name, 0), size_bytes)
        await asyncio.sleep(0.02)


async def test_a_store_of_five_buckets_is_enough_for_fifteen() -> None:
    """The engine's node has a store of a third of the weights, and neither files nor disk take the rest."""
    tensors = ((f"w{i}", torch.full((BUCKET_BYTES // 4,), float(i))) for i in range(NUM_BUCKETS))
    weights = WeightReferences.put(tensors, bucket_size_bytes=BUCKET_BYTES)
    engine = await connect()
    peaks: dict[str, int] = {}
    watching = asyncio.create_task(watch_store("elsewhere", peaks))
    await engine.update_weights(weights, version=1)
    await asyncio.sleep(0.1)
    watching.cancel()
    assert engine.weight_version == 1
    assert 0 < peaks["used"] <= STORE_MB["elsewhere"] << 20
    assert peaks["in files"] == peaks["spilled"] == 0, peaks
    await engine.handle.end()


class Sender:
    """A process that puts weights, which are lost with it."""

    def put(self, name: str) -> WeightReferences:
        return WeightReferences.put([(name, torch.zeros(1 << 20))])

    async def read(self, weights: WeightReferences) -> list[str]:
        """Return the names in the order in which an engine of this node reads them."""
        return [name for name, _ in await weights.fetch()]


def start_sender(node: str) -> Any:
    make: Any = ray.remote(Sender)
    return make.options(num_cpus=0, resources={node: 0.01}).remote()


async def test_a_node_reads_first_what_was_put_there() -> None:
    """So that nodes do not all fetch from the same one; every tensor is read once."""
    senders = [start_sender(node) for node in STORE_MB]
    parts = [await sender.put.remote(node) for sender, node in zip(senders, STORE_MB, strict=True)]
    weights = WeightReferences.join([WeightReferences.join([]), *parts])
    assert await senders[0].read.remote(weights) == ["here", "elsewhere"]
    assert await senders[1].read.remote(weights) == ["elsewhere", "here"]
    assert await senders[1].read.remote(WeightReferences.join(parts[:1])) == ["here"]
    assert await senders[1].read.remote(WeightReferences.join([])) == []
    for sender in senders:
        ray.kill(sender)


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_bucket_that_is_lost(is_first: bool) -> None:
    """Before the first one the engine has its old weights; after it, it has a part of both, and is made again."""
    lost_node, kept_node = ("elsewhere", "here") if is_first else ("here", "elsewhere")
    doomed, other = start_sender(lost_node), start_sender(kept_node)
    parts = [await doomed.put.remote("lost"), await other.put.remote("kept")]
    ray.kill(doomed)
    await asyncio.sleep(1)
    engine = await connect()
    error = OwnerDiedError if is_first else EngineDiedError
    message = "owner has exited" if is_first else "bucket 2 of 2 .* is lost"
    with pytest.raises(error, match=message):
        await engine.update_weights(WeightReferences.join(parts), version=1)
    await engine.handle.end()
    ray.kill(other)


class DirectSender(Sender):
    """A process whose weights are read where they are: NIXL treats the host's memory as a GPU's."""

    def put(self, name: str) -> WeightReferences:
        tensors = {
            f"{name}.odd": torch.arange(1001.0) + len(name),
            f"{name}.short": torch.full((3, 5), 2.0, dtype=torch.bfloat16),
            f"{name}.large": torch.ones(1 << 20),
        }
        return WeightReferences.put(tensors.items(), bucket_size_bytes=8000, is_direct=True)

    async def read_values(self, weights: WeightReferences) -> dict[str, torch.Tensor]:
        on_host = await weights.fetch(on_host=True)
        return {name: tensor.clone() for name, tensor in on_host}


async def test_weights_that_are_read_from_their_senders() -> None:
    """By any number of processes, also late ones, whatever happens to the others; no store has them."""
    make: Any = ray.remote(DirectSender)
    senders = [make.options(num_cpus=0).remote() for _ in "ab"]
    reader = make.options(num_cpus=0).remote()
    parts = [await sender.put.remote(name) for sender, name in zip(senders, "ab", strict=True)]
    weights = WeightReferences.join(parts)
    assert weights.size_bytes == 2 * (4 * 1001 + 2 * 15 + (4 << 20))
    values = await reader.read_values.remote(weights)
    assert values["a.odd"].equal(torch.arange(1001.0) + 1)
    assert values["b.short"].equal(torch.full((3, 5), 2.0, dtype=torch.bfloat16))
    assert values["b.large"].equal(torch.ones(1 << 20))

    doomed, other = await connect(), await connect()
    dying = asyncio.create_task(doomed.update_weights(weights, version=1))
    ray.kill(doomed.handle.actor)
    await other.update_weights(weights, version=1)
    with pytest.raises(EngineDiedError):
        await dying
    late = await connect()
    await late.update_weights(weights, version=1)
    assert late.weight_version == other.weight_version == 1

    ray.kill(senders[1])
    with pytest.raises(EngineDiedError, match=r"bucket \d of 4 of the new weights is lost"):
        async with asyncio.timeout(60):
            await other.update_weights(weights, version=2)
    for engine in (other, late):
        await engine.handle.end()

"""Weights of another process on the same GPU; without one, what is refused."""

import asyncio
import multiprocessing
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from engine_oracles import TinyModel, collect, errors, make_request
from fake_engine import FakeEngine
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from weight_sync_ipc_receiver import GPU, EngineOnTheGPU, WeightsInFiles, receive

from gcore_rollout import EngineProcess, EngineReplicas, HFEngine, SharedWeights
from gcore_rollout.weight_sync import shared_weights
from gcore_rollout.weight_sync.layout import Packing, TensorSpec, unpack
from gcore_rollout.weight_sync.shared_weights import (
    SharedCudaWeights,
    allocator_settings,
    open_weights,
    plain_segments,
    set_allocator_settings,
    share_a_gpu,
    without_expandable_segments,
)


def test_weights_go_by_ipc_where_both_are_on_one_gpu() -> None:
    assert share_a_gpu("GPU-1", "GPU-1")
    assert not share_a_gpu("GPU-1", "GPU-2")
    assert not share_a_gpu(None, None), "not on a GPU"
    assert not share_a_gpu("GPU-1", None)
    assert shared_weights.gpu_of(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ("", ""),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        (
            "expandable_segments:False,max_split_size_mb:512",
            "expandable_segments:False,max_split_size_mb:512",
        ),
        (
            "max_split_size_mb:512, expandable_segments:True",
            "max_split_size_mb:512,expandable_segments:False",
        ),
    ],
)
def test_expandable_segments_are_turned_off_alone(settings: str, plain: str) -> None:
    assert without_expandable_segments(settings) == plain


def test_allocator_settings_come_back() -> None:
    set_allocator_settings("expandable_segments:True,max_split_size_mb:512")
    try:
        with plain_segments():
            assert allocator_settings() == "expandable_segments:False,max_split_size_mb:512"
        assert allocator_settings() == "expandable_segments:True,max_split_size_mb:512"
    finally:
        set_allocator_settings("expandable_segments:False")


def test_buckets_of_a_gpu() -> None:
    """Shapes, types and places, by the real operations on tensors that have no memory."""
    with FakeTensorMode():
        bucket = Packing(torch.empty(1000, dtype=torch.uint8, device="cuda"))
        bucket.add("a", torch.empty(7, 3, dtype=torch.bfloat16, device="cuda"))
        bucket.add("b", torch.empty(5, device="cuda").expand(2, 5))
        assert not bucket.fits(torch.empty(1000, dtype=torch.uint8, device="cuda"))
        found = dict(unpack(bucket.buffer(), bucket.layout))
        assert {name: (t.dtype, list(t.shape), t.device.type) for name, t in found.items()} == {
            "a": (torch.bfloat16, [7, 3], "cuda"),
            "b": (torch.float32, [2, 5], "cuda"),
        }


@pytest.mark.parametrize("is_given", [True, False], ids=["shared before", "by the process"])
async def test_an_engine_process_copies_from_memory_of_its_gpu(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch, is_given: bool
) -> None:
    """The memory is the sender's again when the update returns; a failed one leaves the old weights."""
    made: list[WeightsInFiles] = []

    def share(weights: Any) -> WeightsInFiles:
        made.append(WeightsInFiles(weights))
        return made[-1]

    if not is_given:
        monkeypatch.setattr(shared_weights, "SharedCudaWeights", WeightsInFiles)
        monkeypatch.setattr(shared_weights, "gpu_of", lambda _: GPU)
    engine: Any = await EngineProcess.start(
        partial(EngineOnTheGPU.from_pretrained, tied.path), num_threads=1
    )
    assert engine.weights_gpu == GPU
    request = make_request("r", 9, n=2)
    for version, model in ((1, tied.new), (2, tied.old)):
        weights = share(model.state_dict().items()) if is_given else model.state_dict().items()
        await engine.update_weights(weights, version=version)
        for shared in made:
            shared.overwrite()
            shared.close()
        assert max(errors(model, [request], await collect(engine, request))) < 1e-5
    bad = [("w", torch.zeros(3))]
    with pytest.raises(ValueError, match="weights do not match"):
        await engine.update_weights(share(bad) if is_given else bad, version=3)
    assert engine.weight_version == 2
    assert max(errors(tied.old, [request], await collect(engine, request))) < 1e-5
    # Weights that are elsewhere go through shared memory.
    monkeypatch.setattr(shared_weights, "gpu_of", lambda _: None)
    await engine.update_weights(tied.new.state_dict().items(), version=3)
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5
    await engine.close()


async def test_replicas_on_the_gpu_and_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are copied once on the GPU, and once in the host for all others."""
    sources: list[Any] = []

    class Replica(FakeEngine):
        weights_gpu: str | None = None

        async def update_weights(self, weights: Any, *, version: int) -> None:
            sources.append(weights)
            await super().update_weights(weights, version=version)

    near, far = Replica(), [Replica(), Replica()]
    near.weights_gpu = GPU
    monkeypatch.setattr(shared_weights, "SharedCudaWeights", WeightsInFiles)
    monkeypatch.setattr(shared_weights, "gpu_of", lambda _: GPU)
    replicas = EngineReplicas([near, *far])
    await replicas.update_weights([("w", torch.full((2, 2), 5.0))], version=1)
    assert [type(source) for source in sources] == [WeightsInFiles, SharedWeights, SharedWeights]
    assert sources[1] is sources[2]
    assert all(float(engine.weights["w"].sum()) == 20 for engine in (near, *far))
    assert not sources[0].is_whole, "its memory is free again"
    late = Replica()
    await replicas.add(late)
    assert late.weight_version == 1, "by the copy in the host"
    await asyncio.gather(*(replicas.remove(engine) for engine in (*far, late)))
    await replicas.update_weights([("w", torch.full((2, 2), 6.0))], version=2)
    assert [type(source) for source in sources[4:]] == [WeightsInFiles]
    await replicas.close()


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match="weight 'w' is on cpu; expected a CUDA device"):
        SharedCudaWeights([("w", torch.zeros(3))])


def test_a_gpu_that_is_not_seen_is_named() -> None:
    with pytest.raises(ValueError, match="weight 'w' is on GPU 1234: this process sees"):
        open_weights(
            pickle.dumps(
                [("1234", rebuild_cuda_tensor, (), {"w": TensorSpec(dtype=torch.int8, shape=(1,))})]
            )
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_process_sees_the_senders_memory() -> None:
    weights = {
        "w": torch.randn(1000, 64, device="cuda"),
        "part": torch.arange(100, device="cuda").bfloat16()[10:20],
    }
    shared = SharedCudaWeights(weights.items())
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=receive, args=(other,))
    process.start()
    own.send_bytes(shared.handles())
    assert own.poll(120)
    seen = own.recv()
    process.join(60)
    shared.close()
    assert process.exitcode == 0
    assert seen == [(name, tensor.dtype, tensor.tolist()) for name, tensor in weights.items()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
async def test_an_engine_process_on_the_same_gpu(tied: TinyModel, settings: str) -> None:
    """The sender's memory goes back to the device when the engine has copied it."""
    make = partial(HFEngine.from_pretrained, tied.path, device="cuda")
    engine: Any = await EngineProcess.start(make, num_threads=1)
    set_allocator_settings(settings)
    try:
        weights = {name: tensor.cuda() for name, tensor in tied.new.state_dict().items()}
        assert engine.weights_gpu == shared_weights.gpu_of(torch.device("cuda"))
        before = torch.cuda.memory_reserved()
        await engine.update_weights(weights.items(), version=1)
        assert torch.cuda.memory_reserved() <= before
    finally:
        set_allocator_settings("expandable_segments:False")
    request = make_request("r", 9, n=2)
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-4
    await engine.close()

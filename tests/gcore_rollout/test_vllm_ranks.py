"""vLLM over several devices: the samples of one device, weights in buckets, and a rank that is killed."""

import asyncio
import importlib
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    assert_equal,
    collect,
    errors,
    make_engine,
    make_request,
    make_tiny_mixture,
)
from memory_growth import PRIVATE, SHARED, growing
from process_tree import descendants, left_after
from ray_cluster import ray_cluster
from safetensors import safe_open
from transformers import Qwen2Config, Qwen2ForCausalLM
from weight_sync_ipc_receiver import OPENED_BY, RanksOnTheGPU, WeightsInFiles

from gcore_rollout import (
    DigestedWeights,
    EngineDiedError,
    EngineHandle,
    EngineProcess,
    EngineReplicas,
    InstrumentedEngine,
    RayEngine,
    RequestError,
    VLLMEngine,
    WeightRecord,
    engine_factory,
    start_replicas,
)
from gcore_rollout.engines.vllm import ranks
from gcore_rollout.weight_sync import layout
from gcore_rollout.weight_sync.digests import all_digests, check_weights, digest
from gcore_rollout.weight_sync.layout import group_into_buckets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("vllm_forks"),
    *VLLM_IMPORT_WARNINGS,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

WORKER = "VLLM::Worker_TP"
REQUESTS = [make_request("short", 5, n=2), make_request("long", 37, n=3)]


def new_weights(model: TinyModel) -> dict[str, torch.Tensor]:
    """The new weights, without the head, which is the embedding."""
    return {
        name: tensor for name, tensor in model.new.state_dict().items() if name != "lm_head.weight"
    }


def kill_a_rank(pid: int) -> None:
    os.kill(descendants(pid, WORKER)[-1], signal.SIGKILL)


def test_buckets_of_whole_layers() -> None:
    sizes = {"embed": 30, "h.0.a": 80, "h.0.x.1.b": 60, "h.1.a": 50, "h.10.a": 50, "norm": 5}
    weights = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    buckets = group_into_buckets(weights.items(), 100, whole_layers=True)
    names = [list(bucket) for bucket in buckets]
    assert names == [["embed"], ["h.0.a", "h.0.x.1.b"], ["h.1.a", "h.10.a"], ["norm"]]


async def test_two_devices_are_as_one(tied: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_engine("vllm", tied, max_num_seqs=8)
    expected = await collect(whole, *REQUESTS)
    await whole.close()

    environment = dict(os.environ)
    engine: Any = make_engine("vllm", tied, max_num_seqs=8, tensor_parallel_size=2)
    assert os.environ.get("OMP_NUM_THREADS") == environment.get("OMP_NUM_THREADS")
    workers = descendants(os.getpid(), WORKER)
    assert len(workers) == 2
    found = await collect(engine, *REQUESTS)
    assert found.keys() == expected.keys()
    for place, completion in found.items():
        assert_equal(completion, expected[place], tolerance=1e-5)
    assert max(errors(tied.old, REQUESTS, found)) < 1e-5

    # Buckets of whole layers, and then of single tensors, so that ranks wait for the rest of a layer.
    made: list[int] = []
    make = os.memfd_create

    def memfd_create(name: str) -> int:
        made.append(make(name))
        return made[-1]

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    monkeypatch.setattr(ranks, "_BUCKET_BYTES", 20_000)
    for version, model in enumerate([tied.new, tied.old, tied.new], 1):
        if version == 2:
            monkeypatch.setattr(layout, "layer_of", str)
        weights = list(model.state_dict().items())
        await engine.update_weights(reversed(weights), version=version)
        updated = await collect(engine, *REQUESTS)
        assert max(errors(model, REQUESTS, updated)) < 1e-5
    assert len(made) == 2, "the memory of all buckets"
    held = await engine.held_weights()
    own = tied.new.state_dict()
    assert {tensor.name for tensor in held.tensors} == own.keys()
    assert all(tensor.digest == digest(own[tensor.name]) for tensor in held.tensors), (
        "whole tensors of all ranks"
    )

    await engine.sleep()
    await engine.wake()
    assert max(errors(tied.new, REQUESTS, await collect(engine, *REQUESTS))) < 1e-5

    kill_a_rank(os.getpid())
    with pytest.raises(
        EngineDiedError, match=r"a rank of the engine died; all were ended: \d+ with exit code -9"
    ) as death:
        await collect(engine, *REQUESTS)
    assert len(death.value.unfinished) == 5
    with pytest.raises(EngineDiedError):
        await engine.update_weights(iter(tied.old.state_dict().items()), version=4)
    await engine.close()
    assert not left_after(workers, 10.0)


@pytest.mark.parametrize(
    ("num_devices", "enable_expert_parallel"), [(1, False), (2, False), (2, True)]
)
async def test_a_mixture_takes_the_weights_of_its_trainer(
    tmp_path: Path, num_devices: int, enable_expert_parallel: bool
) -> None:
    """transformers has fused the experts' matrices, which vLLM divides, pads and packs; all are read back."""
    model = make_tiny_mixture(tmp_path, expert_size=48)
    made = VLLMEngine.from_pretrained(
        tmp_path,
        max_num_seqs=8,
        eos_token_ids=[],
        tensor_parallel_size=num_devices,
        enable_expert_parallel=enable_expert_parallel,
        kv_cache_memory_bytes=16 << 20,
    )
    engine = InstrumentedEngine(made, name="engine 0", record=WeightRecord())
    for version, weights in enumerate([model.old, model.new, model.old]):
        digested = DigestedWeights(weights.named_parameters())
        if version:
            await engine.update_weights(digested, version=version)
        await check_weights(engine, all_digests(digested))
        held = await made.held_weights()
        assert {tensor.name for tensor in held.tensors} == digested.digests.keys()
        # With whole experts on each device, vLLM's CPU kernels crash when they compute.
        if not enable_expert_parallel:
            found = await collect(engine, *REQUESTS)
            assert max(errors(weights, REQUESTS, found)) < 2e-5
    await engine.close()


async def test_an_update_takes_little_more_memory_than_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 68 MB in buckets of a layer, 12.6 MB: a rank has half of it, and takes less than two buckets more."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(ranks, "_BUCKET_BYTES", 8 << 20)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what ranks free goes back to the system
    engine = VLLMEngine.from_pretrained(
        tmp_path, max_num_seqs=2, tensor_parallel_size=2, kv_cache_memory_bytes=16 << 20
    )
    processes = [os.getpid(), *descendants(os.getpid(), WORKER)]
    assert len(processes) == 3
    file = tmp_path / "model.safetensors"
    assert file.stat().st_size > 65e6
    peaks_mb: list[list[float]] = []
    for version in range(1, 5):
        with safe_open(file, "pt") as stored, growing(PRIVATE, SHARED, pids=processes) as growth:
            names = stored.keys()
            weights = ((name, stored.get_tensor(name)) for name in names)
            await engine.update_weights(weights, version=version)
        peaks_mb.append([growth_bytes / 1e6 for growth_bytes in growth])
    kept_mb = 0.0
    for memory in engine._bucket_memories:  # pyright: ignore[reportPrivateUsage]
        kept_mb += os.fstat(memory.fileno()).st_blocks * 512 / 1e6
    await engine.close()
    assert 13 < kept_mb < 2 * 13, "the memory of two buckets, for later updates"
    # Buffers of the libraries come on top whenever a thread works for the first time, always in the first update.
    least_mb = [min(peaks) for peaks in zip(*peaks_mb, strict=True)]
    assert all(peak < 2 * 13 for peak in least_mb), peaks_mb
    assert max(peaks_mb[0]) > 4, "it was measured during an update"


async def test_ranks_open_the_memory_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank for itself, and the process of the engine does not; the memory is the sender's again afterwards."""
    model = make_tiny_mixture(tmp_path, expert_size=48)
    log = tmp_path / "opened"
    monkeypatch.setenv(OPENED_BY, str(log))
    make = partial(
        RanksOnTheGPU.from_pretrained,
        tmp_path,
        max_num_seqs=8,
        eos_token_ids=[],
        tensor_parallel_size=2,
        kv_cache_memory_bytes=16 << 20,
    )
    engine: Any = await EngineProcess.start(make, num_threads=2)
    workers = descendants(engine.pid, WORKER)
    for version, weights in enumerate((model.new, model.old), 1):
        shared = WeightsInFiles(DigestedWeights(weights.named_parameters()))
        await engine.update_weights(shared, version=version)
        shared.overwrite()
        assert {int(pid) for pid in log.read_text().split()} == set(workers)
        await check_weights(InstrumentedEngine(engine, name="engine 0"), shared.digests)
        found = await collect(engine, *REQUESTS)
        assert max(errors(weights, REQUESTS, found)) < 2e-5
        shared.close()
    with pytest.raises(ValueError, match="weights do not match the model: unknown names"):
        await engine.update_weights(WeightsInFiles([("other", torch.ones(2))]), version=3)
    assert engine.weight_version == 2
    await engine.close()


async def test_a_killed_rank_costs_its_engine_a_restart(tied: TinyModel) -> None:
    """In a process of its own: the samples are those of an undisturbed engine."""
    make = engine_factory(
        "vllm",
        tied.path,
        device="cpu",
        dtype=torch.float32,
        max_num_seqs=2,
        eos_token_ids=[],
        own_options={"tensor_parallel_size": 2},
    )
    engine = await start_replicas(lambda _: make, 1, num_threads=2, preload=())
    assert isinstance(engine, EngineReplicas)
    try:
        expected = await collect(engine, *REQUESTS)
        again = asyncio.create_task(collect(engine, *REQUESTS))
        await asyncio.sleep(0.05)
        kill_a_rank(os.getpid())
        found = await again
        assert found.keys() == expected.keys()
        for place, completion in found.items():
            assert_equal(completion, expected[place], tolerance=1e-5)
    finally:
        await engine.close()


@pytest.fixture
def cluster() -> Iterator[None]:
    with ray_cluster("here"):
        yield


@pytest.mark.usefixtures("cluster")
async def test_a_killed_rank_of_an_actor(tied: TinyModel) -> None:
    # What Ray is to pickle must not name it.
    assert importlib.import_module("torch._dynamo.config")
    make: Any = partial(
        VLLMEngine.from_pretrained,
        tied.path,
        max_num_seqs=2,
        tensor_parallel_size=2,
        kv_cache_memory_bytes=64 << 20,
    )
    handle = EngineHandle.start(make, num_cpus=0, num_threads=2)
    engine: RayEngine[Any, Any] = await RayEngine.connect(handle)
    other: RayEngine[Any, Any] = await RayEngine.connect(handle)
    expected = await collect(engine, *REQUESTS)
    kill_a_rank(engine.pid)
    with pytest.raises(EngineDiedError, match="a rank of the engine died"):
        await collect(engine, *REQUESTS)
    with pytest.raises(EngineDiedError, match=r"a rank of the engine died; .*: connect again"):
        await collect(other, *REQUESTS)
    # The actor goes on, with another engine in a process of its own.
    pid = engine.pid
    engine = await RayEngine.connect(handle)
    assert engine.pid != pid
    assert Path(f"/proc/{pid}").exists()
    await engine.update_weights(iter(new_weights(tied).items()), version=1)
    found = await collect(engine, *REQUESTS)
    assert found.keys() == expected.keys()
    assert max(errors(tied.new, REQUESTS, found)) < 1e-5
    await handle.end()


def test_what_is_refused(tied: TinyModel) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size is 0; expected at least 1"):
        VLLMEngine.from_pretrained(tied.path, tensor_parallel_size=0)
    with pytest.raises(
        RequestError, match=r"own_options is .*tensor_parallel_size.* for engine 'hf'"
    ):
        engine_factory("hf", tied.path, device="cpu", own_options={"tensor_parallel_size": 2})

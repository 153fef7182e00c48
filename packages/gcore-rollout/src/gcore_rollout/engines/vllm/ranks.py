"""The ranks of a `VLLMEngine` over several devices, each a process of vLLM's: their threads, weights and generators."""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from multiprocessing.connection import wait
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from gcore_rollout.errors import RolloutError, require
from gcore_rollout.weight_sync.layout import Layout, group_into_buckets
from gcore_rollout.weight_sync.shared_weights import (
    OpenedWeights,
    SharedWeights,
    SharedWeightsReader,
)

if TYPE_CHECKING:
    from vllm import LLMEngine

_BUCKET_BYTES = 256 << 20
_END_TIMEOUT_S = 10.0
_reader = SharedWeightsReader()
"""Reader of a rank's process, which keeps the mappings of the buckets' memory."""


def rank_options(
    *, on_cpu: bool, tensor_parallel_size: int = 1, enable_expert_parallel: bool = False
) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` for so many ranks, and set their environment.

    Raises:
        ValueError: there are fewer than one, or fewer visible GPUs.
    """
    size = tensor_parallel_size
    require("tensor_parallel_size", size, size >= 1, "at least 1", ValueError)
    if not on_cpu:
        visible = torch.cuda.device_count()
        require(
            "tensor_parallel_size",
            size,
            size <= visible,
            f"at most {visible}, the visible GPUs",
            ValueError,
        )
    if size == 1:
        return {}
    # A fork would copy threads' locks without their threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # All ranks are on this machine; gloo's ports, which ask for no password, need not be open to others.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_cpu:
        # By itself, vLLM refuses more ranks than there are NUMA nodes; the ranks share the threads of this process.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // size))
    return {
        "tensor_parallel_size": size,
        "enable_expert_parallel": enable_expert_parallel,
        "distributed_executor_backend": "mp",
    }


def send_weights(
    engine: "LLMEngine",
    weights: Iterable[tuple[str, torch.Tensor]],
    memories: Sequence[SharedWeights],
) -> None:
    """Give all ranks new weights through shared memory; each copies its own part out of it.

    Weights are sent in buckets of whole layers. Each of the ``memories`` is written again once all ranks have copied
    the bucket in it, also in later updates: new memory is written at a fraction of the rate. With two of them, a bucket
    is written while the ranks read the one before.
    """
    executor = _executor(engine)
    executor.collective_rpc(_begin_update)
    reading: dict[SharedWeights, Future[None]] = {}
    # vLLM keeps views of a layer's tensors until it has all of them.
    buckets = group_into_buckets(weights, _BUCKET_BYTES, whole_layers=True)
    for bucket, memory in zip(buckets, cycle(memories), strict=False):
        if memory in reading:
            reading.pop(memory).result()
        memory.write(bucket.items())
        take = partial(_take_bucket, path=str(memory.path), layout=memory.layout)
        reading[memory] = executor.collective_rpc(take, non_block=True)
    for taken in reading.values():
        taken.result()
    executor.collective_rpc(_end_update)


def seed_generators(_worker: Any, seed: int) -> None:
    """Start the generators of a rank's process again; all ranks must draw the same samples."""
    from vllm.utils.torch_utils import set_random_seed

    set_random_seed(seed % 2**32)


def end_together(engine: "LLMEngine") -> None:
    """From now on, kill all ranks when one has died: vLLM itself waits eight seconds for those that wait for it."""
    executor = _executor(engine)

    def watch() -> None:
        wait([worker.proc.sentinel for worker in executor.workers])
        if executor.is_failed or not getattr(executor, "shutting_down", False):
            for worker in executor.workers:
                worker.proc.kill()

    Thread(target=watch, daemon=True, name="gcore-vllm-ranks").start()


def shut_down(engine: "LLMEngine") -> None:
    """End the ranks."""
    executor = _executor(engine)
    executor.shutdown()
    for worker in executor.workers:
        worker.proc.join(_END_TIMEOUT_S)


def failure_of(engine: "LLMEngine") -> str | None:
    """Return why the engine's ranks can no longer work, or None."""
    executor = _executor(engine)
    if not executor.is_failed:
        return None
    ends = [
        f"{worker.proc.pid} with exit code {worker.proc.exitcode}" for worker in executor.workers
    ]
    return f"a rank of the engine died; all were ended: {', '.join(ends)}"


def _executor(engine: "LLMEngine") -> Any:
    core: Any = engine.engine_core
    return core.engine_core.model_executor


def gather_tensor(shard: torch.Tensor, shape: Sequence[int], module: Any) -> torch.Tensor:
    """Return a tensor of this shape, of which each rank has a part: gathered, on all ranks.

    Args:
        module: vLLM's module that has the part.
    """
    dims = [
        dim
        for dim, (part, full) in enumerate(zip(shard.shape, shape, strict=False))
        if part != full
    ]
    if shard.dim() != len(shape) or len(dims) != 1:
        return shard
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import QKVParallelLinear

    group: Any = get_tp_group()
    (dim,) = dims
    parts = group.all_gather(shard.contiguous(), dim).split(shard.shape[dim], dim)
    if isinstance(module, QKVParallelLinear):
        # With fewer heads of keys and values than ranks, neighbours have the same ones.
        parts = parts[:: max(1, len(parts) * shard.shape[dim] // shape[dim])]
    # The vocabulary is padded.
    return torch.cat(parts, dim).narrow(dim, 0, shape[dim])


def take_shared(
    worker: Any, handles: bytes, publish: Callable[..., Iterable[tuple[str, torch.Tensor]]]
) -> None:
    """Give a rank new weights on a GPU, which it opens by CUDA IPC; it copies its part from there.

    Args:
        handles: of `SharedCudaWeights`.
        publish: `publish_weights` of the engine's model, without its argument ``weights``.
    """
    opened = OpenedWeights(handles)
    try:
        _begin_update(worker)
        _load(worker, publish(weights=opened))
        _end_update(worker)
    finally:
        opened.release()


# What vLLM's own `reload_weights` does in one call, which takes all weights at once.


def _begin_update(worker: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.model_runner.get_model())


def _take_bucket(worker: Any, path: str, layout: Layout) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RolloutError(f"a rank cannot open the engine's weights: {error}") from error
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    _load(worker, _reader.read(descriptor, layout))
    # The memory is written again: copy what is kept for a layer that has not got all of its tensors.
    for module in worker.model_runner.get_model().modules():
        for _, loading in get_layerwise_info(module).loaded_weights:
            for name, value in loading.arguments.items():
                if isinstance(value, torch.Tensor) and _reader.owns(value):
                    loading.arguments[name] = value.clone()


def _load(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(weights)


def _end_update(worker: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(runner.get_model(), worker.vllm_config.model_config)
    runner.reset_lora_state()
    runner.reset_encoder_cache()
    runner.reset_mm_cache()

"""Effects of vLLM on its process, and facts about models and settings that are needed before it starts."""

import ctypes
import gc
import json
import mmap
import os
import random
import re
import sys
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.core_model_loading import revert_weight_conversion

from gcore_rollout.engines.queueing import return_free_memory
from gcore_rollout.engines.vllm import ranks
from gcore_rollout.errors import EngineModelError, make_extra_error
from gcore_rollout.images.vision_processor import VisionProcessor
from gcore_rollout.weight_sync.layout import check_shapes, with_layout

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.config import VllmConfig


_EXPERT = re.compile(r".*\.(\d+)\.(.*)")
"""The last number in a name, and what follows it."""
TIED_HEAD = "lm_head.weight"
"""The tensor that a checkpoint may leave out if the model uses its embedding in its place."""
_COLLECTOR = {"collect": gc.collect, "freeze": gc.freeze, "unfreeze": gc.unfreeze}
FusedExperts = tuple[Sequence[int], Sequence[str]]
"""The shape of a tensor in which transformers fuses the experts of a layer, and names of the first one's matrices."""


_VISION_MODELS = ("qwen2_5_vl", "qwen2_vl")
"""Model types whose images vLLM takes as they are processed here, with the trainer's log-probabilities."""


def load_vision(folder: Path) -> VisionProcessor | None:
    """Return the image processor of a folder's model; None: it takes no images."""
    # vLLM knows models of which transformers has no config.
    if json.loads((folder / "config.json").read_text()).get("model_type") not in _VISION_MODELS:
        return None
    # vLLM cannot load such a model without it.
    if find_spec("torchvision") is None:
        raise make_extra_error("torchvision", "vllm")
    return VisionProcessor.from_pretrained(folder)


def set_environment() -> None:
    """Set what vLLM reads from the environment alone, before it is imported."""
    # The engine runs here, not in a child: new weights are handed over in memory, and steps follow our loop.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # No telemetry.
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # No notes on every start; a level that was set stays.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def keep_process_state() -> Generator[None]:
    """Restore the process state that vLLM changes while it starts."""
    numpy_state = np.random.get_state()
    random_state = random.getstate()
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    # Children would inherit the preloaded libraries; a launcher's worker would take the world size for its own.
    names = (
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "LOCAL_WORLD_SIZE",
        "OMP_NUM_THREADS",
        "OMP_NUM_THREADS_SET_BY_VLLM",
    )
    variables = {name: os.environ[name] for name in names if name in os.environ}
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(random_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(variables)


def compilation(*, is_off: bool) -> AbstractContextManager[None]:
    """Turn `torch.compile` off inside a block, or leave it on."""
    # Not in `from_pretrained`: Ray pickles that with the modules that it names, and this one cannot be.
    return torch._dynamo.config.patch(disable=is_off)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def collections(*, is_off: bool) -> Generator[None]:
    """Turn off what vLLM asks of the garbage collector inside a block, or leave it on and unfreeze what it has frozen.

    Its start and its shutdown walk through all objects of the process several times, which takes longer than the rest
    of the two with a small model, and the shutdown unfreezes what others have frozen.
    """
    was_frozen = is_off or gc.get_freeze_count() > 0
    if is_off:
        for name in _COLLECTOR:
            setattr(gc, name, lambda *_: 0)
    try:
        yield
    finally:
        for name, function in _COLLECTOR.items():
            setattr(gc, name, function)
        if not was_frozen:
            gc.unfreeze()


def check_head_size(config: "VllmConfig") -> None:
    """Refuse head sizes that vLLM's CPU attention would refuse, but only at the first step."""
    model = config.model_config
    if config.device_config.device_type != "cpu" or model.use_mla:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        raise EngineModelError(
            f"head dimension is {model.get_head_size()}; expected one of {sizes}, which vLLM takes on CPU"
        )


def shut_down(engine: "LLMEngine", *, is_last: bool, made_process_group: bool) -> None:
    """Stop an engine, and destroy only the process groups that vLLM made."""
    from vllm.distributed import parallel_state

    client: Any = engine.engine_core
    if client.engine_core.vllm_config.parallel_config.world_size > 1:
        # The groups are those of other processes.
        client._finalizer.detach()
        ranks.shut_down(engine)
        client.engine_core.scheduler.shutdown()
        return
    if is_last and made_process_group:
        client.shutdown()
        return
    # vLLM's own shutdown, now or when collected, would destroy a default process group that others still use.
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    if is_last:
        # Its groups hang on the default one: a later engine must not find them when their owner has destroyed that.
        groups: Any = parallel_state
        groups.destroy_model_parallel()
        groups._WORLD.destroy()
        groups._WORLD = None


def free_kv_cache(worker: Any) -> None:
    """Return the pages of a CPU worker's keys and values to Linux, as vLLM's own sleep does not; they become zeros.

    The memory of freed activations goes with them.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # All layers' caches are views of one allocation, or of a few.
    storages: dict[int, int] = {}
    for cache in worker.model_runner.kv_caches:
        storage = cache.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    for address, size in storages.items():
        # Whole pages only: the first and the last may hold something else.
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED
        ):
            code = ctypes.get_errno()
            raise OSError(code, f"madvise of the key-value cache: {os.strerror(code)}")
    return_free_memory()


def forget_expert_kernels(model: Any) -> None:
    """Have vLLM make the kernels of a mixture's experts again when it reloads weights.

    On CPU they take packed matrices, and vLLM 0.32 packs those of the first load alone.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_head(model: torch.nn.Module) -> None:
    """Pack a tied head's weight again: on CPU vLLM reloads the embedding and leaves the head's packed copy stale."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def check_speculation(config: Mapping[str, Any]) -> None:
    """Refuse settings with which samples are not drawn from the policy."""
    if config.get("rejection_sample_method") == "synthetic":
        raise ValueError(
            "speculative_config has rejection_sample_method 'synthetic'; expected 'standard' or 'block', which sample "
            "from the policy"
        )


def repair_rejection_sampler() -> None:
    """Replace a function of vLLM 0.32 that is wrong on CPU, and that only speculative decoding calls.

    Its kernel for CPU writes each token's temperature to a copy, so that logits are divided by uninitialised memory:
    all samples and log-probs of a step with any temperature above 0 would be wrong.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat the values ``x`` [B] for each token of a sample, [num_tokens]; ``cu_num_tokens`` [B] is summed up."""
    counts_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced_B = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced_B.repeat_interleave(counts_B, output_size=num_tokens)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Hugging Face folder's tensors, from their headers alone."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        raise EngineModelError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            names = tensors.keys()
            shapes.update((name, tuple(tensors.get_slice(name).get_shape())) for name in names)
    return shapes


def fused_experts(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, FusedExperts]]:
    """Return a folder's shapes without those of experts, and the tensors in which transformers has the experts."""
    others = dict(shapes)
    fused: dict[str, FusedExperts] = {}
    has_experts = any(".experts." in name for name in shapes)
    model = _make_meta_model(folder) if has_experts else None
    if model is None:
        return others, fused
    for name, parameter in model.named_parameters():
        if name in shapes:
            continue
        parts = _view_experts(parameter, revert_weight_conversion(model, {name: parameter}))
        if parts is not None and parts.keys() <= shapes.keys():
            fused[name] = tuple(parameter.shape), [part for part in parts if "experts.0." in part]
            for part in parts:
                del others[part]
    return others, fused


def publish_weights(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    is_tied: bool,
) -> Iterable[tuple[str, torch.Tensor]]:
    """Return a model's weights by the names of its folder, without a tied head, which need not be among them.

    Of a mixture that transformers has fused, each expert's matrices are views. A `ValueError` for weights that are not
    the model's. Those that have a ``layout`` are checked by it, and then requested one by one.
    """
    optional = frozenset({TIED_HEAD} if is_tied else ())
    layout, weights = with_layout(weights)
    empty = ((name, torch.empty(spec.shape, device="meta")) for name, spec in layout.items())
    check_shapes(shapes, dict(_rename(folder, shapes, empty)), optional=optional)
    new = _rename(folder, shapes, weights)
    return ((name, tensor) for name, tensor in new if name not in optional)


def _rename(
    folder: Path, shapes: Container[str], weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights by the names of their folder, one or all experts at a time."""
    for name, weight in weights:
        tensor = weight.detach()
        if name in shapes or name == TIED_HEAD:
            yield name, tensor
        else:
            yield from _convert_back(_make_meta_model(folder), name, tensor).items()


@lru_cache(maxsize=2)
def _make_meta_model(folder: Path) -> Any:
    """Return the model of a folder without weights, whose class says how they are named there; None: it has none."""
    try:
        config = AutoConfig.from_pretrained(folder)
    except ValueError:
        # vLLM knows models of which transformers has no config.
        return None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _convert_back(model: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of the folder that transformers has made this one of, as views if they are whole rows."""
    if model is None:
        return {name: tensor}
    published = revert_weight_conversion(model, {name: torch.empty(tensor.shape, device="meta")})
    views = _view_experts(tensor, published)
    if views is None:
        return revert_weight_conversion(model, {name: tensor})
    return views


def _view_experts(
    tensor: torch.Tensor, published: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Return the matrices of experts in a tensor [experts, rows of all matrices, columns]; None: it is another."""
    num_fused = len(published) // len(tensor) if tensor.ndim == 3 else 0
    if len(published) == 1 or num_fused * len(tensor) != len(published):
        return None
    positions: dict[str, int] = {}
    views: dict[str, torch.Tensor] = {}
    for key, part in published.items():
        match = _EXPERT.fullmatch(key)
        if match is None:
            return None
        expert, matrix = match.groups()
        position = positions.setdefault(matrix, len(positions))
        views[key] = tensor[int(expert)].chunk(num_fused)[position]
        if views[key].shape != part.shape:
            return None
    return views

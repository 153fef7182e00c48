"""vLLM's settings by device, and the random numbers that it draws."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gcore_rollout.errors import require

_CPU_KV_CACHE_BYTES = 1 << 30
LEAST_NUM_SEQS = 256
_MOST_NUM_SEQS = 1024


def device_options(
    *,
    on_cpu: bool,
    gpu_memory_utilization: float | None = None,
    kv_cache_memory_bytes: int | None = None,
    max_num_batched_tokens: int | None = None,
    enforce_eager: bool | None = None,
    async_scheduling: bool | None = None,
    enable_sleep_mode: bool = False,
) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` that depend on the device; see `VLLMEngine.from_pretrained`.

    CUDA graphs are captured unless ``enforce_eager``. New weights are copied to where the old ones are
    (``reload_weights``), and sleep keeps addresses, so that the graphs last as long as the engine.

    Raises:
        ValueError: a value is out of its bounds.
    """
    share = gpu_memory_utilization
    is_share = share is None or 0 < share <= 1
    require("gpu_memory_utilization", share, is_share, "a number in (0, 1], or None", ValueError)
    tokens = max_num_batched_tokens
    has_tokens = tokens is None or tokens >= 1
    require("max_num_batched_tokens", tokens, has_tokens, "at least 1, or None", ValueError)
    if on_cpu and kv_cache_memory_bytes is None:
        kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        # None: vLLM's choice for the device and the usage context.
        "max_num_batched_tokens": max_num_batched_tokens,
        "enforce_eager": on_cpu if enforce_eager is None else enforce_eager,
        # None: wherever vLLM can. Its step on CPU ends before the next one is scheduled, in any case.
        "async_scheduling": False if on_cpu else async_scheduling,
        "enable_sleep_mode": enable_sleep_mode and not on_cpu,
        # New weights never come for a draft model.
        "sleep_preserve_parameter_names": ["draft.*"],
        # On CPU a seeded prompt cut in chunks ends in "CPU Generator does not use offset".
        "enable_chunked_prefill": False if on_cpu else None,
    }
    if share is not None and not on_cpu:
        options["gpu_memory_utilization"] = share
    return options


def rounds_logits(names: Iterable[str], dtype: torch.dtype, *, on_cpu: bool) -> bool:
    """Return whether logits are rounded to the type of an engine, as they are by default, and on CPU by the trainer.

    On a GPU the trainer's products give their float32 sums (`gcore_trainer.token_scores`), and so can those of vLLM
    (``head_dtype``), unless one of the ``names`` of the checkpoint's tensors is of a quantized head.
    """
    is_quantized = any(
        "lm_head." in name and not name.endswith((".weight", ".bias")) for name in names
    )
    return on_cpu or is_quantized or dtype == torch.float32


def fit_num_seqs(args: Any, *, weight_bytes: int, memory_bytes: int) -> int:
    """Return how many samples may run at once, from 256 to 1,024, by the memory of keys and values on each GPU.

    All may grow to the longest length, but a running sample has half of its tokens on average: so many are counted.
    With the lower bound, samples that do not fit wait, which costs less than steps of few samples.

    Args:
        args: vLLM's `EngineArgs`, in which None stands for vLLM's choice.
        weight_bytes: size of the model, which the GPUs of the engine share.
        memory_bytes: size of a GPU's memory.
    """
    model = args.create_model_config()
    num_gpus = args.tensor_parallel_size
    kv_bytes = args.kv_cache_memory_bytes or (
        args.gpu_memory_utilization * memory_bytes - weight_bytes / num_gpus
    )
    num_heads = max(1, model.get_total_num_kv_heads() // num_gpus)
    token_bytes = num_heads * model.get_head_size() * model.get_total_num_hidden_layers()
    if not model.use_mla:
        # Latent attention has one vector in place of a key and a value.
        token_bytes *= 2
    if not args.kv_cache_dtype.startswith("fp8"):
        token_bytes *= model.dtype.itemsize
    most = min(_MOST_NUM_SEQS, args.max_num_batched_tokens or _MOST_NUM_SEQS)
    fitting = int(2 * kv_bytes / (token_bytes * model.max_model_len))
    return min(most, max(LEAST_NUM_SEQS, fitting))


def usage_context(*, on_cpu: bool) -> Any:
    """Return the usage whose defaults vLLM takes: those of its class `LLM` on a GPU.

    They are 16,384 batched tokens with at least 70 GiB of memory (8,192 with less, or on an A100); without a usage
    vLLM takes 2,048. On CPU, where prompts are not cut in chunks, the 2,048 stay.
    """
    from vllm.usage.usage_lib import UsageContext

    return None if on_cpu else UsageContext.LLM_CLASS


def draws_by_sample(seed_per_sample: bool | None, *, on_cpu: bool, has_v2_runner: bool) -> bool:
    """Return whether each sample has a seed of its own: as asked, or where that costs nothing.

    vLLM's second model runner, the default on GPUs with Triton, hashes seed and position in its sampling kernel; the
    first one makes a `torch.Generator` for each sample, and draws for each by a kernel launch of its own.
    """
    if seed_per_sample is None:
        return on_cpu or has_v2_runner
    return seed_per_sample


class OwnGenerators:
    """The process's global generators in states that one engine alone uses, while it computes.

    vLLM's first model runner draws from torch's wherever samples have no seeds, and on CPU in any case; the second one
    from NumPy's. The generators are left as they were.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._generators: list[
            tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]
        ] = [
            (torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed),
            (np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed % 2**32)),
        ]
        if not on_cpu:
            cuda = torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed
            self._generators.append(cuda)
        self._states: list[Any] = []

    @contextmanager
    def in_use(self, seed: int | None = None) -> Generator[None]:
        """Put the engine's states in place inside the block: those of its last one, or fresh ones from a seed."""
        before = [get() for get, _, _ in self._generators]
        if seed is not None:
            for _, _, manual_seed in self._generators:
                manual_seed(seed)
        else:
            for (_, put, _), state in zip(self._generators, self._states, strict=False):
                put(state)
        try:
            yield
        finally:
            self._states = [get() for get, _, _ in self._generators]
            for (_, put, _), state in zip(self._generators, before, strict=True):
                put(state)

"""The `vllm` engine: vLLM's scheduler and kernels, in this process and stepped by this event loop."""

import asyncio
import gc
import json
import os
import random
from collections import deque
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoConfig, GenerationConfig

from gcore_rollout.engine import EngineStats
from gcore_rollout.errors import MissingExtraError, RequestError, RolloutError, UnsupportedModelError
from gcore_rollout.sampling import sample_seeds
from gcore_rollout.types import Completion, Request

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.inputs.engine import TokensInput
    from vllm.logprobs import FlatLogprobs

_TIED_HEAD = "lm_head.weight"
# vLLM draws from a clamped or refused temperature outside these bounds.
_TEMPERATURES = (0.01, 2.0)
_CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(eq=False)
class _Call:
    """One `generate` call: where its completions go, and how many are still to come."""

    pending: int
    finished: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class _Waiting:
    """Samples ``next_index..n-1`` of a request that vLLM has not been given yet."""

    call: _Call
    request: Request
    next_index: int = 0


class VLLMEngine:
    """Runs a model under vLLM, one device per engine.

    Samples enter vLLM in the order of calls, at most ``max_num_seqs`` at a time, each with a seed of its own. The same
    seed gives the same tokens as long as rounding does: vLLM's kernels may add in another order in another batch.

    Log-probs are of the distribution sampled from: temperature applied; greedy ones at temperature 1.

    What a live engine leaves in its process, beyond memory: a default process group of world size 1, unless
    `torch.distributed` was initialised before (`close` takes it down again); vLLM's logging configuration and
    environment variables of its own; on CPU, `torch.accelerator.synchronize` and `empty_cache` as no-ops, and memory
    bound to its NUMA node. The generators of torch, numpy and `random`, the thread count and the garbage collector are
    left as they were.

    Args:
        config: vLLM's; use `from_pretrained`.
        shapes: names and shapes of the checkpoint's tensors, against which new weights are checked.
        eos_token_ids: tokens that end a completion.
        recompute_kv: see `from_pretrained`.
    """

    # vLLM keeps its process groups in module globals: they go with the last engine, and only if they came with one.
    _num_live = 0
    _made_process_group = False

    def __init__(
        self,
        config: "VllmConfig",
        *,
        shapes: dict[str, tuple[int, ...]],
        eos_token_ids: Sequence[int],
        recompute_kv: bool = False,
    ) -> None:
        from vllm import LLMEngine

        group_existed = torch.distributed.is_initialized()
        self._engine: LLMEngine | None = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._engine.engine_core.set_weight_version("0")
        VLLMEngine._made_process_group |= not group_existed
        VLLMEngine._num_live += 1
        self._on_cpu = config.device_config.device_type == "cpu"
        self._max_length = config.model_config.max_model_len
        self._max_num_seqs = config.scheduler_config.max_num_seqs
        self._vocab_size = config.model_config.get_vocab_size()
        self._tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
        self._shapes = {name: shape for name, shape in shapes.items() if not (self._tied and name == _TIED_HEAD)}
        self._eos = list(eos_token_ids)
        self._recompute_kv = recompute_kv
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[str, tuple[_Call, Request, int]] = {}
        self._sample_ids = count()
        self._version = 0
        self._prompt_tokens = 0
        self._finished_tokens = 0
        self._driver: asyncio.Task[None] | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        kv_cache_memory_bytes: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        enforce_eager: bool | None = None,
        recompute_kv: bool = False,
    ) -> Self:
        """Load a local Hugging Face folder. The device is the first one visible to this process.

        Args:
            path: folder with ``config.json`` and safetensors weights; no tokenizer is needed.
            max_model_len: longest prompt + completion, in tokens; default: what the model was made for.
            max_num_seqs: most samples alive at once.
            kv_cache_memory_bytes: default: 1 GiB on CPU, what vLLM finds free on a GPU.
            eos_token_ids: default: what the model's generation config says.
            enforce_eager: no compilation and no CUDA graphs; default: on CPU, where compiling costs more than it saves.
            recompute_kv: on `update_weights`, compute the keys and values of running samples again with the new
                weights. By default those computed before stay, as in the `hf` engine: no stall, and the log-probs
                are still those of the distribution sampled from.

        Raises:
            MissingExtraError: vLLM is not installed.
            UnsupportedModelError: vLLM cannot run this architecture, or there are no safetensors.
        """
        path = Path(path)
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}: at least 1 is needed")
        shapes = _checkpoint_shapes(path)
        if eos_token_ids is None:
            eos_token_ids = _eos_token_ids(path)
        on_cpu = not torch.cuda.is_available()
        eager = on_cpu if enforce_eager is None else enforce_eager
        if kv_cache_memory_bytes is None and on_cpu:
            kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
        _set_environment()
        # With compilation off while vLLM is imported, its `torch.compile`d helpers stay plain functions: on CPU the
        # first log-probs would wait 10 to 30 s for one of them.
        with _process_state_kept(), torch._dynamo.config.patch(disable=on_cpu and eager):  # pyright: ignore[reportPrivateUsage]
            _import_vllm()
            from vllm import EngineArgs

            args = EngineArgs(
                model=str(path),
                dtype=cast(Any, dtype),
                max_model_len=cast(Any, max_model_len),
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                enforce_eager=eager,
                skip_tokenizer_init=True,
                # The model's own generation config may hold top-k, top-p or penalties.
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                # A batch in flight while the weights change would be labelled with the new version.
                async_scheduling=False,
                # On CPU a seeded prompt cut in chunks ends in "CPU Generator does not use offset".
                enable_chunked_prefill=False if on_cpu else None,
            )
            try:
                config = args.create_engine_config()
            except ValueError as error:
                if "architectures" not in str(error):
                    raise
                raise UnsupportedModelError(f"vLLM cannot run {path}: {error}") from error
            _check_head_size(config)
            return cls(config, shapes=shapes, eos_token_ids=eos_token_ids, recompute_kv=recompute_kv)

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        """See `Engine.stats`. A prompt counts when its first sample starts, whatever vLLM's cache then saves."""
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._finished_tokens + self._tokens_sampled(self._running),
            num_running=len(self._running),
            num_waiting=sum(w.request.n - w.next_index for w in self._waiting),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`. Temperatures from 0.01 to 2, or 0, are accepted."""
        self._open()
        for request in requests:
            self._check(request)
        call = _Call(pending=sum(r.n for r in requests))
        self._waiting.extend(_Waiting(call, r) for r in requests)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            while call.pending:
                item = await call.finished.get()
                if isinstance(item, Exception):
                    raise item
                call.pending -= 1
                yield item
        finally:
            if call.pending:
                self._abandon(call)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """See `Engine.update_weights`. Unknown or missing names and wrong shapes are refused before any copy.

        Samples that are running go on with the new weights, over keys and values of the old ones unless
        ``recompute_kv`` was set; samples that start later share no cached prefix with them.
        """
        engine = self._open()
        if version <= self._version:
            raise ValueError(f"version is {version}: it must be above the present {self._version}")
        new = {name: tensor.detach() for name, tensor in weights}
        self._check_weights(new)
        if self._tied:
            new.pop(_TIED_HEAD, None)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": new.items()})
        if self._tied and self._on_cpu:
            engine.apply_model(_repack_head)
        self._version = version
        engine.engine_core.set_weight_version(str(version))
        if self._recompute_kv:
            engine.reset_prefix_cache(reset_running_requests=True)

    async def close(self) -> None:
        """See `Engine.close`. Calls still generating get a `RolloutError`."""
        engine = self._engine
        if engine is None:
            return
        if self._driver is not None:
            self._driver.cancel()
        self._fail_all(RolloutError("the engine was closed while generating"))
        self._engine = None
        VLLMEngine._num_live -= 1
        is_last = VLLMEngine._num_live == 0
        _shut_down(engine, is_last=is_last, made_process_group=VLLMEngine._made_process_group)
        if is_last:
            VLLMEngine._made_process_group = False
        del engine
        gc.collect()

    def _open(self) -> "LLMEngine":
        if self._engine is None:
            raise RolloutError("the engine is closed: make a new one with from_pretrained")
        return self._engine

    def _check(self, request: Request) -> None:
        prompt, sampling = request.prompt_token_ids, request.sampling
        need = len(prompt) + sampling.max_tokens
        if need > self._max_length:
            raise RequestError(
                f"request {request.request_id!r} needs {len(prompt)} prompt + {sampling.max_tokens} completion tokens "
                f"= {need}: the model takes at most {self._max_length}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise RequestError(
                f"request {request.request_id!r} has prompt tokens from {min(prompt)} to {max(prompt)}: "
                f"the model knows 0 to {self._vocab_size - 1}"
            )
        low, high = _TEMPERATURES
        if sampling.temperature != 0 and not low <= sampling.temperature <= high:
            raise RequestError(
                f"request {request.request_id!r} has temperature {sampling.temperature}: "
                f"vLLM takes 0 (greedy) or {low} to {high}"
            )

    def _check_weights(self, new: dict[str, torch.Tensor]) -> None:
        unknown = sorted(new.keys() - self._shapes.keys() - ({_TIED_HEAD} if self._tied else set()))
        missing = sorted(self._shapes.keys() - new.keys())
        if unknown or missing:
            raise ValueError(
                f"weights do not match the model: unknown names {unknown[:3]}, missing names {missing[:3]}"
            )
        for name, shape in self._shapes.items():
            if new[name].shape != shape:
                raise ValueError(f"weight {name!r} has shape {tuple(new[name].shape)}: the model has {shape}")

    async def _drive(self) -> None:
        try:
            while self._waiting or self._running:
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)

    def _step(self) -> None:
        engine = self._open()
        self._admit(engine)
        # On CPU vLLM draws from torch's global generator at every step, even where each sample has a seed.
        with torch.random.fork_rng(devices=(), enabled=self._on_cpu):
            outputs = engine.step()
        for output in outputs:
            self._finish(cast("RequestOutput", output))

    def _admit(self, engine: "LLMEngine") -> None:
        """Hand waiting samples to vLLM while there is room."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            waiting = self._waiting[0]
            request, start = waiting.request, waiting.next_index
            stop = min(request.n, start + self._max_num_seqs - len(self._running))
            waiting.next_index = stop
            if stop == request.n:
                self._waiting.popleft()
            if start == 0:
                self._prompt_tokens += len(request.prompt_token_ids)
            prompt = _prompt(request, self._version)
            seeds = sample_seeds(request.seed, np.arange(start, stop))
            for index, seed in zip(range(start, stop), seeds.tolist(), strict=True):
                sample_id = str(next(self._sample_ids))
                self._running[sample_id] = (waiting.call, request, index)
                engine.add_request(sample_id, prompt, _sampling_params(request, seed, self._eos))

    def _finish(self, output: "RequestOutput") -> None:
        call, request, index = self._running.pop(output.request_id)
        sample = output.outputs[0]
        self._finished_tokens += len(sample.token_ids)
        if sample.finish_reason not in ("stop", "length"):
            reason = f"{sample.finish_reason}, {sample.stop_reason}"
            call.finished.put_nowait(RolloutError(f"vLLM gave up a sample of {request.request_id!r}: {reason}"))
            return
        assert sample.weight_versions is not None
        versions = [np.full(span.end - span.start, int(span.version), np.int32) for span in sample.weight_versions]
        call.finished.put_nowait(
            Completion(
                request_id=request.request_id,
                index=index,
                token_ids=np.array(sample.token_ids, np.int64),
                log_probs=np.array(cast("FlatLogprobs", sample.logprobs).logprobs, np.float32),
                weight_versions=np.concatenate(versions),
                finish_reason=sample.finish_reason,
            )
        )

    def _abandon(self, call: _Call) -> None:
        self._waiting = deque(w for w in self._waiting if w.call is not call)
        self._abort([sample_id for sample_id, (owner, _, _) in self._running.items() if owner is call])

    def _fail_all(self, error: Exception) -> None:
        calls = {w.call for w in self._waiting} | {call for call, _, _ in self._running.values()}
        self._waiting.clear()
        self._abort(list(self._running))
        for call in calls:
            call.finished.put_nowait(error)

    def _abort(self, sample_ids: list[str]) -> None:
        if self._engine is None or not sample_ids:
            return
        self._finished_tokens += self._tokens_sampled(sample_ids)
        self._engine.abort_request(sample_ids)
        for sample_id in sample_ids:
            del self._running[sample_id]

    def _tokens_sampled(self, sample_ids: Iterable[str]) -> int:
        """Tokens sampled so far by samples that are running."""
        if self._engine is None:
            return 0
        wanted = set(sample_ids)
        states = cast(Iterable[Any], self._engine.output_processor.request_states.values())
        return sum(s.detokenizer.num_output_tokens() for s in states if s.external_req_id in wanted)


def _prompt(request: Request, version: int) -> "TokensInput":
    from vllm.inputs.engine import tokens_input

    # vLLM cannot drop cached prefixes while samples run: the salt keeps those of other versions apart.
    return tokens_input(list(request.prompt_token_ids), cache_salt=str(version))


def _sampling_params(request: Request, seed: int, eos_token_ids: list[int]) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        # vLLM's generators take signed 64-bit seeds, and -1 for none.
        seed=seed >> 1,
        stop_token_ids=eos_token_ids,
        # Without a tokenizer vLLM knows no end-of-sequence token but these.
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _import_vllm() -> None:
    try:
        import vllm  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm") from error


def _set_environment() -> None:
    """What vLLM reads from the environment alone, before it is imported."""
    # The engine runs here, not in a child: new weights are handed over in memory, and steps follow our loop.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # No telemetry from somebody's training run.
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # Its notes on every start are not ours to print; a level that was asked for stays.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def _process_state_kept() -> Generator[None]:
    """Undo what starting vLLM does to the process and does not need afterwards."""
    numpy_state = np.random.get_state()
    random_state = random.getstate()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    was_frozen = gc.get_freeze_count() > 0
    # Children would inherit the preloaded libraries; a launcher's worker would take the world size for its own.
    names = ("LD_PRELOAD", "LD_LIBRARY_PATH", "LOCAL_WORLD_SIZE")
    variables = {name: os.environ.get(name) for name in names}
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
        if not was_frozen:
            gc.unfreeze()
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_head_size(config: "VllmConfig") -> None:
    """vLLM's CPU attention would refuse other sizes, but only at the first step."""
    model = config.model_config
    if config.device_config.device_type != "cpu" or model.use_mla:
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        raise UnsupportedModelError(f"head dimension is {model.get_head_size()}: vLLM on CPU takes {sizes}")


def _shut_down(engine: "LLMEngine", *, is_last: bool, made_process_group: bool) -> None:
    from vllm.distributed import parallel_state

    client: Any = engine.engine_core
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


def _repack_head(model: torch.nn.Module) -> None:
    """Pack a tied head's weight again: on CPU vLLM reloads the embedding and leaves the head's packed copy stale."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files: list[str] = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        raise UnsupportedModelError(f"{folder} has no model.safetensors and no model.safetensors.index.json")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as tensors:
            shapes.update((name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys())  # noqa: SIM118
    return shapes


def _eos_token_ids(folder: Path) -> list[int]:
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    eos: int | list[int] | None = generation.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])

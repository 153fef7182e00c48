"""The `vllm` engine: vLLM's scheduler and kernels, in this process and stepped by this event loop."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch

from gcore_rollout.calls import Call, WaitingLine, check_request, check_weights
from gcore_rollout.engine import EngineStats
from gcore_rollout.errors import RequestError, RolloutError, UnsupportedModelError
from gcore_rollout.sampling import sample_seeds
from gcore_rollout.types import Completion, Request
from gcore_rollout.vllm_process import (
    check_head_size,
    checkpoint_shapes,
    import_vllm,
    process_state_kept,
    repack_head,
    set_environment,
    shut_down,
)
from gcore_rollout.vllm_process import (
    eos_token_ids as declared_eos_token_ids,
)

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput, SamplingParams
    from vllm.config import VllmConfig
    from vllm.inputs.engine import TokensInput
    from vllm.logprobs import FlatLogprobs

_TIED_HEAD = "lm_head.weight"
# vLLM draws from a clamped or refused temperature outside these bounds.
_TEMPERATURES = (0.01, 2.0)
_CPU_KV_CACHE_BYTES = 1 << 30


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
        self._waiting = WaitingLine()
        self._running: dict[str, tuple[Call, Request, int]] = {}
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
        shapes = checkpoint_shapes(path)
        if eos_token_ids is None:
            eos_token_ids = declared_eos_token_ids(path)
        on_cpu = not torch.cuda.is_available()
        eager = on_cpu if enforce_eager is None else enforce_eager
        if kv_cache_memory_bytes is None and on_cpu:
            kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
        set_environment()
        # With compilation off while vLLM is imported, its `torch.compile`d helpers stay plain functions: on CPU the
        # first log-probs would wait 10 to 30 s for one of them.
        with process_state_kept(), torch._dynamo.config.patch(disable=on_cpu and eager):  # pyright: ignore[reportPrivateUsage]
            import_vllm()
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
            check_head_size(config)
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
            num_waiting=len(self._waiting),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`. Temperatures from 0.01 to 2, or 0, are accepted."""
        self._open()
        for request in requests:
            self._check(request)
        call = self._waiting.join(requests)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            async with aclosing(call.completions()) as completions:
                async for completion in completions:
                    yield completion
        finally:
            if call.abandoned:
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
        check_weights(self._shapes, new, optional=frozenset({_TIED_HEAD} if self._tied else ()))
        if self._tied:
            new.pop(_TIED_HEAD, None)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": new.items()})
        if self._tied and self._on_cpu:
            engine.apply_model(repack_head)
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
        shut_down(engine, is_last=is_last, made_process_group=VLLMEngine._made_process_group)
        if is_last:
            VLLMEngine._made_process_group = False
        del engine
        gc.collect()

    def _open(self) -> "LLMEngine":
        if self._engine is None:
            raise RolloutError("the engine is closed: make a new one with from_pretrained")
        return self._engine

    def _check(self, request: Request) -> None:
        check_request(request, max_length=self._max_length, vocab_size=self._vocab_size)
        sampling = request.sampling
        low, high = _TEMPERATURES
        if sampling.temperature != 0 and not low <= sampling.temperature <= high:
            raise RequestError(
                f"request {request.request_id!r} has temperature {sampling.temperature}: "
                f"vLLM takes 0 (greedy) or {low} to {high}"
            )

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
        for call, request, indices in self._waiting.admit(self._max_num_seqs - len(self._running)):
            if indices.start == 0:
                self._prompt_tokens += len(request.prompt_token_ids)
            prompt = _prompt(request, self._version)
            seeds = sample_seeds(request.seed, np.array(indices))
            for index, seed in zip(indices, seeds.tolist(), strict=True):
                sample_id = str(next(self._sample_ids))
                self._running[sample_id] = (call, request, index)
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

    def _abandon(self, call: Call) -> None:
        self._waiting.drop_abandoned()
        self._abort([sample_id for sample_id, (owner, _, _) in self._running.items() if owner is call])

    def _fail_all(self, error: Exception) -> None:
        calls = self._waiting.clear() | {call for call, _, _ in self._running.values()}
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

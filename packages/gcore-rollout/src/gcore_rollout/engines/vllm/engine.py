"""The `vllm` engine: vLLM's scheduler and kernels, in this process and on this event loop."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from gcore_rollout.engines.protocol import EngineStats, HeldWeights, Request
from gcore_rollout.engines.queueing import Control, InProcessEngine, Sample, SampleFilter, check_max_num_seqs
from gcore_rollout.engines.vllm import process, translation
from gcore_rollout.errors import MissingExtraError, RolloutError, UnsupportedModelError
from gcore_rollout.images.vision_processor import VisionProcessor

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CPU_KV_CACHE_BYTES = 1 << 30


class VLLMEngine(InProcessEngine):
    """Runs a model under vLLM, one device per engine.

    Samples enter vLLM in the order of calls, at most ``max_num_seqs`` at a time, each with a seed of its own. The same
    seed gives the same tokens as long as rounding does: vLLM's kernels may add in another order in another batch.
    A continued sample draws with a new generator, from a seed of its own, and repetitions are looked for in its new
    tokens alone.

    `sleep` frees keys, values and weights on a GPU, if the engine was made for it; on CPU under Linux, keys and values.

    Temperatures from 0.01 to 2, or 0, are accepted. Log-probs are of the distribution sampled from: temperature
    applied; greedy ones at temperature 1.

    A live engine has these effects on its process, besides memory: a default process group of world size 1, unless
    `torch.distributed` was initialised before (`close` takes it down again); vLLM's logging configuration and
    environment variables of its own; on CPU, `torch.accelerator.synchronize` and `empty_cache` as no-ops, and memory
    bound to its NUMA node. The generators of torch, numpy and `random`, the thread count and the garbage collector are
    left as they were.

    Args:
        config: vLLM's; use `from_pretrained`.
        shapes: names and shapes of the checkpoint's tensors, against which new weights are checked.
        vision: reads images for the model; None: it takes none.
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
        vision: VisionProcessor | None = None,
    ) -> None:
        from vllm import LLMEngine

        super().__init__(
            max_length=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            vision=vision,
        )
        group_existed = torch.distributed.is_initialized()
        self._engine: Any = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._engine.engine_core.set_weight_version("0")
        VLLMEngine._made_process_group |= not group_existed
        VLLMEngine._num_live += 1
        self._can_sleep = config.model_config.enable_sleep_mode
        self._on_cpu = config.device_config.device_type == "cpu"
        self._tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
        self._shapes = shapes
        self._eos = list(eos_token_ids)
        self._recompute_kv = recompute_kv
        self._running: dict[str, Sample] = {}
        self._sample_ids = count()

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
        enable_sleep_mode: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a local Hugging Face folder. The device is the first one visible to this process.

        Args:
            path: folder with ``config.json`` and safetensors weights; a tokenizer is needed where images are read.
            max_model_len: longest prompt + completion, in tokens; default: the model's.
            max_num_seqs: largest number of running samples.
            kv_cache_memory_bytes: default: 1 GiB on CPU, the free memory on a GPU.
            eos_token_ids: default: those of the model's generation config.
            enforce_eager: no compilation and no CUDA graphs; default: on CPU, where compiling costs more than it saves.
            recompute_kv: on `update_weights`, compute the keys and values of running samples again with the new
                weights. By default those computed before stay, as in the `hf` engine: no stall, and the log-probs
                are still those of the distribution sampled from.
            enable_sleep_mode: on a GPU, take memory in the way that `sleep` needs; on CPU `sleep` needs nothing.
            speculative_config: vLLM's setting of this name, such as ``{"method": "ngram", "num_speculative_tokens": 4,
                "prompt_lookup_max": 4}`` or ``{"method": "draft_model", "model": PATH, "num_speculative_tokens": 4}``.
                Samples are drawn from the same distribution and greedy ones are the same, but the same seed gives
                other samples than without. A draft model keeps its weights: the further the policy moves, the fewer
                guesses are right.

        Raises:
            MissingExtraError: vLLM is not installed.
            UnsupportedModelError: vLLM cannot run this architecture, or there are no safetensors.
        """
        path = Path(path)
        if speculative_config is not None:
            process.check_speculation(speculative_config)
        check_max_num_seqs(max_num_seqs)
        shapes = process.checkpoint_shapes(path)
        if eos_token_ids is None:
            eos_token_ids = process.eos_token_ids(path)
        vision = process.load_vision(path)
        on_cpu = not torch.cuda.is_available()
        eager = on_cpu if enforce_eager is None else enforce_eager
        if kv_cache_memory_bytes is None and on_cpu:
            kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
        process.set_environment()
        # With compilation off while vLLM is imported, its `torch.compile`d helpers stay plain functions: on CPU the
        # first log-probs would wait 10 to 30 s for one of them.
        with process.process_state_kept(), torch._dynamo.config.patch(disable=on_cpu and eager):  # pyright: ignore[reportPrivateUsage]
            try:
                from vllm import EngineArgs
            except ModuleNotFoundError as error:
                if error.name != "vllm":
                    raise
                raise MissingExtraError("vllm", "vllm") from error

            if speculative_config is not None and on_cpu:
                process.repair_rejection_sampler()
            args = EngineArgs(
                model=str(path),
                dtype=cast(Any, dtype),
                max_model_len=cast(Any, max_model_len),
                max_num_seqs=max_num_seqs,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                enforce_eager=eager,
                enable_sleep_mode=enable_sleep_mode and not on_cpu,
                speculative_config=None if speculative_config is None else dict(speculative_config),
                # vLLM is given processed images, but needs a tokenizer to start with a vision-language model.
                skip_tokenizer_init=vision is None,
                **({} if vision is None else translation.options_for_images(on_cpu=on_cpu)),
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
            process.check_head_size(config)
            return cls(config, shapes=shapes, eos_token_ids=eos_token_ids, recompute_kv=recompute_kv, vision=vision)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights; unknown or missing names and wrong shapes are refused before any copy.

        Running samples continue with the new weights, over keys and values of the old ones unless
        ``recompute_kv`` was set; samples that start later share no cached prefix with them.
        """
        self._check_update(version)
        engine = self._engine
        new = {name: tensor.detach() for name, tensor in weights}
        process.check_weights_and_head(self._shapes, new, is_tied=self._tied)
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": new.items()})
        if self._tied and self._on_cpu:
            engine.apply_model(process.repack_head)
        if self._vision is not None:
            # Drop the outputs of the old vision tower; reloading leaves the scheduler's entries of them.
            engine.reset_encoder_cache()
        self._version = version
        engine.engine_core.set_weight_version(str(version))
        if self._recompute_kv:
            engine.reset_prefix_cache(reset_running_requests=True)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights:
        """Digest the weights; of a mixture of experts, all but the experts."""
        self._check_open()
        read = partial(translation.held_tensors, shapes=self._shapes, is_tied=self._tied, names=names)
        (tensors,) = self._engine.apply_model(read)
        return HeldWeights(version=self._version, tensors=tensors)

    async def close(self) -> None:
        engine = self._engine
        if engine is None:
            return
        self._stop()
        self._engine = None
        VLLMEngine._num_live -= 1
        is_last = VLLMEngine._num_live == 0
        process.shut_down(engine, is_last=is_last, made_process_group=VLLMEngine._made_process_group)
        if is_last:
            VLLMEngine._made_process_group = False
        del engine
        gc.collect()

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        translation.check_temperature(request)

    def _num_running(self) -> int:
        return len(self._running)

    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(stats, completion_tokens=stats.completion_tokens + self._tokens_sampled(self._running))

    async def _control(self, name: Control) -> None:
        if name == "wake" and not self._on_cpu:
            self._engine.wake_up()
        elif name == "sleep" and self._on_cpu:
            # What is left of the cache is zeros: vLLM must not look for prefixes there.
            is_reset = self._engine.reset_prefix_cache()
            assert is_reset
            self._engine.collective_rpc(process.free_kv_cache)
        elif name == "sleep" and self._can_sleep:
            self._engine.sleep(level=1)
        elif name == "sleep":
            raise RolloutError("sleep needs an engine made with from_pretrained(..., enable_sleep_mode=True)")

    def _step(self) -> None:
        for group in self._admitted():
            prompt = translation.prompt_of(group[0], self._vision, version=self._version)
            for sample in group:
                if not sample.shares_prompt:
                    self._prompt_tokens += len(sample.start_token_ids)
                sample_id = str(next(self._sample_ids))
                self._running[sample_id] = sample
                self._engine.add_request(sample_id, prompt, translation.sampling_params(sample, self._eos))
        # On CPU vLLM draws from torch's global generator at every step, even where each sample has a seed.
        with torch.random.fork_rng(devices=(), enabled=self._on_cpu):
            outputs: list[Any] = self._engine.step()
        for output in outputs:
            sample, result = self._running.pop(output.request_id), output.outputs[0]
            self._completion_tokens += len(result.token_ids)
            if result.finish_reason in ("stop", "length", "repetition"):
                translation.finish(sample, result, result.finish_reason)
            else:
                reason = f"{result.finish_reason}, {result.stop_reason}"
                error = RolloutError(f"vLLM gave up a sample of {sample.request.request_id!r}: {reason}")
                sample.call.finished.put_nowait(error)

    def _remove_running(self, which: SampleFilter, *, as_aborted: bool) -> list[Sample]:
        removed = {sample_id: sample for sample_id, sample in self._running.items() if which(sample)}
        if not removed:
            return []
        self._completion_tokens += self._tokens_sampled(removed)
        if as_aborted:
            from vllm.v1.engine import FinishReason as VLLMFinishReason

            for state in self._states(removed):
                # vLLM itself makes this output when it aborts, but only for an asynchronous front end.
                output: Any = state.make_request_output(
                    new_token_ids=[], pooling_output=None, finish_reason=VLLMFinishReason.ABORT, stop_reason=None
                )
                translation.finish(removed[output.request_id], output.outputs[0], "abort")
        self._engine.abort_request(list(removed))
        for sample_id in removed:
            del self._running[sample_id]
        return list(removed.values())

    def _tokens_sampled(self, sample_ids: Mapping[str, Sample]) -> int:
        return sum(state.detokenizer.num_output_tokens() for state in self._states(sample_ids))

    def _states(self, sample_ids: Mapping[str, Sample]) -> list[Any]:
        # After `close` there are neither samples nor an engine.
        states = self._engine.output_processor.request_states.values() if sample_ids else ()
        return [state for state in states if state.external_req_id in sample_ids]

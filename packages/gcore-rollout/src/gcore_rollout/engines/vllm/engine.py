"""The `vllm` engine: vLLM's scheduler and kernels, in this process and on this event loop."""

import gc
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from gcore_rollout.engines import registry
from gcore_rollout.engines.protocol import Completion, EngineStats, Request
from gcore_rollout.engines.queueing import (
    Control,
    QueuedSample,
    QueueingEngine,
    SampleFilter,
    StopStrings,
    TokenLimits,
    check_max_num_seqs,
)
from gcore_rollout.engines.vllm import held_weights, options, process, ranks, translation
from gcore_rollout.engines.vllm.kept_tokens import record_kept_tokens
from gcore_rollout.engines.vllm.routed_experts import record_experts
from gcore_rollout.errors import EngineDiedError, EngineModelError, RolloutError, make_extra_error
from gcore_rollout.images.vision_processor import VisionProcessor
from gcore_rollout.weight_sync.digests import HeldWeights
from gcore_rollout.weight_sync.shared_weights import OpenedWeights, SharedWeights, gpu_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SLEEP_LEVELS: dict[Control, int] = {"sleep": 1, "discard": 2}
_WAKE_TAGS: dict[Control, list[str] | None] = {
    "wake": None,
    "wake_weights": ["weights"],
    "wake_cache": ["kv_cache"],
}


class VLLMEngine(QueueingEngine[Request, Completion]):
    """Runs a model under vLLM, on one device in this process, or on several, each with a process of vLLM's.

    Samples enter vLLM in the order of calls, at most ``max_num_seqs`` at a time, each with a seed of its own, unless
    ``seed_per_sample`` is off. The same seed gives the same tokens as long as rounding does: vLLM's kernels may add in
    another order in another batch. A continued sample draws with a new generator, from a seed of its own, and
    repetitions are looked for in its new tokens alone.

    Without seeds of their own, samples are drawn from one generator, which starts again with the seed of the first of
    the samples that enter together: the same samples come only from the same calls at the same times.

    `sleep` frees keys, values and weights on a GPU, if the engine was made for it; on CPU under Linux, keys and values,
    and the weights stay where they are. vLLM's own sleep frees nothing on CPU.

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

    Example:
        >>> def load(path: str) -> VLLMEngine:
        ...     return VLLMEngine.from_pretrained(path, max_model_len=4096, gpu_memory_utilization=0.5)
        >>> async def count_tokens(engine: VLLMEngine, request: Request) -> int:
        ...     return sum([completion.work async for completion in engine.generate([request])])
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
        seed_per_sample: bool | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        from vllm import LLMEngine

        super().__init__(max_num_seqs=config.scheduler_config.max_num_seqs)
        self._limits = TokenLimits(
            max_length=config.model_config.max_model_len,
            vocab_size=config.model_config.get_vocab_size(),
            vision=vision,
        )
        group_existed = torch.distributed.is_initialized()
        self._engine: Any = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self._engine.engine_core.set_weight_version("0")
        VLLMEngine._made_process_group |= not group_existed
        VLLMEngine._num_live += 1
        self._can_sleep = config.model_config.enable_sleep_mode
        self._on_cpu = on_cpu = config.device_config.device_type == "cpu"
        has_v2_runner = not on_cpu and config.use_v2_model_runner
        self._draws_by_sample = options.draws_by_sample(
            seed_per_sample, on_cpu=on_cpu, has_v2_runner=has_v2_runner
        )
        self._num_ranks = config.parallel_config.world_size
        self._has_ranks = self._num_ranks > 1
        self._bucket_memories = SharedWeights(), SharedWeights()
        if self._has_ranks:
            ranks.end_together(self._engine)
        # On CPU vLLM draws from torch's generator at every step, even where each sample has a seed.
        needs_generators = (on_cpu or not self._draws_by_sample) and not self._has_ranks
        self._generators = options.OwnGenerators(on_cpu=on_cpu) if needs_generators else None
        self._tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
        self._path = Path(config.model_config.model)
        self._shapes = shapes
        self._layout = process.fused_experts(self._path, shapes)
        self._eos = list(eos_token_ids)
        self._recompute_kv = recompute_kv
        self._finish = translation.finish
        self._needs_top_k = config.model_config.return_sampling_mask
        self._running: dict[str, QueuedSample] = {}
        self._sample_ids = count()
        self._num_checked: dict[str, int] = {}
        """New tokens of running samples in which no stop string ends."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        tensor_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_batched_tokens: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        enforce_eager: bool | None = None,
        async_scheduling: bool | None = None,
        seed_per_sample: bool | None = None,
        recompute_kv: bool = False,
        enable_sleep_mode: bool = False,
        return_routed_experts: bool = False,
        return_sampling_mask: bool = False,
        speculative_config: Mapping[str, Any] | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load a local Hugging Face folder. The devices are the first ones visible to this process.

        Args:
            path: folder with ``config.json`` and safetensors weights; a tokenizer is needed where images are read.
            max_model_len: longest prompt + completion, in tokens; default: the model's.
            max_num_seqs: largest number of running samples. Default: 256 on CPU, and 256 to 1,024 on a GPU, by the
                memory of keys and values; see `options.fit_num_seqs`.
            tensor_parallel_size: number of devices, of one machine, over which each layer is split. With several, each
                has a process of its own, which ends with this one; if one of them dies, so does the engine. On CPU, a
                device is an equal share of the cores.
            enable_expert_parallel: of a mixture of experts, give each of the devices whole experts.
            gpu_memory_utilization: share of a GPU's memory, in (0, 1], that weights, activations, keys and values take
                together; it must be free at the start. Default: vLLM's, 0.92.
            kv_cache_memory_bytes: memory of keys and values; default: 1 GiB on CPU, the rest of the share on a GPU.
            max_num_batched_tokens: most tokens computed in a step; longer prompts are cut in chunks on a GPU. Default:
                16,384 on a GPU of 70 GiB or more, 8,192 on others, 2,048 or the longest sequence on CPU.
            eos_token_ids: default: those of the model's generation config.
            enforce_eager: no compilation and no CUDA graphs; default: on CPU, where compiling costs more than it saves.
            async_scheduling: on a GPU, prepare a step while the one before it runs. `pause`, `sleep` and
                `update_weights` first take in the step that runs. Default: unless ``speculative_config`` has a method
                that guesses on the host, such as ngram.
            seed_per_sample: each sample has a seed of its own, which determines it up to rounding. Default: on CPU, and
                on a GPU where vLLM runs its second model runner; with the first one a step gets slower with each seed.
            recompute_kv: on `update_weights`, compute the keys and values of running samples again with the new
                weights. By default those computed before stay, as in the `hf` engine: no stall, and the log-probs
                are still those of the distribution sampled from.
            enable_sleep_mode: on a GPU, take memory in the way that `sleep` needs; on CPU `sleep` needs nothing.
            return_routed_experts: completions of a mixture of experts have `Completion.routed_experts`, also of tokens
                whose keys and values were cached. On a GPU that takes vLLM's second model runner; on CPU there must be
                no ``speculative_config``.
            return_sampling_mask: completions drawn by ``top_p`` or ``top_k`` have `Completion.kept_ids`. On a GPU that
                takes vLLM's second model runner, and every request that is not greedy needs a ``top_k``; greedy ones
                have log-probs of 0. On CPU there must be no ``speculative_config``.
            speculative_config: vLLM's setting of this name, such as ``{"method": "ngram", "num_speculative_tokens": 4,
                "prompt_lookup_max": 4}`` or ``{"method": "draft_model", "model": PATH, "num_speculative_tokens": 4}``.
                Samples are drawn from the same distribution and greedy ones are the same, but the same seed gives
                other samples than without. A draft model keeps its weights: the further the policy moves, the fewer
                guesses are right.
            engine_args: further fields of vLLM's ``EngineArgs``, such as ``{"quantization": "fp8"}``, which go over
                those that are set here; see `check_engine_options`.

        Raises:
            RolloutError: vLLM is not installed.
            EngineModelError: vLLM cannot run this architecture, there are no safetensors, or it cannot return experts.
        """
        path = Path(path)
        if speculative_config is not None:
            process.check_speculation(speculative_config)
        if max_num_seqs is not None:
            check_max_num_seqs(max_num_seqs)
        shapes = process.checkpoint_shapes(path)
        if eos_token_ids is None:
            eos_token_ids = registry.eos_token_ids(path)
        vision = process.load_vision(path)
        on_cpu = not torch.cuda.is_available()
        of_device = options.device_options(
            on_cpu=on_cpu,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            enable_sleep_mode=enable_sleep_mode,
        )
        is_eager: bool = of_device["enforce_eager"]
        process.set_environment()
        # With compilation off while vLLM is imported, its `torch.compile`d helpers stay plain functions: on CPU the
        # first log-probs would wait 10 to 30 s for one of them.
        with (
            process.keep_process_state(),
            process.compilation(is_off=on_cpu and is_eager),
            process.collections(is_off=on_cpu),
        ):
            try:
                from vllm import EngineArgs
            except ModuleNotFoundError as error:
                if error.name != "vllm":
                    raise
                raise make_extra_error("vllm", "vllm") from error

            of_ranks = ranks.rank_options(
                on_cpu=on_cpu,
                tensor_parallel_size=tensor_parallel_size,
                enable_expert_parallel=enable_expert_parallel,
            )
            if speculative_config is not None and on_cpu:
                if return_sampling_mask:
                    raise EngineModelError(
                        "return_sampling_mask is True; expected False with a speculative_config on CPU"
                    )
                process.repair_rejection_sampler()
            arguments: dict[str, Any] = {
                "model": str(path),
                "dtype": dtype,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs or options.LEAST_NUM_SEQS,
                "speculative_config": speculative_config and dict(speculative_config),
                # vLLM is given processed images, but needs a tokenizer to start with a vision-language model.
                "skip_tokenizer_init": vision is None,
                # The model's own generation config may hold top-k, top-p or penalties.
                "generation_config": "vllm",
                "logprobs_mode": "processed_logprobs",
                "enable_return_routed_experts": return_routed_experts and not on_cpu,
                "return_sampling_mask": return_sampling_mask and not on_cpu,
            }
            if vision is not None:
                arguments |= translation.options_for_images(on_cpu=on_cpu)
            arguments |= of_device
            arguments |= of_ranks
            arguments |= engine_args or {}
            if not options.rounds_logits(shapes, dtype, on_cpu=on_cpu):
                overrides = arguments.get("hf_overrides") or {}
                arguments["hf_overrides"] = {"head_dtype": "float32", **overrides}
            args = EngineArgs(**arguments)
            try:
                if max_num_seqs is None and not on_cpu:
                    num_values = sum(map(math.prod, shapes.values()))
                    args.max_num_seqs = options.fit_num_seqs(
                        args,
                        weight_bytes=num_values * dtype.itemsize,
                        memory_bytes=torch.cuda.get_device_properties(0).total_memory,
                    )
                config = args.create_engine_config(options.usage_context(on_cpu=on_cpu))
            except ValueError as error:
                if "architectures" not in str(error):
                    raise
                raise EngineModelError(f"vLLM cannot run {path}: {error}") from error
            process.check_head_size(config)
            if return_routed_experts and (
                not config.model_config.is_moe or (on_cpu and speculative_config)
            ):
                raise EngineModelError(
                    f"return_routed_experts is True; expected False for {path}: it takes a mixture of experts and, on "
                    "CPU, no speculative_config"
                )
            engine = cls(
                config,
                shapes=shapes,
                eos_token_ids=eos_token_ids,
                recompute_kv=recompute_kv,
                seed_per_sample=seed_per_sample,
                vision=vision,
            )
            if return_routed_experts:
                layers = record_experts(engine._engine, on_cpu=on_cpu)
                engine._finish = partial(translation.finish, layers=layers)
            if return_sampling_mask and on_cpu:
                record_kept_tokens(engine._engine)
        engine._limits.stop_strings = StopStrings(path)
        return engine

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Replace the weights; unknown or missing names and wrong shapes are refused before any copy.

        Running samples continue with the new weights, over keys and values of the old ones unless
        ``recompute_kv`` was set; samples that start later share no cached prefix with them.
        """
        self._check_update(version)
        engine = self._engine
        # A step in flight would be labelled with the new version.
        self._settle()
        publish = partial(process.publish_weights, self._path, self._shapes, is_tied=self._tied)
        new = publish(weights=weights)
        with self._noting_deaths():
            if self._on_cpu:
                engine.apply_model(process.forget_expert_kernels)
            if self._has_ranks and isinstance(weights, OpenedWeights):
                take = partial(ranks.take_shared, handles=weights.handles, publish=publish)
                engine.collective_rpc(take)
            elif self._has_ranks:
                ranks.send_weights(engine, new, self._bucket_memories)
            else:
                engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(new)})
            if self._tied and self._on_cpu:
                engine.apply_model(process.repack_head)
        if self._limits.vision is not None:
            # Drop the outputs of the old vision tower; reloading leaves the scheduler's entries of them.
            engine.reset_encoder_cache()
        self._has_taken(version)
        engine.engine_core.set_weight_version(str(version))
        if self._recompute_kv:
            engine.reset_prefix_cache(reset_running_requests=True)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights:
        """Digest the weights; experts under the names of transformers, if vLLM's kernels keep them as they were loaded.

        On CPU they are unpacked. The layouts of FlashInfer's and AITER's kernels are left out.
        """
        self._check_open()
        shapes, experts = self._layout
        read = partial(
            held_weights.held_tensors,
            shapes=shapes,
            experts=experts,
            is_tied=self._tied,
            names=names,
        )
        # All ranks return the same.
        with self._noting_deaths():
            tensors = self._engine.apply_model(read)[0]
        return HeldWeights(version=self._version, tensors=tensors)

    async def close(self) -> None:
        engine = self._engine
        if engine is None:
            return
        self._stop()
        self._engine = None
        for memory in self._bucket_memories:
            memory.close()
        VLLMEngine._num_live -= 1
        is_last = VLLMEngine._num_live == 0
        with process.collections(is_off=self._on_cpu):
            process.shut_down(
                engine, is_last=is_last, made_process_group=VLLMEngine._made_process_group
            )
        if is_last:
            VLLMEngine._made_process_group = False
        del engine
        gc.collect()

    def _check_request(self, request: Request) -> None:
        self._limits.check(request)
        translation.check_temperature(request)

    @property
    def weights_gpu(self) -> str | None:
        """The UUID of the GPU that the weights are on, of ranks the first one's if all can read its memory; or None."""
        if self._on_cpu:
            return None
        device = torch.cuda.current_device()
        for other in range(1, self._num_ranks):
            if not torch.cuda.can_device_access_peer(other, device):
                return None
        return gpu_of(torch.device("cuda", device))

    def _num_running(self) -> int:
        return len(self._running)

    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(
            stats, completion_tokens=stats.completion_tokens + self._tokens_sampled(self._running)
        )

    async def _control(self, name: Control) -> None:
        with self._noting_deaths():
            self._apply_control(name)

    def _apply_control(self, name: Control) -> None:
        if name in ("pause", *_SLEEP_LEVELS):
            self._settle()
        if name in _WAKE_TAGS:
            if not self._on_cpu:
                self._engine.wake_up(_WAKE_TAGS[name])
        elif name in _SLEEP_LEVELS and self._on_cpu:
            # What is left of the cache is zeros: vLLM must not look for prefixes there.
            is_reset = self._engine.reset_prefix_cache()
            assert is_reset
            self._engine.collective_rpc(process.free_kv_cache)
        elif name in _SLEEP_LEVELS and self._can_sleep:
            self._engine.sleep(level=_SLEEP_LEVELS[name])
        elif name in _SLEEP_LEVELS:
            raise RolloutError(
                "sleep needs an engine made with from_pretrained(..., enable_sleep_mode=True)"
            )

    def _step(self) -> None:
        admitted = self._pop_groups()
        for group in admitted:
            prompt = translation.prompt_of(group[0], self._limits.vision, version=self._version)
            for sample in group:
                if not sample.shares_prompt:
                    self._prompt_tokens += len(sample.start_token_ids)
                sample_id = str(next(self._sample_ids))
                self._running[sample_id] = sample
                settings = translation.sampling_params(
                    sample,
                    self._eos,
                    has_seed=self._draws_by_sample,
                    needs_top_k=self._needs_top_k,
                )
                self._engine.add_request(sample_id, prompt, settings)
        seed: int | None = None
        if admitted and not self._draws_by_sample:
            seed = admitted[0][0].generator_seed
        with (
            self._noting_deaths(),
            self._generators.in_use(seed) if self._generators else nullcontext(),
        ):
            if self._has_ranks and seed is not None:
                self._engine.collective_rpc(ranks.seed_generators, args=(seed,))
            outputs: list[Any] = self._engine.step()
        self._take_in(outputs)
        self._end_at_stop_strings()

    @contextmanager
    def _noting_deaths(self) -> Generator[None]:
        """Make an `EngineDiedError` of an error inside the block that comes from the death of a rank."""
        try:
            yield
        except Exception as error:
            if self._has_ranks:
                reason = ranks.failure_of(self._engine)
                if reason is not None:
                    raise EngineDiedError(reason) from error
            raise

    def _take_in(self, outputs: Sequence[Any]) -> None:
        """Hand over the samples that a step has finished."""
        for output in outputs:
            sample = self._running.pop(output.request_id)
            result = output.outputs[0]
            self._completion_tokens += len(result.token_ids)
            end = self._find_end(sample, result.token_ids)
            if end is not None:
                self._finish(sample, result, "stop", num_tokens=end)
            elif result.finish_reason in ("stop", "length", "repetition"):
                self._finish(sample, result, result.finish_reason)
            else:
                reason = f"{result.finish_reason}, {result.stop_reason}"
                error = RolloutError(
                    f"vLLM gave up a sample of {sample.request.request_id!r}: {reason}"
                )
                sample.call.finished.put_nowait(error)

    def _find_end(
        self, sample: QueuedSample, token_ids: Sequence[int], num_checked: int = 0
    ) -> int | None:
        """Return how many new tokens a sample has up to a stop string; None: it has none."""
        before = [sample.prefix.token_ids, token_ids[:num_checked]]
        end = self._limits.stop_strings.find_end(
            token_ids[num_checked:], sample.request.sampling.stop, before=before
        )
        if end is None:
            return None
        return num_checked + end

    def _end_at_stop_strings(self) -> None:
        """End the running samples whose text has a stop string."""
        watched = {
            sample_id: sample
            for sample_id, sample in self._running.items()
            if sample.request.sampling.stop
        }
        ended: list[str] = []
        for state in self._states(watched):
            sample_id: str = state.external_req_id
            sample = watched[sample_id]
            token_ids = state.detokenizer.output_token_ids
            num_checked = self._num_checked.get(sample_id, 0)
            self._num_checked[sample_id] = len(token_ids)
            end = self._find_end(sample, token_ids, num_checked)
            if end is not None:
                self._completion_tokens += len(token_ids)
                self._finish(sample, self._output_so_far(state), "stop", num_tokens=end)
                ended.append(sample_id)
        if ended:
            self._engine.abort_request(ended)
        for sample_id in ended:
            del self._running[sample_id]
        self._num_checked = {
            name: count for name, count in self._num_checked.items() if name in self._running
        }

    def _settle(self) -> None:
        """Take in the steps in flight, where steps overlap, without starting another."""
        core: Any = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        from vllm.v1.core.sched.interface import PauseState

        # It is paused already while keys and values are asleep.
        before: PauseState = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            # Meanwhile steps are of no tokens.
            while any(step.total_num_scheduled_tokens for _, step, _ in core.batch_queue):
                self._take_in(self._engine.step())
        finally:
            core.scheduler.set_pause_state(before)

    def _remove_running(self, which: SampleFilter, *, as_aborted: bool) -> list[QueuedSample]:
        removed = {
            sample_id: sample for sample_id, sample in self._running.items() if which(sample)
        }
        if not removed:
            return []
        self._completion_tokens += self._tokens_sampled(removed)
        if as_aborted:
            for state in self._states(removed):
                self._finish(removed[state.external_req_id], self._output_so_far(state), "abort")
        self._engine.abort_request(list(removed))
        for sample_id in removed:
            del self._running[sample_id]
        return list(removed.values())

    def _output_so_far(self, state: Any) -> Any:
        """Return the tokens of a running sample as vLLM does when it aborts, but only for an asynchronous front end."""
        from vllm.v1.engine import FinishReason as VLLMFinishReason

        output: Any = state.make_request_output(
            new_token_ids=[],
            pooling_output=None,
            finish_reason=VLLMFinishReason.ABORT,
            stop_reason=None,
        )
        return output.outputs[0]

    def _tokens_sampled(self, sample_ids: Mapping[str, QueuedSample]) -> int:
        return sum(state.detokenizer.num_output_tokens() for state in self._states(sample_ids))

    def _states(self, sample_ids: Mapping[str, QueuedSample]) -> list[Any]:
        if not sample_ids:
            # After `close` there are neither samples nor an engine.
            return []
        states = self._engine.output_processor.request_states.values()
        return [state for state in states if state.external_req_id in sample_ids]

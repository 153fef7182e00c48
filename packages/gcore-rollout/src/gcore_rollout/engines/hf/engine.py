"""The `hf` engine: any transformers causal LM, continuously batched over key-value slots, in this process.

It runs the vision-language models of `VISION_MODELS`. Shapes as in `decoding`.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines import registry
from gcore_rollout.engines.hf import decoding
from gcore_rollout.engines.hf.decoding import (
    Decode,
    DecodeMode,
    MemoryPlan,
    Prefill,
    SlotCache,
    fused_attention,
    pack,
    round_up,
    to_device,
)
from gcore_rollout.engines.hf.vision import embed_images
from gcore_rollout.engines.host_weights import HostWeights
from gcore_rollout.engines.kept_tokens import list_kept
from gcore_rollout.engines.protocol import Completion, FinishReason, Request, SamplingParams
from gcore_rollout.engines.queueing import (
    Control,
    QueuedSample,
    QueueingEngine,
    SampleFilter,
    StopStrings,
    TokenLimits,
    sample_seeds,
    uniforms,
)
from gcore_rollout.engines.repetition import extend_runs, is_repetitive, runs_at_end
from gcore_rollout.images.vision_processor import VisionProcessor, checkpoint_name
from gcore_rollout.weight_sync.digests import HeldWeights, digest_held_tensor
from gcore_rollout.weight_sync.layout import iterate_checked
from gcore_rollout.weight_sync.shared_weights import gpu_of

ALL_TOKENS = 2**31 - 1
"""Top-k of samples that are drawn from all tokens."""


class SampleRows:
    """State of the running samples, slot i in row i, so that the bookkeeping of a step is a few vector operations."""

    def __init__(self, num_rows: int) -> None:
        self.samples: list[QueuedSample] = []
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperatures = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.full(num_rows, ALL_TOKENS, np.int64)
        (
            self.prompt_lengths,
            self.num_sampled,
            self.max_tokens,
            self.last_tokens,
            self.rope_offsets,
        ) = np.zeros((5, num_rows), np.int64)
        self.tokens = np.zeros((num_rows, 0), np.int64)
        self.log_probs = np.zeros((num_rows, 0), np.float32)
        self.versions = np.zeros((num_rows, 0), np.int32)
        # Least and largest size of a pattern, and how often it must come; 0: repetitions are not looked for.
        self.patterns = np.zeros((num_rows, 3), np.int64)
        self.runs = np.zeros((num_rows, 0), np.int64)
        self.has_stop = np.zeros(num_rows, bool)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, group: list[QueuedSample]) -> None:
        """Put samples of one request that start from the same tokens into the next rows."""
        sampling = group[0].request.sampling
        prefix_length = group[0].prefix_length
        detection = sampling.repetition_detection
        pattern = (0, 0, 0)
        if detection is not None:
            self._add_columns("runs", detection.max_pattern_size)
            pattern = (detection.min_pattern_size, detection.max_pattern_size, detection.min_count)
        for name in ("tokens", "log_probs", "versions"):
            self._add_columns(name, sampling.max_tokens)

        slots = slice(len(self), len(self) + len(group))
        self.samples.extend(group)
        indices = np.array([sample.index for sample in group])
        self.seeds[slots] = sample_seeds(group[0].request.seed, indices)
        self.temperatures[slots] = sampling.temperature
        self.top_p[slots] = sampling.top_p if sampling.truncates else 1
        self.top_k[slots] = ALL_TOKENS
        if sampling.truncates and sampling.top_k > 0:
            self.top_k[slots] = sampling.top_k
        self.prompt_lengths[slots] = len(group[0].request.prompt_token_ids)
        self.num_sampled[slots] = prefix_length
        self.max_tokens[slots] = sampling.max_tokens
        self.rope_offsets[slots] = 0
        self.patterns[slots] = pattern
        self.runs[slots] = 0
        self.has_stop[slots] = bool(sampling.stop)
        if prefix_length:
            prefix = group[0].prefix.token_ids
            self.tokens[slots, :prefix_length] = prefix
            self.runs[slots] = runs_at_end(prefix, self.runs.shape[1])

    @property
    def truncates(self) -> bool:
        """True if a running sample is drawn by top-p or top-k."""
        live = slice(len(self))
        return bool((self.top_p[live] < 1).any() or (self.top_k[live] < ALL_TOKENS).any())

    def move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copy rows ``src`` to rows ``dst``, both of shape [M]."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[dst] = array[src]
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            self.samples[d] = self.samples[s]

    def _add_columns(self, name: str, num_columns: int) -> None:
        """Append zeros to an array until it has so many columns."""
        array = getattr(self, name)
        num_missing = num_columns - array.shape[1]
        if num_missing > 0:
            setattr(self, name, np.pad(array, ((0, 0), (0, num_missing))))


class HFEngine(QueueingEngine[Request, Completion]):
    """Runs a transformers causal LM and samples from it; made by `from_pretrained`.

    One decode step computes exactly one token for each live sample: prompts are prefilled without padding and once for
    all samples of a request, the slot of a finished sample is filled by the last live one, and waiting requests are
    admitted between steps. Steps run on the event loop, so the batches depend only on the order of calls.

    A continued sample draws the tokens that it would have drawn without the abort. `sleep` drops keys and values, frees
    weights that need not be kept, and moves others from a GPU to the host's memory.

    Example:
        >>> import asyncio
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> engine = HFEngine.from_pretrained("model", max_num_seqs=4)
        >>> prompt = tuple(tokenizer.encode("1 + 2 ="))
        >>> request = Request(request_id="sum", prompt_token_ids=prompt, n=2, sampling=SamplingParams(max_tokens=3))
        >>> async def main() -> list[tuple[int, ...]]:
        ...     shapes = [completion.log_probs.shape async for completion in engine.generate([request])]
        ...     await engine.close()
        ...     return shapes
        >>> asyncio.run(main())
        [(3,), (3,)]
    """

    _LENGTH_STEP = 64  # Space for keys and values grows by as many tokens.
    _planned_length = 0  # Longest prompt and completion that memory is planned for; 0: unknown.
    _MAX_UNRECORDED = 0  # Tokens of a sample that may have been computed and not been recorded.

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        max_num_seqs: int,
        vision: VisionProcessor | None = None,
    ) -> None:
        text_config: Any = model.config.get_text_config()
        super().__init__(max_num_seqs=max_num_seqs)
        self._limits = TokenLimits(
            max_length=decoding.longest_sequence(text_config),
            vocab_size=model.get_input_embeddings().num_embeddings,
            vision=vision,
        )
        self._model = model.eval().requires_grad_(False)
        self._device: torch.device = model.device
        self._eos = np.asarray(eos_token_ids, dtype=np.int64)
        self._cache = SlotCache(num_layers=text_config.num_hidden_layers)
        self._rows = SampleRows(max_num_seqs)
        self._chosen: list[torch.Tensor] = []
        """[T, K] experts that each router chose in the last pass, if they are recorded."""
        self._experts: WeakKeyDictionary[QueuedSample, list[Any]] = WeakKeyDictionary()
        """[T, L, K] of the tokens of running samples, in parts."""
        self._returns_kept = False
        self._kept: WeakKeyDictionary[QueuedSample, list[NDArray[np.int32]]] = WeakKeyDictionary()
        """The tokens among which each new token of a running sample was drawn, if they are returned."""
        self._hub_names: dict[str, str] = {}
        if vision is not None:
            # transformers has names of its own for parameters of these models.
            self._hub_names = {name: checkpoint_name(model, name) for name in model.state_dict()}
        first = {
            id(parameter): self._published_name(name)
            for name, parameter in model.named_parameters()
        }
        # The first name of each parameter by all of its names: a tied head is the embedding.
        parameters = model.named_parameters(remove_duplicate=False)
        self._sources: dict[str, str] = {
            self._published_name(name): first[id(p)] for name, p in parameters
        }
        self._parameters: dict[str, torch.Tensor] = {
            self._published_name(name): tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
        }
        # Whether the parameters are memory of the caller, which must not be written to.
        self._is_borrowing = False
        self._hosted = HostWeights([self._model], self._device)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        eos_token_ids: Sequence[int] | None = None,
        decode_mode: DecodeMode = "auto",
        kv_cache_bytes: int | None = None,
        return_routed_experts: bool = False,
        return_sampling_mask: bool = False,
    ) -> Self:
        """Load a local Hugging Face folder.

        Args:
            path: folder with ``config.json`` and weights.
            max_model_len: longest prompt + completion that must be computed, in tokens; default: any.
            eos_token_ids: default: those of the model's generation config.
            decode_mode: auto: ``dynamic`` on CPU and for vision-language models; otherwise ``cuda_graphs`` or, if the
                model's steps cannot be recorded, ``static``.
            kv_cache_bytes: memory for keys and values: fewer than ``max_num_seqs`` samples run at once if they would
                take more at ``max_model_len`` tokens each, and longer requests are refused. Default: no limit.
            return_routed_experts: completions have `Completion.routed_experts`; ``decode_mode`` is ``dynamic`` then.
            return_sampling_mask: those drawn by ``top_p`` or ``top_k`` have `Completion.kept_ids`; likewise.

        Raises:
            ValueError: ``kv_cache_bytes`` is too little for one sample, or the model cannot be run in ``decode_mode``.
            EngineModelError: the architecture does not call transformers' attention interface, its logits in the
                engine differ from those of transformers, it computes ``max_model_len`` tokens differently than fewer
                (rope_type ``longrope``), it reads images and the folder has no image processor, or it has no routers
                whose choice could be returned.
        """
        model, vision = decoding.load_model(path, dtype=dtype, max_model_len=max_model_len)
        if eos_token_ids is None:
            eos_token_ids = registry.eos_token_ids(Path(path))
        model = model.to(device)
        make: Any = cls
        if decode_mode not in ("auto", "dynamic") or model.device.type == "cuda":
            # By name, because that module has subclasses of this one.
            make = resolve_name("gcore_rollout.engines.hf.static_engine:engine_of_mode")
            is_dynamic = return_routed_experts or return_sampling_mask or vision is not None
            make = make(decode_mode, model, is_dynamic=is_dynamic)
        engine = make(model, eos_token_ids=eos_token_ids, max_num_seqs=max_num_seqs, vision=vision)
        decoding.check_logits(
            model,
            engine._logits_of,
            max_length=engine._limits.max_length,
            max_num_seqs=max_num_seqs,
        )
        if return_routed_experts:
            decoding.record_experts(model, engine._chosen)
        engine._returns_kept = return_sampling_mask
        engine._limits.stop_strings = StopStrings(path)
        engine._planned_length = min(max_model_len or 0, engine._limits.max_length)
        if kv_cache_bytes is not None:
            engine._max_num_seqs = engine.memory_plan.limited_to(kv_cache_bytes).num_slots
            engine._limits.max_length = engine._planned_length or engine._limits.max_length
        return engine

    @property
    def weights_gpu(self) -> str | None:
        """The UUID of the GPU that the weights are on; None: they are on none."""
        return gpu_of(self._device)

    @property
    def memory_plan(self) -> MemoryPlan:
        """The most memory that keys and values may take."""
        length = round_up(self._planned_length or self._limits.max_length, self._LENGTH_STEP)
        return MemoryPlan(
            num_slots=self._max_num_seqs,
            slot_length=length,
            bytes_per_token=self._cache.bytes_per_token,
        )

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Replace the weights; unknown or missing names and wrong shapes are refused before any copy.

        Where `sleep` has dropped the old ones, tensors are copied as they come, so that the new ones need not be in
        memory together.
        """
        for name, tensor in self._checked_weights(weights, version, at_once=self._has_weights):
            parameter = self._parameters[name]
            if self._is_borrowing:
                parameter.data = torch.empty_like(parameter)
            parameter.data.copy_(tensor, non_blocking=True)
        self._is_borrowing = False
        self._has_taken(version)
        if self._device.type == "cuda":
            # The caller may change its tensors from here on.
            torch.cuda.synchronize(self._device)

    async def update_weights_in_place(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> bool:
        """Update the weights, copying only tensors on another device or of another type.

        Returns:
            Whether the tensors are in use from now on: they must not change until the next update is done.
        """
        new = dict(self._checked_weights(weights, version, at_once=True))
        for name, tensor in new.items():
            parameter = self._parameters[name]
            if tensor.device != parameter.device or tensor.dtype != parameter.dtype:
                await self.update_weights(new.items(), version=version)
                return False
        for name, tensor in new.items():
            self._parameters[name].data = tensor.detach()
        self._is_borrowing = True
        self._has_taken(version)
        return True

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights:
        self._check_open()
        if names is None:
            names = list(self._sources)
        tensors = [
            digest_held_tensor(n, self._parameters[n].detach, source=self._sources[n])
            for n in names
        ]
        return HeldWeights(version=self._version, tensors=tensors)

    def _checked_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, at_once: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_update(version)
        return iterate_checked(self._parameters, weights, at_once=at_once)

    async def close(self) -> None:
        self._stop()
        self._rows = SampleRows(0)
        self._drop_cache()

    def _published_name(self, name: str) -> str:
        return self._hub_names.get(name, name)

    def _check_request(self, request: Request) -> None:
        self._limits.check(request)

    def _num_running(self) -> int:
        return len(self._rows)

    async def _control(self, name: Control) -> None:
        if name in ("wake", "wake_weights"):
            self._hosted.onload()
        elif name in ("sleep", "discard"):
            self._drop_cache()
            if name == "discard":
                self._hosted.drop()
                self._is_borrowing = False
            elif self._device.type != "cpu":
                self._hosted.offload(self._version)
            if self._device.type != "cpu":
                torch.accelerator.empty_cache()

    def _drop_cache(self) -> None:
        self._cache.clear()

    @torch.inference_mode()
    def _step(self) -> None:
        num_old = len(self._rows)
        prefill_logits = self._admit()
        logits: list[torch.Tensor] = []
        if num_old:
            logits.append(self._logits_after_tokens(num_old))
        if prefill_logits is not None:
            logits.append(prefill_logits)
        if logits:
            self._release(self._sample(torch.cat(logits) if len(logits) > 1 else logits[0]))

    def _logits_of(
        self, prompts: Sequence[Sequence[int]], next_tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return logits [P, V] after prompts and after one more token of each; the engine must be idle."""
        two = SamplingParams(max_tokens=2)
        requests = [
            Request(request_id=str(i), prompt_token_ids=tuple(p), sampling=two)
            for i, p in enumerate(prompts)
        ]
        self._enqueue(requests)
        try:
            after_prompts = self._admit()
            assert after_prompts is not None
            self._rows.last_tokens[: len(prompts)] = next_tokens
            self._rows.num_sampled[: len(prompts)] = 1
            return [after_prompts, self._logits_after_tokens(len(prompts))]
        finally:
            self._rows = SampleRows(self._max_num_seqs)
            self._drop_cache()
            self._prompt_tokens = 0

    def _admit(self) -> torch.Tensor | None:
        """Prefill waiting samples into free slots, and return their logits [M, V] in slot order."""
        rows = self._rows
        first = len(rows)
        groups = self._pop_groups()
        if not groups:
            return None
        for group in groups:
            rows.add(group)
        self._reserve(int((rows.prompt_lengths + rows.max_tokens)[first : len(rows)].max()))
        return self._prefill(groups, first)

    def _reserve(self, length: int) -> None:
        """Allocate space for ``length`` tokens of each sample."""
        num_slots = min(round_up(len(self._rows), 64), self._max_num_seqs)
        self._cache.reserve(
            num_slots, min(round_up(length, self._LENGTH_STEP), self._limits.max_length)
        )

    def _prefill(self, groups: Sequence[list[QueuedSample]], first: int) -> torch.Tensor:
        """Return logits [M, V] of the slots from ``first`` on; the samples of a group have one prompt."""
        samples = [group[0] for group in groups]
        tokens, positions, padded_index, ends, longest = pack(
            [sample.start_token_ids for sample in samples]
        )
        self._prompt_tokens += int(ends[-1])
        slot_prompts = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        slots = np.arange(first, first + len(slot_prompts))
        which = self._tensor(slot_prompts)
        inputs: dict[str, Any] = {"input_ids": self._tensor(tokens)[None]}
        blocks: Sequence[tuple[int, int, int]] = ()
        if self._limits.vision is not None and any(sample.request.images for sample in samples):
            embedded = embed_images(self._model, self._limits.vision, samples, tokens, positions)
            self._rows.rope_offsets[slots] = embedded.offsets[slot_prompts]
            inputs = embedded.inputs
            positions = embedded.positions
            blocks = embedded.blocks
        plan = Prefill(
            cache=self._cache,
            num_prompts=len(samples),
            max_length=longest,
            slots=self._tensor(slots),
            prompts=which,
            padded_index=self._tensor(padded_index),
            blocks=blocks,
        )
        keep = self._tensor(ends - 1)
        logits = self._forward(positions, plan, keep=keep, **inputs)
        self._keep_experts(groups, ends)
        return logits[which]

    def _logits_after_tokens(self, batch: int) -> torch.Tensor:
        """Return logits [B, V] after the last sampled token of each of the first ``batch`` slots."""
        rows = self._rows
        positions = rows.prompt_lengths[:batch] + rows.num_sampled[:batch] - 1
        length = int(positions.max()) + 1
        plan = Decode.at(self._tensor(positions), self._cache, length, dtype=self._model.dtype)
        tokens = self._tensor(rows.last_tokens[:batch])[None]
        logits = self._forward(
            positions + rows.rope_offsets[:batch], plan, keep=0, input_ids=tokens
        )
        self._keep_experts(zip(rows.samples[:batch]), np.arange(1, batch + 1))
        return logits

    def _keep_experts(
        self, groups: Iterable[Sequence[QueuedSample]], ends: NDArray[np.int64]
    ) -> None:
        """Keep the experts of the last pass, if they are recorded, by samples; ``ends`` are of each group's tokens."""
        if not self._chosen:
            return
        experts_TLK = torch.stack(self._chosen, dim=1).cpu().numpy()
        self._chosen.clear()
        for group, experts in zip(groups, np.split(experts_TLK, ends[:-1]), strict=True):
            for sample in group:
                self._experts.setdefault(sample, []).append(experts)

    def _forward(
        self,
        positions: NDArray[np.int64],
        plan: Prefill | Decode,
        *,
        keep: torch.Tensor | int,
        **inputs: Any,
    ) -> torch.Tensor:
        """Return logits [K, V] of the tokens to keep, from rotary positions [T], or [3, T] with three axes."""
        position_ids = self._tensor(positions).unsqueeze(-2)  # A row is a batch of one.
        inputs |= {"position_ids": position_ids, "use_cache": False, "slots": plan}
        with fused_attention(self._device):
            if self._limits.vision is None:
                return self._model(logits_to_keep=keep, **inputs).logits[0]
            # Models that read images do not pass all inputs on to their decoder.
            hidden_TD = self._model.get_decoder()(**inputs).last_hidden_state[0]
            if isinstance(keep, torch.Tensor):
                hidden_TD = hidden_TD[keep]
            return self._model.get_output_embeddings()(hidden_TD)

    def _sample(self, logits_BV: torch.Tensor) -> NDArray[np.int64]:
        """Draw a token of every sample, and return the slots of those that ended with it."""
        rows = self._rows
        batch = len(rows)
        u = uniforms(rows.seeds[:batch], rows.num_sampled[:batch])
        truncation = [rows.top_p[:batch], rows.top_k[:batch]] if rows.truncates else []
        temperatures = rows.temperatures[:batch]
        tokens_B, log_probs_B, log_probs_BV = decoding.sample_tokens(
            logits_BV, temperatures, u, truncation=truncation
        )
        if truncation and self._returns_kept:
            for sample, ids in zip(rows.samples, list_kept(log_probs_BV), strict=True):
                if sample.request.sampling.truncates:
                    self._kept.setdefault(sample, []).append(ids)
        ended = self._record(np.arange(batch), tokens_B.cpu().numpy(), log_probs_B.cpu().numpy())
        return np.flatnonzero(ended)

    def _record(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], log_probs: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Record a token of each of these slots; hand over the samples that ended with it, and return which did."""
        rows = self._rows
        at = rows.num_sampled[slots]
        rows.last_tokens[slots] = tokens
        rows.tokens[slots, at] = tokens
        rows.log_probs[slots, at] = log_probs
        rows.versions[slots, at] = self._version
        rows.num_sampled[slots] = at + 1
        self._completion_tokens += len(slots)
        stopped = np.isin(tokens, self._eos)
        full = at + 1 >= rows.max_tokens[slots]
        for i in np.flatnonzero(rows.has_stop[slots] & ~stopped).tolist():
            stop = rows.samples[slots[i]].request.sampling.stop
            before = rows.tokens[slots[i], : at[i]]
            end = self._limits.stop_strings.find_end([int(tokens[i])], stop, before=[before])
            stopped[i] = end is not None
        ended = stopped | full
        if rows.runs.size:
            which = (
                slice(len(slots)) if len(slots) == len(rows) else slots
            )  # All are a view, without a copy.
            runs = rows.runs[which]
            extend_runs(runs, rows.tokens[which], at)
            rows.runs[which] = runs
            ended |= is_repetitive(runs, *rows.patterns[which].T)
        for i in np.flatnonzero(ended).tolist():
            reason: FinishReason = "repetition"
            if stopped[i]:
                reason = "stop"
            elif full[i]:
                reason = "length"
            self._finish(int(slots[i]), reason)
        return ended

    def _finish(self, row: int, reason: FinishReason) -> None:
        rows = self._rows
        sample = rows.samples[row]
        new = slice(sample.prefix_length, int(rows.num_sampled[row]))
        experts = self._experts.get(sample)
        sample.finish(
            rows.tokens[row, new],
            rows.log_probs[row, new],
            rows.versions[row, new],
            reason,
            np.concatenate(experts) if experts else None,
            self._kept.get(sample, ()),
        )

    @torch.inference_mode()
    def _remove_running(self, which: SampleFilter, *, as_aborted: bool) -> list[QueuedSample]:
        rows = [row for row, sample in enumerate(self._rows.samples) if which(sample)]
        removed = [self._rows.samples[row] for row in rows]
        if as_aborted:
            for row in rows:
                self._finish(row, "abort")
        self._release(np.array(rows, np.int64))
        return removed

    def _release(self, slots: NDArray[np.int64]) -> None:
        """Free ``slots``, and move the last live samples into the holes."""
        if len(slots) == 0:
            return
        num_live = len(self._rows) - len(slots)
        tail = np.setdiff1d(np.arange(num_live, len(self._rows)), slots, assume_unique=True)
        if len(tail):
            self._move(tail, slots[slots < num_live])
        del self._rows.samples[num_live:]

    def _move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        lengths = self._rows.prompt_lengths[src] + self._rows.num_sampled[src]
        length = int(lengths.max()) + self._MAX_UNRECORDED
        self._rows.move(src, dst)
        self._cache.move(self._tensor(src), self._tensor(dst), length)

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return to_device(array, self._device)

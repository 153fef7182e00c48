"""The `hf` engine: any transformers causal LM, continuously batched over key-value slots, in this process."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from gcore_rollout import slot_attention
from gcore_rollout.calls import Call, WaitingLine, check_request, check_weights
from gcore_rollout.engine import EngineStats
from gcore_rollout.errors import RolloutError, UnsupportedModelError
from gcore_rollout.sampling import sample_seeds, sample_tokens, uniforms
from gcore_rollout.slot_attention import Decode, Prefill, SlotCache
from gcore_rollout.types import Completion, FinishReason, Request


class _Rows:
    """State of the live samples as arrays, slot i in row i, so a step's bookkeeping is a few vector operations."""

    def __init__(self, num_rows: int) -> None:
        self.owners: list[tuple[Call, Request, int]] = []
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperatures = np.zeros(num_rows, np.float32)
        self.prompt_lengths = np.zeros(num_rows, np.int64)
        self.num_sampled = np.zeros(num_rows, np.int64)
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.last_tokens = np.zeros(num_rows, np.int64)
        self.tokens = np.zeros((num_rows, 0), np.int64)
        self.log_probs = np.zeros((num_rows, 0), np.float32)
        self.versions = np.zeros((num_rows, 0), np.int32)

    def __len__(self) -> int:
        return len(self.owners)

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.seeds,
            self.temperatures,
            self.prompt_lengths,
            self.num_sampled,
            self.max_tokens,
            self.last_tokens,
            self.tokens,
            self.log_probs,
            self.versions,
        )

    def reserve_tokens(self, max_tokens: int) -> None:
        grow = max_tokens - self.tokens.shape[1]
        if grow > 0:
            columns = ((0, 0), (0, grow))
            self.tokens = np.pad(self.tokens, columns)
            self.log_probs = np.pad(self.log_probs, columns)
            self.versions = np.pad(self.versions, columns)

    def move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        for array in self.arrays():
            array[dst] = array[src]
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            self.owners[d] = self.owners[s]


class HFEngine:
    """Runs a transformers causal LM and samples from it.

    One decode step computes exactly one token for each live sample: prompts are prefilled without padding and once for
    all samples of a request, a finished sample's slot is filled by the last live one, and waiting requests are admitted
    between steps. Steps run on the event loop, so what is batched together depends only on the order of calls.

    Args:
        model: loaded with ``attn_implementation=slot_attention.ATTENTION_NAME``; use `from_pretrained`.
        eos_token_ids: tokens that end a completion.
        max_num_seqs: most samples alive at once.
    """

    def __init__(self, model: Any, *, eos_token_ids: Sequence[int], max_num_seqs: int = 256) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}: at least 1 is needed")
        self._model = model.eval().requires_grad_(False)
        self._device: torch.device = model.device
        self._max_length = _longest_sequence(model.config)
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._eos = np.asarray(eos_token_ids, dtype=np.int64)
        self._max_num_seqs = max_num_seqs
        self._cache = SlotCache(num_layers=model.config.num_hidden_layers)
        self._rows = _Rows(max_num_seqs)
        self._waiting = WaitingLine()
        self._version = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._driver: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_num_seqs: int = 256,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Self:
        """Load a local Hugging Face folder.

        Args:
            path: folder with ``config.json`` and weights.
            eos_token_ids: default: what the model's generation config says.

        Raises:
            UnsupportedModelError: the architecture does not call transformers' attention interface.
        """
        slot_attention.register()
        config = AutoConfig.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=slot_attention.ATTENTION_NAME
        )
        # transformers itself ignores an attention that the model never calls, and the samples would mix.
        others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if not model.is_backend_compatible() or others:
            raise UnsupportedModelError(
                f"{config.model_type!r} does not run all its layers through transformers' attention interface: "
                "the hf engine cannot run it, the vllm engine may"
            )
        if eos_token_ids is None:
            eos = model.generation_config.eos_token_id
            eos_token_ids = [eos] if isinstance(eos, int) else list(eos or [])
        return cls(model.to(device), eos_token_ids=eos_token_ids, max_num_seqs=max_num_seqs)

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_running=len(self._rows),
            num_waiting=len(self._waiting),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`."""
        if self._closed:
            raise RolloutError("generate was called on a closed engine")
        for request in requests:
            check_request(request, max_length=self._max_length, vocab_size=self._vocab_size)
        call = self._waiting.join(requests)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        async with aclosing(call.completions()) as completions:
            async for completion in completions:
                yield completion

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """See `Engine.update_weights`. Unknown or missing names and wrong shapes are refused before any copy."""
        if version <= self._version:
            raise ValueError(f"version is {version}: it must be above the present {self._version}")
        own: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        new = dict(weights)
        # Tied parameters are one tensor under several names, any one of which will do.
        given = {own[name].data_ptr() for name in new.keys() & own.keys()}
        tied = frozenset(name for name, tensor in own.items() if name not in new and tensor.data_ptr() in given)
        check_weights({name: tuple(tensor.shape) for name, tensor in own.items()}, new, optional=tied)
        for name, tensor in new.items():
            own[name].data.copy_(tensor, non_blocking=True)
        self._version = version

    async def close(self) -> None:
        """See `Engine.close`. Calls still generating get a `RolloutError`."""
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail_all(RolloutError("the engine was closed while generating"))
        self._rows = _Rows(0)
        self._cache = SlotCache(num_layers=0)

    async def _drive(self) -> None:
        try:
            while self._waiting or len(self._rows):
                self._step()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        calls = self._waiting.clear() | {call for call, _, _ in self._rows.owners}
        self._rows.owners.clear()
        for call in calls:
            call.finished.put_nowait(error)

    @torch.inference_mode()
    def _step(self) -> None:
        """Drop what was abandoned, admit what fits, then sample one token for every live sample."""
        self._drop_abandoned()
        num_old = len(self._rows)
        prefill_logits = self._admit()
        logits = [] if num_old == 0 else [self._decode(num_old)]
        if prefill_logits is not None:
            logits.append(prefill_logits)
        if logits:
            self._sample(torch.cat(logits) if len(logits) > 1 else logits[0])
            self._retire()

    def _drop_abandoned(self) -> None:
        self._waiting.drop_abandoned()
        self._release(np.array([i for i, (call, _, _) in enumerate(self._rows.owners) if call.abandoned], np.int64))

    def _admit(self) -> torch.Tensor | None:
        """Prefill waiting samples into free slots; their logits [M, V], in slot order."""
        rows = self._rows
        first = len(rows)
        prompts: list[tuple[int, ...]] = []
        slot_prompts: list[int] = []
        for call, request, indices in self._waiting.admit(self._max_num_seqs - first):
            slots = slice(len(rows), len(rows) + len(indices))
            rows.seeds[slots] = sample_seeds(request.seed, np.array(indices))
            rows.temperatures[slots] = request.sampling.temperature
            rows.prompt_lengths[slots] = len(request.prompt_token_ids)
            rows.num_sampled[slots] = 0
            rows.max_tokens[slots] = request.sampling.max_tokens
            rows.owners.extend((call, request, i) for i in indices)
            slot_prompts.extend([len(prompts)] * len(indices))
            prompts.append(request.prompt_token_ids)
        if not prompts:
            return None
        admitted = slice(first, len(rows))
        rows.reserve_tokens(int(rows.max_tokens[admitted].max()))
        needed = int((rows.prompt_lengths[admitted] + rows.max_tokens[admitted]).max())
        self._cache.reserve(_round_up(len(rows), 64, self._max_num_seqs), _round_up(needed, 64, self._max_length))
        return self._prefill(prompts, slot_prompts, first)

    def _prefill(self, prompts: list[tuple[int, ...]], slot_prompts: list[int], first: int) -> torch.Tensor:
        lengths = np.array([len(p) for p in prompts])
        ends = np.cumsum(lengths)
        longest = int(lengths.max())
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        padded_index = positions + np.repeat(np.arange(len(prompts)) * longest, lengths)
        self._prompt_tokens += int(ends[-1])
        slots = np.arange(first, first + len(slot_prompts))
        which = self._tensor(np.array(slot_prompts))
        plan = Prefill(
            cache=self._cache,
            padded_index=self._tensor(padded_index),
            num_prompts=len(prompts),
            max_length=longest,
            slots=self._tensor(slots),
            prompts=which,
        )
        tokens = np.fromiter((t for p in prompts for t in p), np.int64, count=int(ends[-1]))
        return self._forward(tokens, positions, plan, keep=self._tensor(ends - 1))[which]

    def _decode(self, batch: int) -> torch.Tensor:
        """Logits [B, V] after the last sampled token of each of the first ``batch`` slots."""
        rows = self._rows
        positions = rows.prompt_lengths[:batch] + rows.num_sampled[:batch] - 1
        position_ids = self._tensor(positions)
        hidden = torch.arange(int(positions.max()) + 1, device=self._device) > position_ids[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._model.dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        plan = Decode(
            cache=self._cache,
            slots=torch.arange(batch, device=self._device),
            positions=position_ids,
            mask=mask[:, None, None],
        )
        return self._forward(rows.last_tokens[:batch], positions, plan, keep=0)

    def _forward(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], plan: Prefill | Decode, keep: torch.Tensor | int
    ) -> torch.Tensor:
        output = self._model(
            input_ids=self._tensor(tokens)[None],
            position_ids=self._tensor(positions)[None],
            use_cache=False,
            logits_to_keep=keep,
            slots=plan,
        )
        return output.logits[0]

    def _sample(self, logits_BV: torch.Tensor) -> None:
        rows = self._rows
        batch = len(rows)
        at = rows.num_sampled[:batch]
        u = uniforms(rows.seeds[:batch], at)
        tokens_B, log_probs_B = sample_tokens(logits_BV, rows.temperatures[:batch], u)
        rows.last_tokens[:batch] = tokens_B.cpu().numpy()
        every = np.arange(batch)
        rows.tokens[every, at] = rows.last_tokens[:batch]
        rows.log_probs[every, at] = log_probs_B.cpu().numpy()
        rows.versions[every, at] = self._version
        rows.num_sampled[:batch] += 1
        self._completion_tokens += batch

    def _retire(self) -> None:
        """Hand over the samples that ended with this step and free their slots."""
        rows = self._rows
        batch = len(rows)
        stopped = np.isin(rows.last_tokens[:batch], self._eos)
        finished = np.flatnonzero(stopped | (rows.num_sampled[:batch] >= rows.max_tokens[:batch]))
        for row in finished.tolist():
            call, request, index = rows.owners[row]
            count = int(rows.num_sampled[row])
            reason: FinishReason = "stop" if stopped[row] else "length"
            call.finished.put_nowait(
                Completion(
                    request_id=request.request_id,
                    index=index,
                    token_ids=rows.tokens[row, :count].copy(),
                    log_probs=rows.log_probs[row, :count].copy(),
                    weight_versions=rows.versions[row, :count].copy(),
                    finish_reason=reason,
                )
            )
        self._release(finished)

    def _release(self, slots: NDArray[np.int64]) -> None:
        """Free ``slots``: the last live samples move into the holes."""
        if len(slots) == 0:
            return
        rows = self._rows
        left = len(rows) - len(slots)
        tail = np.setdiff1d(np.arange(left, len(rows)), slots, assume_unique=True)
        holes = slots[slots < left]
        if len(tail):
            rows.move(tail, holes)
            length = int((rows.prompt_lengths[holes] + rows.num_sampled[holes]).max())
            self._cache.move(self._tensor(tail), self._tensor(holes), length)
        del rows.owners[left:]

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _round_up(value: int, multiple: int, limit: int) -> int:
    return min(-(-value // multiple) * multiple, limit)


def _longest_sequence(config: PreTrainedConfig) -> int:
    """Longest sequence that full attention computes exactly as the model would."""
    longest: int = config.max_position_embeddings
    window: int | None = getattr(config, "sliding_window", None)
    if window and "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        longest = min(longest, window)
    return longest

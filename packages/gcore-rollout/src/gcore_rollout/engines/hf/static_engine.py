"""The `hf` engine on GPUs: several tokens of every sample between two reads by the host, with static shapes."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.hf.decoding import DecodeMode
from gcore_rollout.engines.hf.engine import HFEngine
from gcore_rollout.engines.hf.static import LENGTH_STEP, NUM_STEPS, Block, StaticDecoder
from gcore_rollout.engines.queueing import Control, QueuedSample, SampleFilter
from gcore_rollout.errors import EngineModelError

_PREFILL_TOKENS = 1 << 14
"""Most tokens of several prompts that are computed together, which bounds the memory of activations."""


def engine_of_mode(mode: DecodeMode, model: Any, *, is_dynamic: bool) -> Callable[..., HFEngine]:
    """Return what makes the engine of this mode for a model on its device.

    Steps in which the host chooses experts or rotary embeddings cannot be recorded as graphs. An engine that reads
    images, or returns experts or sets of tokens, ``is_dynamic``: it has no static shapes.

    Raises:
        ValueError: ``mode`` is unknown, or ``cuda_graphs`` elsewhere than on CUDA.
        EngineModelError: the engine ``is_dynamic``, and ``mode`` has static shapes.
    """
    if mode not in get_args(DecodeMode):
        raise ValueError(f"decode_mode is {mode!r}; expected {', '.join(get_args(DecodeMode))}")
    if mode == "cuda_graphs" and model.device.type != "cuda":
        raise ValueError(
            f"decode_mode is 'cuda_graphs' on {model.device}; expected a CUDA device, or another mode"
        )
    if mode == "dynamic" or (mode == "auto" and is_dynamic):
        return HFEngine
    if mode == "auto":
        config: Any = model.config.get_text_config()
        rope: Any = getattr(config, "rope_parameters", None) or {}
        types = {p.get("rope_type") for p in (rope, *rope.values()) if isinstance(p, dict)}
        is_on_host = types & {"dynamic", "longrope"} or "expert" in str(config.to_dict().keys())
        mode = "static" if is_on_host else "cuda_graphs"
    elif is_dynamic:
        raise EngineModelError(
            f"decode_mode is {mode!r}; expected auto or dynamic for a vision-language model, and with "
            "return_routed_experts or return_sampling_mask"
        )
    return partial(StaticHFEngine, use_graphs=mode == "cuda_graphs")


class StaticHFEngine(HFEngine):
    """An `HFEngine` that decodes with static shapes; see there for what it promises.

    All slots are allocated with the first request. The host reads tokens, admits samples, and takes calls once for a
    block of several tokens of each sample. On CUDA it reads a block after it has launched the next one, so that the
    slot of a sample that ended in a block is free one block later. Weights are always copied, so that they stay where
    graphs read them.
    """

    _LENGTH_STEP = LENGTH_STEP
    _MAX_UNRECORDED = NUM_STEPS + 1

    def __init__(self, model: Any, *, use_graphs: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self._decoder = StaticDecoder(
            model, self._cache, max_num_seqs=self._max_num_seqs, use_graphs=use_graphs
        )
        self._reads_late = self._device.type == "cuda"
        self._in_flight: Block | None = None
        """The block that the host has not read."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        # Tokens of the old weights are recorded under their version.
        self._settle()
        await super().update_weights(weights, version=version)

    async def update_weights_in_place(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> bool:
        await self.update_weights(weights, version=version)
        return False

    async def _control(self, name: Control) -> None:
        self._settle()
        await super()._control(name)

    def _drop_cache(self) -> None:
        super()._drop_cache()
        self._decoder.drop_graphs()

    def _reserve(self, length: int) -> None:
        # All of it is allocated once the size of a token is known, by the check of the model.
        num_slots = self._max_num_seqs if self._cache.bytes_per_token else len(self._rows)
        self._decoder.reserve(num_slots, max(length, self._planned_length))

    @torch.inference_mode()
    def _step(self) -> None:
        """Sample some tokens of every sample; those after a sample's end are dropped."""
        num_old = len(self._rows)
        prefill_logits = self._admit()
        before = self._in_flight
        block: Block | None = None
        if len(self._rows):
            block = self._decoder.launch(self._rows, num_old, prefill_logits, in_flight=before)
        if self._reads_late:
            self._in_flight = block
            block = before
        if block is not None:
            self._take(block)

    @torch.inference_mode()
    def _settle(self) -> None:
        """Read the tokens that have been launched, so that all of them are recorded."""
        block = self._in_flight
        self._in_flight = None
        if block is not None:
            self._take(block)

    def _take(self, block: Block) -> None:
        """Record the tokens of a block, and release the samples that end with one of them."""
        tokens, log_probs = block.read()
        order = np.argsort(block.slots)
        live = order[block.slots[order] >= 0]
        is_live = np.ones(len(block.slots), bool)
        finished: list[NDArray[np.int64]] = []
        for step in range(len(tokens)):
            now = live[is_live[live] & ((live >= block.num_old) | (step > 0))]
            slots = block.slots[now]
            ended = self._record(slots, tokens[step, now], log_probs[step, now])
            is_live[now[ended]] = False
            finished.append(slots[ended])
        self._release(np.sort(np.concatenate(finished)))

    def _release(self, slots: NDArray[np.int64]) -> None:
        before = len(self._rows)
        if self._in_flight is not None:
            self._in_flight.remove(slots)
        super()._release(slots)
        self._decoder.clear(len(self._rows), before)

    def _move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        super()._move(src, dst)
        self._decoder.move(self._tensor(src), self._tensor(dst))
        if self._in_flight is not None:
            self._in_flight.move(src, dst)

    def _remove_running(self, which: SampleFilter, *, as_aborted: bool) -> list[QueuedSample]:
        if as_aborted:
            self._settle()
        return super()._remove_running(which, as_aborted=as_aborted)

    def _prefill(self, groups: Sequence[list[QueuedSample]], first: int) -> torch.Tensor:
        logits: list[torch.Tensor] = []
        part: list[list[QueuedSample]] = []
        longest = 0
        for i, group in enumerate(groups):
            part.append(group)
            # Attention computes prompts in a rectangle.
            longest = max(longest, len(group[0].start_token_ids))
            if i + 1 < len(groups):
                next_longest = max(longest, len(groups[i + 1][0].start_token_ids))
                if (len(part) + 1) * next_longest <= _PREFILL_TOKENS:
                    continue
            logits.append(super()._prefill(part, first))
            first += len(logits[-1])
            part = []
            longest = 0
        return torch.cat(logits)

    def _logits_after_tokens(self, batch: int) -> torch.Tensor:
        return self._decoder.logits(self._rows)[:batch]

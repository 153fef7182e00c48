"""Decoding with static shapes in the `hf` engine, which CUDA records as graphs.

The state of the samples is on the device, and several tokens of each, a block, are drawn there before the host reads
them: no step waits for the host. On CUDA the next block is launched before the host reads one, so that the device does
not wait for the host either. The numbers of samples and of keys are rounded up to a few sizes; each pair is a graph.

Shapes as in `decoding`; N: samples rounded up, L: keys rounded up, C chunks of W entries of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.hf.decoding import (
    Decode,
    SlotCache,
    fused_attention,
    round_up,
    to_device,
    truncate_logits,
)
from gcore_rollout.errors import EngineModelError, RolloutError

LENGTH_STEP = 256
"""Numbers of keys are rounded up to multiples of it; a multiple of 16, which the masks of fused attention need."""
NUM_STEPS = 8
"""Most tokens of a sample in a block, not counting the one after its prompt; those after its end are wasted."""
_BATCHES = (8, 16, 32, 64)
"""Numbers of samples that graphs are recorded for; above, multiples of the last."""
_CHUNK = 1024
"""Most entries of the vocabulary whose probabilities are added up together."""
_BELOW_ONE = 1 - 2.0**-52
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
"""Constants of `splitmix64` as the signed numbers that torch multiplies."""


def uniforms_on_device(seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Return the numbers of `queueing.uniforms` to the bit; seeds and positions are int64."""
    x = seeds_B + (positions_B + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    x = x ^ _shift_right(x, 31)
    return (_shift_right(x, 12).double() + 0.5) * 2.0**-52


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as if unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw_tokens(
    logits_BV: torch.Tensor,
    temperatures_B: torch.Tensor,
    u_B: torch.Tensor,
    truncation: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as `sample_tokens` does, without a branch that depends on values and with few passes over the logits.

    The cumulative distribution is inverted in two steps, over sums of chunks and within one chunk. ``truncation`` has
    top-p and top-k of each row; None: every token can be drawn.
    """
    is_greedy_B1 = (temperatures_B == 0)[:, None]
    logits_BV = logits_BV.float() / temperatures_B[:, None].masked_fill(is_greedy_B1, 1)
    if truncation is not None:
        logits_BV = truncate_logits(logits_BV, *truncation)
    top_B1, most_probable_B1 = logits_BV.max(-1, keepdim=True)
    vocab_size = logits_BV.shape[1]
    width = min(vocab_size & -vocab_size, _CHUNK)
    weights_BCW = (logits_BV - top_B1).exp_().unflatten(-1, (-1, width))
    sums_BC = weights_BCW.sum(-1, dtype=torch.float64)
    ends_BC = sums_BC.cumsum(-1)
    total_B1 = ends_BC[:, -1:]
    # Strictly below the total, and right=True: an entry of probability 0 is never drawn.
    threshold_B1 = torch.minimum(u_B[:, None] * total_B1, total_B1 * _BELOW_ONE)
    chunk_B1 = torch.searchsorted(ends_BC, threshold_B1, right=True).clamp_(
        max=sums_BC.shape[1] - 1
    )
    rest_B1 = threshold_B1 - (ends_BC.gather(1, chunk_B1) - sums_BC.gather(1, chunk_B1))
    index_B1W = chunk_B1[:, :, None].expand(-1, 1, width)
    ends_BW = weights_BCW.gather(1, index_B1W)[:, 0].double().cumsum(-1)
    rest_B1 = torch.minimum(rest_B1, ends_BW[:, -1:] * _BELOW_ONE).clamp_(min=0)
    place_B1 = torch.searchsorted(ends_BW, rest_B1, right=True).clamp_(max=width - 1)
    tokens_B1 = torch.where(is_greedy_B1, most_probable_B1, chunk_B1 * width + place_B1)
    log_probs_B1 = (logits_BV.gather(1, tokens_B1) - top_B1).double() - total_B1.log()
    return tokens_B1[:, 0], log_probs_B1[:, 0].float()


@dataclass(eq=False)
class Block:
    """Tokens that have been drawn, or will be once the device gets there, of the samples that were in slots 0..B-1."""

    slots: NDArray[np.int64]
    """[B] present slots of these samples; -1: it has left."""
    num_old: int
    """Number of samples that had a token before; the others have one more in this block."""
    num_steps: int
    read: Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]
    """Waits for the tokens and log-probabilities [1 + steps, B], and returns them. The first row holds only the first
    tokens of new samples. What follows the end of a sample is to be ignored. To be called once, before the block after
    the next one is launched."""

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """[B] tokens of each sample."""
        return self.num_steps + (np.arange(len(self.slots)) >= self.num_old)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Note that the samples in these slots leave."""
        self.slots[np.isin(self.slots, slots)] = -1

    def move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Note that the samples in slots ``src`` move to ``dst`` (both [M], disjoint)."""
        moved = dict(zip(src.tolist(), dst.tolist(), strict=True))
        self.slots = np.array([moved.get(slot, slot) for slot in self.slots.tolist()], np.int64)


class _Drawn:
    """Tokens and log-probabilities that a block draws, on the device and in memory of the host."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros((NUM_STEPS + 1, max_num_seqs), dtype=torch.int64, device=device)
        self.log_probs = torch.zeros((NUM_STEPS + 1, max_num_seqs), device=device)
        self._is_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._host: list[torch.Tensor] = []

    def start_copy(
        self, num_steps: int, batch: int
    ) -> Callable[[], tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Start the copy to the host, next to what the device does afterwards; return what waits for it."""
        drawn = (self.tokens, self.log_probs)
        if not self._host:
            self._host = [
                torch.zeros(t.shape, dtype=t.dtype, pin_memory=self._is_cuda) for t in drawn
            ]
            if self._is_cuda:
                self._stream = torch.cuda.Stream(self.tokens.device)
        # Whole rows: a copy of a part would need memory for the part.
        pairs = [
            (h[: num_steps + 1], d[: num_steps + 1]) for h, d in zip(self._host, drawn, strict=True)
        ]
        end = None
        if self._stream is None:
            for host, device in pairs:
                host.copy_(device)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self.tokens.device))
            with torch.cuda.stream(self._stream):
                for host, device in pairs:
                    host.copy_(device, non_blocking=True)
                end = torch.cuda.Event(blocking=True)
                end.record(self._stream)

        def read() -> tuple[NDArray[np.int64], NDArray[np.float32]]:
            if end is not None:
                end.synchronize()
            tokens, log_probs = (host[:, :batch].numpy() for host, _ in pairs)
            return tokens, log_probs

        return read


class StaticDecoder:
    """Draws tokens of the samples in the slots 0..B-1 of a cache.

    Args:
        max_num_seqs: most samples.
        use_graphs: replay CUDA graphs. They are recorded when a size first comes up, hold no weights of their own, and
            are recorded again if the memory of the model or the cache is another.
    """

    def __init__(
        self, model: Any, cache: SlotCache, *, max_num_seqs: int, use_graphs: bool
    ) -> None:
        self._model = model
        self._cache = cache
        device: torch.device = model.device
        self._device = device
        # Tokens to be computed next, their positions, the largest position of each sample, seeds, lengths of prompts.
        self._state = torch.zeros((5, max_num_seqs), dtype=torch.int64, device=device)
        self._temperatures = torch.ones(max_num_seqs, device=device)
        self._top_p = torch.ones(max_num_seqs, device=device)
        self._top_k = torch.ones(max_num_seqs, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(max_num_seqs, device=device)
        # The host reads one while the device writes the other.
        self._drawn = _Drawn(max_num_seqs, device)
        self._next_drawn = _Drawn(max_num_seqs, device)
        self._graphs = _Graphs(self._advance, self._state) if use_graphs else None

    def reserve(self, num_slots: int, length: int) -> None:
        """Allocate slots for ``length`` tokens each; `RolloutError` if a GPU has no memory for them."""
        length = round_up(length, LENGTH_STEP)
        if length <= self._cache.capacity and num_slots <= self._cache.num_slots:
            return
        size_bytes = num_slots * length * self._cache.bytes_per_token
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
            free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
                self._device
            )
            if size_bytes > free:
                raise RolloutError(
                    f"keys and values of {num_slots} samples of {length} tokens take {size_bytes:,} bytes, and "
                    f"{free:,} bytes of {self._device} are free; expected fewer samples (max_num_seqs), shorter ones "
                    "(max_model_len), or kv_cache_bytes, which limits how many run at once"
                )
        self._cache.reserve(num_slots, length)

    def launch(
        self,
        rows: Any,
        num_old: int,
        prefill_logits: torch.Tensor | None,
        *,
        in_flight: Block | None = None,
    ) -> Block | None:
        """Start to draw up to a fixed number of tokens of every sample.

        Args:
            rows: state of the samples, as far as it is known; that of the first ``num_old`` is on the device.
            num_old: number of samples that have a token; the logits [M, V] of the next ones are ``prefill_logits``.
            in_flight: the block before, if its tokens are not in ``rows`` yet.

        Returns:
            The block; None if no sample needs more tokens.
        """
        batch = len(rows)
        sampled = rows.num_sampled[:batch].copy()
        sampled[num_old:] += 1
        if in_flight is not None:
            still = in_flight.slots >= 0
            sampled[in_flight.slots[still]] += in_flight.num_tokens[still]
        num_steps = min(NUM_STEPS, int((rows.max_tokens[:batch] - sampled).max()))
        if num_steps <= 0 and num_old == batch:
            return None
        if num_old < batch:
            self._upload(rows, num_old, sampled)
        drawn = self._drawn
        self._drawn = self._next_drawn
        self._next_drawn = drawn
        truncates = rows.truncates
        if prefill_logits is not None:
            tokens, positions, _, seeds, starts = self._state[:, num_old:batch]
            u = uniforms_on_device(seeds, positions - starts)
            new = slice(num_old, batch)
            truncation = self._truncation(new, truncates)
            first_tokens, first_log_probs = draw_tokens(
                prefill_logits, self._temperatures[new], u, truncation
            )
            tokens.copy_(first_tokens)
            drawn.tokens[0, num_old:batch] = first_tokens
            drawn.log_probs[0, num_old:batch] = first_log_probs
        size = self._size(batch)
        # After its end, a sample overwrites its last place.
        last = rows.prompt_lengths[:batch] + np.minimum(sampled, rows.max_tokens[:batch])
        length = min(round_up(int(last.max()) + num_steps, LENGTH_STEP), self._cache.capacity)
        advance = self._advance
        if self._graphs is not None:
            advance = self._graphs.at(self._addresses())
        for step in range(1, num_steps + 1):
            advance(size, length, truncates)
            drawn.tokens[step, :size] = self._state[0, :size]
            drawn.log_probs[step, :size] = self._log_probs[:size]
        read = drawn.start_copy(num_steps, batch)
        return Block(slots=np.arange(batch), num_old=num_old, num_steps=num_steps, read=read)

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy the state of the samples in slots ``src`` to slots ``dst`` (both [M], disjoint)."""
        for state in (*self._state, self._temperatures, self._top_p, self._top_k):
            state[dst] = state[src]

    def clear(self, first: int, end: int) -> None:
        """Reset the state of slots that have become free, from ``first`` to before ``end``.

        They may still be computed along with others, and must see at least the key of their own token: without one
        they would fill their place of the cache with numbers that are none.
        """
        self._state[:, first:end] = 0
        self._temperatures[first:end] = 1
        self._top_p[first:end] = 1
        self._top_k[first:end] = 1

    def drop_graphs(self) -> None:
        """Free the memory of the graphs; they are recorded again when they are needed."""
        if self._graphs is not None:
            self._graphs.drop()

    def logits(self, rows: Any) -> torch.Tensor:
        """Return logits [B, V] after the last token of each sample, by the step that draws."""
        batch = len(rows)
        self._upload(rows, 0, rows.num_sampled[:batch])
        last = int((rows.prompt_lengths[:batch] + rows.num_sampled[:batch]).max())
        length = min(round_up(last, LENGTH_STEP), self._cache.capacity)
        return self._step_logits(self._size(batch), length)[:batch]

    def _size(self, batch: int) -> int:
        """Return the number of samples, rounded up."""
        size = next((b for b in _BATCHES if b >= batch), round_up(batch, _BATCHES[-1]))
        return min(size, self._cache.num_slots)

    def _upload(self, rows: Any, first: int, sampled: NDArray[np.int64]) -> None:
        """Copy the state of the samples from slot ``first`` on to the device; ``sampled`` [B] tokens are drawn."""
        new = slice(first, len(rows))
        prompts = rows.prompt_lengths[new]
        # After its end, a sample overwrites its last place.
        last = prompts + rows.max_tokens[new] - 1
        positions = prompts + sampled[new] - 1
        seeds = rows.seeds[new].view(np.int64)
        state = np.stack([rows.last_tokens[new], positions, last, seeds, prompts])
        self._state[:, new] = to_device(state, self._device)
        self._temperatures[new] = to_device(rows.temperatures[new], self._device)
        self._top_p[new] = to_device(rows.top_p[new], self._device)
        self._top_k[new] = to_device(rows.top_k[new], self._device)

    def _truncation(
        self, slots: slice, truncates: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return top-p and top-k of some slots; None unless a running sample is drawn by them."""
        if not truncates:
            return None
        return self._top_p[slots], self._top_k[slots]

    def _step_logits(self, size: int, length: int) -> torch.Tensor:
        """Return logits [N, V], from the state on the device alone."""
        tokens_N, positions_N = self._state[:2, :size]
        plan = Decode.at(positions_N, self._cache, length, dtype=self._model.dtype)
        with fused_attention(self._device):
            output = self._model(
                input_ids=tokens_N[None],
                position_ids=positions_N[None],
                use_cache=False,
                logits_to_keep=0,
                slots=plan,
            )
        return output.logits[0]

    def _advance(self, size: int, length: int, truncates: bool = False) -> None:
        """Draw one token of each sample, by top-p and top-k if ``truncates``, and let the state follow."""
        logits_NV = self._step_logits(size, length)
        tokens, positions, limits, seeds, starts = self._state[:, :size]
        u = uniforms_on_device(seeds, positions + 1 - starts)
        truncation = self._truncation(slice(size), truncates)
        drawn_N, log_probs_N = draw_tokens(logits_NV, self._temperatures[:size], u, truncation)
        tokens.copy_(drawn_N)
        self._log_probs[:size].copy_(log_probs_N)
        positions.copy_(torch.minimum(positions + 1, limits))

    def _addresses(self) -> tuple[int, ...]:
        """Return where everything lies that a graph reads besides the state."""
        tensors = chain(
            self._model.parameters(), self._model.buffers(), self._cache.keys, self._cache.values
        )
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)


class _Graphs:
    """CUDA graphs of a step, one for each pair of sizes and way of drawing, which share their memory."""

    def __init__(self, advance: Callable[[int, int, bool], None], state: torch.Tensor) -> None:
        self._advance = advance
        self._state = state
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._addresses: tuple[int, ...] = ()
        self._stream = torch.cuda.Stream(state.device)
        self.drop()

    def drop(self) -> None:
        """Free all graphs; a pool that was freed cannot be used again."""
        if self._graphs:
            # One may be running.
            torch.cuda.synchronize(self._state.device)
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def at(self, addresses: tuple[int, ...]) -> Callable[[int, int, bool], None]:
        """Return what replays a step; graphs that read other addresses are dropped."""
        if addresses != self._addresses:
            self.drop()
            self._addresses = addresses
        return self._replay

    def _replay(self, size: int, length: int, truncates: bool) -> None:
        key = size, length, truncates
        if key not in self._graphs:
            self._graphs[key] = self._record(size, length, truncates)
        self._graphs[key].replay()

    def _record(self, size: int, length: int, truncates: bool) -> torch.cuda.CUDAGraph:
        state = self._state.clone()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Libraries allocate and choose kernels in their first calls. The tokens are computed again afterwards.
            self._advance(size, length, truncates)
            self._state.copy_(state)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                self._advance(size, length, truncates)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineModelError(
                f"a step of this model cannot be recorded as a CUDA graph ({error}): decode_mode 'static' may run it"
            ) from error
        return graph

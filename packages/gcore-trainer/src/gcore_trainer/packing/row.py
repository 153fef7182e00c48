"""A rank's part of a packed row, attention over it, and what transformers' masks say of that attention.

Shapes: T tokens of the rank, n of the row's N response tokens; in attention H query heads, K key-value heads, D head
dimension.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import getclosurevars
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from gcore_trainer.context_parallel.groups import ContextParallel, DividedRow, sum_over_ranks
from gcore_trainer.errors import BatchError, UnsupportedModelError
from gcore_trainer.objectives.objective import on_device
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.head import KeptTokens
from gcore_trainer.packing.layout import PackedBatch, Segment, make_rectangle, pack, rounded_length
from gcore_trainer.packing.router_replay import routing_of_row
from gcore_trainer.packing.tiles import RowCalls
from gcore_trainer.packing.vision import RowImages, Vision
from gcore_trainer.sample import MicroBatch

NUM_SHORT = 512
"""Most tokens that a sequence has, with its prompt, in a row of short ones that share tokens."""
NUM_SHORT_ALONE = 128
"""The same where none shares any."""
# Functions of transformers.masking_utils that hide tokens, by the name of the function that makes or is them.
_CAUSAL = "causal_mask_function"
_WINDOW = "sliding_window_overlay"
_PACKED = "packed_sequence_mask_function"
_CONJUNCTION = "and_masks"


class PackedPlan:
    """The attention of a `PackedBatch`, made once a micro-batch, used by every layer.

    Args:
        cp: the ranks that divide the row; None: this process holds all of it.
        blocks: places of tokens that see each other, and of those that they see in all (see `RowImages.blocks`).
    """

    def __init__(
        self,
        batch: PackedBatch,
        *,
        device: torch.device,
        cp: ContextParallel | None = None,
        blocks: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.num_calls = 0
        """Attention layers served so far."""
        self.batch = batch
        self._blocks = blocks
        self._device = device
        self._longest = max(s.context_length + s.length for s in batch.segments)
        is_shared = any(s.parent for s in batch.segments)
        self._is_short = device.type == "cpu" and self._longest <= (
            NUM_SHORT if is_shared else NUM_SHORT_ALONE
        )
        self._divided = None if cp is None else DividedRow(batch, cp, device=device)

    def attend(
        self,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTD: torch.Tensor,
        attention: AttentionKind,
    ) -> torch.Tensor:
        """Compute the attention output [1, T, H, D] of the T tokens that this process holds."""
        self.num_calls += 1
        q_THD, k_TKD, v_TKV = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        if self._divided is not None:
            return self._divided.attend(q_THD, k_TKD, v_TKV, attention, self._attend)[None]
        out_THV = self._attend(q_THD, k_TKD, v_TKV, attention)
        for block, context in self._blocks:
            out_THV = out_THV.index_copy(
                0, block, _attend_block(q_THD[block], k_TKD[context], v_TKV[context], attention)
            )
        return out_THV[None]

    def _attend(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        attention: AttentionKind,
    ) -> torch.Tensor:
        """Compute the attention output [T, H, V] of the whole row, with these heads."""
        if attention.sliding_window is not None and attention.sliding_window >= self._longest:
            attention = replace(attention, sliding_window=None)
        if (
            self._is_short
            and attention.sliding_window is None
            and attention.softcap is None
            and attention.sinks is None
        ):
            return self._short.attend(q_THD, k_TKD, v_TKV, attention.scale)
        return self._long.attend(q_THD, k_TKD, v_TKV, attention)

    @cached_property
    def _short(self) -> "ShortRow":
        return ShortRow(self.batch.segments, device=self._device)

    @cached_property
    def _long(self) -> RowCalls:
        return RowCalls(self.batch.segments, device=self._device)


class ShortRow:
    """The attention of a row of short sequences on a CPU: a call for all segments of about one length, under a mask.

    Calls and merges cost more than hidden scores then, and masks have at most `NUM_SHORT` entries a token. Longer
    sequences are computed without masks (`tiles`). S segments of Q queries and L keys in a call.
    """

    def __init__(self, segments: Sequence[Segment], *, device: torch.device) -> None:
        groups: dict[tuple[int, int], list[Segment]] = {}
        for segment in segments:
            context_length = 0
            if segment.parent is not None:
                context_length = rounded_length(segment.context_length)
            groups.setdefault((context_length, rounded_length(segment.length)), []).append(segment)
        unpack_index = np.empty(sum(s.length for s in segments), np.int64)
        self._calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        offset = 0
        for _, members in sorted(groups.items()):
            query_index, is_real = make_rectangle([s.index for s in members])
            unpack_index[query_index[is_real]] = offset + np.flatnonzero(is_real)
            offset += query_index.size
            key_index = query_index
            mask = None
            contexts = [s.parent.sequence for s in members if s.parent]
            if contexts:
                context_index, is_context = make_rectangle(contexts)
                key_index = np.concatenate([context_index, query_index], axis=1)
                num_queries = query_index.shape[1]
                num_context = context_index.shape[1]
                hidden = np.zeros(
                    (len(members), 1, num_queries, num_context + num_queries), np.float32
                )
                hidden[..., :num_context] = np.where(is_context, 0, -np.inf)[:, None, None]
                hidden[..., num_context:] = np.triu(np.full((num_queries, num_queries), -np.inf), 1)
                mask = torch.from_numpy(hidden).to(device)
            self._calls.append(
                (
                    torch.from_numpy(query_index).to(device),
                    torch.from_numpy(key_index).to(device),
                    mask,
                )
            )
        self._masks: dict[torch.dtype, list[torch.Tensor | None]] = {}
        self._unpack_index = torch.from_numpy(unpack_index).to(device)

    def attend(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Compute attention [T, H, V], differentiably."""
        rows: list[torch.Tensor] = []
        is_grouped = q_THD.shape[1] != k_TKD.shape[1]
        dtype = q_THD.dtype
        if dtype not in self._masks:
            self._masks[dtype] = [
                None if mask is None else mask.to(dtype) for _, _, mask in self._calls
            ]
        for (query_index_SQ, key_index_SL, _), mask in zip(
            self._calls, self._masks[dtype], strict=True
        ):
            q_SHQD = _select(q_THD, query_index_SQ)
            k_SKLD = _select(k_TKD, key_index_SL)
            v_SKLV = _select(v_TKV, key_index_SL)
            out_SHQV = scaled_dot_product_attention(
                q_SHQD,
                k_SKLD,
                v_SKLV,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=is_grouped,
            )
            rows.append(out_SHQV.transpose(1, 2).flatten(0, 1))
        return torch.cat(rows).index_select(0, self._unpack_index)


def _attend_block(
    q_LHD: torch.Tensor, k_CKD: torch.Tensor, v_CKV: torch.Tensor, attention: AttentionKind
) -> torch.Tensor:
    """Compute attention [L, H, V] of tokens that see each other, the last L of C, and what precedes them."""
    if attention.softcap is not None or attention.sinks is not None:
        raise UnsupportedModelError(
            "tokens of an image see each other in a layer with a softcap or sinks; expected neither"
        )
    key_C = torch.arange(len(k_CKD), device=q_LHD.device)
    query_L1 = key_C[-len(q_LHD) :, None]
    is_near_LC = query_L1 - key_C < (attention.sliding_window or len(k_CKD))
    out_HLV = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q_LHD, k_CKD, v_CKV)),
        attn_mask=is_near_LC | (key_C >= query_L1[0]),
        scale=attention.scale,
        enable_gqa=q_LHD.shape[1] != k_CKD.shape[1],
    )[0]
    return out_HLV.transpose(0, 1)


def _select(x_THD: torch.Tensor, index_SL: torch.Tensor) -> torch.Tensor:
    """Return tokens of a row as [S, H, L, D]."""
    return x_THD.index_select(0, index_SL.ravel()).unflatten(0, index_SL.shape).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A rank's T tokens of a packed row, and the n of its N response tokens that they predict."""

    # Megatron-Core's layers get a row where they expect their own packing parameters, and look at these two: other than
    # with "thd", they rotate by position and leave queries, keys and values [T, 1, heads, D].
    qkv_format: ClassVar[str] = "packed"
    cp_group: ClassVar[Any] = None

    samples: MicroBatch
    batch: PackedBatch
    """The whole row, on all ranks that divide it."""
    input_ids: torch.Tensor
    """[1, T]."""
    positions: torch.Tensor
    """[1, T]."""
    plan: PackedPlan
    source_index: torch.Tensor
    """[n] which of the T tokens predicts each response token."""
    target_ids: torch.Tensor
    """[n]."""
    cp: ContextParallel | None
    """The ranks that divide the row; None: this one has all of it."""
    row_index: NDArray[np.int64]
    """[T] where each of the T stands in the whole row."""
    target_index: NDArray[np.int64]
    """[n] which of the N response tokens each is; N itself is none of them."""
    kept: KeptTokens | None = None
    """The tokens that each of the n was drawn from; None: all."""
    routing: torch.Tensor | None = None
    """[T, L, K] the experts that each token passes through, where routers do not choose (see `router_replay`)."""
    images: RowImages | None = None
    """None: there are none."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return self.batch.input_ids.size

    def of_all_ranks(self, values_n: torch.Tensor) -> torch.Tensor:
        """Collect [N] of all response tokens from the [n] of each rank, in float32 at least (see `sum_over_ranks`)."""
        values_n = values_n.to(torch.promote_types(values_n.dtype, torch.float32))
        if self.cp is None:
            return values_n
        index = on_device(self.target_index, values_n.device)
        values_N = values_n.new_zeros(self.batch.target_ids.size + 1).index_put((index,), values_n)[
            :-1
        ]
        return sum_over_ranks(values_N, self.cp.ulysses, self.cp.ring)

    def of_samples(self, routing_TLK: torch.Tensor) -> list[NDArray[np.int16]]:
        """Collect [num_inputs, L, K] of each sample's tokens from the [T, L, K] of each rank."""
        row = routing_TLK.new_zeros((self.num_tokens, *routing_TLK.shape[1:]))
        row[on_device(self.row_index, row.device)] = routing_TLK
        if self.cp is not None:
            row = sum_over_ranks(row, self.cp.ulysses, self.cp.ring)
        experts = row.cpu().numpy().astype(np.int16)
        return [experts[index] for index in self.batch.input_places(self.samples)]


def make_rows(
    micro_batches: Sequence[MicroBatch],
    *,
    device: torch.device,
    share_prefix: bool,
    replay_routing: bool,
    cp: ContextParallel | None = None,
    vision: Vision | None = None,
    multiple_of: int = 1,
    equal_lengths: bool = False,
) -> list[Row]:
    """Make a row of each micro-batch; all ranks that work on them pass the same.

    Args:
        share_prefix: compute equal prompts of a micro-batch once, where the row need not be cut within sequences.
        replay_routing: impose the experts that samples bring: the policy's, not those of a critic.
        multiple_of: of the number of each rank's tokens.
        equal_lengths: pad all to the longest.
    """
    segment_multiple = 1
    if cp is not None:
        row_multiple, segment_multiple = cp.padding
        multiple_of *= row_multiple
    share_prefix = share_prefix and segment_multiple == 1

    def pack_rows(row_length: int) -> list[PackedBatch]:
        options = {"multiple_of": row_length, "segment_multiple_of": segment_multiple}
        return [pack(samples, share_prefix=share_prefix, **options) for samples in micro_batches]

    batches = pack_rows(multiple_of)
    if equal_lengths:
        longest = max(batch.input_ids.size for batch in batches)
        batches = pack_rows(math.lcm(longest, multiple_of))
    rows: list[Row] = []
    for samples, batch in zip(micro_batches, batches, strict=True):
        row_index = np.arange(batch.input_ids.size)
        if cp is not None:
            row_index = cp.places(batch.segment_lengths)
        index_of_place = np.full(batch.input_ids.size, -1)
        index_of_place[row_index] = np.arange(row_index.size)
        source_N = index_of_place[batch.predict_index[batch.target_place]]
        target_index = np.flatnonzero(source_N >= 0)
        source_index = source_N[target_index]
        target_ids = batch.target_ids[target_index]
        if not target_index.size:
            # All ranks of a row score something, for their collectives are the same.
            target_index = np.array([source_N.size])
            source_index = target_ids = np.zeros(1, np.int64)
        images = None
        if vision is not None:
            images = vision.row_images(samples, batch)
        elif any(sample.images is not None for sample in samples):
            raise BatchError(
                "a sample has images: this backend or model sees none, the torch backend does with a model that reads "
                "images (docs/reference/models.md)"
            )
        routing = None
        if replay_routing and any(sample.routed_experts is not None for sample in samples):
            routing = on_device(routing_of_row(samples, batch)[row_index], device)
        rows.append(
            Row(
                samples=samples,
                batch=batch,
                input_ids=on_device(batch.input_ids[row_index][None], device),
                positions=on_device(batch.positions[row_index][None], device),
                plan=PackedPlan(
                    batch, device=device, cp=cp, blocks=() if images is None else images.blocks
                ),
                source_index=on_device(source_index, device),
                target_ids=on_device(target_ids, device),
                cp=cp,
                row_index=row_index,
                target_index=target_index,
                kept=_kept_tokens(samples, target_index),
                routing=routing,
                images=images,
            )
        )
    return rows


def _kept_tokens(samples: MicroBatch, target_index: NDArray[np.int64]) -> KeptTokens | None:
    """Return the tokens that some of the samples' N response tokens were drawn from; an index of N is none of them."""
    ids = [sample.kept_ids for sample in samples if sample.kept_ids is not None]
    if not ids:
        return None
    counts: list[NDArray[np.int32]] = []
    for sample in samples:
        if sample.kept_counts is None:
            counts.append(np.zeros_like(sample.response_ids, np.int32))
        else:
            counts.append(sample.kept_counts)
    counts_N1 = np.append(np.concatenate(counts), np.int32(0))
    is_here = np.isin(np.arange(counts_N1.size), target_index)
    return counts_N1[target_index], np.concatenate(ids)[np.repeat(is_here, counts_N1)]


class DescribedMask(torch.Tensor):
    """A mask [B, 1, Lq, Lk] that occupies no memory. The result of any operation on it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage]
    hides: set[str]
    """Names of the functions of ``transformers.masking_utils`` that hide tokens, and of any others."""
    window: int | None
    """Tokens of a sliding window, if there is one."""


def describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **ignored: Any,
) -> DescribedMask:
    """Describe a mask instead of computing it; the arguments are those of ``transformers.masking_utils.sdpa_mask``."""
    del ignored
    mask = torch.ones((), dtype=torch.bool, device=device).expand(
        batch_size, 1, q_length, kv_length
    )
    described = mask.as_subclass(DescribedMask)
    described.hides = set(_list_names(mask_function))
    described.window = local_size
    return described


def _list_names(mask_function: Callable[..., Any]) -> Iterator[str]:
    name = mask_function.__qualname__.partition(".")[0]
    if name != _CONJUNCTION:
        yield name
        return
    for part in getclosurevars(mask_function).nonlocals["mask_functions"]:
        yield from _list_names(part)


def window_of(mask: torch.Tensor) -> int | None:
    """Return the sliding window of a described mask; refuse one that hides other tokens than causality and a window."""
    if not isinstance(mask, DescribedMask):
        raise UnsupportedModelError(
            f"the model computes an attention mask of its own, {list(mask.shape)}: packed training does not apply it"
        )
    unknown = sorted(mask.hides - {_CAUSAL, _WINDOW, _PACKED})
    if unknown or _CAUSAL not in mask.hides:
        raise UnsupportedModelError(
            f"the model's attention mask is made by {', '.join(unknown)}: packed training computes causal attention "
            "and sliding windows only"
        )
    if _WINDOW not in mask.hides:
        return None
    return mask.window

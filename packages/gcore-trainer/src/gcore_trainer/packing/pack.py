"""Packing of samples end to end in one row, and the attention over it.

No padding is computed, and a prompt that many samples share is computed once. A row of T tokens is made of segments. A
*causal* segment starts from nothing: a prompt, or a prompt with its only response. A *branch* segment is one of several
responses to a prompt: its tokens see the prompt's and their own predecessors. A response's last token predicts nothing,
so it is never an input.

Where the row is divided among ranks, its length must be a multiple of something: padding tokens, of id 0, then
follow the real ones of a causal segment or make up a last segment of their own, so that no real token sees them.

Shapes: T packed tokens, S segments of a bucket, Lq/Lk padded queries/keys, H query heads, K key-value heads, D head
dimension.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import getclosurevars
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from gcore_trainer.errors import ConfigError, UnsupportedModelError
from gcore_trainer.packing.block_attention import Scoring, block_attention
from gcore_trainer.sample import Sample

_NUM_WINDOW_ROWS = 512
"""Queries of a tile under a sliding window: its keys are at most so many and the window's."""
# Functions of transformers.masking_utils that hide tokens, by the name of the function that makes or is them.
_CAUSAL, _WINDOW, _PACKED = "causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"
_CONJUNCTION = "and_masks"


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Segments of similar length, attended to as one rectangle. S segments, Lq queries, Lk keys."""

    query_index: NDArray[np.int64]
    """[S, Lq] places in the packed row; what pads a segment points to 0 and is never read back."""
    key_index: NDArray[np.int64]
    """[S, Lk]."""
    prompt_lengths: NDArray[np.int64] | None
    """[S] for branches, whose keys are Lk - Lq places of their prompts, so many of them real, and then the queries'
    own places, causally. None: the keys are the queries' places, causally; padding follows every real token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """T packed tokens that predict N response tokens, in the samples' order, from U distinct places."""

    input_ids: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T] place of each token in its own sequence; padding at the end of a segment repeats the last."""
    segment_lengths: NDArray[np.int64]
    """Lengths of all segments, in the row's order and with their padding; they sum to T."""
    buckets: list[Bucket]
    unpack_index: NDArray[np.int64]
    """[T] where each token's attention output stands among the flattened rectangles of all buckets."""
    sequences: list[NDArray[np.int64]]
    """Places of each whole sequence, in its order: every token is in one, those of a shared prompt are in several."""
    predict_index: NDArray[np.int64]
    """[U] packed places whose next-token distribution is needed."""
    target_place: NDArray[np.int64]
    """[N] which of those U predicts each response token."""
    target_ids: NDArray[np.int64]
    """[N]."""
    last_prompt_places: NDArray[np.int64]
    """Place of each sample's last prompt token in the row."""
    first_response_places: NDArray[np.int64]
    """Place of each sample's first response token in the row; the last response token has none."""

    def input_places(self, samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
        """Return the places [P + R - 1] of each sample's input tokens in the row."""
        return [
            np.concatenate([np.arange(last - s.prompt_ids.size, last) + 1, first + np.arange(s.response_ids.size - 1)])
            for s, last, first in zip(samples, self.last_prompt_places, self.first_response_places, strict=True)
        ]


class _Segment(NamedTuple):
    start: int
    length: int
    parent: "_Segment | None" = None
    num_padding: int = 0
    """Tokens of the length that are padding, at its end."""


def pack(
    samples: list[Sample], *, share_prefix: bool = True, multiple_of: int = 1, segment_multiple_of: int = 1
) -> PackedBatch:
    """Pack one micro-batch.

    Args:
        multiple_of: pad the row so that T is a multiple of it.
        segment_multiple_of: pad every segment so that its length is a multiple of it.

    Raises:
        ConfigError: a multiple is below 1, or segments are to be padded where they share prompts: the padding of a
            prompt would stand between it and its responses.
    """
    for name, value in (("multiple_of", multiple_of), ("segment_multiple_of", segment_multiple_of)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected 1 or more")
    if share_prefix and segment_multiple_of > 1:
        raise ConfigError(f"segment_multiple_of is {segment_multiple_of} with share_prefix=True; expected False")
    by_prompt: dict[bytes | int, list[int]] = {}
    for i, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_key if share_prefix else i, []).append(i)

    pieces: list[NDArray[np.int64]] = []
    segments: list[_Segment] = []
    last_prompt_places = np.empty(len(samples), np.int64)
    first_response_places = np.empty(len(samples), np.int64)
    total = 0
    for members in by_prompt.values():
        prompt = samples[members[0]].prompt_ids
        pieces.append(prompt)
        last_prompt_places[members] = total + prompt.size - 1
        if len(members) == 1:
            [i] = members
            inputs = samples[i].response_ids[:-1]
            num_padding = -(prompt.size + inputs.size) % segment_multiple_of
            pieces += [inputs, np.zeros(num_padding, np.int64)]
            first_response_places[i] = total + prompt.size
            segments.append(_Segment(total, prompt.size + inputs.size + num_padding, num_padding=num_padding))
            total += segments[-1].length
            continue
        root = _Segment(total, prompt.size)
        segments.append(root)
        total += prompt.size
        for i in members:
            inputs = samples[i].response_ids[:-1]
            first_response_places[i] = total
            if inputs.size:
                pieces.append(inputs)
                segments.append(_Segment(total, inputs.size, root))
                total += inputs.size
    if num_padding := -total % math.lcm(multiple_of, segment_multiple_of):
        pieces.append(np.zeros(num_padding, np.int64))
        segments.append(_Segment(total, num_padding))
        total += num_padding

    starts, lengths = _bounds(segments)
    first_positions = np.array([s.parent.length if s.parent else 0 for s in segments])
    last_positions = first_positions + lengths - 1 - np.array([s.num_padding for s in segments])
    response_lengths = np.array([s.response_ids.size for s in samples])
    ends = np.cumsum(response_lengths)
    places = np.repeat(first_response_places - 1 - (ends - response_lengths), response_lengths) + np.arange(ends[-1])
    places[ends - response_lengths] = last_prompt_places
    predict_index, target_place = np.unique(places, return_inverse=True)
    buckets, unpack_index = _bucketed(segments, total)
    shared = {s.parent.start for s in segments if s.parent}
    return PackedBatch(
        input_ids=np.concatenate(pieces),
        positions=np.minimum(
            np.arange(total) - np.repeat(starts - first_positions, lengths), np.repeat(last_positions, lengths)
        ),
        segment_lengths=lengths,
        buckets=buckets,
        unpack_index=unpack_index,
        sequences=[
            np.concatenate([np.arange(x.start, x.start + x.length) for x in (s.parent, s) if x])
            for s in segments
            if s.start not in shared
        ],
        predict_index=predict_index,
        target_place=target_place,
        target_ids=np.concatenate([s.response_ids for s in samples]),
        last_prompt_places=last_prompt_places,
        first_response_places=first_response_places,
    )


def _bucketed(segments: list[_Segment], num_tokens: int) -> tuple[list[Bucket], NDArray[np.int64]]:
    """Group segments with about equal lengths and prompts."""
    groups: dict[tuple[int, int], list[_Segment]] = {}
    for segment in segments:
        prompt_length = 0 if segment.parent is None else rounded_length(segment.parent.length)
        groups.setdefault((prompt_length, rounded_length(segment.length)), []).append(segment)
    buckets: list[Bucket] = []
    unpack_index = np.empty(num_tokens, np.int64)
    offset = 0
    for _, members in sorted(groups.items()):
        query_index, is_real = _rectangle(*_bounds(members))
        unpack_index[query_index[is_real]] = offset + np.flatnonzero(is_real)
        offset += query_index.size
        key_index, prompt_lengths = query_index, None
        if parents := [s.parent for s in members if s.parent]:
            prompt_starts, prompt_lengths = _bounds(parents)
            prompt_index, _ = _rectangle(prompt_starts, prompt_lengths)
            key_index = np.concatenate([prompt_index, query_index], axis=1)
        buckets.append(Bucket(query_index=query_index, key_index=key_index, prompt_lengths=prompt_lengths))
    return buckets, unpack_index


def rounded_length(length: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())


def _bounds(segments: list[_Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array([s.start for s in segments]), np.array([s.length for s in segments])


def _rectangle(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Packed places [S, L] of segments padded to the longest, and which of them are real."""
    columns = np.arange(lengths.max())
    is_real = columns < lengths[:, None]
    return np.where(is_real, starts[:, None] + columns, 0), is_real


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionKind:
    """A layer's attention. H query heads."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    sliding_window: int | None = None
    """Number of latest tokens of its sequence that a query sees, its own included; None: all."""
    softcap: float | None = None
    """Replace scores x by softcap * tanh(x / softcap); None: do not."""
    sinks: torch.Tensor | None = None
    """[H] a further score of each head's softmax, without a value; None: none."""


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Some queries of each segment of a bucket, and the keys that any of them sees."""

    query_index: torch.Tensor
    """[S * Lq] places in the packed row."""
    key_index: torch.Tensor
    """[S * Lk]."""
    num_segments: int
    mask: torch.Tensor | None
    """[S or 1, 1, Lq, Lk], 0 or -inf; None: causal."""


class PackedPlan:
    """The attention of a `PackedBatch` whose row one process holds; made once a micro-batch, used by every layer."""

    def __init__(self, batch: PackedBatch, *, device: torch.device, dtype: torch.dtype) -> None:
        self.num_calls = 0
        """Attention layers served so far."""
        self.batch = batch
        self._unpack_index = torch.from_numpy(batch.unpack_index).to(device)
        self._device = device
        self._dtype = dtype
        self._tiles: dict[int | None, list[list[_Tile]]] = {}

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Compute the attention output [1, T, H, D] of the T tokens that this process holds."""
        self.num_calls += 1
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        outputs: list[torch.Tensor] = []
        for tiles in self._tiles_of(kind.sliding_window):
            rows: list[torch.Tensor] = []
            for tile in tiles:
                shape = (tile.num_segments, -1)
                q_SHQD = q_THD.index_select(0, tile.query_index).unflatten(0, shape).transpose(1, 2)
                k_SKKD = k_TKD.index_select(0, tile.key_index).unflatten(0, shape).transpose(1, 2)
                v_SKKD = v_TKD.index_select(0, tile.key_index).unflatten(0, shape).transpose(1, 2)
                rows.append(_attention(q_SHQD, k_SKKD, v_SKKD, kind, tile.mask).transpose(1, 2))
            outputs.append(torch.cat(rows, dim=1).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._unpack_index)[None]

    def _tiles_of(self, window: int | None) -> list[list[_Tile]]:
        """Return the tiles of each bucket; made once, because layers share them."""
        if window not in self._tiles:
            self._tiles[window] = [
                list(_tiles(bucket, window, device=self._device, dtype=self._dtype)) for bucket in self.batch.buckets
            ]
        return self._tiles[window]


def _attention(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLD: torch.Tensor, kind: AttentionKind, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention [S, H, Q, D]: torch's own, unless scores have soft caps or there are sinks."""
    scale = q_SHQD.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    if kind.softcap is not None or kind.sinks is not None:
        scoring = Scoring(scale=scale, is_causal=mask is None, softcap=kind.softcap, mask=mask)
        return block_attention(q_SHQD, k_SKLD, v_SKLD, scoring, sinks_H=kind.sinks)
    enable_gqa = q_SHQD.shape[1] != k_SKLD.shape[1]
    return scaled_dot_product_attention(
        q_SHQD, k_SKLD, v_SKLD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
    )


def _tiles(bucket: Bucket, window: int | None, *, device: torch.device, dtype: torch.dtype) -> Iterator[_Tile]:
    """Yield a bucket as one tile, or as several where a sliding window hides keys from some of its queries."""
    num_segments, num_queries = bucket.query_index.shape
    query_positions_SQ, key_positions_SK = _positions(bucket)
    if window is not None and window > query_positions_SQ.max():
        window = None
    num_rows = num_queries if window is None else _NUM_WINDOW_ROWS
    for first in range(0, num_queries, num_rows):
        queries_SQ = query_positions_SQ[:, first : first + num_rows]
        is_seen_SK = key_positions_SK <= queries_SQ[:, -1:]
        if window is not None:
            is_seen_SK &= key_positions_SK > queries_SQ[:, :1] - window
        columns = is_seen_SK.any(0)
        mask = None
        if window is not None or bucket.prompt_lengths is not None:
            keys_S11K, queries_S1Q1 = key_positions_SK[:, None, None, columns], queries_SQ[:, None, :, None]
            is_hidden = keys_S11K > queries_S1Q1
            if window is not None:
                is_hidden |= keys_S11K <= queries_S1Q1 - window
            hidden = torch.from_numpy(is_hidden).to(device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
        yield _Tile(
            query_index=torch.from_numpy(bucket.query_index[:, first : first + num_rows].ravel()).to(device),
            key_index=torch.from_numpy(bucket.key_index[:, columns].ravel()).to(device),
            num_segments=num_segments,
            mask=mask,
        )


def _positions(bucket: Bucket) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return places of queries [S or 1, Lq] and keys [S or 1, Lk] in their sequences; padding comes after all."""
    num_queries = bucket.query_index.shape[1]
    own_1Q = np.arange(num_queries)[None]
    if bucket.prompt_lengths is None:
        return own_1Q, own_1Q
    lengths_S1 = bucket.prompt_lengths[:, None]
    place_1P = np.arange(bucket.key_index.shape[1] - num_queries)[None]
    prompts_SP = np.where(place_1P < lengths_S1, place_1P, np.iinfo(np.int64).max)
    return lengths_S1 + own_1Q, np.concatenate([prompts_SP, lengths_S1 + own_1Q], axis=1)


class DescribedMask(torch.Tensor):
    """A mask [B, 1, Lq, Lk] that occupies no memory. The result of any operation on it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage]
    hides: frozenset[str]
    """Names of the functions of ``transformers.masking_utils`` that hide tokens, and of any others."""
    window: int | None
    """Sliding window in tokens; None: there is none."""


def describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> DescribedMask:
    """Describe a mask instead of computing it; the arguments are those of ``transformers.masking_utils.sdpa_mask``.

    A packed row's attention follows its plan, but a mask can hide more than causality does: a sliding window.
    """
    del others
    mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    described = mask.as_subclass(DescribedMask)
    described.hides = frozenset(_names(mask_function))
    described.window = local_size if _WINDOW in described.hides else None
    return described


def window_of(mask: torch.Tensor) -> int | None:
    """Return the sliding window of a described mask, in tokens.

    Raises:
        UnsupportedModelError: the mask hides other tokens than causality and a sliding window do.
    """
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
    return mask.window


def _names(mask_function: Callable[..., Any]) -> Iterator[str]:
    name = mask_function.__qualname__.partition(".")[0]
    if name != _CONJUNCTION:
        yield name
        return
    for part in getclosurevars(mask_function).nonlocals["mask_functions"]:
        yield from _names(part)

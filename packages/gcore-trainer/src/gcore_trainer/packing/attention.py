"""Attention over a packed row, in the form that transformers' models call.

Shapes: T packed tokens, S segments of a bucket, Lq/Lk padded queries/keys, H query heads, K key-value heads, D head
dimension.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface

from gcore_trainer.errors import UnsupportedModelError
from gcore_trainer.packing.block_attention import Scoring, attention
from gcore_trainer.packing.mask import describe, window_of
from gcore_trainer.packing.pack import Bucket, PackedBatch, sequence_rectangles

ATTENTION_NAME = "gcore_packed"

_UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "block_indices")
"""Arguments of a model's attention that change its result, and that are not computed here."""

_NUM_WINDOW_ROWS = 512
"""Queries of a tile under a sliding window: its keys are at most so many and the window's."""


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


class AttentionPlan(Protocol):
    """The attention pattern of a packed row; made once a micro-batch, used by every layer."""

    num_calls: int
    """Attention layers served so far."""

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Compute the attention output [1, T, H, D] of the T tokens that this process holds.

        Args:
            query_1HTD: with rotary embeddings applied, as the keys.
            key_1KTD: K divides H.
            value_1KTD: of the keys' tokens.
            kind: of the layer.
        """
        ...


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


class PackedPlan(AttentionPlan):
    """The attention of a `PackedBatch` whose row one process holds."""

    def __init__(self, batch: PackedBatch, *, device: torch.device, dtype: torch.dtype) -> None:
        self._unpack_index = torch.from_numpy(batch.unpack_index).to(device)
        self._device = device
        self._dtype = dtype
        self._batch = batch
        self._sequences: tuple[list[torch.Tensor], torch.Tensor] | None = None
        self._tiles: dict[int | None, list[list[_Tile]]] = {}
        self.num_calls = 0

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        self.num_calls += 1
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        scale = q_THD.shape[-1] ** -0.5 if kind.scale is None else kind.scale
        outputs: list[torch.Tensor] = []
        for tiles in self._tiles_of(kind.sliding_window):
            rows: list[torch.Tensor] = []
            for tile in tiles:
                shape = (tile.num_segments, -1)
                q_SHQD = q_THD.index_select(0, tile.query_index).unflatten(0, shape).transpose(1, 2)
                k_SKKD = k_TKD.index_select(0, tile.key_index).unflatten(0, shape).transpose(1, 2)
                v_SKKD = v_TKD.index_select(0, tile.key_index).unflatten(0, shape).transpose(1, 2)
                scoring = Scoring(scale=scale, is_causal=tile.mask is None, softcap=kind.softcap, mask=tile.mask)
                out_SHQD = attention(q_SHQD, k_SKKD, v_SKKD, scoring, sinks_H=kind.sinks)
                rows.append(out_SHQD.transpose(1, 2))
            outputs.append(torch.cat(rows, dim=1).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._unpack_index)[None]

    def mix(self, hidden_1TD: torch.Tensor, mixer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute the output [1, T, D] of a layer that mixes the tokens of a sequence otherwise, from first to last.

        Linear attention has a state and no mask, so it is given whole sequences: other layers compute a shared prompt
        once, and such a layer once for each of its responses.

        Args:
            hidden_1TD: the layer's input.
            mixer: from [S, L, D] to [S, L, D]; what pads a sequence is at its end.
        """
        self.num_calls += 1
        if self._sequences is None:
            rectangles, unpack_index = sequence_rectangles(self._batch)
            on_device = [torch.from_numpy(x).to(self._device) for x in rectangles]
            self._sequences = on_device, torch.from_numpy(unpack_index).to(self._device)
        rectangles_SL, unpack_index_T = self._sequences
        outputs = [mixer(hidden_1TD[0][places_SL]).flatten(0, 1) for places_SL in rectangles_SL]
        return torch.cat(outputs).index_select(0, unpack_index_T)[None]

    def _tiles_of(self, window: int | None) -> list[list[_Tile]]:
        """Return the tiles of each bucket; made once, because layers share them."""
        if window not in self._tiles:
            self._tiles[window] = [
                list(_tiles(bucket, window, device=self._device, dtype=self._dtype)) for bucket in self._batch.buckets
            ]
        return self._tiles[window]


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
            keys_SK = key_positions_SK[:, columns]
            positions = (torch.from_numpy(x).to(device) for x in (queries_SQ[:, None, :, None], keys_SK[:, None, None]))
            mask = _mask(*positions, window=window, dtype=dtype)
        key_index = bucket.key_index[:, columns]
        yield _Tile(
            query_index=torch.from_numpy(bucket.query_index[:, first : first + num_rows].ravel()).to(device),
            key_index=torch.from_numpy(key_index.ravel()).to(device),
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


def _mask(
    queries_S1Q1: torch.Tensor, keys_S11K: torch.Tensor, *, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[S or 1, 1, Lq, Lk], -inf where a query does not see a key."""
    is_hidden = keys_S11K > queries_S1Q1
    if window is not None:
        is_hidden |= keys_S11K <= queries_S1Q1 - window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)


def _forward(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if packed is None:
        raise UnsupportedModelError(
            "the model does not pass the keyword arguments of its forward pass on to its attention: packed training "
            "needs it to"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise UnsupportedModelError(f"the model's attention uses {name!r}: packed training does not compute it")
    if attention_mask is not None:
        # Some models have their window in the mask alone; where both have one, transformers' eager attention and SDPA
        # follow the mask.
        sliding_window = window_of(attention_mask)
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedModelError(f"sliding_window is {sliding_window}; expected at least 1, or none")
    kind = AttentionKind(scale=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    return packed.attend(query, key, value, kind), None


def register() -> None:
    """Make ``attn_implementation="gcore_packed"`` known to transformers, through its own extension points."""
    AttentionInterface.register(ATTENTION_NAME, _forward)
    AttentionMaskInterface.register(ATTENTION_NAME, describe)


def mix_by_sequence(mixer: Any) -> None:
    """Make a layer's linear attention compute each sequence of a packed row from the start; see `PackedPlan.mix`."""
    forward = mixer.forward

    def packed_forward(hidden_states: torch.Tensor, *, packed: PackedPlan | None = None, **others: Any) -> torch.Tensor:
        if packed is None:
            return forward(hidden_states=hidden_states, **others)
        # Others are caches and masks, of which a packed row has none.
        return packed.mix(hidden_states, lambda hidden_SLD: forward(hidden_states=hidden_SLD))

    mixer.forward = packed_forward

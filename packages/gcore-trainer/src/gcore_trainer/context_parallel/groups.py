"""The ranks that divide a packed row: process groups, the tokens of each rank, and attention over the row.

Ranks are ring-major: rank = ring_rank * ulysses_size + ulysses_rank. With R ring ranks every segment is cut in 2R equal
chunks, and ring rank r holds chunks r and 2R - 1 - r of each: an early chunk sees few tokens and a late one many, so
causal work is even (zig-zag; Llama 3, arXiv:2407.21783, section 3.3.2; compare striped attention, arXiv:2311.09431).

Shapes: U ranks that exchange heads, T tokens of the row or ring shard, H query heads, K key-value heads, D head
dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_trainer.context_parallel.ring import RingRow, equal_segments
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.layout import PackedBatch


@dataclass(frozen=True, kw_only=True)
class ContextParallel:
    """A rank's place in its context-parallel group, which divides one packed row."""

    ring_size: int = 1
    ulysses_size: int = 1
    rank: int = 0
    """Place among the `size` ranks of the group, ring-major."""
    ring: dist.ProcessGroup | None = None
    """The ranks that pass keys and values on; None: this rank alone."""
    ulysses: dist.ProcessGroup | None = None
    """The ranks that exchange tokens for heads; None: this rank alone."""

    @property
    def size(self) -> int:
        """Ranks that divide the row."""
        return self.ring_size * self.ulysses_size

    @property
    def padding(self) -> tuple[int, int]:
        """Divisors of the row's length and of segments' lengths; segments share no prompt if theirs is above 1."""
        if self.ring_size == 1:
            return self.ulysses_size, 1
        return math.lcm(2 * self.ring_size, self.size), 2 * self.ring_size

    def places(self, segment_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places [T / size] of the row that this rank holds, in its order; `BatchError` unless it divides.

        A ring shard has segments of equal length side by side, shorter ones first; its Ulysses ranks hold equal
        contiguous slices of it.
        """
        ring_rank, ulysses_rank = divmod(self.rank, self.ulysses_size)
        shard = _ring_shard(segment_lengths, ring_size=self.ring_size, ring_rank=ring_rank)
        if shard.size % self.ulysses_size:
            raise BatchError(
                f"a row of {segment_lengths.sum()} tokens cannot be divided among ring_size={self.ring_size} x "
                f"ulysses_size={self.ulysses_size} ranks; expected a multiple of their number"
            )
        return np.split(shard, self.ulysses_size)[ulysses_rank]


def make_context_parallel(cp_groups: list[list[int]], ulysses_size: int) -> ContextParallel:
    """Make the process groups of all context-parallel groups, and return this rank's; all ranks of the world call it.

    The world ranks of each group are ascending: consecutive ``ulysses_size`` of them exchange heads.
    """
    world_size = dist.get_world_size()
    if sorted(chain.from_iterable(cp_groups)) != list(range(world_size)):
        raise ConfigError(f"cp_groups is {cp_groups}; expected each of the {world_size} ranks once")
    for ranks in cp_groups:
        # torch orders a group's ranks by their number, whatever order was given.
        if ranks != sorted(ranks):
            raise ConfigError(f"cp_groups has {ranks}; expected ascending ranks")
        if ulysses_size < 1 or len(ranks) % ulysses_size:
            raise ConfigError(
                f"ulysses_size is {ulysses_size}; expected a divisor of {len(ranks)}, the ranks of {ranks}"
            )
    ulysses: list[list[int]] = []
    ring: list[list[int]] = []
    for ranks in cp_groups:
        ulysses += [ranks[i : i + ulysses_size] for i in range(0, len(ranks), ulysses_size)]
        ring += [ranks[i::ulysses_size] for i in range(ulysses_size)]
    group = next(ranks for ranks in cp_groups if dist.get_rank() in ranks)
    return ContextParallel(
        ring_size=len(group) // ulysses_size,
        ulysses_size=ulysses_size,
        rank=group.index(dist.get_rank()),
        ring=_make_groups(ring),
        ulysses=_make_groups(ulysses),
    )


def _make_groups(all_ranks: list[list[int]]) -> dist.ProcessGroup | None:
    """Make a process group of each list of two or more ranks; return this rank's."""
    divided = [ranks for ranks in all_ranks if len(ranks) > 1]
    if not divided:
        return None
    group: Any = dist.new_subgroups_by_enumeration(divided)[0]
    return group


def _ring_shard(
    segment_lengths: NDArray[np.int64], *, ring_size: int, ring_rank: int
) -> NDArray[np.int64]:
    if ring_size == 1:
        return np.arange(segment_lengths.sum())
    if (segment_lengths % (2 * ring_size)).any():
        length = segment_lengths[segment_lengths % (2 * ring_size) != 0][0]
        raise BatchError(
            f"a segment of {length} tokens cannot be cut in {2 * ring_size} chunks for ring_size={ring_size}; expected "
            f"a multiple of {2 * ring_size}"
        )
    order = np.argsort(segment_lengths, kind="stable")
    starts = (np.cumsum(segment_lengths) - segment_lengths)[order]
    chunk_lengths = segment_lengths[order] // (2 * ring_size)
    early = starts + ring_rank * chunk_lengths
    late = starts + (2 * ring_size - 1 - ring_rank) * chunk_lengths
    chunk_starts = np.stack([early, late], axis=1)
    lengths = np.repeat(chunk_lengths, 2)
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(chunk_starts.ravel() - (ends - lengths), lengths)


class DividedRow:
    """Attention over a row whose tokens the ranks of a context-parallel group divide."""

    def __init__(self, batch: PackedBatch, cp: ContextParallel, *, device: torch.device) -> None:
        self._cp = cp
        self._num_tokens = cp.places(batch.segment_lengths).size
        segments = equal_segments(batch.segment_lengths, ring_size=cp.ring_size)
        self._ring = None if cp.ring is None else RingRow(segments, cp.ring, device=device)
        if cp.ring is not None and any(segment.parent is not None for segment in batch.segments):
            raise BatchError(
                f"the row shares prompts; expected one packed with share_prefix=False for ring_size {cp.ring_size}"
            )

    def attend(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        attention: AttentionKind,
        attend_whole: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Compute [T, H, D] of this rank's tokens; ``attend_whole`` computes it of a whole row with some heads."""
        cp = self._cp
        if q_THD.shape[0] != self._num_tokens:
            raise BatchError(
                f"attention was called with {q_THD.shape[0]} tokens; expected the {self._num_tokens} of this rank"
            )
        if cp.ulysses is not None:
            size = cp.ulysses_size
            num_heads = q_THD.shape[1]
            k_TKD = _repeat_heads(k_TKD, num_query_heads=num_heads, size=size)
            v_TKD = _repeat_heads(v_TKD, num_query_heads=num_heads, size=size)
            q_THD, k_TKD, v_TKD = _scatter_heads([q_THD, k_TKD, v_TKD], cp.ulysses)
            if attention.sinks is not None:
                attention = replace(
                    attention, sinks=attention.sinks.unflatten(0, (size, -1))[cp.rank % size]
                )
        attend = attend_whole if self._ring is None else self._ring.attend
        out_THD = attend(q_THD, k_TKD, v_TKD, attention)
        if cp.ulysses is None:
            return out_THD
        return _gather_heads(out_THD, cp.ulysses)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _exchange(grad_outputs[0], ctx.group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch hands it over
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ARG004 - torch hands it over
        return None, grad_outputs[0]


def _scatter_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange a slice of the tokens with all heads for all tokens with a slice of the heads, [T, heads / U, D].

    DeepSpeed-Ulysses, arXiv:2309.14509, section 3.1.
    """
    parts = [x.unflatten(1, (group.size(), -1)).transpose(0, 1) for x in tensors]
    message = torch.cat([part.flatten(2) for part in parts], dim=-1)
    received = _AllToAll.apply(group, message).flatten(0, 1)
    widths = [part.shape[2] * part.shape[3] for part in parts]
    shares = received.split(widths, dim=-1)
    return [share.unflatten(-1, part.shape[2:]) for share, part in zip(shares, parts, strict=True)]


def _gather_heads(x_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Invert `_scatter_heads`: from [T, H / U, D] to [T / U, H, D]."""
    received: torch.Tensor = _AllToAll.apply(group, x_THD.unflatten(0, (group.size(), -1)))
    return received.transpose(0, 1).flatten(1, 2)


def _repeat_heads(x_TKD: torch.Tensor, *, num_query_heads: int, size: int) -> torch.Tensor:
    """Repeat key-value heads until `size` ranks divide them, each head next to its query heads."""
    if num_query_heads % size:
        raise ConfigError(
            f"ulysses_size is {size}; expected a divisor of the {num_query_heads} query heads of attention"
        )
    num_heads = x_TKD.shape[1]
    return x_TKD.repeat_interleave(math.lcm(num_heads, size) // num_heads, dim=1)


def sum_over_ranks(values_N: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum the ranks' values [N] on all of them; the gradient passes unchanged.

    For ranks that each compute some entries, leave the others 0, and then compute the same loss of all: each
    back-propagates what the loss says of its own entries. The parameters' gradients are then to be summed over ranks.
    A rank that has no entries goes backward too: its attention passes on the gradients of others.
    """
    for group in groups:
        if group is not None:
            values_N = _SumOverRanks.apply(group, values_N)
    return values_N


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received

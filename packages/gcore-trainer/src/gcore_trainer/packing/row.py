"""A rank's tokens of a packed row, with their attention and targets, as every backend's model gets them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.context_parallel.collectives import sum_over_ranks
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.context_parallel.plan import ContextParallelPlan
from gcore_trainer.packing.attention import AttentionPlan, PackedPlan
from gcore_trainer.packing.pack import PackedBatch, pack
from gcore_trainer.packing.router_replay import input_places, routing_of_row
from gcore_trainer.packing.vision import RowImages, Vision, refuse_images
from gcore_trainer.sample import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A rank's T tokens of a packed row, and the n of its N response tokens that they predict."""

    # Megatron-Core's layers get a row where they expect their own packing parameters, and look at these two: other than
    # with "thd", they rotate by position and leave queries, keys and values [T, 1, heads, D].
    qkv_format: ClassVar[str] = "packed"
    cp_group: ClassVar[Any] = None

    input_ids: torch.Tensor
    """[1, T]."""
    positions: torch.Tensor
    """[1, T]."""
    plan: AttentionPlan
    source_index: torch.Tensor
    """[n] which of the T tokens predicts each response token."""
    target_ids: torch.Tensor
    """[n]."""
    target_index: torch.Tensor
    """[n] which of the N response tokens each is; N itself is none of them."""
    num_targets: int
    """N."""
    num_tokens: int
    """Tokens of the whole row, on all ranks that divide it."""
    places: torch.Tensor
    """[T] where each of the T stands in the whole row."""
    input_places: Sequence[NDArray[np.int64]]
    """[P + R - 1] where each sample's input tokens stand in the whole row."""
    routing: torch.Tensor | None
    """[T, L, K] the experts that each token passes through, where routers do not choose (see `router_replay`)."""
    images: RowImages | None
    """None: there are none."""
    cp: ContextParallel

    def of_all_ranks(self, values_n: torch.Tensor) -> torch.Tensor:
        """Collect [N] of all response tokens from the [n] of each rank, in float32 at least (see `sum_over_ranks`)."""
        values_n = values_n.to(torch.promote_types(values_n.dtype, torch.float32))
        if self.cp.size == 1:
            return values_n
        values_N = values_n.new_zeros(self.num_targets + 1).index_put((self.target_index,), values_n)[:-1]
        return sum_over_ranks(values_N, self.cp.ulysses, self.cp.ring)

    def of_samples(self, routing_TLK: torch.Tensor) -> list[NDArray[np.int16]]:
        """Collect [P + R - 1, L, K] of each sample's tokens from the [T, L, K] of each rank."""
        whole = routing_TLK.new_zeros((self.num_tokens, *routing_TLK.shape[1:]))
        whole[self.places] = routing_TLK
        found = sum_over_ranks(whole, self.cp.ulysses, self.cp.ring).cpu().numpy().astype(np.int16)
        return [found[places] for places in self.input_places]


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMaker:
    """Packs micro-batches for one layout.

    Attributes:
        cp: This rank's place among those that divide a row's tokens.
        device: Of the model.
        dtype: Of the model's activations.
        share_prefix: Compute equal prompts of a micro-batch once, where the row need not be cut within sequences.
        replay_routing: Impose the experts that samples bring: the policy's, not those of a critic.
        vision: How the model sees; None: it does not.
        multiple_of: What the number of each rank's tokens must be a multiple of.
    """

    cp: ContextParallel
    device: torch.device
    dtype: torch.dtype
    share_prefix: bool
    replay_routing: bool
    vision: Vision | None = None
    multiple_of: int = 1

    def make(self, micro_batches: Sequence[MicroBatch], *, equal_lengths: bool = False) -> list[Row]:
        """Make a row of each micro-batch.

        Args:
            micro_batches: the same on all ranks that work on them.
            equal_lengths: pad all to the longest.

        Raises:
            BatchError: a sample has images, and the model sees none; or they do not fit their prompt.
        """
        batches = [self._packed(samples) for samples in micro_batches]
        if equal_lengths:
            longest = max(batch.input_ids.size for batch in batches)
            batches = [self._packed(samples, longest) for samples in micro_batches]
        return [self._row(samples, batch) for samples, batch in zip(micro_batches, batches, strict=True)]

    def _packed(self, samples: MicroBatch, multiple_of: int = 1) -> PackedBatch:
        padding = self.cp.padding
        return pack(
            samples,
            share_prefix=self.share_prefix and padding.segment_multiple_of == 1,
            multiple_of=math.lcm(multiple_of, self.multiple_of * padding.multiple_of),
            segment_multiple_of=padding.segment_multiple_of,
        )

    def _row(self, samples: MicroBatch, batch: PackedBatch) -> Row:
        if self.cp.size == 1:
            places = np.arange(batch.input_ids.size)
            plan: AttentionPlan = PackedPlan(batch, device=self.device, dtype=self.dtype)
        else:
            places = self.cp.places(batch)
            plan = ContextParallelPlan(batch, self.cp, device=self.device, dtype=self.dtype)
        here = np.full(batch.input_ids.size, -1)
        here[places] = np.arange(places.size)
        source_N = here[batch.predict_index[batch.target_place]]
        target_index, source_index = np.flatnonzero(source_N >= 0), source_N[source_N >= 0]
        target_ids = batch.target_ids[target_index]
        if not target_index.size:
            # All ranks of a row score something, for their collectives are the same.
            target_index = np.array([source_N.size])
            source_index = target_ids = np.zeros(1, np.int64)
        if self.vision is None:
            refuse_images(samples, "this backend or model sees none, the torch backend does with a Qwen-VL model")
        routing = routing_of_row(samples, batch) if self.replay_routing else None
        return Row(
            input_ids=self._tensor(batch.input_ids[places])[None],
            positions=self._tensor(batch.positions[places])[None],
            plan=plan,
            source_index=self._tensor(source_index),
            target_ids=self._tensor(target_ids),
            target_index=self._tensor(target_index),
            num_targets=source_N.size,
            num_tokens=batch.input_ids.size,
            places=self._tensor(places),
            input_places=input_places(samples, batch),
            routing=None if routing is None else self._tensor(routing[places]),
            images=None if self.vision is None else self.vision.row_images(samples, batch),
            cp=self.cp,
        )

    def _tensor(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

"""Layers that mix the tokens of a sequence by a recurrence, in packed rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.objectives.objective import on_device
from gcore_trainer.packing.layout import PackedBatch, make_rectangle, rounded_length
from gcore_trainer.packing.row import PackedPlan


def mix_by_sequence(mixer: Any) -> None:
    """Make a layer's linear attention compute each sequence of a packed row from the start; see `mix`."""
    forward = mixer.forward

    def packed_forward(
        hidden_states: torch.Tensor, *, packed: PackedPlan | None = None, **options: Any
    ) -> torch.Tensor:
        if packed is None:
            return forward(hidden_states=hidden_states, **options)
        # The options are caches and masks, which a packed row does not have.
        return mix(packed, hidden_states, lambda hidden_SLD: forward(hidden_states=hidden_SLD))

    mixer.forward = packed_forward


def mix(
    plan: PackedPlan, hidden_1TD: torch.Tensor, mixer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute the output [1, T, D] of a layer that mixes the tokens of a sequence from first to last.

    Linear attention has a state and no mask, so it is given whole sequences: other layers compute shared tokens
    once, and such a layer once for each of the responses and branches that follow them.
    """
    plan.num_calls += 1
    rectangles, unpack_index = _rectangles(plan.batch)
    device = hidden_1TD.device
    outputs = [
        mixer(hidden_1TD[0][on_device(rectangle, device)]).flatten(0, 1) for rectangle in rectangles
    ]
    return torch.cat(outputs).index_select(0, on_device(unpack_index, device))[None]


def _rectangles(batch: PackedBatch) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Lay out the sequences of a row, each with a copy of what it shares, in rectangles of similar lengths.

    Returns the places [S, L] of each rectangle, padded with 0, and [T] where each token stands in them, flattened.
    """
    by_length: dict[int, list[NDArray[np.int64]]] = {}
    shared = {s.parent for s in batch.segments if s.parent}
    for segment in batch.segments:
        if segment in shared:
            continue
        sequence = segment.sequence
        by_length.setdefault(rounded_length(sequence.size), []).append(sequence)
    rectangles: list[NDArray[np.int64]] = []
    unpack_index = np.empty(batch.input_ids.size, np.int64)
    offset = 0
    for _, members in sorted(by_length.items()):
        rectangle, is_real = make_rectangle(members)
        unpack_index[rectangle[is_real]] = offset + np.flatnonzero(is_real)
        offset += rectangle.size
        rectangles.append(rectangle)
    return rectangles, unpack_index

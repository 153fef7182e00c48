"""Layers that mix the tokens of a sequence by a recurrence, in packed rows."""

from collections.abc import Callable
from typing import Any

import torch

from gcore_trainer.objectives.objective import on_device
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
    rectangles, unpack_index = plan.batch.sequences
    device = hidden_1TD.device
    outputs = [
        mixer(hidden_1TD[0][on_device(rectangle, device)]).flatten(0, 1) for rectangle in rectangles
    ]
    return torch.cat(outputs).index_select(0, on_device(unpack_index, device))[None]

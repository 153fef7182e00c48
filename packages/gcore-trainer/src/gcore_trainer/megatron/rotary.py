"""Rotary position embeddings of a packed row's tokens (RoFormer, arXiv 2104.09864)."""

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.packed_row import Row


class RowRotary(torch.nn.Module):
    """Takes the place of Megatron-Core's own: angles come from the row's positions, not from its length."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        config, head_dim = architecture.hf_config, architecture.head_dim
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
            self._inv_freq = 1.0 / (rope["rope_theta"] ** exponents)
        else:
            self._inv_freq, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))

    def get_rotary_seq_len(self, inference: Any, decoder: Any, hidden: Any, config: Any, row: Row) -> Row:
        """Whatever `forward` is to be called with."""
        del inference, decoder, hidden, config
        return row

    def forward(self, row: Row, **others: Any) -> torch.Tensor:
        """Angles [T, 1, 1, D] of the tokens that attention sees on this rank."""
        del others
        positions_T = row.positions[0]
        angles = positions_T.float()[:, None] * self._inv_freq.to(positions_T.device)
        return torch.cat([angles, angles], dim=-1)[:, None, None]

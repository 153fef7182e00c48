"""The core attention of Megatron-Core's layers, as a packed row's plan computes it."""

from typing import Any

import torch

from gcore_trainer.packed_row import Row


class PlanAttention(torch.nn.Module):
    """Takes the place of Megatron-Core's dot-product attention, which knows neither packing nor context parallelism."""

    def __init__(self, softmax_scale: float | None = None, **others: Any) -> None:
        super().__init__()
        del others
        self._scale = softmax_scale

    def forward(
        self,
        query_T1HD: torch.Tensor,
        key_T1KD: torch.Tensor,
        value_T1KD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Row,
        **others: Any,
    ) -> torch.Tensor:
        """[T, 1, H * D]."""
        del attention_mask, others
        q_1HTD, k_1KTD, v_1KTD = (x.permute(1, 2, 0, 3) for x in (query_T1HD, key_T1KD, value_T1KD))
        out_1THD = packed_seq_params.plan.attend(q_1HTD, k_1KTD, v_1KTD, scale=self._scale, sliding_window=None)
        return out_1THD[0].flatten(1).unsqueeze(1)

"""A layer's experts as grouped matrix products, whose weights are one parameter for all experts of a rank."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

# E: experts of this rank, N: tokens sent to them, D: hidden size, F: size of an expert.
ALIGNMENT_BYTES = 16
"""Rows of the factors of a grouped product are multiples of it."""


class GroupedExperts(torch.nn.Module):
    """Replaces Megatron-Core's ``SequentialMLP``, for experts that are not divided.

    Its dispatcher sorts tokens by expert, and says how many each has.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any
    ) -> None:
        super().__init__()
        assert pg_collection.expt_tp.size() == 1, "single experts are not divided"
        ffn = config.moe_ffn_hidden_size
        hidden = config.hidden_size
        assert ffn is not None
        self._is_fused = config.bias_activation_fusion
        self.weight1 = _weight(config, num_local_experts, 2 * ffn, hidden)
        """[E, 2 F, D]: gate, then up."""
        self.weight2 = _weight(config, num_local_experts, hidden, ffn)
        """[E, D, F]."""

    def forward(
        self, tokens_ND: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [N, D], weighted by the router's probabilities, and no bias."""
        ends_E = tokens_per_expert.to(tokens_ND.device, non_blocking=True).cumsum(0).int()
        gate_up = _multiply(tokens_ND, self.weight1, ends_E)
        if self._is_fused:
            inner_NF = weighted_bias_swiglu_impl(gate_up, None, probs_N[:, None])
        else:
            gate_NF, up_NF = gate_up.chunk(2, dim=-1)
            # The router's probabilities are float32.
            inner_NF = (functional.silu(gate_NF) * up_NF * probs_N[:, None]).to(gate_up.dtype)
        return _multiply(inner_NF, self.weight2, ends_E), None


def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(
        torch.zeros(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
    )
    # Marks of the experts' linear layers: their replicas are other ranks, and every rank's part counts in norms.
    weight.allreduce = config.expert_model_parallel_size == 1  # pyright: ignore[reportAttributeAccessIssue]
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=1, stride=1)
    return weight


def _multiply(
    inputs_NI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """Multiply the inputs of each expert by its matrix: [N, O]."""
    if not inputs_NI.shape[0]:
        # A rank that no token was sent to: its weights still have gradients, of zeros.
        return inputs_NI @ weight_EOI.sum(0).T
    output_NO = functional.grouped_mm(inputs_NI, weight_EOI.transpose(1, 2), offs=ends_E)
    if output_NO.requires_grad:
        # The backward pass takes no other layout.
        output_NO.register_hook(torch.Tensor.contiguous)
    return output_NO

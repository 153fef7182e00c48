"""The head after the last stage: scores of a row's response tokens."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.packing.row import Row
from gcore_trainer.packing.token_scores import TokenScores, VocabShard, token_scores


class Head:
    """Turns the last stage's hidden states into what the objective looks at, the same on all ranks of the row.

    Args:
        architecture: the model.
        has_value_head: whether it gives values [N], instead of `TokenScores`.
        temperature: divides the logits.
        entropy_grad: make the entropies differentiable too.
        sequence_parallel: whether hidden states are divided over tensor-parallel ranks.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        has_value_head: bool,
        temperature: float,
        entropy_grad: bool,
        sequence_parallel: bool,
    ) -> None:
        self._vocab_size = architecture.vocab_size
        self._is_tied = architecture.is_tied
        self._has_value_head = has_value_head
        self._temperature = temperature
        self._entropy_grad = entropy_grad
        self._sequence_parallel = sequence_parallel

    def scores(self, chunk: Any, hidden_T1D: torch.Tensor, row: Row) -> Any:
        """Compute `TokenScores`, or values [N].

        Args:
            chunk: the last stage, whose weights these are.
            hidden_T1D: the stage's output; a slice of the T under sequence parallelism.
            row: of which they are.
        """
        if self._sequence_parallel:
            # Each rank back-propagates the whole gradient: slices of it are taken, not sums.
            hidden_T1D = gather_from_sequence_parallel_region(hidden_T1D, tensor_parallel_output_grad=False)
        hidden_nD = hidden_T1D[row.source_index, 0]
        if self._has_value_head:
            return row.of_all_ranks(chunk.score(hidden_nD)[:, 0])
        weight_VD = chunk.shared_embedding_or_output_weight() if self._is_tied else chunk.output_layer.weight
        tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        scores = token_scores(
            hidden_nD,
            weight_VD,
            row.target_ids,
            temperature=self._temperature,
            entropy_grad=self._entropy_grad,
            vocab=VocabShard(
                group=tp_group,
                start=parallel_state.get_tensor_model_parallel_rank() * weight_VD.shape[0],
                vocab_size=self._vocab_size,
            ),
        )
        return TokenScores(log_probs=row.of_all_ranks(scores.log_probs), entropies=row.of_all_ranks(scores.entropies))

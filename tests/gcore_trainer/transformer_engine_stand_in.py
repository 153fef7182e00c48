"""A stand-in for Transformer Engine's linear layers, which cannot be installed without CUDA.

It is written from Megatron-Core's wrappers of them: their arguments, their parameters' names and marks, and what they
compute, by torch and Megatron-Core's own layers. It shows that a trainer makes, loads, trains and exports such layers,
and nothing of Transformer Engine itself.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.nn.functional import rms_norm

from gcore_trainer.megatron import trainer


class NormAndColumn(ColumnParallelLinear):
    """RMSNorm, then a column parallel layer; with sequence parallelism the norm is of a slice of the tokens."""

    num_made = 0

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        NormAndColumn.num_made += 1
        assert not others["gather_output"]
        assert not others["is_expert"]
        super().__init__(input_size, output_size, config=config, **others)
        self._eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype)
        )
        mark: Any = self.layer_norm_weight
        mark.sequence_parallel = config.sequence_parallel

    def forward(self, input_T1D: torch.Tensor, *args: Any, **others: Any) -> Any:
        assert self.layer_norm_weight is not None
        normed = rms_norm(input_T1D, input_T1D.shape[-1:], self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **others)


class Row(RowParallelLinear):
    """A row parallel layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        assert not others["is_expert"]
        super().__init__(input_size, output_size, config=config, **others)


class Provider:
    """Of Megatron-Core's provider, what the trainer asks for."""

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndColumn

    def row_parallel_linear(self) -> type:
        return Row


@contextmanager
def transformer_engine_stand_in() -> Generator[None]:
    """Trainers that are made here have its layers."""
    num_before = NormAndColumn.num_made
    with (
        mock.patch.object(trainer, "uses_transformer_engine", return_value=True),
        mock.patch.object(transformer_engine_spec_provider, "TESpecProvider", Provider),
    ):
        yield
    assert NormAndColumn.num_made > num_before

"""Passes over a step's micro-batches, by Megatron-Core's pipeline schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from gcore_trainer.packing.row import Row
from gcore_trainer.sample import MicroBatch

T = TypeVar("T")
Finish = Callable[[Any, torch.Tensor, "Pass"], tuple[torch.Tensor, Any]]
"""Makes a loss, and anything else, of the last stage, its output and the pass."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """A row that goes through the stages."""

    row: Row
    samples: MicroBatch | None
    """None: a row for nothing, while other replicas still have micro-batches."""


def run_passes(chunks: Sequence[Any], passes: Sequence[Pass], finish: Finish) -> list[Any]:
    """Run all passes, backwards too where gradients are enabled.

    Returns:
        on the last stage what ``finish`` returned with each loss, on the others nothing.
    """

    def forward_step(passes: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        one: Pass = next(passes)
        output = chunk(one.row.input_ids, one.row.positions, None, packed_seq_params=one.row)
        return output, partial(finished, chunk.module, one)

    def finished(chunk: Any, one: Pass, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        loss, result = finish(chunk, output, one)
        # Of a count of 0 tokens Megatron-Core makes no mean: gradients stay sums.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    iterators = [iter(passes) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks) if len(iterators) > 1 else chunks[0],
        num_microbatches=len(passes),
        # Of interleaved stages; elsewhere stages send each other the lengths of their messages.
        seq_length=passes[0].row.num_tokens,
        micro_batch_size=1,
        forward_only=not torch.is_grad_enabled(),
    )


def from_last_stage(value: T) -> T:
    """Broadcast the last stage's value, which can be pickled, to all stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    last_rank: Any = parallel_state.get_pipeline_model_parallel_last_rank()
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=last_rank, group=group)
    return box[0]

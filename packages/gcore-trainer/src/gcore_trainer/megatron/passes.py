"""Forward and backward passes over a step's micro-batches, by Megatron-Core's pipeline schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from gcore_trainer.megatron.row import Row
from gcore_trainer.types import MicroBatch

_Outcome = tuple[torch.Tensor, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass:
    """What goes through the stages together."""

    row: Row
    samples: MicroBatch | None
    """None: a row for nothing, while other replicas still have micro-batches."""


class Pipeline:
    """This rank's part of the pipeline.

    Args:
        chunks: the data-parallel modules of its virtual stages.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks

    def run(self, passes: Sequence[Pass], finish: Callable[[Any, torch.Tensor, Pass], _Outcome]) -> list[Any]:
        """Run all passes, backwards too where gradients are enabled; what `finish` made of each, on all stages.

        Args:
            passes: the same on all stages.
            finish: makes the pass's loss, and anything else that can be pickled, of the last stage and its output.
        """

        def forward_step(passes: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            one: Pass = next(passes)
            output = chunk(one.row.input_ids_1T, one.row.positions_1T, None, packed_seq_params=one.row)
            return output, partial(self._finished, finish, chunk.module, one)

        iterators = [iter(passes) for _ in self._chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self._chunks) if len(iterators) > 1 else self._chunks[0],
            num_microbatches=len(passes),
            # Of interleaved stages; elsewhere stages tell each other the lengths of their messages.
            seq_length=passes[0].row.num_tokens,
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
        )
        return self._of_last_stage(results)

    def _finished(
        self, finish: Callable[[Any, torch.Tensor, Pass], _Outcome], chunk: Any, one: Pass, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        loss, result = finish(chunk, output, one)
        # Of a count of 0 tokens Megatron-Core makes no mean: gradients stay sums.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    def _of_last_stage(self, results: list[Any]) -> list[Any]:
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return results
        box = [results]
        dist.broadcast_object_list(
            box,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        return box[0]

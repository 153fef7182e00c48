"""Megatron-Core's process groups, which a process has one set of."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from gcore_trainer.config import ParallelConfig
from gcore_trainer.context_parallel.groups import ContextParallel, make_context_parallel
from gcore_trainer.errors import ConfigError

_joined: tuple[ParallelConfig, ContextParallel] | None = None


def sizes_of(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the sizes under Megatron-Core's names."""
    vpp = parallel.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def join_groups(parallel: ParallelConfig, device: torch.device) -> ContextParallel:
    """Make the groups, or find those that an earlier trainer of this process made; all ranks call this together.

    Ranks are numbered as Megatron-Core does: tensor parallel ranks are neighbours, then context, data, pipeline.

    Raises:
        ConfigError: this process has groups of other sizes.
    """
    global _joined
    if _joined is not None:
        if _joined[0] != parallel:
            raise ConfigError(
                f"parallel is {parallel}; expected {_joined[0]}, the layout of this process: Megatron-Core has only one"
            )
        return _joined[1]
    parallel_state.initialize_model_parallel(**sizes_of(parallel), create_gloo_process_groups=False)
    # No random number is drawn, but sequence parallelism and recomputation switch between generators all the same.
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    context_parallel = ContextParallel()
    if parallel.context_parallel_size > 1:
        groups: list[Any] = [None] * dist.get_world_size()
        own: Any = parallel_state.get_context_parallel_group()
        dist.all_gather_object(groups, dist.get_process_group_ranks(own))
        unique = sorted({tuple(ranks) for ranks in groups})
        context_parallel = make_context_parallel([list(r) for r in unique], parallel.ulysses_sequence_parallel_size)
    _joined = parallel, context_parallel
    return context_parallel


def leave_groups() -> None:
    """Give the groups up, so that trainers of another layout can be made; all ranks call this together.

    Trainers of the old layout cannot be used again; while they live, so do the threads of a gloo group.
    """
    global _joined
    if _joined is None:
        return
    dist.barrier()
    context_parallel = _joined[1]
    # The first of the list stands for the world.
    groups: list[Any] = (parallel_state._global_process_group_list or [None])[1:]  # pyright: ignore[reportPrivateUsage]
    parallel_state.destroy_model_parallel()
    for group in [*groups, context_parallel.ulysses, context_parallel.ring]:
        if group is not None:
            dist.destroy_process_group(group)
    _joined = None

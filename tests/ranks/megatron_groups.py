"""Process groups of Megatron-Core, which a process has one set of, for tests of several layouts."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from gcore_trainer.megatron import architecture


def leave_groups() -> None:
    """Give the groups up, so that trainers of another layout can be made; all ranks call this together.

    Trainers of the old layout cannot be used again; while they live, so do the threads of a gloo group.
    """
    if architecture.joined is None:
        return
    dist.barrier()
    context_parallel = architecture.joined[1]
    # The first of the list stands for the world.
    groups: list[Any] = (parallel_state._global_process_group_list or [None])[1:]  # pyright: ignore[reportPrivateUsage]
    parallel_state.destroy_model_parallel()
    for group in [*groups, context_parallel.ulysses, context_parallel.ring]:
        if group is not None:
            dist.destroy_process_group(group)
    architecture.joined = None

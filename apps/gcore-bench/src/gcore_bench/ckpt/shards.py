"""The state as the ranks of fully sharded training hold it. Apart, since importing DTensor takes seconds."""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gcore_bench.ckpt.state import State, TensorPlan, Values, byte_view, is_same


def row_shards(plans: list[TensorPlan], mesh: DeviceMesh) -> State:
    """Every tensor split along dimension 0."""
    values = Values()
    state: State = {}
    for plan in plans:
        start, end = _share(plan.shape[0], mesh)
        state[plan.name] = _dtensor(values.rows(plan, start, end), plan, mesh, dim=0)
    return state


def empty_shards(plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> State:
    """Zeros, their pages made, to load into, split along ``dim``; tensors with fewer dimensions along dimension 0."""
    state: State = {}
    for plan in plans:
        split = _split(plan, dim)
        start, end = _share(plan.shape[split], mesh)
        local = torch.empty([end - start if i == split else n for i, n in enumerate(plan.shape)], dtype=plan.dtype)
        local.zero_()
        state[plan.name] = _dtensor(local, plan, mesh, dim=split)
    return state


def first_local_difference(state: State, plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> str:
    """Compare this rank's shards to the bit with what was saved: the first tensor that differs; empty if none does."""
    values = Values()
    for plan, local in zip(plans, local_tensors(state), strict=True):
        split = _split(plan, dim)
        start, end = _share(plan.shape[split], mesh)
        if not is_same(local, values.full(plan).narrow(split, start, end - start)):
            return plan.name
    return ""


def local_tensors(state: State) -> list[torch.Tensor]:
    """What of each tensor this rank holds."""
    return [tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)]


def local_bytes(state: State) -> list[torch.Tensor]:
    """The same as bytes."""
    return [byte_view(tensor) for tensor in local_tensors(state)]


def _split(plan: TensorPlan, dim: int) -> int:
    return min(dim, len(plan.shape) - 1)


def _dtensor(local: torch.Tensor, plan: TensorPlan, mesh: DeviceMesh, *, dim: int) -> DTensor:
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(plan.shape), stride=plan.stride
    )


def _share(length: int, mesh: DeviceMesh) -> tuple[int, int]:
    """As `torch.chunk` splits: all but the last shares are equally long."""
    share = math.ceil(length / mesh.size())
    start = min(mesh.get_rank() * share, length)
    return start, min(start + share, length)

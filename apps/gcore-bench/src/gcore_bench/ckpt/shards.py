"""The state as DTensors of fully sharded training. This module is separate because importing DTensor takes seconds."""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gcore_bench.ckpt.workload import State, TensorPlan, Values, byte_view, is_same


def row_shards(plans: list[TensorPlan], mesh: DeviceMesh) -> State:
    """Return every tensor, split along dimension 0."""
    values = Values()
    state: State = {}
    for plan in plans:
        start, end = _range(plan.shape[0], mesh)
        state[plan.name] = _dtensor(values.rows(plan, start, end), plan, mesh, dim=0)
    return state


def empty_shards(plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> State:
    """Return zeros to load into, split along ``dim``, or along the last dimension of tensors that have fewer."""
    state: State = {}
    for plan in plans:
        split = _split(plan, dim)
        start, end = _range(plan.shape[split], mesh)
        local = torch.empty([end - start if i == split else n for i, n in enumerate(plan.shape)], dtype=plan.dtype)
        local.zero_()
        state[plan.name] = _dtensor(local, plan, mesh, dim=split)
    return state


def first_local_difference(state: State, plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> str:
    """Compare this rank's shards bitwise with the saved state; return the first that differs, or an empty string."""
    values = Values()
    for plan, local in zip(plans, local_tensors(state), strict=True):
        split = _split(plan, dim)
        start, end = _range(plan.shape[split], mesh)
        if not is_same(local, values.full(plan).narrow(split, start, end - start)):
            return plan.name
    return ""


def local_tensors(state: State) -> list[torch.Tensor]:
    """Return this rank's shard of each tensor."""
    return [tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)]


def local_bytes(state: State) -> list[torch.Tensor]:
    """Return them as bytes."""
    return [byte_view(tensor) for tensor in local_tensors(state)]


def _split(plan: TensorPlan, dim: int) -> int:
    return min(dim, len(plan.shape) - 1)


def _dtensor(local: torch.Tensor, plan: TensorPlan, mesh: DeviceMesh, *, dim: int) -> DTensor:
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(plan.shape), stride=plan.stride
    )


def _range(length: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return start and end of this rank's indices, split as by `torch.chunk`."""
    size = math.ceil(length / mesh.size())
    start = min(mesh.get_rank() * size, length)
    return start, min(start + size, length)

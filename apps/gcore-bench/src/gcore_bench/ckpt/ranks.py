"""The part ranks: processes save their shards (DTensors), and half as many load them, split by rows and by columns."""

import math
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gcore_bench.ckpt.contenders import CONTENDERS
from gcore_bench.ckpt.limits import Arena, copy_rows, drop_cache, seconds_of, warm_cache, write_rows
from gcore_bench.ckpt.options import LIMITS
from gcore_bench.ckpt.work import measured_saves, root_of
from gcore_bench.ckpt.workload import State, TensorPlan, Values, byte_view, is_same, plan_state
from gcore_bench.harness.measure import settle
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.harness.report import Figures


def run(spec: Spec) -> dict[str, Any]:
    """Measure one rank; of all ranks' seconds the highest count."""
    with joined_world(spec):
        mesh = init_device_mesh("cpu", (spec.world_size,))
        plans = plan_state(spec.options["size_bytes"], spec.options["tensors"])
        if spec.options["phase"] == "load":
            return _load(spec, plans, mesh)
        state = _row_shards(plans, mesh)
        if spec.contender == LIMITS:
            return {"rows": _limits(spec, [byte_view(tensor) for tensor in _local_tensors(state)])}
        contender = CONTENDERS[spec.contender](root_of(spec))
        figures = measured_saves(spec.contender, contender, state, rank=spec.rank, barrier=dist.barrier)
        contender.close()
        return figures


def _limits(spec: Spec, parts: list[torch.Tensor]) -> dict[str, Figures]:
    """Measure all ranks at the same time, each with a copy of its own shards and a file of its own."""

    def sync() -> None:
        if spec.rank == 0:
            os.sync()
        dist.barrier()

    dist.barrier()
    rows = copy_rows(parts, max_threads=1)
    path = root_of(spec) / f"raw-{spec.rank}"
    return rows | write_rows(Arena.of(parts), path, before=sync, after=dist.barrier)


def _load(spec: Spec, plans: list[TensorPlan], mesh: DeviceMesh) -> dict[str, Any]:
    contender = CONTENDERS[spec.contender](root_of(spec))
    seconds: Figures = {}
    for layout, dim in (("rows", 0), ("columns", 1)):
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            template = _empty_shards(plans, mesh, dim=dim)
            if spec.rank == 0:
                prepare(contender.root)
            settle()
            dist.barrier()
            seconds[f"{layout}_{temperature}"] = seconds_of(partial(contender.load_into, 1, template))
            dist.barrier()
            if name := _first_difference(template, plans, mesh, dim=dim):
                raise ValueError(f"tensor {name}, split by {layout}, was loaded with other bytes than were saved")
    contender.close()
    return {"rows": {spec.contender: seconds}}


def _row_shards(plans: list[TensorPlan], mesh: DeviceMesh) -> State:
    """Return every tensor, split along dimension 0, as in fully sharded training."""
    values, state = Values(), State()
    for plan in plans:
        state[plan.name] = _dtensor(values.rows(plan, *_range(plan.shape[0], mesh)), plan, mesh, dim=0)
    return state


def _empty_shards(plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> State:
    """Return zeros to load into, split along ``dim``, or along the last dimension of tensors that have fewer."""
    state: State = {}
    for plan in plans:
        split = min(dim, len(plan.shape) - 1)
        start, end = _range(plan.shape[split], mesh)
        local = torch.empty([end - start if i == split else n for i, n in enumerate(plan.shape)], dtype=plan.dtype)
        state[plan.name] = _dtensor(local.zero_(), plan, mesh, dim=split)
    return state


def _first_difference(state: State, plans: list[TensorPlan], mesh: DeviceMesh, *, dim: int) -> str:
    """Compare this rank's shards bitwise with the saved state; return the first that differs, or an empty string."""
    values = Values()
    for plan, local in zip(plans, _local_tensors(state), strict=True):
        split = min(dim, len(plan.shape) - 1)
        start, end = _range(plan.shape[split], mesh)
        if not is_same(local, values.full(plan).narrow(split, start, end - start)):
            return plan.name
    return ""


def _local_tensors(state: State) -> list[torch.Tensor]:
    """Return this rank's shard of each tensor."""
    return [tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)]


def _dtensor(local: torch.Tensor, plan: TensorPlan, mesh: DeviceMesh, *, dim: int) -> DTensor:
    shape, stride = torch.Size(plan.shape), plan.stride
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def _range(length: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Return start and end of this rank's indices, split as by `torch.chunk`."""
    size = math.ceil(length / mesh.size())
    start = min(mesh.get_rank() * size, length)
    return start, min(start + size, length)

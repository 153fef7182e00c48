"""The part ranks: several processes save their shards, and half as many load them, split by rows and by columns."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gcore_bench.ckpt.contenders import make_contender
from gcore_bench.ckpt.contenders.base import InPlaceContender
from gcore_bench.ckpt.limits import RAW_WRITE, Arena, copy_rows, file_modes, write_seconds
from gcore_bench.ckpt.parts import LIMITS
from gcore_bench.ckpt.shards import empty_shards, first_local_difference, local_bytes, row_shards
from gcore_bench.ckpt.timing import drop_cache, measured_saves, root_of, rows_only, seconds_of, warm_cache
from gcore_bench.ckpt.workload import State, TensorPlan, plan_state
from gcore_bench.harness.child import Spec, joined_world
from gcore_bench.harness.measure import settle
from gcore_bench.harness.rounds import Figures


def run(spec: Spec) -> dict[str, Any]:
    """Measure one rank; of all ranks' seconds the highest count.

    Raises:
        ValueError: the loaded state differs from the saved one.
    """
    with joined_world(spec):
        mesh = init_device_mesh("cpu", (spec.world_size,))
        plans = plan_state(spec.options["size_bytes"], spec.options["tensors"])
        if spec.options["phase"] == "load":
            return _load(spec, plans, mesh)
        return _save(spec, row_shards(plans, mesh))


def _save(spec: Spec, state: State) -> dict[str, Any]:
    if spec.contender == LIMITS:
        return rows_only(_limits(local_bytes(state), root_of(spec), spec.rank))
    contender = make_contender(spec.contender, root_of(spec))
    figures = measured_saves(spec.contender, contender, state, rank=spec.rank, barrier=dist.barrier)
    contender.close()
    return figures


def _limits(parts: list[torch.Tensor], root: Path, rank: int) -> dict[str, Figures]:
    """Measure all ranks at the same time, each with a copy of its own shards and a file of its own."""
    dist.barrier()
    rows = copy_rows(parts, max_threads=1)
    arena = Arena.of(parts)
    for name, direct in file_modes(root, probe=f"probe-{rank}"):
        path = root / f"{name}-{rank}"
        if rank == 0:
            os.sync()
        dist.barrier()
        rows[f"{RAW_WRITE}, {name}"] = {"durable": write_seconds(arena, path, direct=direct)}
        dist.barrier()
        path.unlink()
    return rows


def _load(spec: Spec, plans: list[TensorPlan], mesh: DeviceMesh) -> dict[str, Any]:
    contender = make_contender(spec.contender, root_of(spec))
    assert isinstance(contender, InPlaceContender)
    seconds: Figures = {}
    for layout, dim in (("rows", 0), ("columns", 1)):
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            template = empty_shards(plans, mesh, dim=dim)
            if spec.rank == 0:
                prepare(contender.root)
            settle()
            dist.barrier()
            seconds[f"{layout}_{temperature}"] = seconds_of(partial(contender.load_into, 1, template))
            dist.barrier()
            if name := first_local_difference(template, plans, mesh, dim=dim):
                raise ValueError(f"tensor {name}, split by {layout}, was loaded with other bytes than were saved")
    contender.close()
    return rows_only({spec.contender: seconds})

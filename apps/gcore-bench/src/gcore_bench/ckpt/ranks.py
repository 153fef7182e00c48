"""Several processes: each saves its shards, and half as many load them, split by rows and by columns."""

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gcore_bench.ckpt.contender import InPlaceContender, make_contender
from gcore_bench.ckpt.figures import Figures, Spec
from gcore_bench.ckpt.files import drop_cache, warm_cache
from gcore_bench.ckpt.limits import RAW_WRITE, Arena, copy_rows, file_modes, write_seconds
from gcore_bench.ckpt.parts import LIMITS
from gcore_bench.ckpt.shards import empty_shards, first_local_difference, local_bytes, row_shards
from gcore_bench.ckpt.state import State, TensorPlan, plan_state
from gcore_bench.ckpt.timing import resident_bytes, save_once, save_seconds, seconds_of, settle


def run(spec: Spec) -> Figures:
    """The part of one rank; its seconds are its own, the slowest rank's count.

    Raises:
        ValueError: what was loaded is not what was saved.
    """
    dist.init_process_group("gloo", init_method=f"file://{spec.store}", rank=spec.rank, world_size=spec.world_size)
    mesh = init_device_mesh("cpu", (spec.world_size,))
    plans = plan_state(spec.size_bytes, spec.tensors)
    figures = _load(spec, plans, mesh) if spec.phase == "load" else _save(spec, row_shards(plans, mesh))
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _save(spec: Spec, state: State) -> Figures:
    if spec.contender == LIMITS:
        return Figures(rows=_limits(local_bytes(state), Path(spec.root), spec.rank))
    contender = make_contender(spec.contender, Path(spec.root))
    before_bytes, start_s = resident_bytes(), time.monotonic()
    save_once(contender, 0, state)
    seconds = save_seconds(contender, 1, state, rank=spec.rank, meet=dist.barrier)
    end_s = time.monotonic()
    contender.close()
    return Figures(rows={spec.contender: seconds}, before_bytes=before_bytes, saving_s=(start_s, end_s))


def _limits(parts: list[torch.Tensor], root: Path, rank: int) -> dict[str, dict[str, float]]:
    """All ranks at the same time: each a copy of its own part and a file of its own."""
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


def _load(spec: Spec, plans: list[TensorPlan], mesh: DeviceMesh) -> Figures:
    contender = make_contender(spec.contender, Path(spec.root))
    assert isinstance(contender, InPlaceContender)
    seconds: dict[str, float] = {}
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
                raise ValueError(f"what was loaded is not what was saved: tensor {name}, split by {layout}")
    contender.close()
    return Figures(rows={spec.contender: seconds})

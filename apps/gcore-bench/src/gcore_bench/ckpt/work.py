"""The measurement of a contender in its own processes: saves, loads, and training steps while a save is in flight.

In the part ranks, processes save their shards (DTensors), and half as many load them, split by rows and by columns.
"""

import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from timeit import Timer
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gcore_bench.ckpt.contenders import CONTENDERS, Contender
from gcore_bench.ckpt.limits import TEMPERATURES, Arena, copy_rows, disk_rows, seconds_of, sync_paths, write_rows
from gcore_bench.ckpt.options import LIMITS
from gcore_bench.ckpt.workload import State, TensorPlan, byte_view, is_same, plan_state
from gcore_bench.harness.measure import settle
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.harness.report import Figures

_STEP_S = 0.2
_QUIET_STEPS = 10
_WIDTH = 512
_ADDITIONS = 10_000


def run(spec: Spec) -> dict[str, Any]:
    """Measure ``spec.contender`` in a part; of all ranks' seconds the highest count."""
    plans, root = plan_state(spec.options["size_bytes"], spec.options["tensors"]), Path(spec.folder) / "files"
    if spec.part == "ranks":
        with joined_world(spec):
            return _measured_ranks(spec, plans, root)
    state = {plan.name: plan.full() for plan in plans}
    if spec.contender == LIMITS:
        return {"rows": disk_rows([byte_view(tensor) for tensor in state.values()], root)}
    contender = CONTENDERS[spec.contender](root)
    if spec.part == "loop":
        figures = {"rows": {spec.contender: _loop_seconds(contender, state)}}
    else:
        figures = _measured_saves(spec, contender, state)
        figures["rows"][spec.contender] |= _load_seconds(contender, state, plans)
    contender.close()
    return figures


def _measured_saves(
    spec: Spec, contender: Contender, state: State, barrier: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Save twice, and return the seconds of the second save, memory before both, and when they were.

    The first save allocates buffers and starts processes. ``before_bytes`` is resident memory, where pages that
    processes share are divided among them; ``saving_s`` is on the monotonic clock, the same for all processes. The
    seconds are those until the state may be changed, and until the save survives a crash of the machine.
    """
    before_bytes, begin_s = psutil.Process().memory_full_info().pss, time.monotonic()
    _save_once(contender, 0, state)
    if spec.rank == 0:
        TEMPERATURES["cold"](contender.root)
        os.sync()
    settle()
    barrier()
    start_s = time.perf_counter()
    pending = contender.save(1, state)
    stall_s = time.perf_counter() - start_s
    pending.wait()
    barrier()
    if spec.rank == 0:
        sync_paths(*contender.unsynced(1))
    seconds = {"stall": stall_s, "durable": time.perf_counter() - start_s}
    return {"rows": {spec.contender: seconds}, "before_bytes": before_bytes, "saving_s": (begin_s, time.monotonic())}


def _save_once(contender: Contender, step: int, state: State) -> None:
    contender.save(step, state).wait()
    sync_paths(*contender.unsynced(step))


def _load_seconds(contender: Contender, state: State, plans: list[TensorPlan]) -> Figures:
    seconds: Figures = {}
    loaded: State = {}

    def measure(metric: str, prepare: Callable[[Path], None], load: Callable[[], object]) -> None:
        prepare(contender.root)
        settle()
        seconds[metric] = seconds_of(load)
        for plan in plans:
            _check(plan, loaded.get(plan.name), plan.full())

    for temperature, prepare in TEMPERATURES.items():
        measure(f"load_{temperature}", prepare, lambda: loaded.update(contender.load(1, state)))
        loaded.clear()
    if contender.loads_in_place:
        loaded |= {name: torch.empty_like(tensor) for name, tensor in state.items()}
        for temperature, prepare in TEMPERATURES.items():
            for tensor in loaded.values():
                tensor.zero_()
            measure(f"in_place_{temperature}", prepare, lambda: contender.load_into(1, loaded))
    return seconds


def _check(plan: TensorPlan, found: torch.Tensor | None, expected: torch.Tensor, split: str = "") -> None:
    if not is_same(found, expected):
        raise ValueError(f"tensor {plan.name}{split} was loaded with other bytes than were saved")


def _loop_seconds(contender: Contender, state: State) -> Figures:
    """Measure steps of matrix products, which release the interpreter lock, and steps of pure Python."""
    _save_once(contender, 0, state)
    left, right, product = (torch.randn(_WIDTH, _WIDTH) for _ in range(3))
    matmul = _steps(contender, 1, state, partial(torch.mm, left, right, out=product))
    python = _steps(contender, 2, state, _add)
    saves = {"stall": matmul["stall"], "save": matmul["save"]}
    steps = {"matmul": matmul, "python": python}
    return saves | {f"{name}_{when}": found[when] for name, found in steps.items() for when in ("quiet", "saving")}


def _steps(contender: Contender, number: int, state: State, work: Callable[[], object]) -> Figures:
    """Save while steps of a fixed length repeat ``work``."""
    timer = Timer(work)
    repeats, spent_s = timer.autorange()
    step = partial(timer.timeit, max(1, round(repeats * _STEP_S / spent_s)))
    settle()
    quiet = [step() for _ in range(_QUIET_STEPS // 2)]
    start_s = time.perf_counter()
    pending = contender.save(number, state)
    stall_s = time.perf_counter() - start_s
    saving = [step()]
    while not pending.done():
        saving.append(step())
    pending.wait()
    save_s = time.perf_counter() - start_s
    quiet += [step() for _ in range(_QUIET_STEPS - len(quiet))]
    # The save ended during the last step, which is therefore left out.
    return {"stall": stall_s, "save": save_s, "quiet": fmean(quiet), "saving": fmean(saving[:-1] or saving)}


def _add() -> None:
    total = 0
    for i in range(_ADDITIONS):
        total += i


def _measured_ranks(spec: Spec, plans: list[TensorPlan], root: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (spec.world_size,))
    if spec.options["phase"] == "load":
        contender = CONTENDERS[spec.contender](root)
        figures = {"rows": {spec.contender: _rank_load_seconds(spec, contender, plans, mesh)}}
        contender.close()
        return figures
    # Every tensor is split along dimension 0, as in fully sharded training.
    shards = [plan.rows(*_span(plan, mesh, 0)[1:]) for plan in plans]
    if spec.contender == LIMITS:
        return {"rows": _rank_limits(spec, [byte_view(shard) for shard in shards], root)}
    state: State = {p.name: _dtensor(shard, p, mesh, 0) for p, shard in zip(plans, shards, strict=True)}
    contender = CONTENDERS[spec.contender](root)
    figures = _measured_saves(spec, contender, state, dist.barrier)
    contender.close()
    return figures


def _rank_limits(spec: Spec, parts: list[torch.Tensor], root: Path) -> dict[str, Figures]:
    """Measure all ranks at the same time, each with a copy of its own shards and a file of its own."""

    def sync() -> None:
        if spec.rank == 0:
            os.sync()
        dist.barrier()

    dist.barrier()
    rows = copy_rows(parts, max_threads=1)
    return rows | write_rows(Arena.of(parts), root / f"raw-{spec.rank}", before=sync, after=dist.barrier)


def _rank_load_seconds(spec: Spec, contender: Contender, plans: list[TensorPlan], mesh: DeviceMesh) -> Figures:
    """Load into zeros that are split along the first or the last dimension."""
    seconds: Figures = {}
    for layout, dim in (("rows", 0), ("columns", 1)):
        spans = {plan: _span(plan, mesh, dim) for plan in plans}
        for temperature, prepare in TEMPERATURES.items():
            template: State = {}
            for plan, (split, start, end) in spans.items():
                shape = [*plan.shape[:split], end - start, *plan.shape[split + 1 :]]
                template[plan.name] = _dtensor(torch.zeros(shape, dtype=plan.dtype), plan, mesh, split)
            if spec.rank == 0:
                prepare(contender.root)
            settle()
            dist.barrier()
            seconds[f"{layout}_{temperature}"] = seconds_of(partial(contender.load_into, 1, template))
            dist.barrier()
            for (plan, (split, start, end)), found in zip(spans.items(), template.values(), strict=True):
                assert isinstance(found, DTensor)
                expected = plan.full().narrow(split, start, end - start)
                _check(plan, found.to_local(), expected, f", split by {layout},")
    return seconds


def _dtensor(local: torch.Tensor, plan: TensorPlan, mesh: DeviceMesh, dim: int) -> DTensor:
    shape, stride = torch.Size(plan.shape), plan.stride
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def _span(plan: TensorPlan, mesh: DeviceMesh, dim: int) -> tuple[int, int, int]:
    """Return the dimension to split (the last where there are fewer), and where this rank's part starts and ends."""
    split = min(dim, len(plan.shape) - 1)
    length = plan.shape[split]
    size = math.ceil(length / mesh.size())
    start = min(mesh.get_rank() * size, length)
    return split, start, min(start + size, length)

"""The measurement of a contender in its own processes: saves, loads, and training steps while a save is in flight.

In the part ranks, processes save their shards (DTensors), and half as many load them, split by rows and by columns.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from timeit import Timer
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from gcore_bench.ckpt.contenders import CONTENDERS, Contender
from gcore_bench.ckpt.limits import TEMPERATURES, copy_rows, read_rows, seconds_of, sync_paths, write_rows
from gcore_bench.ckpt.options import LIMITS
from gcore_bench.ckpt.workload import State, TensorPlan, byte_view, is_same, plan_state, small_state
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
    root.mkdir(exist_ok=True)
    with joined_world(spec) if spec.part == "ranks" else nullcontext():
        mesh = init_device_mesh("cpu", (spec.world_size,)) if spec.part == "ranks" else None
        # Ranks split every tensor along dimension 0, as in fully sharded training.
        make = partial(_tensor, mesh, 0)
        if spec.contender == LIMITS:
            return {"rows": _limit_rows(spec, [byte_view(_local(make(plan))) for plan in plans], root)}
        contender, figures, seconds = CONTENDERS[spec.contender](root), dict[str, Any](), Figures()
        load_seconds = partial(_load_seconds, spec, plans, root)
        if spec.part == "small":
            seconds = _small_seconds(contender, root, small_state(spec.options["small_tensors"]))
        elif spec.options["phase"] == "load":
            assert contender.load_into is not None
            for way, dim in (("rows", 0), ("columns", 1)):
                seconds |= load_seconds(partial(_tensor, mesh, dim), way, contender.load_into)
        else:
            state = {plan.name: make(plan) for plan in plans}
            if spec.part == "loop":
                seconds = _loop_seconds(contender, root, state)
            else:
                seconds, figures = _measured_saves(spec, contender, root, state)
            if spec.part == "single":
                times = {"after": lambda _: None, **TEMPERATURES}
                seconds |= load_seconds(make, "load", partial(_load_fresh, contender, state), times)
                if contender.load_into is not None:
                    seconds |= load_seconds(make, "in_place", contender.load_into)
        contender.close()
        return {"rows": {spec.contender: seconds}, **figures}


def _tensor(mesh: DeviceMesh | None, dim: int, plan: TensorPlan) -> torch.Tensor:
    """Return a tensor, with a mesh split over its ranks along a dimension, the last where there are fewer."""
    full = plan.full()
    if mesh is None:
        return full
    # A copy, because parts are views of the whole.
    return distribute_tensor(full, mesh, [Shard(min(dim, full.dim() - 1))], src_data_rank=None).clone()


def _local(tensor: torch.Tensor | None) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _measured_saves(spec: Spec, contender: Contender, root: Path, state: State) -> tuple[Figures, dict[str, Any]]:
    """Save twice, and return the seconds of the second save, and memory before both and when they were.

    The first save allocates buffers and starts processes. ``before_bytes`` is resident memory, where pages that
    processes share are divided among them; ``saving_s`` is on the monotonic clock, the same for all processes. The
    seconds are those until the state may be changed, and until the save survives a crash of the machine.
    """
    before_bytes, begin_s = psutil.Process().memory_full_info().pss, time.monotonic()
    _save_once(contender, root, state)
    if spec.rank == 0:
        TEMPERATURES["cold"](root)
        os.sync()
    settle()
    _barrier(spec)
    start_s = time.perf_counter()
    pending = contender.save(root / "1", state)
    stall_s = time.perf_counter() - start_s
    pending.wait()
    _barrier(spec)
    if spec.rank == 0:
        sync_paths(*contender.unsynced(root / "1"))
    seconds = {"stall": stall_s, "durable": time.perf_counter() - start_s}
    return seconds, {"before_bytes": before_bytes, "saving_s": (begin_s, time.monotonic())}


def _save_once(contender: Contender, root: Path, state: State) -> None:
    """Save step 0, which allocates buffers and starts processes."""
    contender.save(root / "0", state).wait()
    sync_paths(*contender.unsynced(root / "0"))


def _barrier(spec: Spec) -> None:
    if spec.world_size > 1:
        dist.barrier()


def _load_fresh(contender: Contender, like: State, path: Path, loaded: State) -> None:
    loaded.update(contender.load(path, like))


def _load_seconds(
    spec: Spec,
    plans: list[TensorPlan],
    root: Path,
    make: Callable[[TensorPlan], torch.Tensor],
    way: str,
    load: Callable[[Path, State], object],
    times: Mapping[str, Callable[[Path], object]] = TEMPERATURES,
) -> Figures:
    """Load at each of the `times`, into fresh memory or into zeros, and check this rank's part of every tensor."""
    seconds: Figures = {}
    for temperature, prepare in times.items():
        loaded: State = {}
        if way != "load":
            loaded |= {plan.name: torch.zeros_like(make(plan)) for plan in plans}
        if spec.rank == 0:
            prepare(root)
        settle()
        _barrier(spec)
        seconds[f"{way}_{temperature}"] = seconds_of(partial(load, root / "1", loaded))
        _barrier(spec)
        for plan in plans:
            if not is_same(_local(loaded.get(plan.name)), _local(make(plan))):
                split = f", split by {way}," if spec.part == "ranks" else ""
                raise ValueError(f"tensor {plan.name}{split} was loaded with other bytes than were saved")
        del loaded
    return seconds


def _small_seconds(contender: Contender, root: Path, state: State) -> Figures:
    """Save twice what the process has not saved yet, and load it; the size of the index is in megabytes."""
    _save_once(contender, root, {"warm": torch.zeros(8)})
    seconds: Figures = {}
    for metric, path in (("first_stall", root / "1"), ("stall", root / "2")):
        settle()
        start_s = time.perf_counter()
        pending = contender.save(path, state)
        seconds[metric] = time.perf_counter() - start_s
        pending.wait()
        sync_paths(*contender.unsynced(path))
        seconds["durable"] = time.perf_counter() - start_s
    indexes = [path.stat().st_size for path in sorted(root.rglob("index.json"))]
    if indexes:
        seconds["index_mb"] = max(indexes) / 1e6
    ways: dict[str, Callable[[], object]] = {"load_warm": partial(contender.load, root / "2", state)}
    template = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    if contender.load_into is not None:
        ways["in_place_warm"] = partial(contender.load_into, root / "2", template)
    for metric, load in ways.items():
        TEMPERATURES["warm"](root)
        settle()
        start_s = time.perf_counter()
        found = load()
        seconds[metric] = time.perf_counter() - start_s
        loaded: Any = template if metric == "in_place_warm" else found
        if not is_same(torch.cat([*loaded.values()]), torch.cat([*state.values()])):
            raise ValueError(f"{metric}: other bytes than were saved")
        del found, loaded
    return seconds


def _loop_seconds(contender: Contender, root: Path, state: State) -> Figures:
    """Measure steps of matrix products, which release the interpreter lock, and steps of pure Python."""
    _save_once(contender, root, state)
    left, right, product = (torch.randn(_WIDTH, _WIDTH) for _ in range(3))
    matmul = _steps(contender, root / "1", state, partial(torch.mm, left, right, out=product))
    python = _steps(contender, root / "2", state, _add)
    steps = {"matmul": matmul, "python": python}
    found = {f"{name}_{when}": step[when] for name, step in steps.items() for when in ("quiet", "saving")}
    return {"stall": matmul["stall"], "save": matmul["save"], **found}


def _steps(contender: Contender, path: Path, state: State, work: Callable[[], object]) -> Figures:
    """Save while steps of a fixed length repeat ``work``."""
    timer = Timer(work)
    repeats, spent_s = timer.autorange()
    step = partial(timer.timeit, max(1, round(repeats * _STEP_S / spent_s)))
    settle()
    quiet = [step() for _ in range(_QUIET_STEPS // 2)]
    start_s = time.perf_counter()
    pending = contender.save(path, state)
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


def _limit_rows(spec: Spec, parts: list[torch.Tensor], root: Path) -> dict[str, Figures]:
    """Measure the limits; several ranks at the same time, each with a copy of its own shards and a file of its own."""

    def sync() -> None:
        if spec.rank == 0:
            os.sync()
        _barrier(spec)

    path, is_alone = root / f"raw-{spec.rank}", spec.world_size == 1
    _barrier(spec)
    rows = copy_rows(parts, max_threads=os.cpu_count() or 1 if is_alone else 1)
    rows |= write_rows(parts, path, before=sync, after=partial(_barrier, spec))
    settle()
    return rows | read_rows(path) if is_alone else rows

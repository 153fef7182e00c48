"""The measurement of a contender in its own process: saves, loads, and training steps while a save is in flight."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from gcore_bench.ckpt.contenders import CONTENDERS, Contender
from gcore_bench.ckpt.limits import disk_rows, drop_cache, seconds_of, sync_paths, warm_cache
from gcore_bench.ckpt.options import LIMITS
from gcore_bench.ckpt.workload import State, byte_view, first_difference, full_state, plan_state
from gcore_bench.harness.measure import settle
from gcore_bench.harness.processes import Spec
from gcore_bench.harness.report import Figures

_STEP_S = 0.2
_QUIET_STEPS = 10
_WIDTH = 512
_ADDITIONS = 10_000


def run(spec: Spec) -> dict[str, Any]:
    """Measure ``spec.contender`` in the part single or loop."""
    plans = plan_state(spec.options["size_bytes"], spec.options["tensors"])
    state, root = full_state(plans), root_of(spec)
    if spec.contender == LIMITS:
        return {"rows": disk_rows([byte_view(tensor) for tensor in state.values()], root)}
    contender = CONTENDERS[spec.contender](root)
    if spec.part == "loop":
        figures = {"rows": {spec.contender: _loop_seconds(contender, state)}}
    else:
        figures = measured_saves(spec.contender, contender, state)
        loads = _load_seconds(contender, state, lambda loaded: first_difference(loaded, plans))
        figures["rows"][spec.contender] |= loads
    contender.close()
    return figures


def root_of(spec: Spec) -> Path:
    """Return the folder of the contender's files."""
    return Path(spec.folder) / "files"


def measured_saves(
    name: str, contender: Contender, state: State, *, rank: int = 0, barrier: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Save twice, and return the seconds of the second save, memory before both, and when they were.

    The first save allocates buffers and starts processes. ``before_bytes`` is resident memory, where pages that
    processes share are divided among them; ``saving_s`` is on the monotonic clock, the same for all processes. The
    seconds are those until the state may be changed, and until the save survives a crash of the machine.
    """
    before_bytes, begin_s = psutil.Process().memory_full_info().pss, time.monotonic()
    _save_once(contender, 0, state)
    if rank == 0:
        drop_cache(contender.root)
        os.sync()
    settle()
    barrier()
    start_s = time.perf_counter()
    pending = contender.save(1, state)
    stall_s = time.perf_counter() - start_s
    pending.wait()
    barrier()
    if rank == 0:
        sync_paths(*contender.unsynced(1))
    seconds = {"stall": stall_s, "durable": time.perf_counter() - start_s}
    return {"rows": {name: seconds}, "before_bytes": before_bytes, "saving_s": (begin_s, time.monotonic())}


def _save_once(contender: Contender, step: int, state: State) -> None:
    contender.save(step, state).wait()
    sync_paths(*contender.unsynced(step))


def _load_seconds(contender: Contender, state: State, difference: Callable[[State], str]) -> Figures:
    seconds: Figures = {}
    loaded: State = {}

    def measure(metric: str, load: Callable[[], object]) -> None:
        settle()
        seconds[metric] = seconds_of(load)
        if name := difference(loaded):
            raise ValueError(f"tensor {name} was loaded with other bytes than were saved")

    for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
        prepare(contender.root)
        measure(f"load_{temperature}", lambda: loaded.update(contender.load(1, state)))
        loaded.clear()
    if contender.loads_in_place:
        loaded |= {name: torch.empty_like(tensor) for name, tensor in state.items()}
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            for tensor in loaded.values():
                tensor.zero_()
            prepare(contender.root)
            measure(f"in_place_{temperature}", lambda: contender.load_into(1, loaded))
    return seconds


def _loop_seconds(contender: Contender, state: State) -> Figures:
    """Measure steps of matrix products, which release the interpreter lock, and steps of pure Python."""
    _save_once(contender, 0, state)
    left, right, product = (torch.randn(_WIDTH, _WIDTH) for _ in range(3))
    matmul = _steps(contender, 1, state, _step_of(lambda: torch.mm(left, right, out=product)))
    python = _steps(contender, 2, state, _step_of(_add))
    saves = {"stall": matmul["stall"], "save": matmul["save"]}
    steps = {"matmul": matmul, "python": python}
    return saves | {f"{name}_{when}": found[when] for name, found in steps.items() for when in ("quiet", "saving")}


def _steps(contender: Contender, number: int, state: State, step: Callable[[], None]) -> Figures:
    settle()
    quiet = [seconds_of(step) for _ in range(_QUIET_STEPS // 2)]
    start_s = time.perf_counter()
    pending = contender.save(number, state)
    stall_s = time.perf_counter() - start_s
    saving = [seconds_of(step)]
    while not pending.done():
        saving.append(seconds_of(step))
    pending.wait()
    save_s = time.perf_counter() - start_s
    quiet += [seconds_of(step) for _ in range(_QUIET_STEPS - len(quiet))]
    # The save ended during the last step, which is therefore left out.
    return {"stall": stall_s, "save": save_s, "quiet": fmean(quiet), "saving": fmean(saving[:-1] or saving)}


def _step_of(work: Callable[[], object]) -> Callable[[], None]:
    """Return a step that repeats ``work`` for the length of a step."""
    work()
    repeats = 1
    while (spent_s := seconds_of(partial(_repeat, work, repeats))) < _STEP_S / 2:
        repeats *= 2
    return partial(_repeat, work, max(1, round(repeats * _STEP_S / spent_s)))


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def _add() -> None:
    total = 0
    for i in range(_ADDITIONS):
        total += i

"""The part loop: seconds of training steps while a save is in flight, and while none is."""

from collections.abc import Callable
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from gcore_bench.ckpt.contenders import make_contender
from gcore_bench.ckpt.contenders.base import Contender
from gcore_bench.ckpt.timing import root_of, rows_only, save_once, seconds_of
from gcore_bench.ckpt.workload import State, full_state, plan_state
from gcore_bench.harness.child import Spec
from gcore_bench.harness.measure import settle

_STEP_S = 0.2
_QUIET_STEPS = 10
_WIDTH = 512
_ADDITIONS = 10_000


def run(spec: Spec) -> dict[str, Any]:
    """Measure steps of matrix products, which release the interpreter lock, and steps of pure Python."""
    state = full_state(plan_state(spec.options["size_bytes"], spec.options["tensors"]))
    contender = make_contender(spec.contender, root_of(spec))
    save_once(contender, 0, state)
    seconds: dict[str, float] = {}
    for number, (name, work) in enumerate((("matmul", _matmul()), ("python", _add)), start=1):
        found = _steps(contender, number, state, _step_of(work))
        if name == "matmul":
            seconds |= {"stall": found.pop("stall"), "save": found.pop("save")}
        seconds |= {f"{name}_quiet": found["quiet"], f"{name}_saving": found["saving"]}
    contender.close()
    return rows_only({spec.contender: seconds})


def _steps(contender: Contender, number: int, state: State, step: Callable[[], None]) -> dict[str, float]:
    settle()
    quiet = [seconds_of(step) for _ in range(_QUIET_STEPS // 2)]
    start_s = perf_counter()
    pending = contender.save(number, state)
    stall_s = perf_counter() - start_s
    saving = [seconds_of(step)]
    while not pending.done():
        saving.append(seconds_of(step))
    pending.wait()
    save_s = perf_counter() - start_s
    quiet += [seconds_of(step) for _ in range(_QUIET_STEPS - len(quiet))]
    # The save ended during the last step, which is therefore left out.
    return {"stall": stall_s, "save": save_s, "quiet": fmean(quiet), "saving": fmean(saving[:-1] or saving)}


def _step_of(work: Callable[[], None]) -> Callable[[], None]:
    """Return a step that repeats ``work`` for the length of a step."""
    work()
    repeats = 1
    while (spent_s := seconds_of(partial(_repeat, work, repeats))) < _STEP_S / 2:
        repeats *= 2
    return partial(_repeat, work, max(1, round(repeats * _STEP_S / spent_s)))


def _repeat(work: Callable[[], None], count: int) -> None:
    for _ in range(count):
        work()


def _matmul() -> Callable[[], None]:
    left, right, product = (torch.randn(_WIDTH, _WIDTH) for _ in range(3))

    def multiply() -> None:
        torch.mm(left, right, out=product)

    return multiply


def _add() -> None:
    total = 0
    for i in range(_ADDITIONS):
        total += i

"""The part single: the save and the loads of a contender in one process, or the limits."""

import os
from pathlib import Path
from typing import Any

import torch

from gcore_bench.ckpt.contenders import make_contender
from gcore_bench.ckpt.contenders.base import Contender, InPlaceContender
from gcore_bench.ckpt.limits import RAW_WRITE, Arena, copy_rows, file_modes, read_rows, write_file, write_seconds
from gcore_bench.ckpt.parts import LIMITS
from gcore_bench.ckpt.timing import drop_cache, measured_saves, root_of, rows_only, seconds_of, warm_cache
from gcore_bench.ckpt.workload import State, TensorPlan, byte_view, first_difference, full_state, plan_state
from gcore_bench.harness.child import Spec
from gcore_bench.harness.measure import settle
from gcore_bench.harness.rounds import Figures


def run(spec: Spec) -> dict[str, Any]:
    """Measure ``spec.contender``.

    Raises:
        ValueError: the loaded state differs from the saved one.
    """
    plans = plan_state(spec.options["size_bytes"], spec.options["tensors"])
    state, root = full_state(plans), root_of(spec)
    if spec.contender == LIMITS:
        return rows_only(_limits([byte_view(tensor) for tensor in state.values()], root))
    contender = make_contender(spec.contender, root)
    figures = measured_saves(spec.contender, contender, state)
    figures["rows"][spec.contender] |= _load_seconds(contender, state, plans)
    contender.close()
    return figures


def _load_seconds(contender: Contender, state: State, plans: list[TensorPlan]) -> Figures:
    seconds: Figures = {}
    loaded: State = {}

    def load() -> None:
        loaded.update(contender.load(1, state))

    for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
        prepare(contender.root)
        settle()
        seconds[f"load_{temperature}"] = seconds_of(load)
        _require_equal(loaded, plans)
        loaded.clear()
    if isinstance(contender, InPlaceContender):
        template = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        for temperature, prepare in (("cold", drop_cache), ("warm", warm_cache)):
            for tensor in template.values():
                tensor.zero_()
            prepare(contender.root)
            settle()
            seconds[f"in_place_{temperature}"] = seconds_of(lambda: contender.load_into(1, template))
            _require_equal(template, plans)
    return seconds


def _require_equal(loaded: State, plans: list[TensorPlan]) -> None:
    if name := first_difference(loaded, plans):
        raise ValueError(f"tensor {name} was loaded with other bytes than were saved")


def _limits(parts: list[torch.Tensor], root: Path) -> dict[str, Figures]:
    rows = copy_rows(parts, max_threads=os.cpu_count() or 1)
    arena = Arena.of(parts)
    for name, direct in file_modes(root):
        os.sync()
        rows[f"{RAW_WRITE}, {name}"] = {"durable": write_seconds(arena, root / "raw", direct=direct)}
        (root / "raw").unlink()
    write_file(arena, root / "raw", direct=False)
    del arena
    settle()
    return rows | read_rows(root / "raw")

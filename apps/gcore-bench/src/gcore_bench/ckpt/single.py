"""One process: the save and the loads of a contender, or the limits."""

import os
import time
from pathlib import Path

import torch

from gcore_bench.ckpt.contender import Contender, InPlaceContender, make_contender
from gcore_bench.ckpt.figures import Figures, Spec
from gcore_bench.ckpt.files import drop_cache, warm_cache
from gcore_bench.ckpt.limits import RAW_WRITE, Arena, copy_rows, file_modes, read_rows, write_file, write_seconds
from gcore_bench.ckpt.parts import LIMITS
from gcore_bench.ckpt.state import State, TensorPlan, byte_view, first_difference, full_state, plan_state
from gcore_bench.ckpt.timing import resident_bytes, save_once, save_seconds, seconds_of, settle


def run(spec: Spec) -> Figures:
    """Measure ``spec.contender``.

    Raises:
        ValueError: what it loaded is not what was saved.
    """
    plans = plan_state(spec.size_bytes, spec.tensors)
    state, root = full_state(plans), Path(spec.root)
    if spec.contender == LIMITS:
        return Figures(rows=_limits([byte_view(tensor) for tensor in state.values()], root))
    contender = make_contender(spec.contender, root)
    before_bytes, start_s = resident_bytes(), time.monotonic()
    save_once(contender, 0, state)
    seconds = save_seconds(contender, 1, state)
    end_s = time.monotonic()
    seconds |= _load_seconds(contender, state, plans)
    contender.close()
    return Figures(rows={spec.contender: seconds}, before_bytes=before_bytes, saving_s=(start_s, end_s))


def _load_seconds(contender: Contender, state: State, plans: list[TensorPlan]) -> dict[str, float]:
    seconds: dict[str, float] = {}
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
        raise ValueError(f"what was loaded is not what was saved: tensor {name}")


def _limits(parts: list[torch.Tensor], root: Path) -> dict[str, dict[str, float]]:
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

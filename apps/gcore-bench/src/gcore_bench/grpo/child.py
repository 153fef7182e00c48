"""The process that one contender runs in: the command line holds a spec, the figures of every step go to a file."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.workload import WORKLOADS, Workload


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a process is to do."""

    role: str
    """A contender; floor; or model, which makes the workload's model."""
    workload: str
    model: str
    steps: int
    threads: int
    seed: int = 0
    lengths: tuple[int, ...] = ()
    """Of a step's responses: what the floor computes."""


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    steps = _ROLES[spec.role](spec, WORKLOADS[spec.workload], Path(spec.model))
    Path(sys.argv[2]).write_text(json.dumps([asdict(s) for s in steps]))


def _gcore(engine: Any) -> Callable[[Spec, Workload, Path], list[StepFigures]]:
    def run(spec: Spec, workload: Workload, model: Path) -> list[StepFigures]:
        from gcore_bench.grpo import gcore_contender

        return gcore_contender.run(
            workload, model, engine=engine, steps=spec.steps, threads=spec.threads, seed=spec.seed
        )

    return run


def _trl(*, use_vllm: bool) -> Callable[[Spec, Workload, Path], list[StepFigures]]:
    def run(spec: Spec, workload: Workload, model: Path) -> list[StepFigures]:
        from gcore_bench.grpo import trl_contender

        return trl_contender.run(
            workload, model, use_vllm=use_vllm, steps=spec.steps, threads=spec.threads, seed=spec.seed
        )

    return run


def _floor(spec: Spec, workload: Workload, model: Path) -> list[StepFigures]:
    from gcore_bench.grpo import floor

    return floor.run(workload, model, lengths=spec.lengths, steps=spec.steps, threads=spec.threads)


def _model(spec: Spec, workload: Workload, model: Path) -> list[StepFigures]:
    from gcore_bench.grpo.models import make_model

    make_model(workload, model, threads=spec.threads)
    return []


_ROLES = {
    "gcore": _gcore("hf"),
    "gcore-vllm": _gcore("vllm"),
    "trl": _trl(use_vllm=False),
    "trl-vllm": _trl(use_vllm=True),
    "floor": _floor,
    "model": _model,
}

if __name__ == "__main__":
    main()

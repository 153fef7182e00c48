"""The process of a contender, which returns the figures of its steps; or which makes the workload's model."""

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.workload import MODEL, WORKLOADS, Task
from gcore_bench.harness.processes import Spec


def run(spec: Spec) -> list[dict[str, Any]]:
    """Return the figures of every step."""
    own: dict[str, Any] = {**spec.options, "model": Path(spec.options["model"]), "threads": spec.threads}
    task = Task(workload=WORKLOADS[spec.part], contender=spec.contender, **own)
    name = "setup" if spec.contender == MODEL else f"contenders.{spec.contender.removesuffix('-vllm')}"
    steps: list[StepFigures] = import_module(f"gcore_bench.grpo.{name}").run(task)
    return [asdict(step) for step in steps]

"""The process of a contender, which returns the figures of its steps; or which makes the workload's model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.workload import WORKLOADS, Task
from gcore_bench.harness.processes import Spec


def run(spec: Spec) -> list[dict[str, Any]]:
    """Return the figures of every step."""
    task = Task(
        workload=WORKLOADS[spec.part],
        model=Path(spec.options["model"]),
        steps=spec.options["steps"],
        threads=spec.threads,
        seed=spec.options["seed"],
    )
    return [asdict(step) for step in _steps(spec, task)]


def _steps(spec: Spec, task: Task) -> list[StepFigures]:
    match spec.contender:
        case "gcore" | "gcore-vllm":
            from gcore_bench.grpo.contenders import gcore

            return gcore.run(task, engine="vllm" if spec.contender == "gcore-vllm" else "hf")
        case "trl" | "trl-vllm":
            from gcore_bench.grpo.contenders import trl

            return trl.run(task, use_vllm=spec.contender == "trl-vllm")
        case "floor":
            from gcore_bench.grpo.contenders import floor

            return floor.run(task, lengths=spec.options["lengths"])
        case _:
            from gcore_bench.grpo.setup import make_model

            make_model(task.workload, task.model, threads=task.threads)
            return []

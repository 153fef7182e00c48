"""gcore on Ray: the command `gcore-llm train` with two controllers; figures are read from its metrics.jsonl."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import reported_step
from gcore_bench.grpo.setup import train_config
from gcore_bench.grpo.workload import Task, Workload
from gcore_bench.harness.processes import Program
from gcore_runs.settings.parsing import to_toml

_NUM_CONTROLLERS = 2
_MAIN = "from gcore_llm.cli import main; main()"


def program(task: Task, *, folder: Path) -> Program:
    """Return the command of a task; its settings and its run are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = replace(
        train_config(task.workload, steps=task.steps, threads=task.threads, seed=task.seed),
        runtime="ray",
        controllers=_NUM_CONTROLLERS,
        model=str(task.model.resolve()),
        name="run",
        runs_dir=str(folder.resolve()),
    )
    settings, run = folder / "settings.toml", folder / config.name
    settings.write_text(to_toml(config))
    shutil.rmtree(run, ignore_errors=True)
    return Program(
        command=[sys.executable, "-c", _MAIN, "train", "--config", str(settings.resolve())],
        environment={"OMP_NUM_THREADS": str(task.threads)},
        folder=folder,
        read=lambda: _figures(task.workload, run / "metrics.jsonl"),
    )


def _figures(workload: Workload, metrics: Path) -> list[dict[str, Any]]:
    rows: list[Mapping[str, float]] = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        reported_step(
            row,
            workload.samples_per_step,
            # Responses are scored while others of the step are being generated.
            gen_s=sum(row.get(f"timing_s/{stage}", 0.0) for stage in ("gen", "reward", "sync")),
            train_s=row["timing_s/train"],
        )
        # Evaluations have rows of their own.
        for row in rows
        if "timing_s/step" in row
    ]

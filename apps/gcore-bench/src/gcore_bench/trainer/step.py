"""One policy-gradient step, measured the same way whoever makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from gcore_bench.trainer.figures import Spec
from gcore_bench.trainer.measure import measured
from gcore_bench.trainer.workload import load_samples
from gcore_trainer import Sample

_WARMUP = [
    Sample(
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([2, 1]),
        advantages=np.array([a, a], np.float32),
        old_log_probs=np.full(2, -9.0, np.float32),
    )
    for a in (1.0, -1.0)
]
"""Enough to import what a first step imports and to make moments, and so small that it leaves no memory behind."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step computed, for contenders to be compared by."""

    loss: float
    grad_norm: float
    computed_tokens: float
    """That passed through the model's layers, padding included."""


class Stepper(Protocol):
    """A contender: model, optimizer and one way to make a step."""

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> StepResult: ...


def make_stepper(contender: str, folder: Path) -> Stepper:
    """Import the contender's library and load the model."""
    match contender:
        case "trl":
            from gcore_bench.trainer.trl_contender import TrlStep

            return TrlStep(folder)
        case "verl":
            from gcore_bench.trainer.verl_contender import VerlStep

            return VerlStep(folder / "model")
        case _:
            from gcore_bench.trainer.gcore_contender import GcoreStep

            return GcoreStep(folder / "model", contender)


def run(spec: Spec) -> dict[str, dict[str, float]]:
    """Seconds and memory of a step, and what it computed."""
    folder = Path(spec.folder)
    stepper = make_stepper(spec.contender, folder)
    return {spec.contender: step_figures(stepper, load_samples(folder / "samples.npz"), spec)}


def step_figures(stepper: Stepper, samples: Sequence[Sample], spec: Spec) -> dict[str, float]:
    """A warm-up step, and then those that count."""
    stepper.step(_WARMUP, [[0, 1]])
    results: list[StepResult] = []
    times = measured(lambda: results.append(stepper.step(samples, spec.batches)), times=spec.options["steps"])
    first = results[0]
    return times.figures() | {
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "computed_tokens": first.computed_tokens,
    }

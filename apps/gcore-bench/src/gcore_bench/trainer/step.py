"""The parts step and balance: a policy-gradient step, measured in the same way under every contender; their setup."""

from pathlib import Path
from typing import Any

import numpy as np

from gcore_bench.harness.measure import measured
from gcore_bench.harness.models import make_model
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.harness.report import Figures
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.updates import StepResult
from gcore_bench.trainer.workload import (
    load_samples,
    long_workload,
    make_samples,
    off_policy,
    save_samples,
    step_workload,
)
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_trainer import PackedModel, ParallelConfig, Sample, TorchParallel

_WARMUP = [
    Sample(
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([2, 1]),
        advantages=np.array([a, a], np.float32),
        old_log_probs=np.full(2, -9.0, np.float32),
    )
    for a in (1.0, -1.0)
]
"""Enough to trigger the imports of a first step and to allocate moments, and so small that it frees no large blocks."""


def run(spec: Spec) -> dict[str, Figures]:
    """Return seconds and memory of a step, and its result; in the part balance those of this rank."""
    if spec.part == "setup":
        return _set_up(spec)
    if spec.part == "step":
        folder = Path(spec.folder)
        match spec.contender:
            case "trl":
                from gcore_bench.trainer.contenders.trl import TrlStep

                return _measured(spec, TrlStep(folder))
            case "verl":
                from gcore_bench.trainer.contenders.verl import VerlStep

                return _measured(spec, VerlStep(folder / "model"))
            case kind:
                from gcore_bench.trainer.contenders.gcore import GcoreStep

                return _measured(spec, GcoreStep(folder / "model", kind))
    from gcore_bench.trainer.contenders.gcore import GcoreStep

    # Parameters are sharded, so that ranks wait for each other in every pass.
    with joined_world(spec):
        parallel = TorchParallel.join(ParallelConfig())
        return _measured(spec, GcoreStep(Path(spec.folder) / "model", "gcore-shared", parallel=parallel))


def _measured(spec: Spec, stepper: Any) -> dict[str, Figures]:
    samples, batches = load_samples(Path(spec.folder) / "samples.npz"), spec.options["batches"][spec.rank]
    stepper.step(_WARMUP, [[0, 1]])
    results: list[StepResult] = []
    times = measured(lambda: results.append(stepper.step(samples, batches)), times=spec.options["steps"])
    first = results[0]
    computed = {"loss": first.loss, "grad_norm": first.grad_norm, "computed_tokens": first.computed_tokens}
    return {spec.contender: times.figures() | computed}


def _set_up(spec: Spec) -> dict[str, Figures]:
    """Write ``model``, ``long-model``, ``tokenizer`` and ``samples.npz``, which contenders share."""
    folder, options = Path(spec.folder), TrainerOptions(**spec.options)
    make_model(folder / "model", step_workload(options), max_length=options.max_tokens, seed=options.seed)
    make_model(folder / "long-model", long_workload(options), max_length=max(options.lengths) + 1, seed=options.seed)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    samples = make_samples(options)
    (log_probs,) = PackedModel.from_pretrained(folder / "model").log_probs([samples])
    save_samples(folder / "samples.npz", off_policy(samples, log_probs, seed=options.seed))
    return {}

"""The part context: training steps on one long sequence that context-parallel ranks divide."""

from pathlib import Path

import numpy as np

from gcore_bench.harness.measure import measured
from gcore_bench.harness.processes import Spec, joined_world
from gcore_bench.harness.report import Figures
from gcore_bench.trainer.updates import OPTIMIZER
from gcore_bench.trainer.workload import LONG_VOCAB_SIZE, context_layouts
from gcore_trainer import PackedModel, ParallelConfig, Sample, SFTObjective, TorchParallel, TorchTrainer


def run(spec: Spec) -> dict[str, Figures]:
    """Return a row for each length: seconds of a step, and the loss, which all layouts must agree on."""
    with joined_world(spec):
        return _run(spec)


def _run(spec: Spec) -> dict[str, Figures]:
    size, ulysses = context_layouts(spec.options["context_sizes"])[spec.contender]
    config = ParallelConfig(context_parallel_size=size, ulysses_sequence_parallel_size=ulysses)
    trainer = TorchTrainer(
        PackedModel.from_pretrained(Path(spec.folder) / "long-model"),
        optimizer=OPTIMIZER,
        objective=SFTObjective(),
        parallel=TorchParallel.join(config) if size > 1 else None,
    )
    rows: dict[str, Figures] = {}
    trainer.train_step([[_sample(32, spec)]])
    for length in spec.options["lengths"]:
        batches = [[_sample(length, spec)]]
        losses: list[float] = []
        times = measured(
            lambda batches=batches, losses=losses: losses.append(trainer.train_step(batches)["sft/loss"]),
            times=spec.options["steps"],
        )
        rows[f"{length:,} {spec.contender}"] = times.figures() | {"loss": losses[0], "tokens": float(length)}
    return rows


def _sample(length: int, spec: Spec) -> Sample:
    tokens = np.random.default_rng(spec.options["seed"]).integers(1, LONG_VOCAB_SIZE, length + 1)
    return Sample(prompt_ids=tokens[:16], response_ids=tokens[16:])

"""gcore: `TorchTrainer`, on padded rows, on packed ones, and on packed ones whose prompts are computed once."""

from collections.abc import Sequence
from pathlib import Path

from gcore_bench.trainer.models import LOSS, OPTIMIZER
from gcore_bench.trainer.padded_model import PaddedModel
from gcore_bench.trainer.step import StepResult
from gcore_trainer import PackedModel, PolicyObjective, Sample, TorchParallel, TorchTrainer


class GcoreStep:
    """One trainer's steps.

    Args:
        model: Hugging Face folder.
        kind: ``gcore-padded``, ``gcore-packed`` or ``gcore-shared``.
        parallel: FSDP ranks; None: alone.
    """

    def __init__(self, model: Path, kind: str, *, parallel: TorchParallel | None = None) -> None:
        family = PaddedModel if kind == "gcore-padded" else PackedModel
        self._trainer = TorchTrainer(
            family.from_pretrained(model, share_prefix=kind == "gcore-shared"),
            optimizer=OPTIMIZER,
            objective=PolicyObjective(LOSS),
            parallel=parallel,
        )

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> StepResult:
        metrics = self._trainer.train_step([[samples[i] for i in batch] for batch in batches])
        return StepResult(
            loss=metrics["actor/pg_loss"],
            grad_norm=metrics["actor/grad_norm"],
            computed_tokens=metrics["perf/computed_tokens"],
        )

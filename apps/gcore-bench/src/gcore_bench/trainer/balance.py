"""The same step on FSDP ranks, each with the micro-batches that were dealt to it."""

from pathlib import Path

from gcore_bench.trainer.figures import Spec
from gcore_bench.trainer.ranks import joined_world
from gcore_bench.trainer.step import step_figures
from gcore_bench.trainer.workload import load_samples
from gcore_trainer import ParallelConfig, TorchParallel


def run(spec: Spec) -> dict[str, dict[str, float]]:
    """This rank's seconds; parameters are sharded, so that ranks wait for each other in every pass."""
    from gcore_bench.trainer.gcore_contender import GcoreStep

    folder = Path(spec.folder)
    with joined_world(spec):
        stepper = GcoreStep(folder / "model", "gcore-shared", parallel=TorchParallel.join(ParallelConfig()))
        return {spec.contender: step_figures(stepper, load_samples(folder / "samples.npz"), spec)}

"""What the ranks do in `test_collectives.py`: training, sleep and export, of which the collectives are recorded."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from collectives import Collective, RecordedCollectives
from fsdp_cases import make_trainer
from megatron_cases import Layout, Steps
from megatron_groups import leave_groups
from rank import Rank

from gcore_trainer import (
    MegatronTrainer,
    Objective,
    OptimizerConfig,
    ParallelConfig,
    Trainer,
)


def torch_collectives(
    rank: Rank,
    path: str,
    objective: Objective[Any],
    parallel: ParallelConfig,
    steps: Steps,
    options: Mapping[str, Any],
    to: str,
) -> dict[str, list[Collective]]:
    """The collectives of each stage of a `TorchTrainer`."""
    with RecordedCollectives() as making:
        trainer = make_trainer(path, objective, OptimizerConfig(), parallel, **options)
    return {"making": making.calls, **_stages(trainer, steps, to)}


def megatron_collectives(
    rank: Rank, path: str, objective: Objective[Any], layout: Layout, steps: Steps, to: str
) -> dict[str, list[Collective]]:
    """The same of a `MegatronTrainer`."""
    leave_groups()
    parallel = ParallelConfig(**layout)
    with RecordedCollectives() as making:
        trainer = MegatronTrainer(
            path, parallel=parallel, optimizer=OptimizerConfig(), objective=objective
        )
    return {"making": making.calls, **_stages(trainer, steps, to)}


def _stages(trainer: Trainer, steps: Steps, to: str) -> dict[str, list[Collective]]:
    stages: dict[str, list[Collective]] = {}
    for i, replicas in enumerate(steps):
        micro_batches = replicas[trainer.data_parallel_rank]
        with RecordedCollectives() as scoring:
            trainer.log_probs(micro_batches)
        with RecordedCollectives() as asleep:
            trainer.sleep()
            trainer.wake()
        with RecordedCollectives() as training:
            trainer.train_step(micro_batches)
        stages[f"scores {i}"] = scoring.calls
        stages[f"asleep {i}"] = asleep.calls
        stages[f"training {i}"] = training.calls
    with RecordedCollectives() as exporting:
        for _ in trainer.export_weights():
            pass
        trainer.save_pretrained(to)
    stages["exporting"] = exporting.calls
    default = dist.distributed_c10d._world.pg_backend_config  # pyright: ignore[reportPrivateUsage]  # nothing else has it
    configs = set(default.values())
    assert len(configs) == 1, f"groups with backends of their own: {configs}"
    return stages

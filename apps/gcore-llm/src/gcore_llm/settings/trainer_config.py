"""Settings of how training runs, of the run's length and of what it leaves behind."""

from dataclasses import dataclass, field
from typing import Literal

from gcore_runs.errors import UserError
from gcore_runs.settings.run_config import BaseTrainerConfig
from gcore_trainer import ConfigError, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(BaseTrainerConfig):
    """Settings of training, of the run's length and of its output."""

    backend: Literal["torch", "megatron"] = "torch"
    """torch: a transformers model, sharded by FSDP2 over several processes; megatron: Megatron-Core."""
    num_processes: int = 1
    """Ranks, each a process with a device of its own; 1 with torch: training runs in the main process."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: a step samples, then trains. one_step_off: the next step's batch is sampled while this one's is trained on,
    by the weights before it. async: batches are sampled without a pause, up to rollout.max-staleness steps ahead, and
    new weights come in the middle of responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            if self.backend == "torch":
                self.parallel.check_torch()
            self.parallel.data_parallel_size(self.num_processes)
        except ConfigError as error:
            raise UserError(f"trainer.parallel: {error} (trainer.num_processes={self.num_processes})") from None

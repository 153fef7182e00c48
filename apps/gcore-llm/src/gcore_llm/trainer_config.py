"""Settings of how training runs, of the run's length and of what it leaves behind."""

from dataclasses import dataclass, field
from typing import Literal

from gcore_runs.errors import UserError, check_at_least, check_port
from gcore_trainer import ConfigError, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How training runs, the run's length and what it leaves behind."""

    backend: Literal["torch", "megatron"] = "torch"
    """torch: a transformers model, sharded by FSDP2 over several processes; megatron: Megatron-Core."""
    num_processes: int = 1
    """Ranks, each a process with a device of its own; 1 with torch: training runs in the main process."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    total_training_steps: int = 200
    """Steps of generation, rewarding, preparation and training."""
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: a step samples, then trains. one_step_off: the next step's batch is sampled while this one's is trained on,
    by the weights before it. async: batches are sampled without a pause, up to rollout.max-staleness steps ahead, and
    new weights come in the middle of responses."""
    save_freq: int = 25
    """Steps between checkpoints."""
    max_ckpt_to_keep: int = 2
    """Checkpoints kept."""
    test_freq: int = 50
    """Steps between evaluations on held-out prompts; the first and last step always evaluate."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    prometheus_port: int = 0
    """Serve the metrics for Prometheus at http://PROMETHEUS-HOST:PORT/metrics; 0: do not."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve them at; 127.0.0.1: to this machine alone."""

    def __post_init__(self) -> None:
        for name in ("num_processes", "total_training_steps", "save_freq", "max_ckpt_to_keep", "test_freq"):
            check_at_least(f"trainer.{name}", getattr(self, name), 1)
        check_port("trainer.prometheus_port", self.prometheus_port)
        try:
            if self.backend == "torch":
                self.parallel.check_torch()
            self.parallel.data_parallel_size(self.num_processes)
        except ConfigError as error:
            raise UserError(f"trainer.parallel: {error} (trainer.num_processes={self.num_processes})") from None

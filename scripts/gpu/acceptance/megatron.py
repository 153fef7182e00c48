"""Part 11: the Megatron-Core backend on one rank, against the torch backend on the same GPU."""

import gc
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from acceptance.machine import peak_flops_per_s
from acceptance.models import compute_dtype, equal_groups, load_packed, model_folder, model_shape
from acceptance.training import peak_memory
from acceptance.trial import Trial
from gcore_trainer import (
    MegatronTrainer,
    OptimizerConfig,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
)


def steps(trial: Trial) -> None:
    """Compare log-probabilities of both backends, and measure a training step."""
    on_cuda = trial.device.startswith("cuda")
    rendezvous = f"file://{trial.work}/rendezvous"
    dist.init_process_group(
        "nccl" if on_cuda else "gloo", init_method=rendezvous, rank=0, world_size=1
    )
    groups = equal_groups(trial, num=2 if trial.is_small else 8)
    batches = groups.samples(trial, seed=0)
    packed = load_packed(trial, "1.5B", gradient_checkpointing=True)
    expected = np.concatenate(list(chain.from_iterable(packed.log_probs(batches[:1]))))
    del packed
    gc.collect()
    trainer = MegatronTrainer(
        model_folder(trial, "1.5B"),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-6),
        objective=PolicyObjective(PolicyLossConfig()),
        dtype=compute_dtype(trial),
        device=torch.device("cuda", 0) if on_cuda else torch.device("cpu"),
    )
    log_probs = np.concatenate(list(chain.from_iterable(trainer.log_probs(batches[:1]))))
    trial.figure(
        "log-probabilities: difference of both backends, mean",
        float(np.abs(log_probs - expected).mean()),
        "nats",
    )
    trainer.train_step(batches)
    with peak_memory(trial) as peaks:
        seconds = min(
            trial.measure_seconds(lambda: trainer.train_step(batches))
            for _ in range(1 if trial.is_small else 2)
        )
    flops = sum(groups.flops(model_shape(trial, "1.5B")))
    trial.figure(
        "1.5B, equal: model FLOPs of the peak", 100 * flops / seconds / peak_flops_per_s(trial), "%"
    )
    trial.figure("1.5B, equal: tokens", sum(groups.tokens) / seconds, "per second")
    for measured in peaks:
        trial.figure("1.5B, equal: peak memory", measured / 1e9, "GB")
    dist.destroy_process_group()

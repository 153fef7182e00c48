"""Parts of a training state that several integrations save: random number generators, and sharded optimizers."""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from gcore_ckpt.format.tree import PerRank, State
from gcore_ckpt.ranks.shards import is_dtensor

RANDOM_STATES = PerRank(None, otherwise=lambda _rank, _size: None)
"""A template for `random_states`; None where another number of ranks has saved them."""


def random_states() -> PerRank:
    """Return the states of this rank's random number generators: of Python, numpy, torch and its CUDA device."""
    version, numbers, gauss = random.getstate()
    states: dict[str, State] = {
        "python": [version, np.array(numbers, dtype=np.uint32), gauss],
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return PerRank(states)


def set_random_states(states: Mapping[str, State] | None) -> None:
    """Set the generators to what `random_states` returned, as far as this process has them; None leaves them."""
    if states is None:
        return
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def state_of_model(model: torch.nn.Module, rank: int) -> State:
    """Return what this rank saves of a model: its buffers are taken from rank 0.

    Under DDP each rank has buffers of its own (the statistics of batch normalisation), and DDP itself broadcasts those
    of rank 0.
    """
    if rank == 0:
        return model
    buffers = {name for name, _ in model.named_buffers()}
    state = model.state_dict()
    return {
        name: value for name, value in state.items() if name not in buffers or is_dtensor(value)
    }


def stateful_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> "torch.optim.Optimizer | State":
    """Return what saves and loads the optimizer: itself, or by the names of the parameters where they are sharded."""
    if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
        raise ValueError(
            "model is of the first FSDP, whose parameters have no names of their own; expected FSDP2"
        )
    if not any(is_dtensor(parameter) for parameter in model.parameters()):
        return optimizer
    # accelerate's wrapper steps only when gradients are to be synchronised
    return _ShardedOptimizer(
        model, cast("torch.optim.Optimizer", getattr(optimizer, "optimizer", optimizer))
    )


class _ShardedOptimizer:
    """The state of an optimizer of DTensors, which any number of ranks can load."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(self._model, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self._model, self._optimizer, state)

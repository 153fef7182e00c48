"""The common part of trainers of all kinds of models: the learning rate, skipped steps, and the state."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, assert_never

import numpy as np
import torch

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import ConfigError, NonFiniteGradientError, StateError
from gcore_trainer.training.replicas import Replicas

_logger = logging.getLogger(__name__)


class Optimizer(Protocol):
    """A backend's AdamW, with the gradients that it updates by."""

    @property
    def num_updates(self) -> int:
        """Updates that the moments have seen."""
        ...

    def update(self, lr: float) -> float:
        """Clip the gradient and update if its norm is finite; return the norm before clipping."""
        ...

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return ``model``, ``exp_avg`` and ``exp_avg_sq`` as in `BaseTrainer.state`."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the tensors of a state that was checked, and its ``optimizer_step``."""
        ...


class BaseTrainer:
    """One rank's part of a model in training.

    All ranks call the same methods in the same order. The ranks of one data-parallel replica (those that divide its
    layers, matrices or tokens) pass the same samples and get the same results; different replicas pass different ones.

    Args:
        config: of the optimizer.
        optimizer: of this rank's parameters.
        replicas: one rank of each data-parallel replica.

    Raises:
        ConfigError: the learning rate decays, and ``total_training_steps`` is not set.
    """

    def __init__(self, *, config: OptimizerConfig, optimizer: Optimizer, replicas: Replicas) -> None:
        if config.lr_scheduler_type != "constant" and not config.total_training_steps:
            raise ConfigError(
                f"total_training_steps is 0; expected 1 or more for lr_scheduler_type {config.lr_scheduler_type!r}"
            )
        self._config = config
        self._optimizer = optimizer
        self._replicas = replicas
        self._step = 0
        self._nonfinite_steps = 0

    @property
    def step(self) -> int:
        """Steps taken so far, those skipped for their gradient included."""
        return self._step

    @property
    def data_parallel_rank(self) -> int:
        """The replica that this rank belongs to."""
        return self._replicas.rank

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas, each with samples of its own."""
        return self._replicas.size

    def _apply_gradient(self) -> dict[str, float]:
        lr = learning_rate(self._config, self._step)
        grad_norm = self._optimizer.update(lr)
        if np.isfinite(grad_norm):
            self._nonfinite_steps = 0
        else:
            self._nonfinite_steps += 1
            _logger.warning(
                "step %d: the gradient norm is %s; the update is skipped (%d in a row, max_nonfinite_steps=%d)",
                self._step,
                grad_norm,
                self._nonfinite_steps,
                self._config.max_nonfinite_steps,
            )
            if self._nonfinite_steps >= self._config.max_nonfinite_steps:
                raise NonFiniteGradientError(
                    f"the gradient norm was {grad_norm} in {self._nonfinite_steps} steps in a row "
                    f"(max_nonfinite_steps={self._config.max_nonfinite_steps}): try a lower lr"
                )
        self._step += 1
        return {"actor/grad_norm": grad_norm, "actor/lr": lr, "actor/nonfinite_steps": float(self._nonfinite_steps)}

    def state(self) -> dict[str, Any]:
        """Return all that a resumed trainer needs, under the same names in every backend and layout.

        ``model``, ``exp_avg`` and ``exp_avg_sq`` map Hugging Face names to what this rank has of the tensor: a live
        tensor, a live `DTensor`, or a list of `TensorPart`. The rest are plain numbers.
        """
        return {
            "step": self._step,
            "nonfinite_steps": self._nonfinite_steps,
            "optimizer_step": self._optimizer.num_updates,
            **self._optimizer.tensors(),
            **self._averages(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `state`, or one that was loaded in its place, by copying into this trainer's tensors.

        Raises:
            StateError: names or shapes differ; nothing was changed.
        """
        own = self.state()
        if difference := sorted(state.keys() ^ own.keys()):
            raise StateError(f"state does not match this trainer's: names on one side only: {difference}")
        for group, tensors in own.items():
            if not isinstance(tensors, dict):
                continue
            if difference := sorted(state[group].keys() ^ tensors.keys()):
                raise StateError(f"{group} does not match the model: names on one side only: {difference[:3]}")
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and state[group][name].shape != tensor.shape:
                    raise StateError(
                        f"{group}[{name!r}] has shape {tuple(state[group][name].shape)}; expected {tuple(tensor.shape)}"
                    )
        self._optimizer.load(state)
        for group, tensors in self._averages().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[group][name])
        self._step = state["step"]
        self._nonfinite_steps = state["nonfinite_steps"]

    def _averages(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return further groups of tensors of the state, without gradients: averages of the parameters."""
        return {}


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate of the update after ``step`` updates.

    It rises linearly to ``lr`` over ``lr_warmup_steps``. Then it is constant, or falls to ``min_lr_ratio * lr`` at
    ``total_training_steps``: along a line, or along half a cosine (SGDR, arXiv 1608.03983, eq. 5), and stays there.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(1, config.total_training_steps - config.lr_warmup_steps)
    progress = min(1.0, (step - config.lr_warmup_steps) / span)
    match config.lr_scheduler_type:
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(config.lr_scheduler_type)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def add_sums(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Add a micro-batch's sums to those of the ones before it, by name and in float64."""
    for name, value in parts.items():
        sums[name] = sums.get(name, 0.0) + (value.double() if isinstance(value, torch.Tensor) else value)


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        add_sums(total, part)
    return total

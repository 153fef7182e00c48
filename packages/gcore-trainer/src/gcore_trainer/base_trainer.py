"""What trainers of all kinds of models have in common: the rate, steps that are skipped, and the state."""

import logging
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import ConfigError, NonFiniteGradientError, StateError
from gcore_trainer.replicas import Replicas
from gcore_trainer.schedule import learning_rate

_logger = logging.getLogger(__name__)


class BaseTrainer(ABC):
    """One rank's part of a model in training.

    All ranks call the same methods in the same order. The ranks of one data-parallel replica (those that divide its
    layers, matrices or tokens) pass the same samples and get the same results; different replicas pass different ones.

    Args:
        optimizer: see `OptimizerConfig`.
        replicas: one rank of each data-parallel replica.

    Raises:
        ConfigError: the rate is to decay, and over how many steps is not said.
    """

    def __init__(self, *, optimizer: OptimizerConfig, replicas: Replicas) -> None:
        if optimizer.lr_scheduler_type != "constant" and not optimizer.total_training_steps:
            raise ConfigError(f"total_training_steps is 0: lr_scheduler_type={optimizer.lr_scheduler_type!r} needs it")
        self._config = optimizer
        self._replicas = replicas
        self._step = 0
        self._nonfinite_steps = 0

    @property
    def step(self) -> int:
        """Steps taken so far, those skipped for their gradient included."""
        return self._step

    @property
    def data_parallel_rank(self) -> int:
        """Which replica this rank belongs to."""
        return self._replicas.rank

    @property
    def data_parallel_size(self) -> int:
        """Replicas, each with samples of its own."""
        return self._replicas.size

    def _apply_gradient(self) -> dict[str, float]:
        lr = learning_rate(self._config, self._step)
        grad_norm = self._update(lr)
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
        """Everything a resumed trainer needs, under the same names in every backend and layout.

        ``model``, ``exp_avg`` and ``exp_avg_sq`` map Hugging Face names to what this rank has of the tensor: a live
        tensor, a live `DTensor`, or a list of `TensorPart`. The rest are plain numbers.
        """
        return {
            "step": self._step,
            "nonfinite_steps": self._nonfinite_steps,
            "optimizer_step": self._optimizer_step(),
            **self._tensors(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave, or what was loaded in its place; tensors that are this trainer's own are there.

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
                _check_same_shape(f"{group}[{name!r}]", state[group][name], tensor)
        self._load_tensors(state)
        self._step = state["step"]
        self._nonfinite_steps = state["nonfinite_steps"]

    @abstractmethod
    def _update(self, lr: float) -> float:
        """Clip the gradient and update, if its norm is finite; the norm before clipping."""

    @abstractmethod
    def _optimizer_step(self) -> int:
        """Updates that the optimizer's moments have seen."""

    @abstractmethod
    def _tensors(self) -> dict[str, dict[str, Any]]:
        """``model``, ``exp_avg`` and ``exp_avg_sq`` of `state`, and what else a trainer has of its kind."""

    @abstractmethod
    def _load_tensors(self, state: dict[str, Any]) -> None:
        """Take over the tensors and ``optimizer_step`` of a state that was checked."""


def _check_same_shape(name: str, given: Any, own: Any) -> None:
    if isinstance(own, torch.Tensor) and given.shape != own.shape:
        raise StateError(f"{name} has shape {tuple(given.shape)}: the model has {tuple(own.shape)}")

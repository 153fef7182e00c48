"""The interface of every training backend, and what their steps have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import BatchError, ConfigError, NonFiniteGradientError, StateError, TrainerError
from gcore_trainer.losses import BatchTotals
from gcore_trainer.objectives import Objective, Share
from gcore_trainer.replicas import Replicas
from gcore_trainer.schedule import learning_rate
from gcore_trainer.types import MicroBatch, by_sample

ShareOf = Callable[[Any, MicroBatch], Share]
"""(scores, samples) to this micro-batch's part of the loss and of the sums."""


class Trainer(ABC):
    """One rank's part of a model in training.

    All ranks call the same methods in the same order. The ranks of one data-parallel replica (those that divide its
    layers, matrices or tokens) pass the same samples and get the same results; different replicas pass different ones.

    Args:
        optimizer: see `OptimizerConfig`.
        objective: what is minimised.
        replicas: one rank of each data-parallel replica.

    Raises:
        ConfigError: the rate is to decay, and over how many steps is not said.
    """

    def __init__(self, *, optimizer: OptimizerConfig, objective: Objective[Any], replicas: Replicas) -> None:
        if optimizer.lr_scheduler_type != "constant" and not optimizer.total_training_steps:
            raise ConfigError(f"total_training_steps is 0: lr_scheduler_type={optimizer.lr_scheduler_type!r} needs it")
        self._config = optimizer
        self._objective = objective
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

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One update on all samples of all replicas; the result does not depend on how they are split.

        Samples whose gradient is known to be zero are left out of the passes; they count in the loss's denominators.

        Args:
            micro_batches: this replica's; another may have more of them, or none.

        Returns:
            the objective's metrics, ``actor/grad_norm``, ``actor/lr``, ``actor/nonfinite_steps`` and
            ``perf/computed_tokens`` (those that passed through the model, in all replicas); the same on all ranks.

        Raises:
            BatchError: the samples lack what the objective needs, or there are none at all.
            NonFiniteGradientError: too many skipped steps in a row.
        """
        error = None
        try:
            self._objective.check(micro_batches)
        except TrainerError as found:
            error = found
        samples = [s for batch in micro_batches for s in batch]
        kept = [[s for s in batch if not self._objective.is_idle(s)] for batch in micro_batches]
        kept = [batch for batch in kept if batch]
        everyones = self._replicas.gather_or_raise((self._objective.totals(samples), len(kept)), error)
        totals = sum((t for t, _ in everyones), BatchTotals(num_sequences=0, num_tokens=0))
        if not totals.num_sequences:
            raise BatchError("micro_batches holds no sample: at least one is needed")
        num_passes = max(n for _, n in everyones)

        def share(scores: Any, samples: MicroBatch) -> Share:
            return self._objective.share(scores, samples, totals)

        sums = self._backward(kept, num_passes, share)
        return {
            **self._objective.metrics(_added(self._replicas.gather(sums))),
            **self._apply_gradient(),
        }

    def _apply_gradient(self) -> dict[str, float]:
        lr = learning_rate(self._config, self._step)
        grad_norm = self._update(lr)
        if np.isfinite(grad_norm):
            self._nonfinite_steps = 0
        else:
            self._nonfinite_steps += 1
            if self._nonfinite_steps >= self._config.max_nonfinite_steps:
                raise NonFiniteGradientError(
                    f"the gradient norm was {grad_norm} in {self._nonfinite_steps} steps in a row "
                    f"(max_nonfinite_steps={self._config.max_nonfinite_steps}): try a lower lr"
                )
        self._step += 1
        return {"actor/grad_norm": grad_norm, "actor/lr": lr, "actor/nonfinite_steps": float(self._nonfinite_steps)}

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities [R] of each sample's response under the present policy.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "tokens")

    def log_probs_and_routing(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """`log_probs`, and the experts [P + R - 1, L, K] that every token passed through: see `router_replay`.

        Args:
            micro_batches: this replica's; another may have more of them, or none.

        Raises:
            TrainerError: the model has no routers.
        """
        if not self.num_routers:
            raise TrainerError("the model has no routers whose choice of experts could be recorded")
        with self._recording_routing() as routing:
            log_probs = self.log_probs(micro_batches)
        return [list(zip(*pair, strict=True)) for pair in zip(log_probs, routing, strict=False)]

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Values [R] of the states before each sample's response tokens, under the present critic.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "values")

    def _predicted(self, micro_batches: Sequence[MicroBatch], scores: str) -> list[list[NDArray[np.float32]]]:
        if self._objective.scores != scores:
            raise TrainerError(f"this trainer's model gives {self._objective.scores}: {scores} were asked for")
        num_passes = max(self._replicas.gather(len(micro_batches)))
        return by_sample(self._predict(micro_batches, num_passes), micro_batches)

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
        for group in ("model", "exp_avg", "exp_avg_sq"):
            if difference := sorted(state[group].keys() ^ own[group].keys()):
                raise StateError(f"{group} does not match the model: names on one side only: {difference[:3]}")
            for name, tensor in own[group].items():
                _check_same_shape(f"{group}[{name!r}]", state[group][name], tensor)
        self._load_tensors(state)
        self._step = state["step"]
        self._nonfinite_steps = state["nonfinite_steps"]

    @property
    @abstractmethod
    def num_routers(self) -> int:
        """Layers whose choice of experts can be recorded and imposed; 0 where there are no experts."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and whole tensors, one at a time, on every rank; a tied head is left out."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads; all ranks call it, one writes."""

    @abstractmethod
    def _backward(self, micro_batches: Sequence[MicroBatch], num_passes: int, share: ShareOf) -> dict[str, float]:
        """Put the gradient of all replicas' shares together, from ``num_passes`` passes, and give this one's sums."""

    @abstractmethod
    def _update(self, lr: float) -> float:
        """Clip the gradient and update, if its norm is finite; the norm before clipping."""

    @abstractmethod
    def _predict(self, micro_batches: Sequence[MicroBatch], num_passes: int) -> list[NDArray[np.float32]]:
        """Log-probs or values [N] of each micro-batch, in ``num_passes`` passes."""

    @abstractmethod
    def _recording_routing(self) -> AbstractContextManager[Sequence[list[NDArray[np.int16]]]]:
        """Inside, `_predict` appends what it records: [P + R - 1, L, K] of each sample, a list for each pass."""

    @abstractmethod
    def _optimizer_step(self) -> int:
        """Updates that the optimizer's moments have seen."""

    @abstractmethod
    def _tensors(self) -> dict[str, dict[str, Any]]:
        """``model``, ``exp_avg`` and ``exp_avg_sq`` of `state`."""

    @abstractmethod
    def _load_tensors(self, state: dict[str, Any]) -> None:
        """Take over the tensors and ``optimizer_step`` of a state that was checked."""


def _added(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _check_same_shape(name: str, given: Any, own: Any) -> None:
    if isinstance(own, torch.Tensor) and given.shape != own.shape:
        raise StateError(f"{name} has shape {tuple(given.shape)}: the model has {tuple(own.shape)}")

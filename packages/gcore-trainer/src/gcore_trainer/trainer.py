"""The common part of all trainers, and the torch backend of language models."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError

from gcore_trainer.config import OptimizerConfig, require
from gcore_trainer.errors import BatchError, ConfigError, StateError, TrainerError
from gcore_trainer.lora import LoRAWeights, save_adapters
from gcore_trainer.objectives.objective import (
    BatchTotals,
    Objective,
    PartialLoss,
    add_sums,
    named_scores,
)
from gcore_trainer.packing.router_replay import Routing
from gcore_trainer.sample import NOTHING, MicroBatch, Sample, by_sample, filled_up
from gcore_trainer.torch.host_memory import Sleeper
from gcore_trainer.torch.optimizer import AdamW, gather_full_tensor

T = TypeVar("T")
_logger = logging.getLogger(__name__)
MAX_NONFINITE_STEPS = 10
"""A step whose gradient is NaN or infinite is skipped; this many in a row end the run."""


class Replicas:
    """The data-parallel replicas of a trainer, one rank of each in a group; None: this one is alone.

    They work on different samples, and all of them call every method.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1
        self.rank = 0
        if group is not None:
            self.size = dist.get_world_size(group)
            self.rank = dist.get_rank(group)

    def gather(self, value: T) -> list[T]:
        """Return every replica's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_or_raise(self, compute: Callable[[], T]) -> list[T]:
        """Gather what every replica computes; if one raises an error, all do, so that none waits for another."""
        try:
            value = compute()
        except (TrainerError, OSError, SafetensorError) as error:
            self.gather((None, error))
            raise
        everyones = self.gather((value, None))
        for rank, (_, error) in enumerate(everyones):
            if error is not None and self._group is not None:
                raise type(error)(f"rank {dist.get_global_rank(self._group, rank)}: {error}")
        return [value for value, _ in everyones]


class BaseTrainer:
    """One rank's part of a model in training: learning rate, skipped steps and state.

    All ranks call the same methods in the same order. The ranks of one data-parallel replica (those that divide its
    layers, matrices or tokens) pass the same samples and get the same results; different replicas pass different ones.
    """

    _module: torch.nn.Module
    _exports_states = False
    """Whether exported weights are of the optimizer's states."""
    _sleepers: tuple[Sleeper, ...] = ()
    """The sleepers of the optimizer's states and of the weights; none before the first `sleep`."""

    def __init__(
        self, *, config: OptimizerConfig, optimizer: AdamW, objective: Any, replicas: Replicas
    ) -> None:
        scheduler = config.lr_scheduler_type
        total = config.total_training_steps
        is_known = scheduler == "constant" or total > 0
        require(
            "total_training_steps",
            total,
            is_known,
            f"1 or more for lr_scheduler_type {scheduler!r}",
        )
        self._config = config
        self._optimizer = optimizer
        self._objective = objective
        self._replicas = replicas
        self.step = 0
        """Steps taken so far, including skipped steps."""
        self._nonfinite_steps = 0
        self.data_parallel_rank = replicas.rank
        """The replica that this rank belongs to."""
        self.data_parallel_size = replicas.size
        """Number of replicas, each with samples of its own."""

    def _update(self, sums: dict[str, float]) -> dict[str, float]:
        """Update with the gradient; return its metrics, and the objective's of all replicas' sums."""
        total: dict[str, float] = {}
        for part in self._replicas.gather(sums):
            add_sums(total, part)
        lr = learning_rate(self._config, self.step)
        grad_norm = self._optimizer.update(lr)
        count = 0
        if not np.isfinite(grad_norm):
            count = self._nonfinite_steps + 1
        self._nonfinite_steps = count
        if count:
            message = "step %d: the gradient norm is %s; the update is skipped (%d in a row, of at most %d)"
            _logger.warning(message, self.step, grad_norm, count, MAX_NONFINITE_STEPS)
        if count >= MAX_NONFINITE_STEPS:
            raise TrainerError(
                f"the gradient norm was {grad_norm} in {count} steps in a row: try a lower lr"
            )
        self.step += 1
        metrics = {
            "actor/grad_norm": grad_norm,
            "actor/lr": lr,
            "actor/nonfinite_steps": float(count),
        }
        return self._objective.metrics(total) | metrics

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the device's memory until `wake`; calls that compute or export meanwhile raise `TrainerError`.

        With ``keep_weights`` the optimizer's states and the gradients alone leave the device (those of adapters, which
        are exported, stay): parameters can be scored with and exported. See `Sleeper`.
        """
        self._sleepers = self._sleepers or (
            Sleeper(self._module, self._stored_tensors),
            Sleeper(self._module),
        )
        states, weights = self._sleepers
        if keep_weights and self._exports_states:
            return
        states.sleep()
        if not keep_weights:
            weights.sleep()

    def wake(self, *, states: bool = False) -> None:
        """Bring the parameters back, and also ``states``, which otherwise come back with the next update."""
        first = 0 if states or self._exports_states else 1
        for sleeper in self._sleepers[first:]:
            sleeper.wake()

    def _check_awake(self) -> None:
        for sleeper in self._sleepers[1:]:
            sleeper.check_awake()

    def _stored_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors besides the parameters that stay in memory between updates, by groups and names."""
        return self._optimizer.stored_tensors()

    def _read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of a tensor, or a view of it in host memory if it is asleep."""
        for sleeper in self._sleepers:
            view = sleeper.find(tensor)
            if view is not None:
                return view
        return tensor.detach()

    def state(self) -> dict[str, Any]:
        """Return the state of a trainer, under the same names in every backend and layout.

        ``model``, ``exp_avg`` and ``exp_avg_sq`` map Hugging Face names to what this rank has of the tensor: a live
        tensor, a live `DTensor`, or a list of `TensorPart`. The rest are plain numbers. Tensors that are asleep are
        views of host memory, valid until they wake; 8-bit moments wake first.
        """
        if self._optimizer.computes_moments:
            self.wake(states=True)
        return {
            "step": self.step,
            "nonfinite_steps": self._nonfinite_steps,
            "optimizer_step": self._optimizer.num_updates,
            **self._optimizer.tensors(self._read),
            **self._averages(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Copy a state of the form of `state` into this trainer's tensors.

        Raises:
            StateError: names or shapes differ; nothing was changed.
        """
        _check_state(state, self.state())
        self._optimizer.load(state)
        for group, tensors in self._averages().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[group][name])
        self.step = state["step"]
        self._nonfinite_steps = state["nonfinite_steps"]

    def _averages(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return further groups of tensors of the state, without gradients: averages of the parameters."""
        return {}


def _check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `StateError` if names or shapes of a saved state differ from the ``expected`` state of the trainer."""
    difference = sorted(state.keys() ^ expected.keys())
    if difference:
        raise StateError(
            f"state does not match this trainer's: names on one side only: {difference}"
        )
    for group, tensors in expected.items():
        if not isinstance(tensors, dict):
            continue
        difference = sorted(state[group].keys() ^ tensors.keys())
        if difference:
            raise StateError(
                f"{group} does not match the model: names on one side only: {difference[:3]}"
            )
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and state[group][name].shape != tensor.shape:
                raise StateError(
                    f"{group}[{name!r}] has shape {tuple(state[group][name].shape)}; expected {tuple(tensor.shape)}"
                )


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
    remaining = 1.0 - progress
    if config.lr_scheduler_type == "cosine":
        remaining = (1.0 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


class Trainer(BaseTrainer, ABC):
    """The interface of every training backend of language models, and the common part of their steps.

    Example:
        >>> def save_all(trainer: Trainer, folder: str) -> None:
        ...     # Works for every backend.
        ...     trainer.save_pretrained(folder)
        >>> packed = PackedModel.from_pretrained("model")
        >>> save_all(TorchTrainer(packed, optimizer=OptimizerConfig(), objective=SFTObjective()), "saved")
    """

    num_routers: int = 0
    """Layers whose choice of experts can be recorded and imposed; 0 for a model without experts."""
    _head: Any
    """Has the temperature of log-probs."""
    _base: str
    """The folder, or the name, of the model that training started from."""

    def load_state(self, state: dict[str, Any]) -> None:
        self._check_awake()
        self.wake(states=True)
        super().load_state(state)

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Make one update on all samples of all replicas; the result does not depend on how they are split.

        Samples whose gradient is known to be zero are left out of the passes; they count in the loss's denominators.

        Args:
            micro_batches: this replica's; another may have more of them, or none.

        Returns:
            metrics, the same on all ranks; ``perf/computed_tokens`` have passed through the models of all replicas.

        Raises:
            BatchError: the samples lack what the objective needs, hold numbers that are not finite at tokens that
                count, or there are none at all.
            TrainerError: too many skipped steps in a row.
        """
        self._check_awake()
        self.wake(states=True)
        samples: list[Sample] = []
        learned: list[MicroBatch] = []
        for batch in micro_batches:
            samples.extend(batch)
            with_gradient = [s for s in batch if not self._objective.has_no_gradient(s)]
            if with_gradient:
                learned.append(with_gradient)

        def check_batches() -> tuple[BatchTotals, int]:
            self._objective.check(micro_batches)
            return self._objective.totals(samples), len(learned)

        replica_totals, num_batches = zip(
            *self._replicas.gather_or_raise(check_batches), strict=True
        )
        totals = sum(replica_totals, BatchTotals(num_sequences=0, num_tokens=0))
        if not totals.num_sequences:
            raise BatchError("micro_batches holds no sample; expected at least one in any replica")
        return self._update(self._backward(learned, max(num_batches), totals))

    def log_probs(
        self, micro_batches: Sequence[MicroBatch], *, temperature_scale: float = 1.0
    ) -> list[list[NDArray[np.float32]]]:
        """Return the log-probabilities [R] of each sample's response; another replica may have more micro-batches.

        ``temperature_scale`` multiplies the temperature. With log-probs l at 1 and m at 1/2, exp(2 l - m) is the sum of
        the squared probabilities of all tokens.
        """
        self._head.temperature *= temperature_scale
        try:
            return self._predict_by_sample(micro_batches, "tokens")
        finally:
            self._head.temperature /= temperature_scale

    def log_probs_and_routing(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """Return `log_probs`, and the experts [num_inputs, L, K] of every token; `TrainerError` if there are none."""
        if not self.num_routers:
            raise TrainerError("the model has no routers whose choice of experts could be recorded")
        routing: Routing = []
        log_probs = self._predict_by_sample(micro_batches, "tokens", routing)
        pairs = zip(log_probs, routing, strict=False)
        return [list(zip(scores, experts, strict=True)) for scores, experts in pairs]

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Return the values [R] of the states before each sample's response tokens, under the present critic."""
        return self._predict_by_sample(micro_batches, "values")

    def _predict_by_sample(
        self, micro_batches: Sequence[MicroBatch], scores: str, routing: Routing | None = None
    ) -> list[list[NDArray[np.float32]]]:
        self._check_awake()
        if self._objective.scores != scores:
            raise TrainerError(
                f"the trainer's model gives {self._objective.scores}; expected {scores}"
            )
        num_passes = max(self._replicas.gather(len(micro_batches)))
        return by_sample(self._predict(micro_batches, num_passes, routing), micro_batches)

    def _partial_loss(self, scores: Any, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        """Compute the objective's part of the loss, or 0 with the scores' gradients for `NOTHING`."""
        if samples is NOTHING:
            return named_scores(scores).sum() * 0.0, {}
        return self._objective.partial_loss(scores, samples, totals)

    def _module_names(self) -> dict[str, str]:
        """Return parameter names of transformers' model by those of a Hugging Face folder, where they differ."""
        return {}

    @abstractmethod
    def export_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return names and full tensors without a tied head, for all ranks to iterate over; adapters: `LoRAWeights`."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads. All ranks call it, and each writes a share.

        They all see the folder, which has its name once it is complete.

        Raises:
            OSError, safetensors.SafetensorError: a rank cannot write; all of them raise it.
        """

    def save_adapters(self, path: str | Path) -> None:
        """Write the adapters alone, a folder of peft's; all ranks call it, one writes; `ConfigError` if it has none."""
        weights = self.export_weights()
        if not isinstance(weights, LoRAWeights):
            raise ConfigError("lora is None: the model has no adapters to save")
        adapters = weights.adapters()
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_adapters(
                Path(path),
                {self._module_names().get(name, name): tensor for name, tensor in adapters.items()},
                weights.config,
                base=self._base,
                modules=dict(self._module.named_modules()),
                has_value_head=self._objective.scores == "values",
            )

    @abstractmethod
    def _backward(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, totals: BatchTotals
    ) -> dict[str, float]:
        """Compute the gradient of all replicas' loss in ``num_passes`` passes; return the sums of this one."""

    @abstractmethod
    def _predict(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, routing: Routing | None
    ) -> list[NDArray[np.float32]]:
        """Compute log-probs or values [N] of each micro-batch, in ``num_passes`` passes; see `PackedModel.predict`."""


class TorchTrainer(Trainer):
    """Trains a `PackedModel` or `PackedValueModel`; `ConfigError` if the objective needs the other one.

    Args:
        packed: the `PackedTransformer`; its parameters are updated in place.
        parallel: the `TorchParallel` of the ranks that divide parameters and samples; None: this process is alone.
        offload: whether optimizer states are in host memory, and updates run there; see `AdamW`.

    Example:
        >>> packed = PackedModel.from_pretrained("model")
        >>> trainer = TorchTrainer(packed, optimizer=OptimizerConfig(lr=1e-3), objective=SFTObjective())
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> losses = [trainer.train_step([[sample]])["sft/loss"] for _ in range(3)]
        >>> losses[0] > losses[1] > losses[2]
        True
    """

    def __init__(
        self,
        packed: Any,
        *,
        optimizer: OptimizerConfig,
        objective: Objective[Any],
        parallel: Any = None,
        offload: bool = False,
    ) -> None:
        if objective.scores != packed.scores:
            raise ConfigError(
                f"objective is {type(objective).__name__}; expected one that reads {packed.scores}, which the model "
                f"gives, and not {objective.scores}"
            )
        self._model = packed
        self._head = packed
        self._module = packed.model
        self._parallel = parallel
        self._base = packed.model.name_or_path
        group = None
        if parallel is not None:
            group = parallel.replicas
            parallel.shard(packed)
        self._parameters = packed.named_parameters()
        self._exports_states = packed.lora is not None
        adamw = packed.optimizer(optimizer, offload=offload)
        super().__init__(
            config=optimizer, optimizer=adamw, objective=objective, replicas=Replicas(group)
        )
        self.num_routers = packed.num_routers
        packed.model.eval()  # dropout would make every ratio to the sampling policy noise

    def export_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        self._check_awake()
        lora = self._model.lora
        if lora is None:
            return self._gather_tensors(self._parameters)
        masters = self._optimizer.stored_tensors()["model"]
        return LoRAWeights(
            lambda: self._gather_tensors(self._parameters),
            lambda: dict(self._gather_tensors(masters)),
            lora,
        )

    def _module_names(self) -> dict[str, str]:
        return dict(zip(self._parameters, dict(self._module.named_parameters()), strict=True))

    def _gather_tensors(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield name, gather_full_tensor(tensor.detach().to(self._parameters[name].device))

    def save_pretrained(self, path: str | Path) -> None:
        self._check_awake()
        ranks = Replicas(self._parallel and dist.group.WORLD)
        self._model.save_pretrained(path, self.export_weights(), ranks)

    def _backward(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, totals: BatchTotals
    ) -> dict[str, float]:
        tokens_before = self._model.num_computed_tokens
        self._optimizer.zero_grad()
        sums: dict[str, torch.Tensor] = {}
        # FSDP averages over ranks; the parts of the loss are to be added.
        scale = 1
        passes: Iterable[MicroBatch] = filled_up(micro_batches, num_passes)
        if self._parallel is not None:
            scale = self._parallel.world_size
            passes = self._parallel.syncing(self._model, passes)
        for samples in passes:
            scores = self._model.score(samples, entropy_grad=self._objective.entropy_grad)
            loss, parts = self._partial_loss(scores, samples, totals)
            torch.autograd.backward(loss * scale)
            add_sums(sums, parts)
        computed_tokens = self._model.num_computed_tokens - tokens_before
        return {name: value.item() for name, value in sums.items()} | {
            "perf/computed_tokens": computed_tokens
        }

    def _predict(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, routing: Routing | None
    ) -> list[NDArray[np.float32]]:
        return self._model.predict(micro_batches, num_passes, routing)

"""What ranks of Megatron tests do; every function returns what the tests compare."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from deepep_stand_in import deepep_stand_in
from megatron_groups import leave_groups
from numpy.typing import NDArray
from rank import Rank
from transformer_engine_stand_in import transformer_engine_stand_in

from gcore_trainer import (
    BatchTotals,
    MegatronConfig,
    MegatronTrainer,
    MicroBatch,
    Objective,
    OptimizerConfig,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    TrainerError,
)
from gcore_trainer.megatron import trainer as megatron_trainer
from gcore_trainer.megatron.features import fusion_options
from gcore_trainer.objectives.objective import PartialLoss, check_fields

Layout = Mapping[str, Any]
Steps = list[list[list[MicroBatch]]]
"""Micro-batches of each step and replica."""
Tensors = dict[str, torch.Tensor]
Box = tuple[str, str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""Group, name, global shape, offset and data of a part of the state."""


def megatron_predicts(
    rank: Rank,
    path: str,
    layout: Layout,
    options: Mapping[str, Any],
    micro_batches: list[MicroBatch],
) -> tuple[list[list[NDArray[np.float32]]], Tensors]:
    """Log-probs of this replica's micro-batches at half the temperature, and the exported weights on rank 0."""
    trainer = _trainer(path, layout, options)
    own = micro_batches[trainer.data_parallel_rank :: trainer.data_parallel_size]
    return trainer.log_probs(own, temperature_scale=0.5), _exported(rank, trainer)


def megatron_critic(
    rank: Rank, path: str, layout: Layout, samples: MicroBatch, to: str
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]], dict[str, float]]:
    """Values before and after five updates of a critic, which is saved, and the last update's metrics."""
    trainer = _trainer(
        path, layout, {"optimizer": OptimizerConfig(lr=1e-2), "objective": _SquaredErrors()}
    )
    [before] = trainer.values([samples])
    metrics = [trainer.train_step([samples]) for _ in range(5)]
    [after] = trainer.values([samples])
    trainer.save_pretrained(to)
    return before, after, metrics[-1]


class _SquaredErrors(Objective[torch.Tensor]):
    """Mean squared distance of values to returns."""

    scores = "values"
    loss_name = "critic/vf_loss"

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the squared error", "returns")

    def partial_loss(
        self, scores: torch.Tensor, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        returns = torch.from_numpy(
            np.concatenate([s.returns for s in samples if s.returns is not None])
        )
        loss = (scores - returns).square().sum() / totals.num_tokens
        return loss, {"loss": loss.detach()}


def megatron_trains(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[list[dict[str, float]], Tensors, list[Box]]:
    """Metrics of every step, exported weights on rank 0, and this rank's state."""
    trainer = _trainer(path, layout, options)
    metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return metrics, _exported(rank, trainer), _boxes(trainer)


def megatron_trains_and_scores(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[list[dict[str, float]], NDArray[np.float32], Tensors]:
    """Metrics of every step, log-probs after every other one, and exported weights on rank 0."""
    trainer = _trainer(path, layout, options)
    metrics: list[dict[str, float]] = []
    scores: list[NDArray[np.float32]] = []
    for step, replicas in enumerate(steps):
        own = replicas[trainer.data_parallel_rank]
        metrics.append(trainer.train_step(own))
        if step % 2:
            scores += [values for batch in trainer.log_probs(own) for values in batch]
    return metrics, np.concatenate(scores), _exported(rank, trainer)


def megatron_scores_and_trains(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[NDArray[np.float32], list[dict[str, float]], Tensors, list[Box]]:
    """Log-probs of the first step's samples before it; then as `megatron_trains`."""
    trainer = _trainer(path, layout, options)
    scores = [
        values
        for batch in trainer.log_probs(steps[0][trainer.data_parallel_rank])
        for values in batch
    ]
    metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return np.concatenate(scores), metrics, _exported(rank, trainer), _boxes(trainer)


def megatron_resumes(
    rank: Rank,
    path: str,
    layout: Layout,
    options: Mapping[str, Any],
    numbers: dict[str, int],
    saved: dict[str, Tensors],
    steps: Steps,
) -> tuple[list[dict[str, float]], Tensors]:
    """As `megatron_trains`, of a trainer into whose own tensors a state was loaded."""
    trainer = _trainer(path, layout, options)
    state = trainer.state()
    for group, tensors in saved.items():
        for name, parts in state[group].items():
            for part in parts:
                box = [
                    slice(first, first + size)
                    for first, size in zip(part.offset, part.tensor.shape, strict=True)
                ]
                part.tensor.copy_(tensors[name][tuple(box)])
    trainer.load_state(state | numbers)
    metrics = [trainer.train_step(replicas[trainer.data_parallel_rank]) for replicas in steps]
    return metrics, _exported(rank, trainer)


def megatron_loads_less(rank: Rank, path: str, layout: Layout) -> None:
    """Load a state from which one part of a tensor was taken."""
    trainer = _trainer(path, layout, {})
    state = trainer.state()
    state["exp_avg"]["model.norm.weight"] = []
    trainer.load_state(state)


def megatron_saves(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], to: str
) -> None:
    _trainer(path, layout, options).save_pretrained(to)


def megatron_is_made(rank: Rank, path: str, *layouts: Layout) -> None:
    """Make a trainer of each layout, one after the other, in one process."""
    leave_groups()
    gc.collect()
    for layout in layouts:
        _made(path, layout, {})


def _trainer(path: str, layout: Layout, options: Mapping[str, Any]) -> MegatronTrainer:
    leave_groups()
    gc.collect()  # earlier trainers, and with them the threads of their groups
    return _made(path, layout, options)


def _made(path: str, layout: Layout, options: Mapping[str, Any]) -> MegatronTrainer:
    defaults: dict[str, Any] = {
        "optimizer": OptimizerConfig(),
        "objective": PolicyObjective(PolicyLossConfig()),
    }
    options = defaults | dict(options)
    if options.pop("recompute", False):
        options["megatron"] = MegatronConfig(recompute_granularity="full")
    with ExitStack() as stack:
        if options.pop("stand_in", False):
            stack.enter_context(transformer_engine_stand_in())
        if options.pop("deepep", False):
            stack.enter_context(deepep_stand_in())
        if options.pop("cuda_fusions", False):
            patch = mock.patch.object(megatron_trainer, "fusion_options", _cuda_fusions)
            stack.enter_context(patch)
        return MegatronTrainer(path, parallel=ParallelConfig(**layout), **options)


def _cuda_fusions(config: MegatronConfig, *, device_type: str, has_te: bool) -> dict[str, Any]:
    del device_type
    return fusion_options(config, device_type="cuda", has_te=has_te)


def _exported(rank: Rank, trainer: MegatronTrainer) -> Tensors:
    weights = dict(trainer.export_weights())
    return weights if rank.number == 0 else {}


def _boxes(trainer: MegatronTrainer) -> list[Box]:
    state = trainer.state()
    return [
        (group, name, part.global_shape, part.offset, part.tensor)
        for group in ("model", "exp_avg", "exp_avg_sq")
        for name, parts in state[group].items()
        for part in parts
    ]


def megatron_replays(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[list[NDArray[np.int16]], list[dict[str, float]]]:
    """The experts of this replica's samples of the first step, and metrics of training on the others."""
    trainer = _trainer(path, layout, options)
    first, *others = [replicas[trainer.data_parallel_rank] for replicas in steps]
    found = trainer.log_probs_and_routing(first)
    return [experts for batch in found for _, experts in batch], [
        trainer.train_step(batch) for batch in others
    ]


def megatron_rests(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[list[dict[str, float]], Tensors, list[Box], list[tuple[int, int, int]], str]:
    """As `megatron_trains`, asleep before each step; also the bytes awake, with weights alone and asleep, and an error.

    With weights alone they are exported; asleep, its state can be read; awake, the optimizer sleeps until the update.
    """
    leave_groups()
    others = _held_bytes()
    trainer = _trainer(path, layout, options)
    metrics: list[dict[str, float]] = []
    held: list[tuple[int, int, int]] = []
    error = ""
    for replicas in steps:
        own = replicas[trainer.data_parallel_rank]
        before = _held_bytes()
        live = [(*box, _values(tensor)) for *box, tensor in _boxes(trainer)]
        weights = {name: _values(tensor) for name, tensor in trainer.export_weights()}
        trainer.sleep(keep_weights=True)
        kept = _held_bytes()
        exported = {name: _values(tensor) for name, tensor in trainer.export_weights()}
        np.testing.assert_equal(exported, weights)
        trainer.sleep()
        trainer.sleep()
        held.append((before - others, kept - others, _held_bytes() - others))
        for (*box, tensor), (*same, expected) in zip(_boxes(trainer), live, strict=True):
            assert box == same
            np.testing.assert_array_equal(_values(tensor), expected)
        for call in (
            lambda: trainer.train_step([]),
            lambda: [*trainer.export_weights()],
        ):
            with pytest.raises(TrainerError, match="the trainer is asleep") as raised:
                call()
            error = str(raised.value)
        trainer.wake()
        trainer.wake()
        assert _held_bytes() < before
        trainer.log_probs(own)
        assert _held_bytes() < before
        trainer.wake(states=True)
        assert _held_bytes() == before
        _check_views(trainer)
        metrics.append(trainer.train_step(own))
    return metrics, _exported(rank, trainer), _boxes(trainer), held, error


def megatron_holds(
    rank: Rank, path: str, layout: Layout, options: Mapping[str, Any], steps: Steps
) -> tuple[int, int]:
    """Bytes of the trainer's tensors after training, without and with those in host memory on its behalf."""
    leave_groups()
    others = _held_bytes()
    trainer = _trainer(path, layout, options)
    for replicas in steps:
        trainer.train_step(replicas[trainer.data_parallel_rank])
    stored: Any = trainer._optimizer.stored_tensors()  # pyright: ignore[reportPrivateUsage]  # state() has boxes of them
    on_host = 0
    for tensors in stored.values():
        on_host += sum(t.nbytes for t in tensors.values() if not t.untyped_storage().resizable())
    return _held_bytes() - others, on_host


def _values(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return a copy that is no tensor; memory that NumPy has seen cannot be freed."""
    return tensor.to(torch.float32, copy=True).numpy()


def _held_bytes() -> int:
    """Bytes of all tensors of this process but the smallest, and but for those in host memory on a trainer's behalf."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Not fake tensors, which other cases leave.
        is_own = type(found) in (torch.Tensor, torch.nn.Parameter)
        if is_own and found.layout == torch.strided and found.numel() >= 1024:
            storage = found.untyped_storage()
            if storage.resizable():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _check_views(trainer: MegatronTrainer) -> None:
    """Parameters and their gradients are parts of the buffers that collectives send."""
    chunks: Any = trainer._chunks  # pyright: ignore[reportPrivateUsage]  # nothing else says what the buffers are
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for parameter in buffer.params:
                for view, whole in (
                    (parameter, buffer.param_data),
                    (parameter.main_grad, buffer.grad_data),
                ):
                    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert not buffer.grad_data.any()

"""A simulated learner: it takes the time of its slowest replica."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller.trainer_group import deal
from gcore_llm.learning.micro_batches import sample_flops
from gcore_llm.learning.trainer_worker import Role
from gcore_llm.simulate.config import SimulateConfig
from gcore_llm.simulate.load import LoadMeter
from gcore_placement import RunningLedger, TransformerWorkload
from gcore_placement.simulation.live import Work
from gcore_runs.errors import UserError
from gcore_trainer import MicroBatch

if TYPE_CHECKING:
    import torch


class ModelledLearner:
    """A `gcore_controller.SharedTrainerGroup` of modelled replicas, to which micro-batches are dealt as on real ones.

    A micro-batch takes its FLOPs over the FLOPs per second of a replica's devices, and ``micro_batch_s``. There are no
    weights: `export_weights` is empty, and `save` keeps its state in memory.
    """

    def __init__(
        self, config: SimulateConfig, workload: TransformerWorkload, *, ledger: RunningLedger, meter: LoadMeter
    ) -> None:
        self._num_replicas = config.num_learner_replicas
        self._model = config.learner
        self._flops_per_s = config.learner.device_flops_per_s * config.learner.devices_per_replica
        self._workload = workload
        self._ledger = ledger
        self._meter = meter
        self._turn = asyncio.Lock()
        self._num_updates = 0
        self._saved: dict[str, Any] = {}

    @property
    def num_updates(self) -> int:
        return self._num_updates

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See `Learner.score`; all values are 0, and all models cost the same."""
        del role
        await self._work("preparation", micro_batches, share=self._model.forward_share)
        zero = np.float32(0.0)
        return [[np.broadcast_to(zero, sample.response_ids.size) for sample in batch] for batch in micro_batches]

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """See `Learner.score_and_route`; all experts are 0, in one layer."""
        scores = await self.score("actor", micro_batches)
        return [
            [
                (values, np.broadcast_to(np.int16(0), (sample.num_inputs, 1, 1)))
                for values, sample in zip(of_batch, batch, strict=True)
            ]
            for of_batch, batch in zip(scores, micro_batches, strict=True)
        ]

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """See `Learner.train_step`; all models cost the same."""
        del role
        await self._work("training", micro_batches, share=1.0)
        self._num_updates += 1
        return {}

    def export_weights(self, *, averaged: bool = False) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Return nothing: there are no weights."""
        del averaged
        return iter(())

    def save_pretrained(self, path: Path) -> None:
        """
        Raises:
            UserError: always.
        """
        raise UserError(f"cannot write {path}: a simulated learner has no weights")

    def save(self, step: int, rest: dict[str, Any]) -> None:
        """See `Learner.save`."""
        self._saved = {"step": step, **rest}

    def load(self) -> dict[str, Any]:
        """See `Learner.load`."""
        return self._saved

    def close(self) -> None:
        """Do nothing."""

    async def _work(self, work: Work, micro_batches: Sequence[MicroBatch], *, share: float) -> None:
        with self._meter.paused():
            flops = np.array([sample_flops(self._workload, batch) for batch in micro_batches])
            each_s = share * (flops / self._flops_per_s + self._model.micro_batch_s)
            seconds = np.array([each_s[part].sum() for part in deal(flops.tolist(), self._num_replicas)])
        longest_s = float(seconds.max())
        async with self._turn:
            with self._ledger.whole(work, float(seconds.mean()) / longest_s if longest_s else 1.0):
                await asyncio.sleep(longest_s)

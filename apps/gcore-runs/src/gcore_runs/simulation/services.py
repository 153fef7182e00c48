"""The simulated services next to the engine, a reward and a trainer; what they share, and what an app says of them."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, Literal

import numpy as np

from gcore_controller import SharedTrainerGroup, deal
from gcore_placement import RunningLedger, TransformerWorkload, log_normal, uniform
from gcore_rollout import RequestT, RewardRunner, RewardRunnerConfig, SampleT
from gcore_runs.errors import UserError
from gcore_runs.simulation.collectives import training_collectives
from gcore_runs.simulation.config import BaseSimConfig

if TYPE_CHECKING:
    import torch

_GROUP_STREAM = 3
_SAMPLE_STREAM = 4
_LATENCY_STREAM = 5
_INDEX_BITS = 16
_GROUP_MASK = (1 << 47) - 1
_RANK: ContextVar[int] = ContextVar("controller")


def now_s() -> float:
    """Return the simulated time."""
    return asyncio.get_running_loop().time()


def sample_name(request_seed: int, index: int) -> int:
    """Return the number that stands for a sample, in place of its content; `group_and_index` decodes it."""
    return ((request_seed & _GROUP_MASK) << _INDEX_BITS) | index


def group_and_index(name: int) -> tuple[int, int]:
    """Return the key of a sample's group, and its index there."""
    return name >> _INDEX_BITS, name & ((1 << _INDEX_BITS) - 1)


class SimulatedModality(ABC, Generic[RequestT, SampleT]):
    """The samples of an app: what they take to be made and trained on, and what stands for them."""

    weights_bytes: float
    """Size of the weights that the engines get."""
    workload: TransformerWorkload | None = None
    """The model's layers; None: training has no collectives by the token."""

    @abstractmethod
    def size(self, request: RequestT, index: int) -> tuple[float, float, float]:
        """Return the steps of a sample, those of them that an aborted one has made, and the tokens of its prompt."""

    @abstractmethod
    def sample(
        self, request: RequestT, index: int, num_steps: float, *, version: int, is_aborted: bool
    ) -> SampleT:
        """Return the sample after ``num_steps`` further steps."""

    @abstractmethod
    def flops(self, micro_batch: Sequence[Any]) -> float:
        """Return the FLOPs of training on a micro-batch."""

    def num_tokens(self, micro_batch: Sequence[Any]) -> float:
        """Return the tokens of a micro-batch, of which collectives are modelled where there is a ``workload``."""
        del micro_batch
        return 0.0

    @abstractmethod
    def outputs(self, sample: Any) -> Any:
        """Return what stands for a model's outputs for a sample to train on."""


class LoadMeter:
    """Adds up the real processor seconds of each controller's own code, during which simulated time stands still.

    These are the steps of its program's coroutine and of every task that it starts, but for what `exclude` surrounds.
    """

    def __init__(self, num_controllers: int) -> None:
        self._busy_s = [0.0] * num_controllers
        self._paused_s = 0.0

    async def run(self, rank: int, program: Coroutine[Any, Any, None]) -> None:
        """Run a controller's program under the meter."""
        _RANK.set(rank)
        asyncio.get_running_loop().set_task_factory(self._make_task)
        await asyncio.create_task(program)

    @contextmanager
    def exclude(self) -> Generator[None]:
        """Do not count the block, because a real service would run it elsewhere; blocks do not nest."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self._paused_s += time.thread_time() - start_s

    def cut(self) -> list[float]:
        """Return the seconds of each controller since the last call, by rank."""
        busy_s = self._busy_s
        self._busy_s = [0.0] * len(self._busy_s)
        return busy_s

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> "asyncio.Task[Any]":
        rank = _RANK.get(None)
        if rank is not None:
            work = self._meter(rank, work)
        return asyncio.Task(work, loop=loop, **options)

    async def _meter(self, rank: int, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._count_steps(rank, work)

    @coroutine
    def _count_steps(self, rank: int, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a coroutine, and count each of its steps."""
        step: Callable[[Any], Any] = work.send
        arg: Any = None
        while True:
            self._paused_s = 0.0
            start_s = time.thread_time()
            try:
                awaited = step(arg)
            except StopIteration as end:
                return end.value
            finally:
                self._busy_s[rank] += time.thread_time() - start_s - self._paused_s
            try:
                step = work.send
                arg = yield awaited
            except BaseException as error:
                step = work.throw
                arg = error


@dataclass(kw_only=True)
class SharedState(Generic[RequestT, SampleT]):
    """The state that all services of a simulated cluster share."""

    config: BaseSimConfig
    modality: SimulatedModality[RequestT, SampleT]
    seed: int
    meter: LoadMeter
    ledger: RunningLedger | None
    """None: device-seconds are not counted, and the trainer may work while the engines do."""
    version: int = 0
    """Version of the weights of all engines."""

    def count_whole(self, work: str, busy_share: float) -> AbstractContextManager[None]:
        """See `RunningLedger.occupy_all`; without a ledger nothing is counted."""
        return self.ledger.occupy_all(work, busy_share) if self.ledger else nullcontext()


class ModelledReward:
    """Scores of 0 and 1: a share ``acceptance`` of groups has both, the others one of them.

    A rule answers at once, a judge with replicas of its own after a latency. Score and latency depend on the seed and
    the sample alone. Completions are samples' names (see `sample_name`).

    Args:
        n: samples in a group.
        has_signal: returns whether the scores of the group with a key differ, in place of draws.
    """

    def __init__(
        self, state: SharedState[Any, Any], n: int, has_signal: Callable[[int], bool] | None = None
    ) -> None:
        self._state = state
        self._n = n
        self._has_signal = has_signal
        self._seed = state.seed
        self._model = state.config.reward
        self._loads = np.zeros(max(1, self._model.num_replicas), dtype=np.intp)

    def runner(self) -> RewardRunner:
        """Return the service that makes the calls, as many at once as the replicas take."""
        max_concurrency = len(self._loads) * self._model.max_concurrency
        if not self._model.latency_s:
            return RewardRunner(
                self.rule,
                RewardRunnerConfig(max_concurrency=max_concurrency, sync_in_threads=False),
            )
        return RewardRunner(
            self.judge, RewardRunnerConfig(max_concurrency=max_concurrency, timeout_s=math.inf)
        )

    def rule(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score at once."""
        del prompt, row
        with self._state.meter.exclude():
            group, index = group_and_index(int(completion))
            u = uniform(self._seed, _GROUP_STREAM, group)
            differs = self._has_signal(group) if self._has_signal else u < self._model.acceptance
            if not differs:
                return float(u >= (1 + self._model.acceptance) / 2)
            right = int(uniform(self._seed, _SAMPLE_STREAM, group) * self._n)
            if index in (right, (right + 1) % self._n):
                return float(index == right)
            return float(uniform(self._seed, _SAMPLE_STREAM, group, index) < 0.5)

    async def judge(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score after the latency, in which the replica with the fewest calls is busy."""
        with self._state.meter.exclude():
            u = uniform(self._seed, _LATENCY_STREAM, int(completion))
            latency_s = log_normal(u, median=self._model.latency_s, sigma=self._model.latency_sigma)
            replica = int(self._loads.argmin())
            self._change_load(replica, 1)
        try:
            await asyncio.sleep(latency_s)
        finally:
            self._change_load(replica, -1)
        return self.rule(prompt, completion, row)

    def _change_load(self, replica: int, change: int) -> None:
        """Note a call that starts or ends; a replica is busy while it has any."""
        was_busy = self._loads[replica] > 0
        self._loads[replica] += change
        if self._model.devices and self._state.ledger and was_busy != (self._loads[replica] > 0):
            self._state.ledger.change("reward", change * self._model.devices_per_replica)


class ModelledLearner(SharedTrainerGroup[Sequence[Any]]):
    """A trainer group of modelled replicas, to which micro-batches are dealt as on real ones.

    A micro-batch takes its FLOPs over a replica's FLOPs per second, and ``micro_batch_s``, with its collectives (see
    `training_collectives`); a step takes the time of its slowest replica. All models cost the same. There are no
    weights, so nothing is exported or saved.
    """

    def __init__(self, state: SharedState[Any, Any]) -> None:
        self._num_updates = 0
        self._state = state
        self._model = state.config.learner
        self._flops_per_s = self._model.device_flops_per_s * self._model.devices_per_replica
        modality = state.modality
        self._collectives = training_collectives(
            state.config, modality.weights_bytes, modality.workload
        )
        self._turn = asyncio.Lock()

    @property
    def num_replicas(self) -> int:
        return self._state.config.num_learner_replicas

    @property
    def num_updates(self) -> int:
        return self._num_updates

    async def score(
        self, role: str, micro_batches: Sequence[Sequence[Any]], *, with_routing: bool = False
    ) -> list[list[Any]]:
        """Score samples by the modality's outputs; all experts are 0, in one layer."""
        del role
        await self._work("preparation", micro_batches, share=self._model.forward_share)
        scores: list[list[Any]] = []
        for batch in micro_batches:
            outputs = list(map(self._state.modality.outputs, batch))
            if with_routing:
                routes = [
                    np.broadcast_to(np.int16(0), (sample.num_inputs, 1, 1)) for sample in batch
                ]
                outputs = list(zip(outputs, routes, strict=True))
            scores.append(outputs)
        return scores

    async def train_step(
        self, role: str, micro_batches: Sequence[Sequence[Any]]
    ) -> dict[str, float]:
        del role
        await self._work("training", micro_batches, share=1.0)
        self._num_updates += 1
        return {}

    def export_weights(self, *, averaged: bool = False) -> "Iterator[tuple[str, torch.Tensor]]":
        del averaged
        return iter(())

    def save_pretrained(self, path: Path) -> None:
        raise UserError(f"cannot write {path}: a simulated learner has no weights")

    def save(self, step: int, rest: dict[str, Any]) -> None:
        """Do nothing: there are no models."""

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Do nothing: there is no memory."""

    async def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def _ask_all(self, stage: str, message: Callable[[Any], Any]) -> Any:
        del stage, message
        raise UserError("a simulated learner has no checkpoint")

    async def _work(
        self,
        work: Literal["preparation", "training"],
        micro_batches: Sequence[Sequence[Any]],
        *,
        share: float,
    ) -> None:
        modality = self._state.modality
        is_training = work == "training"
        update_s = self._collectives.update_s if is_training else 0.0
        with self._state.meter.exclude():
            flops = np.array([modality.flops(batch) for batch in micro_batches])
            tokens = np.array([modality.num_tokens(batch) for batch in micro_batches])
            products_s = share * (flops / self._flops_per_s + self._model.micro_batch_s)
            each_s = self._collectives.seconds(products_s, tokens, is_training=is_training)
            parts = deal(flops.tolist(), self.num_replicas)
            seconds = update_s + np.array(
                [self._collectives.replica_s(each_s[part]) for part in parts]
            )
        longest_s = float(seconds.max())
        async with self._turn:
            with self._state.count_whole(
                work, float(seconds.mean()) / longest_s if longest_s else 1.0
            ):
                await asyncio.sleep(longest_s)

"""The simulated services next to the engine: a reward, a trainer, lengths and scores of a replayed run; and the meter
of the controllers' own code."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gcore_controller import deal
from gcore_placement import (
    LeastLoaded,
    RunningLedger,
    SampledLengths,
    TransformerWorkload,
    log_normal,
    step_lengths,
    uniform,
)
from gcore_rollout import Request, RewardRunner, RewardRunnerConfig
from gcore_runs.errors import UserError
from gcore_runs.simulation.config import LengthConfig, SimulateConfig
from gcore_trainer import MicroBatch

if TYPE_CHECKING:
    import torch

_GROUP_STREAM, _SAMPLE_STREAM, _LATENCY_STREAM = 3, 4, 5
_INDEX_BITS = 16
_GROUP_MASK = (1 << 47) - 1
_RANK: ContextVar[int] = ContextVar("controller")


def sample_name(request_seed: int, index: int) -> int:
    """Return the number that stands for every token of a sample; `group_and_index` decodes it."""
    return ((request_seed & _GROUP_MASK) << _INDEX_BITS) | index


def group_and_index(name: int) -> tuple[int, int]:
    """Return the key of a sample's group, and its index there."""
    return name >> _INDEX_BITS, name & ((1 << _INDEX_BITS) - 1)


def drawn_length(u: float, config: LengthConfig, *, unit: int) -> int:
    """Return the ``u`` quantile of the lengths in units of ``unit`` tokens, at least one."""
    return max(1, round(log_normal(u, median=config.median, sigma=config.sigma) / unit))


@dataclass(frozen=True, kw_only=True)
class CoarseWorkload(TransformerWorkload):
    """The work of sequences whose entries stand for ``token_unit`` tokens each.

    For L entries the linear term is exact. The attention term has u^2 L (L + 1) / 2 pairs, u = token_unit, where the
    tokens have u L (u L + 1) / 2: more by a share of nearly 1 / L.
    """

    token_unit: int

    @property
    def flops_per_token(self) -> float:
        return super().flops_per_token * self.token_unit

    @property
    def flops_per_attended_pair(self) -> float:
        return super().flops_per_attended_pair * self.token_unit**2


def weights_bytes(workload: CoarseWorkload) -> float:
    """Return the size in bfloat16 of all matrices, the head, and an embedding that is not tied to it."""
    # Forward and backward pass take 6 FLOPs for each weight that a token meets; the embedding is looked up.
    met = workload.flops_per_token / workload.token_unit / 6
    return 2 * (met + workload.hidden_size * workload.vocab_size)


class LoadMeter:
    """Adds up the real processor seconds of each controller's own code, during which simulated time stands still.

    These are the steps of its program's coroutine and of every task that it starts; the work of simulated services in
    such a step, inside `paused`, is not counted.
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
    def paused(self) -> Generator[None]:
        """Do not count the block, because a real service would run it elsewhere; blocks do not nest."""
        start_s = time.thread_time()
        try:
            yield
        finally:
            self._paused_s += time.thread_time() - start_s

    def cut(self) -> list[float]:
        """Return the seconds of each controller since the last call, by rank."""
        busy_s, self._busy_s = self._busy_s, [0.0] * len(self._busy_s)
        return busy_s

    def counted(self, rank: int, step: Callable[..., Any], *args: Any) -> Any:
        """Take a step of a controller's coroutine."""
        self._paused_s, start_s = 0.0, time.thread_time()
        try:
            return step(*args)
        finally:
            self._busy_s[rank] += time.thread_time() - start_s - self._paused_s

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        rank = _RANK.get(None)
        metered = coroutine if rank is None else _Metered(self, rank, coroutine)
        return asyncio.Task(metered, loop=loop, **options)


class _Metered(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps is counted."""

    __slots__ = ("_coroutine", "_meter", "_rank")

    def __init__(self, meter: LoadMeter, rank: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._meter, self._rank, self._coroutine = meter, rank, coroutine

    def send(self, value: Any) -> Any:
        return self._meter.counted(self._rank, self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._meter.counted(self._rank, self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


class Replay:
    """Responses by prompt index, which is a prompt's place in the order of sampling; after the last it starts again.

    Args:
        steps: the responses that each step sampled, in the run's order.
        num_kept: groups of each step whose scores differed.
        n: responses to a prompt.
        sigma: standard deviation of the lengths' logarithm.
        seed: of the order within a step.

    Raises:
        ValueError: no step sampled anything.
    """

    def __init__(
        self, steps: Sequence[SampledLengths], num_kept: Sequence[int], *, n: int, sigma: float, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        lengths = [random.permutation(step_lengths(step, sigma=sigma)).reshape(-1, n) for step in steps]
        signals = [random.permutation(np.arange(len(own)) < kept) for own, kept in zip(lengths, num_kept, strict=True)]
        self._lengths, self._signals = np.concatenate(lengths), np.concatenate(signals)
        if not len(self._lengths):
            raise ValueError("steps have 0 samples; expected at least one")
        self._rows: dict[int, int] = {}
        """The row of each group that has been sampled, by the key that samples' names hold."""

    def length(self, request: Request, index: int) -> int:
        """Return the tokens of one response to a request, whose id is its prompt index."""
        row = int(request.request_id) % len(self._lengths)
        self._rows[group_and_index(sample_name(request.seed, index))[0]] = row
        return int(self._lengths[row, index])

    def has_signal(self, group: int) -> bool:
        """Return whether the scores of a group differ; ``group`` is the key of one whose responses were sampled."""
        return bool(self._signals[self._rows[group]])


class ModelledReward:
    """Scores of 0 and 1: a share ``acceptance`` of groups, or those of the replay, has both, the others one of them.

    A rule answers at once, a judge with replicas of its own after a latency. Score and latency depend on the seed and
    the sample alone. Completions are samples' names (see `sample_name`).
    """

    def __init__(
        self, config: SimulateConfig, *, ledger: RunningLedger, meter: LoadMeter, replay: Replay | None = None
    ) -> None:
        self._seed, self._n, self._model = config.seed, config.n, config.reward
        self._ledger, self._meter, self._replay = ledger, meter, replay
        self._choice = LeastLoaded(max(1, self._model.num_replicas))

    def runner(self) -> RewardRunner:
        """Return the service that makes the calls, as many at once as the replicas take."""
        places = max(1, self._model.num_replicas) * self._model.max_concurrency
        if not self._model.latency_s:
            return RewardRunner(self.rule, RewardRunnerConfig(max_concurrency=places, sync_in_threads=False))
        return RewardRunner(self.judge, RewardRunnerConfig(max_concurrency=places, timeout_s=math.inf))

    def rule(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score at once."""
        del prompt, row
        with self._meter.paused():
            group, index = group_and_index(int(completion))
            u = uniform(self._seed, _GROUP_STREAM, group)
            differs = u < self._model.acceptance if self._replay is None else self._replay.has_signal(group)
            if not differs:
                return float(u >= (1 + self._model.acceptance) / 2)
            right = int(uniform(self._seed, _SAMPLE_STREAM, group) * self._n)
            if index in (right, (right + 1) % self._n):
                return float(index == right)
            return float(uniform(self._seed, _SAMPLE_STREAM, group, index) < 0.5)

    async def judge(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score after the latency, in which the replica with the fewest calls is busy."""
        devices = self._model.devices_per_replica if self._model.devices else 0
        with self._meter.paused():
            u = uniform(self._seed, _LATENCY_STREAM, int(completion))
            latency_s = log_normal(u, median=self._model.latency_s, sigma=self._model.latency_sigma)
            replica, load = self._choice.take(1)
            if load == 1 and devices:
                self._ledger.reward(devices)
        try:
            await asyncio.sleep(latency_s)
        finally:
            if not self._choice.add(replica, -1) and devices:
                self._ledger.reward(-devices)
        return self.rule(prompt, completion, row)


class ModelledLearner:
    """A `gcore_controller.SharedTrainerGroup` of modelled replicas, to which micro-batches are dealt as on real ones.

    A micro-batch takes its FLOPs over the FLOPs per second of a replica's devices, and ``micro_batch_s``; a step takes
    the time of its slowest replica. All models cost the same. There are no weights: `export_weights` is empty, and
    `save` keeps its state in memory.

    Args:
        cost_of: returns the FLOPs of a micro-batch.
    """

    def __init__(
        self, config: SimulateConfig, cost_of: Callable[[MicroBatch], float], *, ledger: RunningLedger, meter: LoadMeter
    ) -> None:
        self.num_replicas = config.num_learner_replicas
        self.num_updates = 0
        self._model, self._cost_of, self._ledger, self._meter = config.learner, cost_of, ledger, meter
        self._flops_per_s = config.learner.device_flops_per_s * config.learner.devices_per_replica
        self._turn = asyncio.Lock()
        self._saved: dict[str, Any] = {}

    async def score(
        self, role: str, micro_batches: Sequence[MicroBatch], *, with_routing: bool = False
    ) -> list[list[Any]]:
        """Score responses; all values are 0, and so are all experts, in one layer."""
        del role
        await self._work("preparation", micro_batches, share=self._model.forward_share)
        zero = np.float32(0.0)
        scores = [[np.broadcast_to(zero, sample.response_ids.size) for sample in batch] for batch in micro_batches]
        if not with_routing:
            return scores
        routes = [[np.broadcast_to(np.int16(0), (sample.num_inputs, 1, 1)) for sample in own] for own in micro_batches]
        return [list(zip(*own, strict=True)) for own in zip(scores, routes, strict=True)]

    async def train_step(self, role: str, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Train on the micro-batches."""
        del role
        await self._work("training", micro_batches, share=1.0)
        self.num_updates += 1
        return {}

    def export_weights(self, *, averaged: bool = False) -> Iterator[tuple[str, "torch.Tensor"]]:
        """Return nothing: there are no weights."""
        del averaged
        return iter(())

    def save_pretrained(self, path: Path) -> None:
        """Raise `UserError`."""
        raise UserError(f"cannot write {path}: a simulated learner has no weights")

    def save(self, step: int, rest: dict[str, Any]) -> None:
        self._saved = {"step": step, **rest}

    def load(self) -> dict[str, Any]:
        return self._saved

    def close(self) -> None:
        """Do nothing."""

    async def _work(
        self, work: Literal["preparation", "training"], micro_batches: Sequence[MicroBatch], *, share: float
    ) -> None:
        with self._meter.paused():
            flops = np.array([self._cost_of(batch) for batch in micro_batches])
            each_s = share * (flops / self._flops_per_s + self._model.micro_batch_s)
            seconds = np.array([each_s[part].sum() for part in deal(flops.tolist(), self.num_replicas)])
        longest_s = float(seconds.max())
        async with self._turn:
            with self._ledger.whole(work, float(seconds.mean()) / longest_s if longest_s else 1.0):
                await asyncio.sleep(longest_s)

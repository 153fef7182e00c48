"""A modelled engine: the interface of real ones, in simulated time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.simulate.config import SimulateConfig
from gcore_llm.simulate.load import LoadMeter
from gcore_llm.simulate.replay import Replay
from gcore_llm.simulate.replica import ModelledReplica, RunningSample
from gcore_llm.simulate.work import sample_name
from gcore_placement.simulation.least_loaded import LeastLoaded
from gcore_placement.simulation.running_ledger import Ledger
from gcore_placement.workload.draws import blend, length, uniform
from gcore_rollout import Call, Completion, EngineStats, Request, RolloutError

if TYPE_CHECKING:
    import torch

_LENGTH_STREAM = 2
_PROMPT_STREAM = 6


@dataclass
class ModelledWeights:
    """Those of all engines of a cluster, which change together."""

    version: int = 0


class ModelledEngine:
    """Replicas behind `gcore_rollout.Engine`, between which requests are divided as `EngineReplicas` does it.

    A response's length depends on the seed, its request's seed and its index, unless it is replayed. All its tokens are
    its name (see `sample_name`), and its arrays have one entry in memory, so that long ones cost no more than short
    ones.

    Args:
        num_replicas: of this engine.
        weights: whose version this engine's are; an update of one engine is of all that have the same.
        sync_s: seconds that new weights take.
        replay: what gives lengths in the place of draws.
    """

    def __init__(
        self,
        config: SimulateConfig,
        *,
        num_replicas: int,
        weights: ModelledWeights,
        sync_s: float,
        ledger: Ledger,
        meter: LoadMeter,
        replay: Replay | None = None,
    ) -> None:
        self._config = config
        self._sync_s = sync_s
        self._ledger = ledger
        self._meter = meter
        self._length = self._drawn_length if replay is None else replay.length
        devices = config.engine.devices_per_replica
        self._replicas = [
            ModelledReplica(
                config.engine,
                finished=self._finished,
                changed=lambda is_busy: ledger.generate(devices if is_busy else -devices),
            )
            for _ in range(num_replicas)
        ]
        self._choice = LeastLoaded(len(self._replicas))
        self._num_unfinished = 0
        self._weights = weights
        self._is_paused = self._is_asleep = False
        self._num_prompt_tokens = self._num_completion_tokens = 0

    @property
    def weight_version(self) -> int:
        return self._weights.version

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """See `Engine.generate`."""
        call = Call(pending=sum(len(request.sample_indices) for request in requests))
        with self._meter.paused():
            self._submit(requests, call)
        try:
            async with aclosing(call.completions()) as completions:
                async for completion in completions:
                    yield completion
        finally:
            if call.abandoned:
                self._withdraw(lambda sample: sample.call is call)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        ids = None if request_ids is None else frozenset(request_ids)
        with self._meter.paused():
            for sample, num_tokens in self._withdraw(lambda s: ids is None or s.request.request_id in ids):
                # One that would have ended at this very moment still lacks its last token.
                whole = min(num_tokens, sample.length - sample.num_begun - self._config.token_unit)
                self._hand_over(sample, int(whole / self._config.token_unit + 1e-9), is_aborted=True)

    async def pause(self) -> None:
        """See `Engine.pause`."""
        self._is_paused = True
        self._hold_or_release()

    async def resume(self) -> None:
        """See `Engine.resume`."""
        self._is_paused = False
        self._hold_or_release()

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._check_idle("sleep")
        self._is_asleep = True
        self._hold_or_release()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        self._is_asleep = False
        self._hold_or_release()

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """See `Engine.update_weights`; between responses only, for all devices take part in it."""
        del weights
        if self._is_asleep:
            raise RolloutError("the engine is asleep: wake it before update_weights")
        if version <= self._weights.version:
            raise ValueError(f"version is {version}: it must be above the present {self._weights.version}")
        self._check_idle("update_weights")
        await asyncio.sleep(self._config.overhead_s)
        with self._ledger.whole("sync", 1.0):
            await asyncio.sleep(self._sync_s)
        self._weights.version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            num_running=sum(replica.num_running for replica in self._replicas),
            num_waiting=sum(replica.num_waiting for replica in self._replicas),
            weight_version=self._weights.version,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self._withdraw(lambda _: True)

    def _submit(self, requests: Sequence[Request], call: Call) -> None:
        self._num_unfinished += call.pending
        fair_share = max(1, self._num_unfinished // len(self._replicas))
        new: dict[int, list[RunningSample]] = {}
        for request in requests:
            for indices in _parts(request.sample_indices, fair_share, len(self._replicas)):
                replica, _ = self._choice.take(len(indices))
                new.setdefault(replica, []).extend(self._samples(request, indices, call, replica))
        for replica, samples in new.items():
            self._replicas[replica].submit(samples)

    def _samples(self, request: Request, indices: Sequence[int], call: Call, replica: int) -> Iterator[RunningSample]:
        """Those of a request that one replica makes: their prompt is computed once."""
        unit = self._config.token_unit
        begun = {completion.index: completion for completion in request.prefixes}
        num_prompt = len(request.prompt_token_ids) * unit
        for index in indices:
            before = begun.get(index)
            num_begun = 0 if before is None else before.token_ids.size * unit
            yield RunningSample(
                call=call,
                request=request,
                index=index,
                begun=before,
                length=min(self._length(request, index), request.sampling.max_tokens) * unit,
                num_begun=num_begun,
                num_prefill=num_prompt + num_begun,
                replica=replica,
            )
            self._num_prompt_tokens += num_prompt + num_begun
            num_prompt = 0

    def _drawn_length(self, request: Request, index: int) -> int:
        config = self._config
        u = uniform(config.seed, _LENGTH_STREAM, request.seed, index)
        if config.prompt_share:
            u = blend(uniform(config.seed, _PROMPT_STREAM, request.seed), u, config.prompt_share)
        return length(u, config.response_length, unit=config.token_unit)

    def _finished(self, samples: list[RunningSample]) -> None:
        self._forget(samples)
        for sample in samples:
            self._hand_over(sample, round((sample.length - sample.num_begun) / self._config.token_unit))

    def _forget(self, samples: list[RunningSample]) -> None:
        self._num_unfinished -= len(samples)
        for sample in samples:
            self._choice.add(sample.replica, -1)

    def _withdraw(self, which: Callable[[RunningSample], bool]) -> list[tuple[RunningSample, float]]:
        taken = [entry for replica in self._replicas for entry in replica.withdraw(which)]
        self._forget([sample for sample, _ in taken])
        return taken

    def _hand_over(self, sample: RunningSample, size: int, *, is_aborted: bool = False) -> None:
        """The completion, with ``size`` entries made here."""
        request, begun = sample.request, sample.begun
        drawn_at = request.sampling.max_tokens * self._config.token_unit
        reason = "abort" if is_aborted else "length" if sample.length >= drawn_at else "stop"
        self._num_completion_tokens += size * self._config.token_unit
        behind = partial(_behind, size=size)
        sample.call.finished.put_nowait(
            Completion(
                request_id=request.request_id,
                index=sample.index,
                token_ids=behind(begun and begun.token_ids, np.int64(sample_name(request.seed, sample.index))),
                log_probs=behind(begun and begun.log_probs, np.float32(-1.0)),
                weight_versions=behind(begun and begun.weight_versions, np.int32(self._weights.version)),
                finish_reason=reason,
            )
        )

    def _check_idle(self, call: str) -> None:
        if self._num_unfinished:
            raise RolloutError(
                f"{self._num_unfinished} samples are unfinished: abort them or let them end before {call}"
            )

    def _hold_or_release(self) -> None:
        for replica in self._replicas:
            if self._is_paused or self._is_asleep:
                replica.hold()
            else:
                replica.release()


def _behind(begun: NDArray[Any] | None, value: np.generic, *, size: int) -> NDArray[Any]:
    """[T] the entries begun, and ``size`` more of one value."""
    new: NDArray[Any] = np.ndarray((size,), value.dtype, value.tobytes(), strides=(0,))
    return new if begun is None else np.concatenate([begun, new])


def _parts(indices: Sequence[int], largest: int, num_replicas: int) -> Iterator[Sequence[int]]:
    """A request's samples, in parts of at most a replica's fair share of all."""
    num_parts = min(num_replicas, -(-len(indices) // largest))
    bounds = [len(indices) * i // num_parts for i in range(num_parts + 1)]
    return (indices[start:stop] for start, stop in pairwise(bounds))

"""A simulated engine: the interface of real ones, in simulated time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gcore_placement import EngineCosts, LeastLoaded, Replica, ReplicaRequest, RunningLedger, blend, uniform
from gcore_rollout import Call, Completion, EngineStats, Request, RolloutError
from gcore_runs.simulation.config import SimulateConfig
from gcore_runs.simulation.services import LoadMeter, Replay, drawn_length, sample_name

if TYPE_CHECKING:
    import torch

_LENGTH_STREAM, _PROMPT_STREAM = 2, 6


@dataclass
class ModelledWeights:
    """The weights of all engines of a cluster, which change together."""

    version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """A response from its request to its completion. Lengths are in tokens."""

    call: Call
    request: Request
    index: int
    prefix: Completion | None
    length: float
    prefix_length: float
    replica: int


class _TimedReplica:
    """A `gcore_placement.Replica` that the event loop's timers move forward.

    Args:
        finished: called with the responses that are complete, after others have taken their places.
        busy: called with True when the replica starts to generate, and with False when it has nothing left.
    """

    def __init__(
        self, costs: EngineCosts, *, finished: Callable[[list[_Sample]], None], busy: Callable[[bool], None]
    ) -> None:
        self.replica: Replica[_Sample] = Replica(costs)
        self._finished = finished
        self._busy = busy
        self._is_busy = False
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, sequences: list[ReplicaRequest[_Sample]]) -> None:
        self.replica.submit(sequences, _now_s())
        self._changed()

    def withdraw(self, which: Callable[[_Sample], bool]) -> list[tuple[_Sample, float]]:
        taken = self.replica.withdraw(which, _now_s())
        self._changed()
        return taken

    def set_held(self, is_held: bool) -> None:
        (self.replica.hold if is_held else self.replica.release)(_now_s())
        self._changed()

    def _changed(self) -> None:
        """Report whether the replica generates, and wait for the next response to end."""
        if (self.replica.num_running > 0) != self._is_busy:
            self._is_busy = not self._is_busy
            self._busy(self._is_busy)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (end_s := self.replica.next_end_s) is not None:
            self._timer = asyncio.get_running_loop().call_at(end_s, self._complete)

    def _complete(self) -> None:
        self._timer = None
        ended = self.replica.complete(_now_s())
        self._changed()
        self._finished(ended)


class ModelledEngine:
    """Replicas with the interface of `gcore_rollout.Engine`; requests are divided as `EngineReplicas` does it.

    A response's length depends on the seed, its request's seed and its index, unless it is replayed. All its tokens are
    its name (see `sample_name`), and its arrays have one entry in memory, so that long ones cost no more than short
    ones.

    Args:
        num_replicas: of this engine.
        weights: the weights of this engine; an update of one engine updates all that share them.
        sync_s: seconds of a weight update.
        replay: gives lengths in place of draws.
    """

    def __init__(
        self,
        config: SimulateConfig,
        *,
        num_replicas: int,
        weights: ModelledWeights,
        sync_s: float,
        ledger: RunningLedger,
        meter: LoadMeter,
        replay: Replay | None = None,
    ) -> None:
        self._config, self._weights, self._sync_s = config, weights, sync_s
        self._ledger, self._meter = ledger, meter
        self._length = self._drawn_length if replay is None else replay.length
        devices, costs = config.engine.devices_per_replica, config.engine.costs

        def busy(is_busy: bool) -> None:
            ledger.generate(devices if is_busy else -devices)

        self._replicas = [_TimedReplica(costs, finished=self._finished, busy=busy) for _ in range(num_replicas)]
        self._choice = LeastLoaded(num_replicas)
        self._num_unfinished = 0
        self._is_paused = self._is_asleep = False
        self._num_prompt_tokens = self._num_completion_tokens = 0

    @property
    def weight_version(self) -> int:
        return self._weights.version

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
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
        ids = None if request_ids is None else frozenset(request_ids)
        with self._meter.paused():
            for sample, num_tokens in self._withdraw(lambda s: ids is None or s.request.request_id in ids):
                # A response that would have ended at this very moment still lacks its last token.
                whole = min(num_tokens, sample.length - sample.prefix_length - self._config.token_unit)
                self._hand_over(sample, int(whole / self._config.token_unit + 1e-9), is_aborted=True)

    async def pause(self) -> None:
        self._is_paused = True
        self._hold_or_release()

    async def resume(self) -> None:
        self._is_paused = False
        self._hold_or_release()

    async def sleep(self) -> None:
        self._check_idle("sleep")
        self._is_asleep = True
        self._hold_or_release()

    async def wake(self) -> None:
        self._is_asleep = False
        self._hold_or_release()

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """Change the version after the seconds of a sync; only between responses, because all devices take part."""
        del weights
        if self._is_asleep:
            raise RolloutError("the engine is asleep; expected it to be awake: call wake before update_weights")
        if version <= self._weights.version:
            raise ValueError(f"version is {version}; expected above the present {self._weights.version}")
        self._check_idle("update_weights")
        await asyncio.sleep(self._config.overhead_s)
        with self._ledger.whole("sync", 1.0):
            await asyncio.sleep(self._sync_s)
        self._weights.version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            num_running=sum(timed.replica.num_running for timed in self._replicas),
            num_waiting=sum(timed.replica.num_waiting for timed in self._replicas),
            weight_version=self._weights.version,
        )

    async def close(self) -> None:
        self._withdraw(lambda _: True)

    def _submit(self, requests: Sequence[Request], call: Call) -> None:
        """Divide requests over replicas; the part of one that a replica takes is at most its fair share of all."""
        self._num_unfinished += call.pending
        fair_share = max(1, self._num_unfinished // len(self._replicas))
        new: dict[int, list[ReplicaRequest[_Sample]]] = {}
        for request in requests:
            indices = request.sample_indices
            num_parts = min(len(self._replicas), -(-len(indices) // fair_share))
            for start, stop in pairwise(len(indices) * i // num_parts for i in range(num_parts + 1)):
                replica, _ = self._choice.take(stop - start)
                new.setdefault(replica, []).extend(self._samples(request, indices[start:stop], call, replica))
        for replica, sequences in new.items():
            self._replicas[replica].submit(sequences)

    def _samples(
        self, request: Request, indices: Sequence[int], call: Call, replica: int
    ) -> Iterator[ReplicaRequest[_Sample]]:
        """Yield the samples of a request that one replica generates; their prompt is computed once."""
        unit = self._config.token_unit
        prefixes = {completion.index: completion for completion in request.prefixes}
        num_prompt = len(request.prompt_token_ids) * unit
        for index in indices:
            prefix = prefixes.get(index)
            prefix_length = 0 if prefix is None else prefix.token_ids.size * unit
            length = min(self._length(request, index), request.sampling.max_tokens) * unit
            sample = _Sample(
                call=call,
                request=request,
                index=index,
                prefix=prefix,
                length=length,
                prefix_length=prefix_length,
                replica=replica,
            )
            prefill_s = (num_prompt + prefix_length) / self._config.engine.prefill_tokens_per_s
            yield ReplicaRequest(item=sample, length=length - prefix_length, prefill_s=prefill_s)
            self._num_prompt_tokens += num_prompt + prefix_length
            num_prompt = 0

    def _drawn_length(self, request: Request, index: int) -> int:
        config = self._config
        u = uniform(config.seed, _LENGTH_STREAM, request.seed, index)
        if config.prompt_share:
            u = blend(uniform(config.seed, _PROMPT_STREAM, request.seed), u, config.prompt_share)
        return drawn_length(u, config.response_length, unit=config.token_unit)

    def _finished(self, samples: list[_Sample]) -> None:
        self._forget(samples)
        for sample in samples:
            self._hand_over(sample, round((sample.length - sample.prefix_length) / self._config.token_unit))

    def _forget(self, samples: list[_Sample]) -> None:
        self._num_unfinished -= len(samples)
        for sample in samples:
            self._choice.add(sample.replica, -1)

    def _withdraw(self, which: Callable[[_Sample], bool]) -> list[tuple[_Sample, float]]:
        taken = [entry for replica in self._replicas for entry in replica.withdraw(which)]
        self._forget([sample for sample, _ in taken])
        return taken

    def _hand_over(self, sample: _Sample, size: int, *, is_aborted: bool = False) -> None:
        """Deliver the completion, with ``size`` entries made here."""
        request, prefix = sample.request, sample.prefix
        drawn_at = request.sampling.max_tokens * self._config.token_unit
        finish_reason = "length" if sample.length >= drawn_at else "stop"
        self._num_completion_tokens += size * self._config.token_unit
        extended = partial(_extended, size=size)
        sample.call.finished.put_nowait(
            Completion(
                request_id=request.request_id,
                index=sample.index,
                token_ids=extended(prefix and prefix.token_ids, np.int64(sample_name(request.seed, sample.index))),
                log_probs=extended(prefix and prefix.log_probs, np.float32(-1.0)),
                weight_versions=extended(prefix and prefix.weight_versions, np.int32(self._weights.version)),
                finish_reason="abort" if is_aborted else finish_reason,
            )
        )

    def _check_idle(self, call: str) -> None:
        if self._num_unfinished:
            raise RolloutError(
                f"{self._num_unfinished} samples are unfinished; expected none before {call}: abort or finish them"
            )

    def _hold_or_release(self) -> None:
        for replica in self._replicas:
            replica.set_held(self._is_paused or self._is_asleep)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _extended(prefix: NDArray[Any] | None, value: np.generic, *, size: int) -> NDArray[Any]:
    """Return the entries that were made before, and ``size`` more of one value: [T]."""
    new: NDArray[Any] = np.ndarray((size,), value.dtype, value.tobytes(), strides=(0,))
    return new if prefix is None else np.concatenate([prefix, new])

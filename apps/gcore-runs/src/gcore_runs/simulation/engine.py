"""A simulated engine: the interface of real ones, in simulated time."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from gcore_placement import ReplicaRequest, SimulatedReplica
from gcore_rollout import Call, EngineStats, RequestT, RolloutError, SampleT, fair_parts
from gcore_runs.simulation.services import SharedState, now_s

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample(ReplicaRequest, Generic[RequestT, SampleT]):
    """A sample until it is complete; its length has no steps of an aborted sample that it continues."""

    call: Call[SampleT]
    request: RequestT
    replica: int


class _TimedReplica(SimulatedReplica[_Sample[RequestT, SampleT]]):
    """A replica that the event loop's timers move forward.

    Args:
        finished: called with the samples that are complete, after others have taken their places.
    """

    _is_busy = False
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        state: SharedState[RequestT, SampleT],
        finished: Callable[[list[_Sample[RequestT, SampleT]]], None],
    ) -> None:
        super().__init__(state.config.engine.costs)
        self._ledger = state.ledger
        self._devices = state.config.engine.devices_per_replica
        self._finish = finished

    def update(self) -> None:
        """Note in the ledger whether the replica generates, and wait for the next sample to end."""
        if (self.num_running > 0) != self._is_busy:
            self._is_busy = not self._is_busy
            if self._ledger:
                self._ledger.change(
                    "generation", self._devices if self._is_busy else -self._devices
                )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        end_s = self.next_end_s
        if end_s is not None:
            self._timer = asyncio.get_running_loop().call_at(end_s, self._complete)

    def _complete(self) -> None:
        self._timer = None
        ended = self.complete(now_s())
        self.update()
        self._finish(ended)


class ModelledEngine(Generic[RequestT, SampleT]):
    """Replicas with the interface of `gcore_rollout.Engine`; requests are divided as `EngineReplicas` does it.

    An update of one engine updates all engines of the cluster.
    """

    def __init__(self, state: SharedState[RequestT, SampleT], num_replicas: int) -> None:
        self._state = state
        self._replicas = [_TimedReplica(state, self._finish) for _ in range(num_replicas)]
        self._loads = np.zeros(num_replicas, dtype=np.intp)
        """Work of the unfinished samples of each replica."""
        self._holds: frozenset[str] = frozenset()
        """Reasons for which the replicas stand still: pause, sleep (of keys and values), weights (asleep)."""
        self._num_prompt_tokens = self._num_completion_tokens = 0.0

    @property
    def weight_version(self) -> int:
        return self._state.version

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        call: Call[SampleT] = Call(pending=sum(len(request.sample_indices) for request in requests))
        with self._state.meter.exclude():
            self._submit(requests, call)
        try:
            async with aclosing(call.completions()) as samples:
                async for sample in samples:
                    yield sample
        finally:
            if call.abandoned:
                self._withdraw(lambda sample: sample.call is call)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        ids = None if request_ids is None else frozenset(request_ids)
        with self._state.meter.exclude():
            for sample, num_steps in self._withdraw(
                lambda s: ids is None or s.request.request_id in ids
            ):
                self._hand_over(sample, num_steps, is_aborted=True)

    async def pause(self) -> None:
        self._hold(self._holds | {"pause"})

    async def resume(self) -> None:
        self._hold(self._holds - {"pause"})

    async def sleep(self, *, keep_weights: bool = True) -> None:
        del keep_weights  # there are none
        self._check_idle("sleep")
        self._hold(self._holds | {"sleep", "weights"})

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        self._hold(
            self._holds - ({"weights"} if weights else set()) - ({"sleep"} if cache else set())
        )

    async def update_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> None:
        """Change the version after the seconds of a sync; only between samples, because all devices take part."""
        del weights
        if "weights" in self._holds:
            raise RolloutError(
                "the engine is asleep; expected it to be awake: call wake before update_weights"
            )
        if version <= self._state.version:
            raise ValueError(
                f"version is {version}; expected above the present {self._state.version}"
            )
        self._check_idle("update_weights")
        config = self._state.config
        await asyncio.sleep(config.overhead_s)
        with self._state.count_whole("sync", 1.0):
            await asyncio.sleep(config.sync_s(self._state.modality.weights_bytes))
        self._state.version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=int(self._num_prompt_tokens),
            completion_tokens=int(self._num_completion_tokens),
            num_running=sum(replica.num_running for replica in self._replicas),
            num_waiting=sum(replica.num_waiting for replica in self._replicas),
            weight_version=self._state.version,
            num_slots=len(self._replicas) * self._state.config.engine.max_num_seqs,
        )

    async def close(self) -> None:
        self._withdraw(lambda _: True)

    def _submit(self, requests: Sequence[RequestT], call: Call[SampleT]) -> None:
        """Divide requests over replicas; the part of one that a replica takes is at most its fair share of all."""
        new: dict[int, list[_Sample[RequestT, SampleT]]] = {}
        outstanding = int(self._loads.sum())
        for request, indices in fair_parts(
            requests, outstanding=outstanding, num_replicas=len(self._replicas)
        ):
            replica = int(self._loads.argmin())
            self._loads[replica] += len(indices) * request.work_per_sample
            new.setdefault(replica, []).extend(self._samples(request, indices, call, replica))
        for replica, samples in new.items():
            self._replicas[replica].submit(samples, now_s())
            self._replicas[replica].update()

    def _samples(
        self, request: RequestT, indices: Sequence[int], call: Call[SampleT], replica: int
    ) -> Iterator[_Sample[RequestT, SampleT]]:
        """Yield the samples of a request that one replica generates; their prompt is computed once."""
        for position, index in enumerate(indices):
            num_steps, num_before, num_prefill = self._state.modality.size(request, index)
            if position > 0:
                num_prefill = 0
            num_prefill += num_before
            self._num_prompt_tokens += num_prefill
            yield _Sample(
                call=call,
                request=request,
                index=index,
                replica=replica,
                length=num_steps - num_before,
                prefill_s=num_prefill / self._state.config.engine.prefill_tokens_per_s,
            )

    def _finish(self, samples: list[_Sample[RequestT, SampleT]]) -> None:
        for sample in samples:
            self._loads[sample.replica] -= sample.request.work_per_sample
        for sample in samples:
            self._hand_over(sample, sample.length)

    def _withdraw(
        self, which: Callable[[_Sample[RequestT, SampleT]], bool]
    ) -> list[tuple[_Sample[RequestT, SampleT], float]]:
        """Take samples out of the replicas, each with the steps that it has made."""
        withdrawn: list[tuple[_Sample[RequestT, SampleT], float]] = []
        for replica in self._replicas:
            withdrawn += replica.withdraw(which, now_s())
            replica.update()
        for sample, _ in withdrawn:
            self._loads[sample.replica] -= sample.request.work_per_sample
        return withdrawn

    def _hand_over(
        self, sample: _Sample[RequestT, SampleT], num_steps: float, *, is_aborted: bool = False
    ) -> None:
        content = self._state.modality.sample(
            sample.request,
            sample.index,
            num_steps,
            version=self._state.version,
            is_aborted=is_aborted,
        )
        self._num_completion_tokens += num_steps
        sample.call.finished.put_nowait(content)

    def _check_idle(self, call: str) -> None:
        num_unfinished = sum(
            replica.num_running + replica.num_waiting for replica in self._replicas
        )
        if num_unfinished:
            raise RolloutError(
                f"{num_unfinished} samples are unfinished; expected none before {call}: abort or finish them"
            )

    def _hold(self, holds: frozenset[str]) -> None:
        self._holds = holds
        for replica in self._replicas:
            if holds:
                replica.hold(now_s())
            else:
                replica.release(now_s())
            replica.update()

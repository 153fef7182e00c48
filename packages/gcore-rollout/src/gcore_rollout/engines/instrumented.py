"""The wrapper of a run's engines: calls are timed, weights compared with the trainer's, and devices leased.

This module does not import torch.
"""

import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from gcore_rollout.engines.protocol import Engine, EngineStats, RequestT, SampleT
from gcore_rollout.errors import WrongWeightsError
from gcore_rollout.weight_sync.digests import (
    Digest,
    Digests,
    HeldTensor,
    HeldWeights,
    check_weights,
    digests_of,
    get_weights_gpu,
    report_weights,
)

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

_TIME_SHARE = 0.01
_MIN_BYTES = 8 << 20
_MIN_TENSORS = 4
_MAX_NAMED = 3


class Timers(Protocol):
    """Records when devices work at a stage, and how much they generate; `gcore_controller.DeviceTimers` is one."""

    @property
    def generated(self) -> MutableMapping[str, int]:
        """Work of the samples of each stage."""
        ...

    def stage(self, stage: str, *devices: str) -> AbstractContextManager[Any]: ...


class DeviceLease:
    """The lease of an engine that has its devices alone; subclasses lease shared ones, and are called in its place."""

    def sampling(self, engine: Engine[Any, Any]) -> AbstractAsyncContextManager[None]:
        """Keep the engine awake inside the block, in which it samples."""
        del engine
        return nullcontext()

    def with_weights(self, engine: Engine[Any, Any]) -> AbstractAsyncContextManager[None]:
        """Keep the engine's weights awake inside the block."""
        del engine
        return nullcontext()

    async def sleep(self, engine: Engine[Any, Any], *, keep_weights: bool) -> None:
        await engine.sleep(keep_weights=keep_weights)

    async def wake(self, engine: Engine[Any, Any], *, weights: bool, cache: bool) -> None:
        await engine.wake(weights=weights, cache=cache)

    async def close(self, engine: Engine[Any, Any]) -> None:
        await engine.close()


class WeightRecord:
    """Digests of the trainer's weights by version, the first and the last few, to explain an engine's wrong weights.

    Example:
        >>> record = WeightRecord()
        >>> for version in (1, 2):
        ...     weights = DigestedWeights([("head", torch.full((3,), float(version)))])
        ...     size_bytes = sum(tensor.nbytes for _, tensor in weights)
        ...     record.note(version, weights.digests)
        ...     if version == 1:
        ...         old = weights.digests["head"]["float32"]
        >>> held = HeldTensor(name="head", source="head", dtype="float32", size_bytes=12, digest=old, seconds=0.0)
        >>> record.explanation(held, 2)
        'has the values of version 1'
    """

    def __init__(self) -> None:
        self._versions: dict[int, Digests] = {}

    def note(self, version: int, digests: Digests) -> None:
        self._versions[version] = dict(digests)
        for old in sorted(self._versions)[1:-2]:
            del self._versions[old]

    def explanation(self, tensor: HeldTensor, version: int) -> str:
        """Describe the weights of a tensor that differs from its source at ``version``."""
        for recorded_version, digests in sorted(self._versions.items(), reverse=True):
            if (
                recorded_version != version
                and _digest(digests, tensor.source, tensor.dtype) == tensor.digest
            ):
                return f"has the values of version {recorded_version}"
        present = self._versions[version]
        for name in present:
            if name != tensor.source and _digest(present, name, tensor.dtype) == tensor.digest:
                return f"has the values of {name!r}"
        expected = _digest(present, tensor.source, tensor.dtype)
        if expected is not None and expected.unordered == tensor.digest.unordered:
            return "has its values in another order"
        return "has other values"


def note_costs(costs: dict[str, tuple[int, float]], tensors: Sequence[HeldTensor]) -> None:
    """Record bytes and seconds of tensors that have just been checked; `choose_tensors` takes them last from now on."""
    for tensor in tensors:
        costs.pop(tensor.name, None)
        costs[tensor.name] = tensor.size_bytes, tensor.seconds


def choose_tensors(costs: Mapping[str, tuple[int, float]], step_s: float) -> list[str] | None:
    """Return the names of tensors to check after a step of ``step_s`` seconds, in rotation; None: all.

    By the times of their last checks, in ``costs``, they take 1 % of the step, or they are 8 MiB, or 4 tensors,
    whichever is more.
    """
    names: list[str] = []
    num_bytes = 0
    seconds = 0.0
    for name, (size_bytes, cost_s) in costs.items():
        num_bytes += size_bytes
        seconds += cost_s
        if num_bytes > _MIN_BYTES and seconds > _TIME_SHARE * step_s and len(names) >= _MIN_TENSORS:
            return names
        names.append(name)
    return None


class InstrumentedEngine(Generic[RequestT, SampleT]):
    """An engine under a name, whose calls are timed and whose weights are compared with the trainer's.

    Times: new weights are stage sync, sleep and wake are swap, samples are ``stage``.

    Weights: all tensors are compared after the first update and by `check_weights`; after later ones those that
    `choose_tensors` chooses by the time since the last update. They are read from the model, so that any cause of a
    wrong tensor is found. An engine that cannot report its weights, and weights without digests (`DigestedWeights`),
    pass unchecked.

    Args:
        name: for the timers, errors and announcements.
        timers: None: nothing is timed.
        record: the trainer's weights, one record for all replicas of a model; None: weights are not compared.
        lease: the other users of the engine's devices; None: there are none.

    Example:
        >>> import asyncio
        >>> from safetensors.torch import load_file
        >>> weights = DigestedWeights(load_file("model/model.safetensors").items())
        >>> model = HFEngine.from_pretrained("model")
        >>> engine = InstrumentedEngine(model, name="engine 0", record=WeightRecord())
        >>> asyncio.run(engine.update_weights(weights, version=1))  # A WrongWeightsError if a tensor differs.
        >>> engine.weight_version
        1
    """

    def __init__(
        self,
        engine: Engine[RequestT, SampleT],
        *,
        name: str,
        timers: Timers | None = None,
        stage: str = "gen",
        record: WeightRecord | None = None,
        lease: DeviceLease | None = None,
    ) -> None:
        self.name = name
        self._engine = engine
        self._timers = timers
        self._stage = stage
        self._record = record
        self._lease = lease or DeviceLease()
        self._costs: dict[str, tuple[int, float]] = {}
        """Bytes and seconds of the check of each tensor, the next one first."""
        self._checked_s: float | None = None

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def weights_gpu(self) -> str | None:
        """See `EngineProcess`; None also for an engine that does not report it."""
        return get_weights_gpu(self._engine)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        async with self._lease.sampling(self._engine):
            with self._time_stage(self._stage):
                async with aclosing(
                    cast(AsyncGenerator[SampleT], self._engine.generate(requests))
                ) as samples:
                    async for sample in samples:
                        if self._timers is not None:
                            self._timers.generated[self._stage] += sample.work
                        yield sample

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        with self._time_stage("swap"):
            await self._lease.sleep(self._engine, keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        with self._time_stage("swap"):
            await self._lease.wake(self._engine, weights=weights, cache=cache)

    async def update_weights(
        self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int
    ) -> None:
        """Update and compare; a `WrongWeightsError` says that the engine has other weights than these now."""
        # Taken before the update: during it, a `SharedWeights` may be given the next version. Digests of weights that
        # are made one by one are filled in during the update.
        digests = digests_of(weights)
        with self._time_stage("sync"):
            async with self._lease.with_weights(self._engine):
                await self._engine.update_weights(weights, version=version)
            if digests and self._record is not None:
                names = None
                if self._checked_s is not None:
                    names = choose_tensors(self._costs, time.monotonic() - self._checked_s)
                await self._compare(self._record, digests, version, names)
                self._checked_s = time.monotonic()

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        return await report_weights(self._engine, names)

    async def check_weights(self, digests: Digests) -> None:
        if self._record is None:
            async with self._lease.with_weights(self._engine):
                await check_weights(self._engine, digests)
        elif digests:
            await self._compare(self._record, digests, self.weight_version, None)

    async def close(self) -> None:
        await self._lease.close(self._engine)

    def _time_stage(self, stage: str) -> AbstractContextManager[Any]:
        if self._timers is None:
            return nullcontext()
        return self._timers.stage(stage, self.name)

    async def _compare(
        self, record: WeightRecord, digests: Digests, version: int, names: Sequence[str] | None
    ) -> None:
        """Compare the engine's tensors of these names, None: all, with the digests of a version."""
        record.note(version, digests)
        report = await report_weights(self._engine, names)
        if report is None:
            return
        if report.version != version:
            raise WrongWeightsError(
                f"{self.name} has weights of version {report.version}; expected version {version}"
            )
        note_costs(self._costs, report.tensors)
        compared = [t for t in report.tensors if _digest(digests, t.source, t.dtype) is not None]
        wrong = [t for t in compared if _digest(digests, t.source, t.dtype) != t.digest]
        if wrong:
            faults = "; ".join(
                f"{t.name!r} {record.explanation(t, version)}" for t in wrong[:_MAX_NAMED]
            )
            if len(wrong) > _MAX_NAMED:
                faults += f" and {len(wrong) - _MAX_NAMED} more differ"
            raise WrongWeightsError(
                f"{self.name} does not have the trainer's weights of version {version}: {faults} "
                f"({len(wrong)} of {len(compared)} compared tensors are wrong)",
                tensors=tuple(tensor.name for tensor in wrong),
            )
        if names is not None:
            return
        missing = sorted(digests.keys() - {t.source for t in compared})
        if missing:
            message = "%s: %d of %d tensors cannot be compared with the trainer's, among them %s"
            _logger.warning(message, self.name, len(missing), len(digests), missing[0])


def _digest(digests: Digests, name: str, dtype: str) -> Digest | None:
    return digests.get(name, {}).get(dtype)

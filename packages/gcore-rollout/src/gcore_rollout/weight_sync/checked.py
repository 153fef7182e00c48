"""Instrumentation of engines: calls are timed, and weights are compared with the trainer's by digests.

The bits of a tensor are read as 64-bit words w_i, and its digest is the sum of m_i * w_i modulo 2^64 with odd
pseudo-random multipliers m_i (multilinear hashing: J. L. Carter and M. N. Wegman, "Universal classes of hash
functions", 1979). Integer sums are exact, so the result does not depend on the device or on the order of summation; one
changed word always changes the digest. This module imports torch only where it computes.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import (
    Digest,
    Digests,
    Engine,
    EngineStats,
    HeldTensor,
    HeldWeights,
    RequestT,
    SampleT,
    check_weights,
    report_weights,
)
from gcore_rollout.engines.queueing import splitmix64
from gcore_rollout.errors import WrongWeightsError
from gcore_rollout.weight_sync.device_reads import DeviceReads, Promised

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 16
"""Words with multipliers of their own; each block of this many words is also weighted by its number."""
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
_MULTIPLIERS = (splitmix64(np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)).view(
    np.int64
)
"""Odd int64 multipliers [BLOCK_WORDS]: the outputs of SplitMix64 (G. L. Steele et al., OOPSLA 2014)."""
_BLOCKS_AT_ONCE, _BLOCKS_AT_ONCE_ON_DEVICE = 1, 128
"""Blocks computed together: one, which fits a core's cache; elsewhere 64 MiB, as launches cost more than memory."""
_TIME_SHARE = 0.01
_MIN_BYTES = 8 << 20
_MIN_TENSORS = 4
_MAX_NAMED = 3


def digest(tensor: "torch.Tensor") -> Digest:
    """Digest the values of a tensor of any shape, in its data type; -0.0 counts as 0.0.

    It reads the tensor once, and takes at most 128 MiB of additional memory.
    """
    flat = tensor.detach().contiguous().view(-1)
    is_small = flat.device.type == "cpu" and flat.nbytes <= _BLOCK_WORDS * _WORD_BYTES
    if is_small and dtype_name(flat.dtype) == "float32":
        return _small_digest(flat.numpy())
    return _digest_of(flat.numel(), _sums(flat).tolist())


def _small_digest(values: NDArray[np.float32]) -> Digest:
    """Return `digest` of at most one block, by NumPy, which starts an operation in a fraction of torch's time."""
    words = np.zeros(-(-len(values) * values.itemsize // _WORD_BYTES), np.int64)
    np.add(values, np.float32(0.0), out=words.view(np.float32)[: len(values)])
    words ^= words >> 32
    unordered = int(words.sum())
    words *= _MULTIPLIERS[: len(words)]
    return _digest_of(len(values), (int(words.sum()) * _GOLDEN, unordered))


def _digest_of(numel: int, sums: Sequence[int]) -> Digest:
    ordered, unordered = sums
    return Digest((numel * _GOLDEN + ordered) % _MODULUS, unordered % _MODULUS)


def _sums(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the two sums of a tensor's digest, int64 [2], on its device; the host does not wait for them."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    weights = _multipliers(flat.device)
    totals, unordered = list[torch.Tensor](), list[torch.Tensor]()
    at_once = _BLOCKS_AT_ONCE if flat.device.type == "cpu" else _BLOCKS_AT_ONCE_ON_DEVICE
    for chunk in flat.split(at_once * _BLOCK_WORDS * _WORD_BYTES // flat.itemsize):
        words = _words(chunk)
        unordered.append(words.sum())
        rows = words.view(-1, max(1, min(words.numel(), _BLOCK_WORDS)))
        totals.append(rows.mul_(weights[: rows.shape[1]]).sum(1))
    total = torch.cat(totals)
    numbers = torch.arange(len(total), device=flat.device)
    # As int64, whose products and sums wrap around.
    return torch.stack([(total * ((2 * numbers + 1) * (_GOLDEN - _MODULUS))).sum(), torch.stack(unordered).sum()])


def _words(chunk: "torch.Tensor") -> "torch.Tensor":
    """Return a copy of the bits as int64 [W], whole blocks or less than one; upper halves of words are mixed in."""
    import torch

    # -0.0 + 0.0 is 0.0: an engine that keeps weights packed gives them back as sums.
    values = chunk + 0.0 if chunk.is_floating_point() else chunk.clone()
    size = _WORD_BYTES // values.itemsize
    size *= _BLOCK_WORDS if values.numel() > size * _BLOCK_WORDS else 1
    if missing := -values.numel() % size:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int64)
    return words.bitwise_xor_(words >> 32)


@lru_cache
def _multipliers(device: "torch.device") -> "torch.Tensor":
    """Return `_MULTIPLIERS` on a device."""
    import torch

    return torch.from_numpy(_MULTIPLIERS).to(device)


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def held(name: str, read: Callable[[], "torch.Tensor"], *, source: str | None = None) -> HeldTensor:
    """Digest a tensor that an engine computes with; ``read`` returns it as it was published."""
    start_s = time.perf_counter()
    tensor = read()
    return HeldTensor(
        name=name,
        source=source or name,
        dtype=dtype_name(tensor.dtype),
        size_bytes=tensor.nbytes,
        digest=digest(tensor),
        seconds=time.perf_counter() - start_s,
    )


class DigestedWeights:
    """Weights for engines, with a digest of every tensor that has been iterated over, made before anything is copied.

    Every tensor of every update is digested, in all of ``dtypes``. On an accelerator the digests are sums there, which
    the host reads once for all tensors when it first asks for one, after the weights are on their way.

    Args:
        dtypes: data types in which engines hold tensors; each tensor is cast to each of them for its digests. Those
            that engines hold in another type cannot be compared. None: float32.
        digests: filled by the source of the weights, while it is iterated over; None: they are made here.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, "torch.Tensor"]],
        *,
        dtypes: Sequence["torch.dtype"] | None = None,
        digests: Digests | None = None,
    ) -> None:
        import torch

        self._weights = weights
        self._dtypes = [torch.float32] if dtypes is None else list(dict.fromkeys(dtypes))
        self._made: dict[str, Mapping[str, Digest]] = {}
        self._reads: DeviceReads | None = None
        self.digests: Digests = self._made if digests is None else digests
        """Digests of the tensors that have been iterated over."""

    def __iter__(self) -> Iterator[tuple[str, "torch.Tensor"]]:
        for name, tensor in self._weights:
            # Other ranks have and digest what is on the meta device.
            if self.digests is self._made and not tensor.is_meta:
                self._made[name] = self._digest(tensor)
            yield name, tensor

    def _digest(self, tensor: "torch.Tensor") -> Mapping[str, Digest]:
        if tensor.device.type == "cpu":
            return {dtype_name(dtype): digest(tensor.to(dtype)) for dtype in self._dtypes}
        reads = self._reads = self._reads or DeviceReads()
        convert = partial(_digest_of, tensor.numel())
        return Promised({dtype_name(dtype): reads.add(_sums(tensor.to(dtype)), convert) for dtype in self._dtypes})


def digests_of(weights: Any) -> Digests:
    """Return the digests that weights come with, of those iterated over so far; empty if there are none."""
    return getattr(weights, "digests", {})


def all_digests(weights: Iterable[tuple[str, Any]]) -> Digests:
    """Return the digests of all tensors without copying them; empty if the weights have none."""
    for _ in weights:
        pass
    return digests_of(weights)


class WrappedEngine(Generic[RequestT, SampleT]):
    """Forwards all calls to an engine in this process; subclasses add something to some of them."""

    def __init__(self, engine: Engine[RequestT, SampleT]) -> None:
        self._engine = engine

    @property
    def weight_version(self) -> int:
        return self._engine.stats().weight_version

    @property
    def weights_gpu(self) -> str | None:
        """See `EngineProcess`; None also for an engine that does not report it."""
        return getattr(self._engine, "weights_gpu", None)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        async with aclosing(cast(AsyncGenerator[SampleT], self._engine.generate(requests))) as completions:
            async for completion in completions:
                yield completion

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await self._engine.sleep(keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        await self._engine.wake(weights=weights, cache=cache)

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        await self._engine.update_weights(weights, version=version)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        return await report_weights(self._engine, names)

    async def check_weights(self, digests: Digests) -> None:
        await check_weights(self._engine, digests)

    async def close(self) -> None:
        await self._engine.close()


class Timers(Protocol):
    """Records when devices work at a stage, and how much they generate; `gcore_controller.DeviceTimers` is one."""

    @property
    def generated(self) -> MutableMapping[str, int]:
        """Work of the samples of each stage."""
        ...

    def stage(self, stage: str, *devices: str) -> AbstractContextManager[Any]: ...


class TimedEngine(WrappedEngine[RequestT, SampleT]):
    """An engine whose calls are recorded: new weights as stage sync, sleep and wake as swap, samples as ``stage``.

    ``name`` is that of the engine, for the timers and in announcements.
    """

    def __init__(self, engine: Engine[RequestT, SampleT], timers: Timers, *, stage: str, name: str) -> None:
        super().__init__(engine)
        self.name = name
        self._timers, self._stage = timers, stage

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        with self._timers.stage(self._stage, self.name):
            async with aclosing(super().generate(requests)) as samples:
                async for sample in samples:
                    self._timers.generated[self._stage] += sample.work
                    yield sample

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        with self._timers.stage("sync", self.name):
            await super().update_weights(weights, version=version)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        with self._timers.stage("swap", self.name):
            await super().sleep(keep_weights=keep_weights)

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        with self._timers.stage("swap", self.name):
            await super().wake(weights=weights, cache=cache)


class WeightRecord:
    """Digests of the trainer's weights by version, the first and the last few, to explain an engine's wrong weights."""

    def __init__(self) -> None:
        self._versions: dict[int, Digests] = {}

    def note(self, version: int, digests: Digests) -> None:
        self._versions[version] = dict(digests)
        for old in sorted(self._versions)[1:-2]:
            del self._versions[old]

    def explanation(self, tensor: HeldTensor, version: int) -> str:
        """Describe the weights of a tensor that differs from its source at ``version``."""
        for other, digests in sorted(self._versions.items(), reverse=True):
            if other != version and _digest(digests, tensor.source, tensor.dtype) == tensor.digest:
                return f"has the values of version {other}"
        present = self._versions[version]
        for other in present:
            if other != tensor.source and _digest(present, other, tensor.dtype) == tensor.digest:
                return f"has the values of {other!r}"
        expected = _digest(present, tensor.source, tensor.dtype)
        if expected is not None and expected.unordered == tensor.digest.unordered:
            return "has its values in another order"
        return "has other values"


class Rotation:
    """Chooses the tensors to check after an update: as many as fit into the time, in rotation."""

    def __init__(self) -> None:
        self._costs: dict[str, tuple[int, float]] = {}
        """Bytes and seconds of each tensor, the next one first."""

    def note(self, tensors: Sequence[HeldTensor]) -> None:
        """Record the costs of tensors that have just been checked; they are checked last from now on."""
        for tensor in tensors:
            self._costs.pop(tensor.name, None)
            self._costs[tensor.name] = tensor.size_bytes, tensor.seconds

    def choose(self, step_s: float) -> list[str] | None:
        """Return the names to check after a step of ``step_s`` seconds; None: all.

        By the times of their last checks they take 1 % of the step, or they are 8 MiB, or 4 tensors, whichever is more.
        """
        names: list[str] = []
        num_bytes, seconds = 0, 0.0
        for name, (size_bytes, cost_s) in self._costs.items():
            num_bytes, seconds = num_bytes + size_bytes, seconds + cost_s
            if num_bytes > _MIN_BYTES and seconds > _TIME_SHARE * step_s and len(names) >= _MIN_TENSORS:
                return names
            names.append(name)
        return None


class CheckedEngine(WrappedEngine[RequestT, SampleT]):
    """An engine whose weights are compared with the trainer's after every update.

    All tensors are compared after the first update and by `check_weights`; after later ones those that `Rotation`
    chooses by the time since the last update. They are read from the model, so that any cause of a wrong tensor is
    found. An engine that cannot report its weights, and weights without digests (`DigestedWeights`), pass unchecked.
    Replicas of a model share a ``record``; ``name`` is for errors.
    """

    def __init__(self, engine: Engine[RequestT, SampleT], *, name: str, record: WeightRecord | None = None) -> None:
        super().__init__(engine)
        self.name = name
        self._record, self._rotation = record or WeightRecord(), Rotation()
        self._checked_s: float | None = None

    async def update_weights(self, weights: Iterable[tuple[str, "torch.Tensor"]], *, version: int) -> None:
        """Update and compare; a `WrongWeightsError` says that the engine has other weights than these now."""
        # Taken before the update: during it, a `SharedWeights` may be given the next version. Digests of weights that
        # are made one by one are filled in during the update.
        digests = digests_of(weights)
        await super().update_weights(weights, version=version)
        if digests:
            names = None if self._checked_s is None else self._rotation.choose(time.monotonic() - self._checked_s)
            await self._check(digests, version, names)
            self._checked_s = time.monotonic()

    async def check_weights(self, digests: Digests) -> None:
        if digests:
            await self._check(digests, self.weight_version, None)

    async def _check(self, digests: Digests, version: int, names: Sequence[str] | None) -> None:
        self._record.note(version, digests)
        held = await report_weights(self._engine, names)
        if held is None:
            return
        if held.version != version:
            raise WrongWeightsError(f"{self.name} has weights of version {held.version}; expected version {version}")
        self._rotation.note(held.tensors)
        compared = [t for t in held.tensors if _digest(digests, t.source, t.dtype) is not None]
        if wrong := [t for t in compared if _digest(digests, t.source, t.dtype) != t.digest]:
            named = [f"{t.name!r} {self._record.explanation(t, version)}" for t in wrong[:_MAX_NAMED]]
            more = f" and {len(wrong) - len(named)} more differ" if len(wrong) > len(named) else ""
            raise WrongWeightsError(
                f"{self.name} does not have the trainer's weights of version {version}: {'; '.join(named)}{more} "
                f"({len(wrong)} of {len(compared)} compared tensors are wrong)",
                tensors=tuple(tensor.name for tensor in wrong),
            )
        if names is None and (left := sorted(digests.keys() - {t.source for t in compared})):
            message = "%s: %d of %d tensors cannot be compared with the trainer's, among them %s"
            _logger.warning(message, self.name, len(left), len(digests), left[0])


def _digest(digests: Digests, name: str, dtype: str) -> Digest | None:
    return digests.get(name, {}).get(dtype)

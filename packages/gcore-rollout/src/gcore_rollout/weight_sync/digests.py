"""Digests of tensors, by which the weights of engines are compared with the trainer's.

The bits of a tensor are read as 64-bit words w_i, and its digest is the sum of m_i * w_i modulo 2^64 with odd
pseudo-random multipliers m_i (multilinear hashing: J. L. Carter and M. N. Wegman, "Universal classes of hash
functions", 1979). Integer sums are exact, so the result does not depend on the device or on the order of summation; one
changed word always changes the digest. This module imports torch only where it computes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import splitmix64

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 16
"""Words with multipliers of their own; each block of this many words is also weighted by its number."""
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64
_MULTIPLIERS = (
    splitmix64(np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)) | np.uint64(1)
).view(np.int64)
"""Odd int64 multipliers [BLOCK_WORDS]: the outputs of SplitMix64 (G. L. Steele et al., OOPSLA 2014)."""
_BLOCKS_AT_ONCE = 1
_BLOCKS_AT_ONCE_ON_DEVICE = 128
"""Blocks computed together: one, which fits a core's cache; elsewhere 64 MiB, as launches cost more than memory."""


class Digest(NamedTuple):
    """64-bit checksums of a tensor; see `digest`."""

    ordered: int
    """Depends on all values and their places."""
    unordered: int
    """Depends on the values alone, 8 bytes at a time."""


Digests = Mapping[str, Mapping[str, Digest]]
"""Digests of one version: for each published name, the digest in each of several data types, by torch's name."""


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One tensor that an engine computes with.

    Example:
        >>> import asyncio
        >>> engine = HFEngine.from_pretrained("model")
        >>> tensor = asyncio.run(engine.held_weights(["model.norm.weight"])).tensors[0]
        >>> tensor.source, tensor.dtype, tensor.size_bytes
        ('model.norm.weight', 'float32', 512)
        >>> expected = DigestedWeights([("model.norm.weight", torch.ones(128))])
        >>> digests = dict(expected) and expected.digests
        >>> tensor.digest == digests["model.norm.weight"]["float32"]
        True
    """

    name: str
    """Hugging Face name of the parameter."""
    source: str
    """Name of the published tensor that it has to equal: its own name, or the embedding's for a tied head."""
    dtype: str
    """Data type, such as bfloat16."""
    size_bytes: int
    digest: Digest
    seconds: float
    """Time that the digest took."""


@dataclass(frozen=True, kw_only=True)
class HeldWeights:
    """Tensors that an engine computes with, read from its model and not from the update.

    Example:
        >>> import asyncio
        >>> held = asyncio.run(HFEngine.from_pretrained("model").held_weights())
        >>> held.version, sum(tensor.size_bytes for tensor in held.tensors)
        (0, 3282432)
        >>> [tensor.source for tensor in held.tensors if tensor.name == "lm_head.weight"]
        ['model.embed_tokens.weight']
    """

    version: int
    tensors: Sequence[HeldTensor]


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
    totals: list[torch.Tensor] = []
    unordered: list[torch.Tensor] = []
    at_once = _BLOCKS_AT_ONCE if flat.device.type == "cpu" else _BLOCKS_AT_ONCE_ON_DEVICE
    for chunk in flat.split(at_once * _BLOCK_WORDS * _WORD_BYTES // flat.itemsize):
        words = _words(chunk)
        unordered.append(words.sum())
        rows = words.view(-1, max(1, min(words.numel(), _BLOCK_WORDS)))
        totals.append(rows.mul_(weights[: rows.shape[1]]).sum(1))
    total = torch.cat(totals)
    numbers = torch.arange(len(total), device=flat.device)
    # As int64, whose products and sums wrap around.
    ordered = (total * ((2 * numbers + 1) * (_GOLDEN - _MODULUS))).sum()
    return torch.stack([ordered, torch.stack(unordered).sum()])


def _words(chunk: "torch.Tensor") -> "torch.Tensor":
    """Return a copy of the bits as int64 [W], whole blocks or less than one; upper halves of words are mixed in."""
    import torch

    # -0.0 + 0.0 is 0.0: an engine that keeps weights packed gives them back as sums.
    values = chunk + 0.0 if chunk.is_floating_point() else chunk.clone()
    size = _WORD_BYTES // values.itemsize
    if values.numel() > size * _BLOCK_WORDS:
        size *= _BLOCK_WORDS
    num_missing = -values.numel() % size
    if num_missing:
        values = torch.cat([values, values.new_zeros(num_missing)])
    words = values.view(torch.int64)
    return words.bitwise_xor_(words >> 32)


@lru_cache
def _multipliers(device: "torch.device") -> "torch.Tensor":
    """Return `_MULTIPLIERS` on a device."""
    import torch

    return torch.from_numpy(_MULTIPLIERS).to(device)


def dtype_name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def digest_held_tensor(
    name: str, read: Callable[[], "torch.Tensor"], *, source: str | None = None
) -> HeldTensor:
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


class DeviceReads:
    """Integers [K] on a device, the same K for all, that the host reads when it asks for the first of them."""

    def __init__(self) -> None:
        self._unread: list[torch.Tensor] = []
        self._read: list[list[int]] = []

    def add(
        self, values_K: "torch.Tensor", convert: Callable[[Sequence[int]], T]
    ) -> Callable[[], T]:
        """Return a function that waits for the device, and converts the values that it has found."""
        index = len(self._read) + len(self._unread)
        self._unread.append(values_K)
        return lambda: convert(self._value(index))

    def _value(self, index: int) -> list[int]:
        unread = self._unread
        if unread:
            import torch

            self._unread = []
            device = unread[0].device
            values = torch.stack([values_K.to(device) for values_K in unread])
            self._read += values.tolist()
        return self._read[index]


class Promised(Mapping[str, T], Generic[T]):
    """A mapping whose values are computed when they are asked for; pickled as a dict of them."""

    def __init__(self, values: Mapping[str, Callable[[], T]]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> T:
        return self._values[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


@dataclass(frozen=True, kw_only=True)
class UnmergedWeights:
    """Frozen weights, and adapters that are to be merged into them; see `AdapterWeights`.

    Both are made when they are iterated over, by all ranks in this order.

    Example:
        >>> frozen = {"head.weight": torch.zeros(4, 3)}
        >>> adapters = {
        ...     "head.lora_A.default.weight": torch.ones(1, 3),
        ...     "head.lora_B.default.weight": torch.ones(4, 1),
        ... }
        >>> unmerged = UnmergedWeights(frozen=frozen.items, adapters=adapters.items, scaling=2.0)
        >>> weights = DigestedWeights([("head.weight", torch.full((4, 3), 2.0))], unmerged=unmerged)
        >>> sum(tensor.numel() for _, tensor in weights.unmerged.adapters())
        7
    """

    frozen: Callable[[], Iterable[tuple[str, "torch.Tensor"]]]
    adapters: Callable[[], Iterable[tuple[str, "torch.Tensor"]]]
    scaling: float


class DigestedWeights:
    """Weights for engines, with a digest of every tensor that has been iterated over, made before anything is copied.

    Every tensor of every update is digested, in all of ``dtypes``. On an accelerator the digests are sums there, which
    the host reads once for all tensors when it first asks for one, after the weights are on their way.

    Args:
        dtypes: data types in which engines hold tensors; each tensor is cast to each of them for its digests. Those
            that engines hold in another type cannot be compared. None: float32.
        digests: filled by the source of the weights, while it is iterated over; None: they are made here.
        unmerged: the same weights before their adapters were merged into them; None: there are no adapters.

    Example:
        >>> weights = DigestedWeights([("head", torch.ones(3))], dtypes=[torch.float32, torch.bfloat16])
        >>> for name, tensor in weights:
        ...     print(name, tuple(tensor.shape), sorted(weights.digests[name]))
        head (3,) ['bfloat16', 'float32']
        >>> weights.digests["head"]["float32"] == digest(torch.ones(3))
        True
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, "torch.Tensor"]],
        *,
        dtypes: Sequence["torch.dtype"] | None = None,
        digests: Digests | None = None,
        unmerged: UnmergedWeights | None = None,
    ) -> None:
        import torch

        self.unmerged = unmerged
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
        digests: dict[str, Callable[[], Digest]] = {}
        for dtype in self._dtypes:
            digests[dtype_name(dtype)] = reads.add(_sums(tensor.to(dtype)), convert)
        return Promised(digests)


def digests_of(weights: Any) -> Digests:
    """Return the digests that weights come with, of those iterated over so far; empty if there are none."""
    return getattr(weights, "digests", {})


def all_digests(weights: Iterable[tuple[str, Any]]) -> Digests:
    """Return the digests of all tensors without copying them; empty if the weights have none."""
    for _ in weights:
        pass
    return digests_of(weights)


async def report_weights(engine: Any, names: Sequence[str] | None = None) -> HeldWeights | None:
    """Digest the tensors of these names (`HeldTensor.name`), or all that can be compared.

    Returns:
        The answer of the engine's method ``held_weights(names)``; None if it has none, or wraps one that has none.
    """
    report = getattr(engine, "held_weights", None)
    if report is None:
        return None
    return await report(names)


async def check_weights(engine: Any, digests: Digests) -> None:
    """Have an engine with a method `check_weights` compare its weights with digests; see `InstrumentedEngine`."""
    if hasattr(engine, "check_weights"):
        await engine.check_weights(digests)


def get_weights_gpu(engine: Any) -> str | None:
    """Return the UUID of the GPU that an engine's weights are on; None: they are on none, or it does not report it."""
    return getattr(engine, "weights_gpu", None)

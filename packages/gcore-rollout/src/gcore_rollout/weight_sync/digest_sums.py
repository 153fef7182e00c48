"""The sums that digests of tensors consist of, and digests on an accelerator, which the host reads all at once."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_rollout.engines.protocol import Digest
from gcore_rollout.engines.queueing import splitmix64

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
BLOCK_WORDS = 1 << 16
"""Words with multipliers of their own; each block of this many words is also weighted by its number."""
GOLDEN = 0x9E3779B97F4A7C15
MODULUS = 1 << 64
MULTIPLIERS = (splitmix64(np.arange(1, BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)).view(
    np.int64
)
"""Odd int64 multipliers [BLOCK_WORDS]: the outputs of SplitMix64 (G. L. Steele et al., OOPSLA 2014)."""
_BLOCKS_AT_ONCE = 128
"""Blocks computed together, 64 MiB: a launch costs more than memory."""
_SIGNED_GOLDEN = GOLDEN - MODULUS
"""As an int64, whose products and sums wrap around."""


def words_of(chunk: "torch.Tensor") -> "torch.Tensor":
    """Return the bits as int64 [W], whole blocks or less than one; upper halves of words are mixed into lower ones."""
    import torch

    # -0.0 + 0.0 is 0.0: an engine that keeps weights packed gives them back as sums.
    values = chunk + 0.0 if chunk.is_floating_point() else chunk.clone()
    size = WORD_BYTES // values.itemsize
    size *= BLOCK_WORDS if values.numel() > size * BLOCK_WORDS else 1
    if missing := -values.numel() % size:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int64)
    return words.bitwise_xor_(words >> 32)


@lru_cache
def multipliers(device: "torch.device") -> "torch.Tensor":
    """Return `MULTIPLIERS` on a device."""
    import torch

    return torch.from_numpy(MULTIPLIERS).to(device)


def digest_on_device(tensor: "torch.Tensor") -> Digest:
    """Digest a tensor as `checked.digest` does, and wait for it once."""
    return _digest(tensor.numel(), sums_on_device(tensor).tolist())


def sums_on_device(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the two sums of a tensor's digest, int64 [2], for which the host does not wait."""
    import torch

    flat = tensor.detach().contiguous().view(-1)
    weights = multipliers(flat.device)
    first = 0
    sums_2 = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for chunk in flat.split(_BLOCKS_AT_ONCE * BLOCK_WORDS * WORD_BYTES // flat.itemsize):
        words = words_of(chunk)
        unordered = words.sum()
        rows = words.view(-1, max(1, min(words.numel(), BLOCK_WORDS)))
        totals = rows.mul_(weights[: rows.shape[1]]).sum(1)
        blocks = torch.arange(first, first + len(totals), device=flat.device)
        sums_2 = sums_2 + torch.stack([(totals * ((2 * blocks + 1) * _SIGNED_GOLDEN)).sum(), unordered])
        first += len(totals)
    return sums_2


def _digest(numel: int, sums: Sequence[int]) -> Digest:
    ordered, unordered = sums
    return Digest((numel * GOLDEN + ordered) % MODULUS, unordered % MODULUS)


class DigestsOnDevice:
    """Digests of many tensors, which the host reads together when the first of them is asked for."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._numels: list[int] = []
        self._read: list[Digest] = []

    def add(self, tensor: "torch.Tensor", dtypes: "Mapping[str, torch.dtype]") -> Mapping[str, Digest]:
        """Start to digest a tensor, cast to each of these types; it may change as soon as the device gets there."""
        first = len(self._numels)
        for dtype in dtypes.values():
            self._sums.append(sums_on_device(tensor.to(dtype)))
            self._numels.append(tensor.numel())
        return _OfTensor(self, {name: first + i for i, name in enumerate(dtypes)})

    def __getitem__(self, index: int) -> Digest:
        if unread := self._sums:
            import torch

            self._sums = []
            device = unread[0].device
            found: list[list[int]] = torch.stack([sums_2.to(device) for sums_2 in unread]).tolist()
            self._read += [_digest(n, sums) for n, sums in zip(self._numels[len(self._read) :], found, strict=True)]
        return self._read[index]


class _OfTensor(Mapping[str, Digest]):
    """The digests of one tensor by data type; pickled as a dict."""

    def __init__(self, digests: DigestsOnDevice, places: Mapping[str, int]) -> None:
        self._digests = digests
        self._places = places

    def __getitem__(self, dtype: str) -> Digest:
        return self._digests[self._places[dtype]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

"""Digests of tensors, computed on the device where they are: equal values in equal places have equal digests.

The bits of a tensor are read as 64-bit words w_i, and the digest is the sum of m_i * w_i modulo 2^64 with odd
pseudo-random multipliers m_i (multilinear hashing: J. L. Carter and M. N. Wegman, "Universal classes of hash
functions", 1979). Integer sums are exact, so the result does not depend on the device or on the order of summation; one
changed word always changes the digest.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from gcore_rollout.weight_sync.report import Digest, Digests, HeldTensor

_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 16
"""Words that have multipliers of their own; each block of so many is weighted once more, by its number."""
_BLOCKS_AT_ONCE = {"cpu": 1}
"""One block fits a core's cache; on other devices a launch costs more than memory."""
_DEFAULT_BLOCKS_AT_ONCE = 128
_GOLDEN = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def digest(tensor: torch.Tensor) -> Digest:
    """Digest the values of a tensor of any shape, in its data type; -0.0 counts as 0.0.

    It reads the tensor once, and takes at most 128 MiB of memory beside it.
    """
    flat = tensor.detach().contiguous().view(-1)
    at_once = _BLOCKS_AT_ONCE.get(flat.device.type, _DEFAULT_BLOCKS_AT_ONCE)
    multipliers = _multipliers(flat.device)
    ordered, unordered = flat.numel() * _GOLDEN, 0
    for number, chunk in enumerate(flat.split(at_once * _BLOCK_WORDS * _WORD_BYTES // flat.itemsize)):
        words = _words(chunk)
        unordered += int(words.sum())
        # Fresh memory, so that it may be written to.
        rows = words.view(-1, max(1, min(words.numel(), _BLOCK_WORDS)))
        sums = rows.mul_(multipliers[: rows.shape[1]]).sum(1).tolist()
        for block, total in enumerate(sums, start=number * at_once):
            ordered += total * ((2 * block + 1) * _GOLDEN % _MODULUS)
    return Digest(ordered % _MODULUS, unordered % _MODULUS)


def held(name: str, read: Callable[[], torch.Tensor], *, source: str | None = None) -> HeldTensor:
    """Digest a tensor that an engine computes with.

    Args:
        name: its Hugging Face name.
        read: gives the tensor as it was published, whatever layout the engine keeps it in.
        source: see `HeldTensor.source`; None: ``name``.
    """
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


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without its prefix."""
    return str(dtype).removeprefix("torch.")


class DigestedWeights:
    """Weights on their way to engines, with a digest of every tensor that has been iterated over.

    Digests are made on the trainer's own tensors, before anything is copied.

    Args:
        weights: Hugging Face names and full tensors.
        dtypes: data types in which engines hold tensors; each tensor is cast to each of them for its digests. Those
            that engines hold in another type cannot be compared.
        digests: filled by what makes the weights, while it is iterated over; None: they are made here.
    """

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        digests: Digests | None = None,
    ) -> None:
        self._weights = weights
        self._dtypes = tuple(dict.fromkeys(dtypes))
        self._given = digests
        self._made: dict[str, Mapping[str, Digest]] = {}

    @property
    def digests(self) -> Digests:
        """Of the tensors that have been iterated over."""
        return self._made if self._given is None else self._given

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            if self._given is None:
                self._made[name] = {dtype_name(dtype): digest(tensor.to(dtype)) for dtype in self._dtypes}
            yield name, tensor


def _words(chunk: torch.Tensor) -> torch.Tensor:
    """[W] int64 of the bits, with the upper half of each word mixed into the lower; whole blocks, or less than one."""
    # -0.0 + 0.0 is 0.0: an engine that keeps weights packed gives them back as sums.
    values = chunk + 0.0 if chunk.is_floating_point() else chunk.clone()
    size = _WORD_BYTES // values.itemsize
    size *= _BLOCK_WORDS if values.numel() > size * _BLOCK_WORDS else 1
    if missing := -values.numel() % size:
        values = torch.cat([values, values.new_zeros(missing)])
    words = values.view(torch.int64)
    return words.bitwise_xor_(words >> 32)


@lru_cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """[_BLOCK_WORDS] odd, int64: the outputs of SplitMix64 (G. L. Steele et al., OOPSLA 2014)."""
    z = np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)

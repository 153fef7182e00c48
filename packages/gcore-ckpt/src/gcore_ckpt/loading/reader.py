"""Opens a committed step, reads its shards with every block checked, and lists its leaves. Needs no torch."""

import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.format import tree, validation
from gcore_ckpt.format.boxes import (
    DIGITS,
    DTYPES,
    JOINT_BYTES,
    MAX_ITEM_BYTES,
    SMALL_BYTES,
    block_count,
    checksum,
    digest,
)
from gcore_ckpt.format.index import decode_index
from gcore_ckpt.format.stored import DataFile, Index, StoredShard, StoredTensor
from gcore_ckpt.format.tree import ArrayKind, Node, State, StatePath, View
from gcore_ckpt.loading.hints import describe_foreign
from gcore_ckpt.storage import StepFiles, Storage, step_name
from gcore_ckpt.storage.local import open_storage
from gcore_ckpt.storage.safetensors_folder import find_weights, open_weights
from gcore_ckpt.threads import Workers

Step: TypeAlias = int | Literal["latest"]

_logger = logging.getLogger(__name__)

_READ_BYTES = 16 << 20
_THREADS = 4
_local = threading.local()


@dataclass(frozen=True)
class StepReader:
    """An open step: its path for messages, its index and its open files."""

    where: str
    index: Index
    files: StepFiles

    def decode_tree(
        self,
        node: Node,
        array: Callable[[ArrayKind, str, StoredTensor, View | None], object],
        per_rank: Callable[[Mapping[str, Node]], Node],
    ) -> State:
        """Return the state of the tree, or of a node in it, with what `array` makes of each stored tensor."""

        def check_array(array_kind: ArrayKind, name: str, view: View | None) -> object:
            stored = self.index.tensors.get(name)
            if stored is None:
                raise ValueError(f"{array_kind} {name!r} is not in the index")
            if array_kind == "array" and not DTYPES[stored.dtype].in_numpy:
                raise ValueError(
                    f"array {name!r} has dtype {stored.dtype}, which numpy does not have"
                )
            if view is not None:
                size = math.prod(stored.shape)
                if view.stop > size:
                    raise ValueError(
                        f"a view ends at element {view.stop} of the {size} of {name!r}"
                    )
            return array(array_kind, name, stored, view)

        with validation.reading(f"{self.where}/index.json: tree"):
            return tree.decode(node, check_array, per_rank)

    def read(self, name: str, shard: StoredShard, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a shard; all blocks that hold some of it are read and checked."""
        block = shard.block_bytes
        stop = start + len(buffer)
        number = start // block
        first = number * block
        last = min(block_count(stop, block) * block, shard.size_bytes)
        blocks = buffer if (first, last) == (start, stop) else memoryview(bytearray(last - first))
        self._read(name, shard.file, shard.offset_bytes + first, blocks)
        self._check(name, shard, number, blocks)
        if blocks is not buffer:
            buffer[:] = blocks[start - first : stop - first]

    def check_file(self, file: str, data: memoryview) -> None:
        """Check the bytes of a data file: its header, and all blocks of the shards in it."""
        _check_header(f"{self.where}/{file}", self.index.files[file], data)
        for name, tensor in self.index.tensors.items():
            for shard in tensor.shards:
                if shard.file == file:
                    self._check(name, shard, 0, data[shard.offset_bytes :][: shard.size_bytes])

    def _check(self, name: str, shard: StoredShard, number: int, blocks: memoryview) -> None:
        """Check adjacent blocks of a shard, from one of this number."""
        if shard.checksums is None:
            return
        for start in range(0, len(blocks), shard.block_bytes):
            actual = digest(blocks[start : start + shard.block_bytes])
            expected = shard.checksums[number * DIGITS :][:DIGITS]
            if actual != expected:
                raise CorruptCheckpointError(
                    f"{self.where}/{shard.file}: tensor {name!r} has checksum {actual} in block {number} of its shard "
                    f"{shard.box}; expected {expected}"
                )
            number += 1

    def read_adjacent(self, shards: Sequence[tuple[str, StoredShard]], buffer: memoryview) -> None:
        """Fill `buffer` with small shards that are adjacent in a file, and the tensors' names; all are checked."""
        first_name, first = shards[0]
        self._read(first_name, first.file, first.offset_bytes, buffer)
        for name, shard in shards:
            start = shard.offset_bytes - first.offset_bytes
            self._check(name, shard, 0, buffer[start : start + shard.size_bytes])

    def _read(self, name: str, file: str, offset_bytes: int, buffer: memoryview) -> None:
        try:
            count = self.files.read_into(file, offset_bytes, buffer)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"{self.where} was deleted while it was being read"
            ) from error
        if count < len(buffer):
            raise CorruptCheckpointError(f"{self.where}/{file}: ends within tensor {name!r}")


def is_small(shard: StoredShard) -> bool:
    """Return whether a shard is read together with those next to it: small, and of one block."""
    is_one_block = shard.size_bytes <= shard.block_bytes or shard.checksums is None
    return shard.size_bytes < SMALL_BYTES and is_one_block


def adjacent_runs(
    shards: Sequence[tuple[str, StoredShard]],
) -> Iterator[tuple[int, list[int]]]:
    """Yield the bytes and the numbers of small shards that are read together: adjacent ones in one file."""

    def place(number: int) -> tuple[str, int]:
        return shards[number][1].file, shards[number][1].offset_bytes

    run: list[int] = []
    size_bytes = 0
    end = ("", 0)
    for number in sorted(range(len(shards)), key=place):
        shard = shards[number][1]
        if run and (place(number) != end or size_bytes + shard.size_bytes > JOINT_BYTES):
            yield size_bytes, run
            run = []
            size_bytes = 0
        run.append(number)
        size_bytes += shard.size_bytes
        end = (shard.file, shard.offset_bytes + shard.size_bytes)
    if run:
        yield size_bytes, run


def pieces(
    shard: StoredShard, start: int, stop: int, size_bytes: int = _READ_BYTES
) -> Iterator[tuple[int, int]]:
    """Cut bytes `start` to `stop` of a shard between blocks, and elements, into pieces of about `size_bytes`."""
    step = math.lcm(max(1, size_bytes // shard.block_bytes) * shard.block_bytes, MAX_ITEM_BYTES)
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end


def scratch(size_bytes: int) -> memoryview:
    """Return memory of this thread, the same each time: new memory would take longer than what is done to it."""
    memory = getattr(_local, "memory", b"")
    if len(memory) < size_bytes:
        memory = _local.memory = bytearray(size_bytes)
    return memoryview(memory)[:size_bytes]


def find_step(storage: Storage, step: Step) -> int | None:
    """Return the number of a committed step; `"latest"` is the highest. None stands for a Hugging Face folder."""
    steps = storage.steps()
    if not steps and find_weights(storage) is not None:
        if step == "latest":
            return None
        raise CheckpointNotFoundError(
            f"{storage} holds safetensors files and no step {step!r}; expected 'latest'"
        )
    if not steps:
        raise CheckpointNotFoundError(
            f"{storage} holds no committed step{describe_foreign(storage)}"
        )
    if step == "latest":
        return steps[-1]
    if step not in steps:
        raise CheckpointNotFoundError(
            f"{storage} holds no step {step!r}; its committed steps are {steps}"
        )
    return step


@contextmanager
def open_step(storage: Storage, step: int | None) -> Generator[StepReader]:
    """Open what `find_step` found and check all but the tensors' bytes."""
    if step is None:
        with open_weights(storage) as (where, files, index):
            yield StepReader(where, index, files)
        return
    where = f"{storage}/{step_name(step)}"
    try:
        with storage.open_step(step) as files:
            with validation.reading(f"{where}/index.json"):
                data = files.read_index()
            index = decode_index(data, f"{where}/index.json")
            for name, file in index.files.items():
                _open(files, f"{where}/{name}", name, file)
            yield StepReader(where, index, files)
    except FileNotFoundError as error:
        if step not in storage.steps():
            raise CheckpointNotFoundError(f"{where} was deleted while it was being read") from error
        raise CorruptCheckpointError(f"{error.filename or error}: the file is missing") from error


def read_index(storage: Storage, step: int) -> Index:
    """Return the index of a committed step; its files are not opened."""
    with storage.open_step(step) as files:
        return decode_index(files.read_index(), f"{storage}/{step_name(step)}/index.json")


def read_metric(storage: Storage, step: int) -> float | None:
    """Return the metric that a committed step was saved with; None, too, for one that cannot be read."""
    try:
        return read_index(storage, step).metric
    except (OSError, CheckpointError) as error:
        _logger.warning("the metric of %s/%s cannot be read: %s", storage, step_name(step), error)
        return None


def _open(files: StepFiles, where: str, name: str, expected: DataFile) -> None:
    with validation.reading(where):
        size_bytes = files.open(name)
    if size_bytes != expected.size_bytes:
        raise CorruptCheckpointError(
            f"{where}: has {size_bytes} bytes; expected {expected.size_bytes}"
        )
    header = bytearray(expected.header_size_bytes)
    files.read_into(name, 0, memoryview(header))
    _check_header(where, expected, memoryview(header))


def _check_header(where: str, expected: DataFile, data: memoryview) -> None:
    actual = checksum(data[: expected.header_size_bytes])
    if actual != expected.header_checksum:
        raise CorruptCheckpointError(
            f"{where}: header has checksum {actual}; expected {expected.header_checksum}"
        )


class StepLeaf(NamedTuple):
    """A leaf of a saved state; an empty container is one too."""

    path: str  # its place, dotted: `optim.state.0.step`
    tensor: str | None  # name of the stored tensor or array; None for a small value
    value: State
    per_rank: bool
    view: View | None = None  # in the memory of that tensor


def step_leaves(reader: StepReader, prefix: str = "") -> list[StepLeaf]:
    """Return the leaves of a step, or of what lies under a dotted path, in the order of its state."""
    with validation.reading(f"{reader.where}/index.json: tree"):
        leaves = list(_leaves(reader.index.tree, (), per_rank=False))
        for leaf in leaves:
            if leaf.tensor is not None and leaf.tensor not in reader.index.tensors:
                raise ValueError(f"{leaf.tensor!r} is not in the index")
    return [
        leaf
        for leaf in leaves
        if not prefix or leaf.path == prefix or leaf.path.startswith(f"{prefix}.")
    ]


def _leaves(node: Node, path: StatePath, *, per_rank: bool) -> Iterator[StepLeaf]:
    if len(path) > tree.MAX_DEPTH:
        raise ValueError(f"more than {tree.MAX_DEPTH} containers inside each other")
    ranks = tree.ranks_of(node)
    if ranks is not None:
        for rank, child in ranks.items():
            yield from _leaves(child, (*path, f"rank {rank}"), per_rank=True)
        return
    fields = tree.fields_of(node)
    items = tree.items_of(node)
    for key, child in (fields or dict(enumerate(items or ()))).items():
        yield from _leaves(child, (*path, key), per_rank=per_rank)
    if not fields and not items:
        name, view = tree.tensor_of(node)
        value = None if name is not None else tree.decode(node, _unknown, _unknown)
        yield StepLeaf(".".join(map(str, path)), name, value, per_rank, view)


def _unknown(*node: object) -> Node:
    raise ValueError(f"unknown node {str(node)[:80]}")


def verify(
    path: str | os.PathLike[str],
    step: Step = "latest",
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read every byte of a committed step and check it, in a few megabytes of memory.

    Args:
        path: The folder or URL of the checkpoints.
        step: Number of the step; `"latest"` is the highest committed one.
        progress: Is called, from several threads, with the bytes that have been checked since the last call.

    Raises:
        CheckpointNotFoundError: The step is not committed.
        CorruptCheckpointError: With the file and, where there is one, the tensor that is not what was saved.
    """

    def check(size_bytes: int, read: Callable[[memoryview], None]) -> None:
        read(scratch(size_bytes))
        if progress is not None:
            progress(size_bytes)

    def checks(reader: StepReader) -> Iterator[Callable[[], None]]:
        small: list[tuple[str, StoredShard]] = []
        for name, tensor in reader.index.tensors.items():
            for shard in tensor.shards:
                if is_small(shard):
                    small.append((name, shard))
                    continue
                for start, stop in pieces(shard, 0, shard.size_bytes):
                    yield partial(check, stop - start, partial(reader.read, name, shard, start))
        for size_bytes, run in adjacent_runs(small):
            shards = [small[i] for i in run]
            yield partial(check, size_bytes, partial(reader.read_adjacent, shards))

    storage = open_storage(path)
    with Workers(_THREADS) as workers, open_step(storage, find_step(storage, step)) as reader:
        reader.decode_tree(
            reader.index.tree, lambda _, name, *__: name, lambda nodes: {"dict": dict(nodes)}
        )
        workers.run(checks(reader))

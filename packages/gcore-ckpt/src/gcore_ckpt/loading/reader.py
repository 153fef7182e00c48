"""Opening a committed step and reading its shards, each block checked against its checksum."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gcore_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.format.checksum import DIGITS, block_count, checksum, digest
from gcore_ckpt.format.dtypes import DTYPES
from gcore_ckpt.format.index import DataFile, Index, StoredShard, StoredTensor, decode_index
from gcore_ckpt.format.tree import ArrayKind, Node, State, decode
from gcore_ckpt.storage import StepFiles, Storage, step_name
from gcore_ckpt.storage.safetensors_folder import find_weights, open_weights

Step: TypeAlias = int | Literal["latest"]

_READ_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """An open step.

    Attributes:
        where: Its path, for messages.
        index: What it holds.
        files: Its open files.
    """

    where: str
    index: Index
    files: StepFiles

    def decode_tree(
        self,
        node: Node,
        array: Callable[[ArrayKind, str, StoredTensor], object],
        per_rank: Callable[[Mapping[str, Node]], Node],
    ) -> State:
        """Return the state of the tree, or of a node in it, with what `array` makes of each stored tensor.

        Raises:
            CorruptCheckpointError: It is no tree, or refers to what the index does not have.
        """

        def checked(kind: ArrayKind, name: str) -> object:
            stored = self.index.tensors.get(name)
            if stored is None:
                raise ValueError(f"{kind} {name!r} is not in the index")
            if kind == "array" and not DTYPES[stored.dtype].in_numpy:
                raise ValueError(f"array {name!r} has dtype {stored.dtype}, which numpy does not have")
            return array(kind, name, stored)

        try:
            return decode(node, checked, per_rank)
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.where}/index.json: tree: {error}") from error

    def read_blocks(self, name: str, shard: StoredShard, first: int, buffer: memoryview) -> None:
        """Fill `buffer` with whole blocks of a shard, from block `first` on, and check them.

        Raises:
            CorruptCheckpointError: They are not what was saved; `buffer` then holds rubbish.
            CheckpointNotFoundError: The step was deleted meanwhile.
        """
        self.read(name, shard, first * shard.block_bytes, buffer)
        if shard.checksums is None:
            return
        for number in range(block_count(len(buffer), shard.block_bytes)):
            start = number * shard.block_bytes
            found = digest(buffer[start : start + shard.block_bytes])
            expected = shard.checksums[(first + number) * DIGITS :][:DIGITS]
            if found != expected:
                raise CorruptCheckpointError(
                    f"{self.where}/{shard.file}: tensor {name!r} has checksum {found} in block {first + number} "
                    f"of its shard {shard.box}; expected {expected}"
                )

    def read(self, name: str, shard: StoredShard, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a shard, unchecked.

        Raises:
            CorruptCheckpointError: The file ends before.
            CheckpointNotFoundError: The step was deleted meanwhile.
        """
        try:
            count = self.files.read_into(shard.file, shard.offset_bytes + start, buffer)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{self.where} was deleted while it was being read") from error
        if count < len(buffer):
            raise CorruptCheckpointError(f"{self.where}/{shard.file}: ends within tensor {name!r}")


def block_runs(shard: StoredShard, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Return blocks `first` to `last` (one past the end) in runs of about the size that is best to read at once."""
    step = max(1, _READ_BYTES // shard.block_bytes)
    for start in range(first, last, step):
        yield start, min(start + step, last)


def find_step(storage: Storage, step: Step) -> int | None:
    """Return the number of a committed step; `"latest"` is the highest. None is what a Hugging Face folder holds.

    Raises:
        CheckpointNotFoundError: It is not there.
    """
    steps = storage.steps()
    if not steps and find_weights(storage) is not None:
        if step == "latest":
            return None
        raise CheckpointNotFoundError(f"{storage} holds safetensors files and no step {step!r}; expected 'latest'")
    if not steps:
        raise CheckpointNotFoundError(f"{storage} holds no committed step")
    if step == "latest":
        return steps[-1]
    if step not in steps:
        raise CheckpointNotFoundError(f"{storage} holds no step {step!r}; its committed steps are {steps}")
    return step


@contextmanager
def open_step(storage: Storage, step: int | None) -> Generator[StepReader]:
    """Open what `find_step` found and check all but the tensors' bytes.

    Raises:
        CheckpointNotFoundError: The step is not committed, or was deleted while it was being opened.
        CorruptCheckpointError: Its index or the layout of a file is not what was saved.
    """
    if step is None:
        with open_weights(storage) as (where, files, index):
            yield StepReader(where=where, index=index, files=files)
        return
    where = f"{storage}/{step_name(step)}"
    try:
        with storage.open_step(step) as files:
            try:
                index = decode_index(files.read_index(), f"{where}/index.json")
                for name, file in index.files.items():
                    _open(files, where, name, file)
            except FileNotFoundError as error:
                if step not in storage.steps():
                    raise CheckpointNotFoundError(f"{where} was deleted while it was being read") from error
                raise CorruptCheckpointError(f"{error.filename or error}: the file is missing") from error
            yield StepReader(where=where, index=index, files=files)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{where} was deleted while it was being read") from error


def _open(files: StepFiles, where: str, name: str, expected: DataFile) -> None:
    try:
        size_bytes = files.open(name)
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}/{name}: {error}") from error
    if size_bytes != expected.size_bytes:
        raise CorruptCheckpointError(f"{where}/{name}: has {size_bytes} bytes; expected {expected.size_bytes}")
    if expected.header_checksum is None:
        return
    header = bytearray(expected.header_size_bytes)
    files.read_into(name, 0, memoryview(header))
    found = checksum(bytes(header))
    if found != expected.header_checksum:
        raise CorruptCheckpointError(
            f"{where}/{name}: header has checksum {found}; expected {expected.header_checksum}"
        )

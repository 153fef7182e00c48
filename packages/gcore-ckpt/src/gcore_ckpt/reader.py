"""Opens a committed step and hands out its tensors' bytes, each checked against its checksum."""

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

from gcore_ckpt.checksum import checksum
from gcore_ckpt.directory import Step, find_step, step_name
from gcore_ckpt.dtypes import DTYPES
from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.index import INDEX_FILE, DataFile, Index, decode_index
from gcore_ckpt.tree import ArrayKind, State, decode


@dataclass(frozen=True, kw_only=True)
class StepReader:
    """An open step. Its files stay readable while it is open, also if retention deletes the step meanwhile."""

    directory: Path
    index: Index
    files: Mapping[str, FileIO]

    def decode_tree(self, array: Callable[[ArrayKind, str], object]) -> State:
        """The tree of the step, with what `array` makes of each key in it.

        Raises:
            CorruptCheckpointError: The tree is not one, or refers to what the index does not have.
        """
        try:
            return decode(self.index.tree, partial(self._checked, array))
        except ValueError as error:
            raise CorruptCheckpointError(f"{self.directory / INDEX_FILE}: tree: {error}") from error

    def _checked(self, array: Callable[[ArrayKind, str], object], kind: ArrayKind, key: str) -> object:
        entry = self.index.tensors.get(key)
        if entry is None:
            raise ValueError(f"{kind} {key!r} is not in the index")
        if kind == "array" and not DTYPES[entry.dtype].in_numpy:
            raise ValueError(f"array {key!r} has dtype {entry.dtype}, which numpy does not have")
        return array(kind, key)

    def read_into(self, key: str, buffer: memoryview) -> None:
        """Fills `buffer`, of the tensor's size in bytes, with the tensor `key`.

        Raises:
            CorruptCheckpointError: The bytes are not what was saved; `buffer` then holds rubbish.
        """
        (shard,) = self.index.tensors[key].shards
        path = self.directory / shard.file
        file = self.files[shard.file]
        file.seek(shard.offset_bytes)
        if _read_fully(file, buffer) < len(buffer):
            raise CorruptCheckpointError(f"{path}: ends within tensor {key!r}")
        found = checksum(buffer)
        if found != shard.checksum:
            raise CorruptCheckpointError(f"{path}: tensor {key!r} has checksum {found}, expected {shard.checksum}")


@contextmanager
def open_step(path: Path, step: Step) -> Generator[StepReader]:
    """Opens a committed step and checks all but the tensors' bytes.

    Raises:
        CheckpointNotFoundError: The step is not committed, or was deleted while it was being opened.
        CorruptCheckpointError: Its index or the layout of a file is not what was saved.
    """
    directory = path / step_name(find_step(path, step))
    with ExitStack() as stack:
        try:
            index_path = directory / INDEX_FILE
            index = decode_index(index_path.read_bytes(), str(index_path))
            files = {name: stack.enter_context(_open(directory / name, file)) for name, file in index.files.items()}
        except FileNotFoundError as error:
            if not directory.is_dir():
                raise CheckpointNotFoundError(f"{directory} was deleted while it was being read") from error
            raise CorruptCheckpointError(f"{error.filename}: the file is missing") from error
        for key, entry in index.tensors.items():
            if [shard.shape for shard in entry.shards] != [entry.shape]:
                count = len(entry.shards)
                raise CheckpointError(f"{index_path}: tensor {key!r} has {count} shards; only whole tensors are read")
        yield StepReader(directory=directory, index=index, files=files)


@contextmanager
def _open(path: Path, expected: DataFile) -> Generator[FileIO]:
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise CorruptCheckpointError(f"{path}: is no regular file")
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != expected.size_bytes:
            raise CorruptCheckpointError(f"{path}: has {size_bytes} bytes, expected {expected.size_bytes}")
        header = bytearray(expected.header_size_bytes)
        _read_fully(file, memoryview(header))
        found = checksum(bytes(header))
        if found != expected.header_checksum:
            raise CorruptCheckpointError(f"{path}: header has checksum {found}, expected {expected.header_checksum}")
        yield file


def _read_fully(file: FileIO, buffer: memoryview) -> int:
    size_bytes = 0
    while size_bytes < len(buffer):
        count = file.readinto(buffer[size_bytes:])
        if not count:
            break
        size_bytes += count
    return size_bytes

"""Takes over a checkpoint of `torch.distributed.checkpoint`: a folder of `.metadata` and `*.distcp` files.

`.metadata` is a pickle, which could run anything. Here it makes nothing but records of what it says, whatever classes
it names; what the records say is checked before use, and values and tensors are read with `weights_only=True`.
"""

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import Box, overlap
from gcore_ckpt.format.nested import NestedState
from gcore_ckpt.format.tree import MAX_DEPTH, State
from gcore_ckpt.tools.importing import save_imported

_METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
)
_RECORDS = {
    _METADATA: (*_METADATA_CLASSES, "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    _OLD_METADATA: ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


def import_dcp(
    source: str | os.PathLike[str], path: str | os.PathLike[str], *, step: int = 0
) -> None:
    """Read a checkpoint that `torch.distributed.checkpoint.save` wrote to a folder, and save it as a step.

    One process does it, with the whole state in host memory. Dicts and lists come back nested where the checkpoint
    says how they were; torch has made strings of its dicts' integer keys. Sharded tensors are saved whole.

    Args:
        source: The folder, which holds `.metadata`.
        path: The folder or URL of the checkpoints to save to.
        step: Number of the step to save.

    Raises:
        CheckpointNotFoundError: `source` holds no `.metadata`.
        CorruptCheckpointError: The checkpoint is damaged, or holds what is not read here: objects of classes that torch
            does not load with `weights_only=True`, or files that an extension has transformed.
        CheckpointWriteError, CheckpointLockedError: It could not be saved.
    """
    save_imported(source, path, step, _read)


class _Record:
    """The record of an object in a pickle: its state."""

    def __init__(self, *_: object) -> None:
        self.fields: Mapping[str, object] = {}

    def __setstate__(self, state: object) -> None:
        self.fields = cast("dict[str, object]", state) if isinstance(state, dict) else {"": state}


class _Unpickler(pickle.Unpickler):
    """Makes records; knows no class but those that DCP's metadata are made of."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        key = module_name, global_name
        if global_name in _RECORDS.get(module_name, ()):
            # Of this unpickling alone, because a pickle can set attributes of the classes that it is given.
            return self._classes.setdefault(key, type(global_name, (_Record,), {}))
        if key == ("torch", "Size"):
            return torch.Size
        if key == ("collections", "OrderedDict"):
            return dict
        dtype = vars(torch).get(global_name)
        if module_name == "torch" and isinstance(dtype, torch.dtype):
            return dtype
        raise ValueError(f"names {module_name}.{global_name}, which metadata of DCP do not hold")


class _Chunk(NamedTuple):
    """Bytes in a file, and the box of a tensor that they hold; None for a value."""

    file: str
    offset_bytes: int
    length_bytes: int
    box: Box | None


class _Entry(NamedTuple):
    """A tensor, or a value: its path in the state and its chunks; dtype and shape are a tensor's."""

    path: tuple[str | int, ...]
    chunks: Sequence[_Chunk]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def _read(folder: Path) -> State:
    where = folder / _METADATA_FILE
    if not where.is_file():
        raise CheckpointNotFoundError(
            f"{folder} holds no {_METADATA_FILE}, as torch.distributed.checkpoint writes it"
        )
    with (
        validation.reading(where, Exception),
        where.open("rb") as file,
    ):  # unpickling raises anything
        entries = dict(_entries(_Unpickler(file).load()))
    state = NestedState()
    for name, entry in entries.items():
        with validation.reading(f"{folder}: {name!r}", OSError):
            state.put(entry.path, _value(folder, entry))
    with validation.reading(where):
        return state.state()


def _entries(metadata: object) -> Iterator[tuple[str, _Entry]]:
    fields = _fields(metadata, "Metadata")
    described = validation.expect(dict, fields.get("state_dict_metadata"), "state_dict_metadata")
    paths = validation.expect(dict, fields.get("planner_data") or {}, "planner_data")
    infos: dict[tuple[str, tuple[int, ...] | None], _Record] = {}
    for index, info in validation.expect(dict, fields.get("storage_data"), "storage_data").items():
        key = _fields(index, "MetadataIndex")
        offset = key.get("offset")
        infos[
            validation.expect(str, key.get("fqn"), "fqn"),
            None if offset is None else _sizes(offset),
        ] = info
    for name, record in described.items():
        path = _path(paths.get(name, (name,)))
        if type(record).__name__ == "BytesStorageMetadata":
            yield name, _Entry(path, [_chunk(name, infos.get((name, None)), None)])
            continue
        tensor = _fields(record, "TensorStorageMetadata")
        properties = _fields(tensor.get("properties"), "TensorProperties").get("")
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} has a {type(dtype).__name__} for its dtype")
        shape = _sizes(tensor.get("size"))
        chunks: list[_Chunk] = []
        for chunk in validation.expect(list, tensor.get("chunks"), "chunks"):
            box = _fields(chunk, "ChunkStorageMetadata")
            start = _sizes(box.get("offsets"))
            extent = _sizes(box.get("sizes"))
            chunks.append(_chunk(name, infos.get((name, start)), Box(start, extent)))
        _check_whole(name, shape, dtype.itemsize, chunks)
        yield name, _Entry(path, chunks, dtype, shape)


def _chunk(name: str, info: object, box: Box | None) -> _Chunk:
    fields = _fields(info, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError(f"{name!r} was transformed by an extension of DCP; expected plain files")
    try:
        file = validation.plain_name(
            validation.expect(str, fields.get("relative_path"), "relative_path")
        )
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None
    offset, length = _sizes((fields.get("offset"), fields.get("length")))
    return _Chunk(file, offset, length, box)


def _check_whole(name: str, shape: tuple[int, ...], itemsize: int, chunks: list[_Chunk]) -> None:
    """Check that the chunks hold each element once and that their bytes are enough for it."""
    boxes = [chunk.box for chunk in chunks if chunk.box is not None]
    if any(not box.inside(shape) for box in boxes):
        raise ValueError(f"{name!r} has a chunk outside of its shape {shape}")
    size = Box.of_shape(shape).size
    validation.shape([*shape], f"{name!r}: shape")
    if sum(box.size for box in boxes) != size or (len(boxes) > 1 and overlap(boxes) is not None):
        raise ValueError(f"the chunks of {name!r} do not hold each of its {size} elements once")
    if sum(chunk.length_bytes for chunk in chunks) < size * itemsize:
        raise ValueError(f"the chunks of {name!r} have fewer bytes than its shape {shape}")


def _value(folder: Path, entry: _Entry) -> State:
    if entry.dtype is None:
        return _load(folder, entry.chunks[0])
    tensor: torch.Tensor | None = None
    for chunk in entry.chunks:
        piece = _load(folder, chunk)
        box = cast("Box", chunk.box)
        if (
            not isinstance(piece, torch.Tensor)
            or piece.dtype != entry.dtype
            or tuple(piece.shape) != box.shape
        ):
            raise ValueError(
                f"{chunk.file} holds something else at byte {chunk.offset_bytes} than a tensor of {box}"
            )
        if box == Box.of_shape(entry.shape):
            return piece.detach()
        tensor = torch.empty(entry.shape, dtype=entry.dtype) if tensor is None else tensor
        tensor[box.slices()] = piece.detach()
    return torch.empty(entry.shape, dtype=entry.dtype) if tensor is None else tensor


def _load(folder: Path, chunk: _Chunk) -> State:
    with (folder / chunk.file).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if chunk.offset_bytes + chunk.length_bytes > size_bytes:
            raise ValueError(
                f"{chunk.file} has {size_bytes} bytes; expected more: it was cut short"
            )
        file.seek(chunk.offset_bytes)
        data = file.read(chunk.length_bytes)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # of many kinds, for damaged data and for classes that it does not load
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{chunk.file}: torch.load(weights_only=True) refuses what is at byte {chunk.offset_bytes}: "
                         f"{reason}") from error  # fmt: skip


def _path(value: object) -> tuple[str | int, ...]:
    parts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()
    if not 0 < len(parts) <= MAX_DEPTH or any(type(part) not in (str, int) for part in parts):
        raise ValueError(
            f"a path is a {type(value).__name__} of {len(parts)} parts; expected a tuple of str and int"
        )
    return cast("tuple[str | int, ...]", parts)


def _fields(record: object, name: str) -> Mapping[str, object]:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"holds a {type(record).__name__} in the place of a {name}")
    return record.fields


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        raise ValueError(f"holds a {type(value).__name__} in the place of sizes")
    return tuple(validation.size(size, "size") for size in cast("tuple[object, ...]", value))

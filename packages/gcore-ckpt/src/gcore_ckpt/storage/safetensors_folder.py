"""A Hugging Face folder as it is: the headers of its safetensors files, made into an index like that of a step.

Such a folder comes from anywhere, so all that its files say is checked before anything relies on it.
"""

import json
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.format import validation
from gcore_ckpt.format.boxes import DTYPES, Box
from gcore_ckpt.format.stored import DataFile, Index, StoredShard, StoredTensor, naming
from gcore_ckpt.storage import INDEX_FILE, StepFiles, Storage
from gcore_ckpt.storage.local import LocalFiles, LocalStorage

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_MAX_JSON_BYTES = 100_000_000  # of a header, as the safetensors library has it
_LENGTH_BYTES = 8
# Codes that few readers know: read here, not written.
_FOREIGN_CODES = {
    "C64": "complex64",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_CODES = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
_DTYPE_OF_CODE = _CODES | _FOREIGN_CODES


def find_weights(storage: Storage) -> Path | None:
    """Return the file that says what a local path holds in Hugging Face's form; None where there is none."""
    if not isinstance(storage, LocalStorage):
        return None
    path = storage.path
    if not path.is_dir():
        if path.suffix == ".safetensors" and path.exists():
            return path
        return None
    for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE):
        if (path / name).exists():
            return path / name
    files = list(path.glob("*.safetensors"))
    # Next to an `index.json` it is a step's data file, whose names of tensors are not those of the state.
    if len(files) != 1 or (path / INDEX_FILE).exists():
        return None
    return files[0]


@contextmanager
def open_weights(storage: Storage) -> Generator[tuple[str, StepFiles, Index]]:
    """Open what `find_weights` finds, a flat dict of tensors: the path of the folder, its files, their index."""
    path = find_weights(storage)
    if path is None:
        raise CheckpointNotFoundError(f"{storage} was deleted while it was being read")
    with LocalFiles(path.parent) as files:
        if path.name == WEIGHTS_INDEX_FILE:
            data_files, tensors = _read_sharded(files, path.parent)
        else:
            file, tensors = _read_header(files, path.parent, path.name)
            data_files = {path.name: file}
        tree = {"dict": {name: {"tensor": name} for name in tensors}}
        yield str(path.parent), files, Index(tree=tree, tensors=tensors, files=data_files)


def _read_sharded(
    files: StepFiles, folder: Path
) -> tuple[dict[str, DataFile], dict[str, StoredTensor]]:
    """Return the files of a folder of several, and the tensors that its weight map names."""
    where = folder / WEIGHTS_INDEX_FILE
    with validation.reading(where):
        size_bytes = _open(files, where)
        if size_bytes > _MAX_JSON_BYTES:
            raise ValueError(f"has {size_bytes} bytes; expected at most {_MAX_JSON_BYTES}")
        content = _parse(_read(files, WEIGHTS_INDEX_FILE, 0, size_bytes))
        if "weight_map" not in content:
            raise ValueError("weight_map is missing")
        file_of: dict[str, str] = validation.expect(dict, content["weight_map"], "weight_map")
        for name, file in file_of.items():
            validation.plain_name(validation.expect(str, file, f"file of {name!r}"))
    data_files: dict[str, DataFile] = {}
    tensors_of: dict[str, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(file_of.values()):
        data_files[file], tensors_of[file] = _read_header(files, folder, file)
    tensors: dict[str, StoredTensor] = {}
    with validation.reading(where):
        for name, file in file_of.items():
            if name not in tensors_of[file]:
                raise ValueError(f"tensor {name!r} is not in {file}, where its weight_map puts it")
            tensors[name] = tensors_of[file][name]
    return data_files, tensors


def _read_header(
    files: StepFiles, folder: Path, name: str
) -> tuple[DataFile, dict[str, StoredTensor]]:
    """Return the tensors of a safetensors file in the order of its header."""
    with validation.reading(folder / name):
        size_bytes = _open(files, folder / name)
        length = _LENGTH_BYTES
        if size_bytes >= _LENGTH_BYTES:
            length += int.from_bytes(_read(files, name, 0, _LENGTH_BYTES), "little")
        if size_bytes < length or length - _LENGTH_BYTES > _MAX_JSON_BYTES:
            raise ValueError(
                f"its header ends at byte {length}, its {size_bytes} bytes (and {_MAX_JSON_BYTES} for a header) before"
            )
        header = _parse(_read(files, name, _LENGTH_BYTES, length - _LENGTH_BYTES))
        metadata = validation.expect(dict, header.pop("__metadata__", {}), "__metadata__")
        for key, value in metadata.items():
            validation.expect(str, value, f"{key!r} in __metadata__")
        tensors = {key: _tensor(key, entry, name, length) for key, entry in header.items()}
        _check_places(tensors, length, size_bytes)
    return DataFile(size_bytes=size_bytes, header_size_bytes=length, header_checksum=None), tensors


def _open(files: StepFiles, path: Path) -> int:
    if not path.exists():
        raise ValueError("the file is missing")
    return files.open(path.name)


def _tensor(name: str, entry: object, file: str, header_size_bytes: int) -> StoredTensor:
    with naming(name):
        fields = validation.expect(dict, entry, "entry")
        missing = {"dtype", "shape", "data_offsets"} - fields.keys()
        if missing:
            raise ValueError(f"{' and '.join(sorted(missing))} is missing")
        code = validation.expect(str, fields["dtype"], "dtype")
        if code not in _DTYPE_OF_CODE:
            raise ValueError(
                f"unknown dtype {code[:40]!r}; expected one of {', '.join(_DTYPE_OF_CODE)}"
            )
        shape = validation.shape(fields["shape"], "shape")
        offsets = validation.sizes(fields["data_offsets"], "data_offsets")
        if len(offsets) != 2:
            raise ValueError(f"data_offsets are {len(offsets)} numbers; expected 2")
        begin, end = offsets
        dtype = _DTYPE_OF_CODE[code]
        size_bytes = math.prod(shape) * DTYPES[dtype].size_bytes
        if end - begin != size_bytes:
            raise ValueError(
                f"data_offsets {begin} to {end} do not fit {code} of shape {shape}, {size_bytes} bytes"
            )
    # Without checksums to check, blocks of one byte let every read be of what is asked for and no more.
    shard = StoredShard(
        file=file,
        offset_bytes=header_size_bytes + begin,
        size_bytes=size_bytes,
        box=Box.of_shape(shape),
        block_bytes=1,
        checksums=None,
    )
    return StoredTensor(dtype=dtype, shape=shape, shards=(shard,))


def _check_places(
    tensors: Mapping[str, StoredTensor], header_size_bytes: int, size_bytes: int
) -> None:
    """Check that the tensors fill the file without gap or overlap, as the format demands."""
    end = header_size_bytes
    spans: list[tuple[int, int, str]] = []
    for name, tensor in tensors.items():
        spans.append((tensor.shards[0].offset_bytes, tensor.size_bytes, name))
    for offset_bytes, length, name in sorted(spans):
        if offset_bytes != end:
            raise ValueError(
                f"tensor {name!r} begins at byte {offset_bytes}, the one before it ends at {end}"
            )
        end += length
    if end != size_bytes:
        raise ValueError(f"its tensors end at byte {end}, the file has {size_bytes}")


def _read(files: StepFiles, name: str, start: int, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    if files.read_into(name, start, memoryview(data)) != size_bytes:
        raise ValueError(f"ends before byte {start + size_bytes}")
    return bytes(data)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        return validation.expect(
            dict, json.loads(data.decode(), object_pairs_hook=_unique), "header"
        )
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"{name!r} is there twice")
        fields[name] = value
    return fields

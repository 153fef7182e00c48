"""Data files and data sets of the Hub as Arrow tables, memory-mapped where they are large."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from gcore_runs.data.cache import cache_file
from gcore_runs.data.hub import DatasetName, dataset_files
from gcore_runs.data.rows import LazySequence, RowSource
from gcore_runs.errors import UserError
from gcore_runs.run_folder import json_object

_BATCH_ROWS = 10_000
_BATCH_BYTES = 2**22
_BOM = b"\xef\xbb\xbf"
_FORMATS = {".parquet": "Parquet", ".arrow": "Arrow", ".csv": "CSV"}


class ArrowRows(LazySequence[Mapping[str, Any]]):
    """The rows of Arrow files, which are memory-mapped: a row is read when it is indexed.

    In memory are the positions of record batches alone. Pickled, it is the paths of the files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [file.absolute() for file in files]
        self._batches: list[pa.RecordBatch] = []
        for file in self.files:
            self._batches.extend(_map_batches(file))
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files,)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def item(self, index: int) -> Mapping[str, Any]:
        position = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[position]
        return self._decode(batch.slice(index - int(self._ends[position]) + batch.num_rows, 1))[0]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for part in self._parts():
            yield from self._decode(part)

    def values(self, key: str) -> Iterator[Any]:
        """Yield the values of one column, without reading the others; None where there is none."""
        for part in self._parts():
            yield from (
                part.column(key).to_pylist() if key in part.schema.names else [None] * part.num_rows
            )

    def _parts(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, a few thousand at a time."""
        for batch in self._batches:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield batch.slice(first, _BATCH_ROWS)

    def _decode(self, part: pa.RecordBatch) -> list[Any]:
        return part.to_pylist()


class JsonRows(ArrowRows):
    """The lines of a JSONL file in an Arrow file with their numbers, each parsed when it is read."""

    def __init__(self, files: Sequence[Path], name: str) -> None:
        super().__init__(files)
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.files, self._name)

    def values(self, key: str) -> Iterator[Any]:
        """Yield the values of one column; None where there is none."""
        for part in self._parts():
            lines = part.column(0).to_pylist()
            try:
                # All at once, which takes half the time.
                rows = json.loads(b"[" + b",".join(lines) + b"]")
            except ValueError:
                rows = []
            if len(rows) != len(lines) or not all(isinstance(row, dict) for row in rows):
                rows = self._decode(part)
            for row in rows:
                yield row.get(key)

    def _decode(self, part: pa.RecordBatch) -> list[Any]:
        lines, numbers = (column.to_pylist() for column in part.columns)
        return [
            json_object(line, f"{self._name}:{n}") for line, n in zip(lines, numbers, strict=True)
        ]


def open_file(file: Path, *, is_large: bool) -> RowSource:
    """Return the rows of a file, converted to Arrow in the cache if it is large; raises as `open_rows`."""
    status = file.stat()
    folder = file.parent
    key = (str(file.absolute()), status.st_size, status.st_mtime_ns)
    try:
        if file.suffix == ".jsonl":
            copy = cache_file("jsonl.arrow", key, lambda target: _convert_lines(file, target))
            rows: Sequence[Any] = JsonRows([copy], str(file))
        elif file.suffix == ".arrow":
            rows = ArrowRows([file])
        elif is_large:
            rows = ArrowRows(
                [cache_file("table.arrow", key, lambda target: _convert_table(file, target))]
            )
        elif file.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows = pyarrow.csv.read_csv(file).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"data file {file} is not {_FORMATS[file.suffix]}: {error}") from None
    if is_large:
        return RowSource(name=str(file), rows=rows, folder=folder, identity=repr(key))
    return RowSource(name=str(file), rows=list(rows), folder=folder)


def open_dataset(source: str, *, setting: str, large_bytes: int) -> RowSource:
    """Return the rows of a data set on the Hub; raises as `open_rows`."""
    name = DatasetName.parse(source, setting=setting)
    commit, files = dataset_files(name, setting=setting)
    rows = ArrowRows(files)
    if sum(file.stat().st_size for file in files) > large_bytes:
        return RowSource(name=str(name), rows=rows, folder=Path(), identity=f"{name} {commit}")
    return RowSource(name=str(name), rows=list(rows), folder=Path())


def _map_batches(file: Path) -> list[pa.RecordBatch]:
    source = pa.memory_map(str(file))
    try:
        reader = pyarrow.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return list(pyarrow.ipc.open_stream(source))
    return [reader.get_batch(index) for index in range(reader.num_record_batches)]


def _convert_lines(file: Path, target: Path) -> None:
    """Write the lines of a file that are not blank, with their numbers, as Arrow."""
    schema = pa.schema({"line": pa.large_binary(), "number": pa.int64()})
    first = 1
    with file.open("rb") as source, pyarrow.ipc.new_file(str(target), schema) as writer:
        while lines := source.readlines(_BATCH_BYTES):
            numbers: Sequence[int] = range(first, first + len(lines))
            if first == 1:
                lines[0] = lines[0].removeprefix(_BOM)
            first += len(lines)
            if not all(map(bytes.strip, lines)):
                numbers = [n for n, line in zip(numbers, lines, strict=True) if line.strip()]
                lines = [line for line in lines if line.strip()]
            arrays = [pa.array(lines, pa.large_binary()), pa.array(numbers, pa.int64())]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _convert_table(file: Path, target: Path) -> None:
    """Write a Parquet or CSV file as Arrow, a few thousand rows at a time."""
    if file.suffix == ".csv":
        batches: Any = pyarrow.csv.open_csv(file)
        schema = batches.schema
    else:
        source = pyarrow.parquet.ParquetFile(file)
        batches = source.iter_batches(batch_size=_BATCH_ROWS)
        schema = source.schema_arrow
    with pyarrow.ipc.new_file(str(target), schema) as writer:
        for batch in batches:
            writer.write_batch(batch)

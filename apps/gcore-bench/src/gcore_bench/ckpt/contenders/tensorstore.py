"""tensorstore: an uncompressed zarr3 array for each tensor, in files that it syncs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from gcore_bench.ckpt.contenders.arrays import Array, to_arrays, to_state
from gcore_bench.ckpt.contenders.base import Contender, Pending
from gcore_bench.ckpt.workload import State

_MAX_CHUNK_BYTES = 64 << 20


class Tensorstore(Contender):
    """A write completes twice: with the copy, after which the array may change, and with the commit."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._context: Any = ts.Context({"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}})

    def save(self, step: int, state: State) -> Pending:
        arrays = to_arrays(state)
        opening = [
            ts.open(self._spec(step, name) | {"metadata": _metadata(array)}, create=True, context=self._context)
            for name, array in arrays.items()
        ]
        writes = [store.result().write(array) for store, array in zip(opening, arrays.values(), strict=True)]
        for write in writes:
            write.copy.result()
        return _Committing(writes)

    def unsynced(self, step: int) -> list[Path]:
        return [self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        opening = {name: ts.open(self._spec(step, name), open=True, context=self._context) for name in like}
        reading = {name: store.result().read() for name, store in opening.items()}
        return to_state({name: read.result() for name, read in reading.items()})

    def _spec(self, step: int, name: str) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.path(step) / name}/"}}


def _metadata(array: Array) -> dict[str, Any]:
    rows = max(1, _MAX_CHUNK_BYTES // (array.nbytes // array.shape[0]))
    chunk_shape = [min(rows, array.shape[0]), *array.shape[1:]]
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }


class _Committing:
    def __init__(self, writes: Sequence[Any]) -> None:
        self._writes = writes

    def done(self) -> bool:
        return all(write.commit.done() for write in self._writes)

    def wait(self) -> None:
        for write in self._writes:
            write.commit.result()

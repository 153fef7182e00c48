"""The libraries that `gcore-bench ckpt` compares, at their best documented settings.

Each is imported only in the process that measures it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]
_Array = np.ndarray[Any, np.dtype[Any]]
_MAX_CHUNK_BYTES = 64 << 20


class Library(ABC):
    """A library that saves steps at paths below one folder, which are named by their numbers."""

    def __init__(self, root: Path) -> None:
        del root

    @abstractmethod
    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        """Start to save; return a call that waits for the end. The state may be changed once this returns."""

    @abstractmethod
    def load(self, path: Path, like: State, /) -> State:
        """Load into newly allocated memory; ``like`` has the shapes."""

    def find_unsynced(self, path: Path, /) -> list[Path]:
        """Return files and folders that are left unsynced, without which a save may not survive a crash."""
        return [path, path.parent]

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release buffers and processes."""


class InPlaceLibrary(Library):
    """A library that can also load into the memory of a state."""

    @abstractmethod
    def load_into(self, path: Path, state: State, /) -> None:
        """Load over the tensors of a state."""


def _do_nothing() -> None:
    """Wait for a save that has ended."""


class GcoreLibrary(InPlaceLibrary):
    """gcore-ckpt with its default settings, one checkpointer for the whole run, as in a training loop."""

    def __init__(self, root: Path) -> None:
        from gcore_ckpt import Checkpointer

        self._checkpointer = Checkpointer(root)

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        return self._checkpointer.save(int(path.name), state).wait

    def load(self, path: Path, _like: State, /) -> State:
        return self._checkpointer.load(step=int(path.name))

    def load_into(self, path: Path, state: State, /) -> None:
        self._checkpointer.load(state, step=int(path.name))

    def find_unsynced(self, _path: Path, /) -> list[Path]:
        return []

    def close(self) -> None:
        self._checkpointer.close()


class TorchSaveLibrary(Library):
    """One file for the whole state, which is not synced."""

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        import torch

        torch.save(state, path)
        return _do_nothing

    def load(self, path: Path, _like: State, /) -> State:
        import torch

        return torch.load(path, weights_only=True)


class SafetensorsLibrary(Library):
    """One file for the whole state, which is not synced."""

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        from safetensors.torch import save_file

        save_file(state, path)
        return _do_nothing

    def load(self, path: Path, _like: State, /) -> State:
        from safetensors.torch import load_file

        # The loaded tensors are views of the mapped file, which is read when they are.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}


class DcpLibrary(InPlaceLibrary):
    """torch.distributed.checkpoint: `save`, which syncs its files."""

    def __init__(self, root: Path) -> None:
        import torch.distributed as dist

        # A process that writes needs a group, and training has one.
        store = root.with_name(f"store-{os.getpid()}")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=path)
        return _do_nothing

    def load(self, path: Path, like: State, /) -> State:
        import torch

        fresh: State = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self.load_into(path, fresh)
        return fresh

    def load_into(self, path: Path, state: State, /) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(state, checkpoint_id=path)


class DcpAsyncLibrary(DcpLibrary):
    """`async_save` in a process, from a copy in shared memory that is kept between saves.

    That has the shortest stall on CPU tensors; no stager that can be used here returns before the copy is done.
    """

    def __init__(self, root: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(root)
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        process = AsyncCheckpointerType.PROCESS
        # A future of the upload alone, because of the stager.
        upload: Any = async_save(
            state, checkpoint_id=path, async_checkpointer_type=process, async_stager=self._stager
        )
        return upload.result

    def close(self) -> None:
        self._stager.close()


class OrbaxLibrary(Library):
    """Orbax's asynchronous checkpointer on numpy arrays, which it copies before it returns, as uncompressed zarr3."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import orbax.checkpoint

        self._ocp: Any = orbax.checkpoint
        handler = self._ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        self._checkpointer = self._ocp.AsyncCheckpointer(handler)

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        arrays = {name: _to_array(tensor) for name, tensor in state.items()}
        self._checkpointer.save(path, args=self._ocp.args.PyTreeSave(arrays))
        return self._checkpointer.wait_until_finished

    def load(self, path: Path, like: State, /) -> State:
        types = dict.fromkeys(like, self._ocp.RestoreArgs(restore_type=np.ndarray))
        arrays = self._checkpointer.restore(
            path, args=self._ocp.args.PyTreeRestore(restore_args=types)
        )
        return {name: _to_tensor(array) for name, array in arrays.items()}

    def find_unsynced(self, path: Path, /) -> list[Path]:
        # It writes these itself; tensorstore syncs those with the data.
        return [*path.glob("_*METADATA"), path, path.parent]

    def close(self) -> None:
        self._checkpointer.close()


class TensorstoreLibrary(Library):
    """tensorstore: an uncompressed zarr3 array for each tensor, in files that it syncs.

    A write completes twice: with the copy, after which the array may change, and with the commit.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        import tensorstore

        self._ts: Any = tensorstore
        self._context = self._ts.Context(
            {"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}}
        )

    def save(self, path: Path, state: State, /) -> Callable[[], object]:
        stores: list[Any] = []
        arrays = [_to_array(tensor) for tensor in state.values()]
        for name, array in zip(state, arrays, strict=True):
            rows = max(1, _MAX_CHUNK_BYTES // (array.nbytes // array.shape[0]))
            chunk_shape = [min(rows, array.shape[0]), *array.shape[1:]]
            metadata = {
                "shape": list(array.shape),
                "data_type": array.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            }
            stores.append(self._open(path / name, metadata=metadata))
        writes = [store.result().write(array) for store, array in zip(stores, arrays, strict=True)]
        for write in writes:
            write.copy.result()
        return lambda: [write.commit.result() for write in writes]

    def load(self, path: Path, like: State, /) -> State:
        stores = {name: self._open(path / name) for name in like}
        reads = {name: store.result().read() for name, store in stores.items()}
        return {name: _to_tensor(read.result()) for name, read in reads.items()}

    def _open(self, path: Path, **metadata: Any) -> Any:
        """Open an array, or create it if it is given metadata."""
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **metadata}
        return self._ts.open(spec, create=bool(metadata), open=not metadata, context=self._context)


LIBRARIES: dict[str, Callable[[Path], Library]] = {
    "gcore": GcoreLibrary,
    "dcp": DcpLibrary,
    "dcp-async": DcpAsyncLibrary,
    "torch.save": TorchSaveLibrary,
    "safetensors": SafetensorsLibrary,
    "orbax": OrbaxLibrary,
    "tensorstore": TensorstoreLibrary,
}


def _to_array(tensor: "torch.Tensor") -> _Array:
    """View a tensor as an array; bfloat16, which numpy lacks, is the dtype of ml_dtypes."""
    import torch

    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_tensor(array: _Array) -> "torch.Tensor":
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)

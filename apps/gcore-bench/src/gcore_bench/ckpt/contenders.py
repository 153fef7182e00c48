"""Checkpoint libraries at their best documented settings; each is imported only in the process that measures it."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gcore_bench.ckpt.workload import State

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_MAX_CHUNK_BYTES = 64 << 20


class Pending(NamedTuple):
    """A save that may continue after its call has returned; by default it was complete then."""

    done: Callable[[], bool] = lambda: True
    wait: Callable[[], object] = lambda: None


class Contender(ABC):
    """One library, saving below one folder."""

    loads_in_place = False
    """Whether it can load into existing memory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def save(self, step: int, state: State) -> Pending:
        """Start to save; the state may be changed once this returns."""

    @abstractmethod
    def load(self, step: int, like: State) -> State:
        """Load into newly allocated memory; ``like`` has the shapes, for libraries that need them."""

    def load_into(self, step: int, template: State) -> None:
        """Load into the memory of ``template``, for libraries with ``loads_in_place``."""
        raise NotImplementedError(f"{type(self).__name__} loads into new memory only")

    def unsynced(self, step: int) -> list[Path]:
        """Return files and folders that the library leaves unsynced, without which a save may not survive a crash."""
        return [self.path(step), self.root]

    def close(self) -> None:  # noqa: B027  # most have nothing to release
        """Release buffers and processes, if there are any."""

    def path(self, step: int) -> Path:
        """Return where a step is saved."""
        return self.root / f"{step:08d}"


class Gcore(Contender):
    """gcore-ckpt with its default settings, one checkpointer for the whole run, as in a training loop."""

    loads_in_place = True

    def __init__(self, root: Path) -> None:
        from gcore_ckpt import Checkpointer

        super().__init__(root)
        self._checkpointer = Checkpointer(root)

    def save(self, step: int, state: State) -> Pending:
        handle = self._checkpointer.save(step, state)
        return Pending(handle.done, handle.wait)

    def load(self, step: int, like: State) -> State:
        del like
        return self._checkpointer.load(step=step)

    def load_into(self, step: int, template: State) -> None:
        self._checkpointer.load(template, step=step)

    def unsynced(self, step: int) -> list[Path]:
        del step
        return []

    def close(self) -> None:
        self._checkpointer.close()


class SingleFile(Contender):
    """One file for the whole state, by a library's own writer and reader, which do not sync it."""

    def __init__(self, root: Path, write: Callable[[State, Path], object], read: Callable[[Path], State]) -> None:
        super().__init__(root)
        self._write = write
        self._read = read

    def save(self, step: int, state: State) -> Pending:
        self._write(state, self.path(step))
        return Pending()

    def load(self, step: int, like: State) -> State:
        del like
        return self._read(self.path(step))


class Dcp(Contender):
    """torch.distributed.checkpoint: `save`, which syncs its files; loads are the same for all kinds."""

    loads_in_place = True

    def __init__(self, root: Path) -> None:
        import torch.distributed as dist

        super().__init__(root)
        if not dist.is_initialized():
            # A process that writes needs a group, and training has one.
            store = root.with_name(f"store-{os.getpid()}")
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    def save(self, step: int, state: State) -> Pending:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, checkpoint_id=self.path(step))
        return Pending()

    def load(self, step: int, like: State) -> State:
        fresh: State = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self.load_into(step, fresh)
        return fresh

    def load_into(self, step: int, template: State) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(template, checkpoint_id=self.path(step))


class DcpAsync(Dcp):
    """`async_save` in a thread or a process, with its default stager; none used here returns before the copy is done.

    With ``caches`` the copy goes into shared memory that is kept between saves: the shortest stall on CPU tensors.
    """

    def __init__(self, root: Path, kind: Literal["thread", "process"], *, caches: bool = False) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(root)
        self._kind = kind
        # Collectives of the thread must not mix with those of training.
        self._group: Any = dist.new_group(backend="gloo") if kind == "thread" else None
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options) if caches else None

    def save(self, step: int, state: State) -> Pending:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        # The stagers above copy before they return, so that there is a future of the upload alone.
        upload: Any = async_save(
            state,
            checkpoint_id=self.path(step),
            async_checkpointer_type=AsyncCheckpointerType(self._kind),
            async_stager=self._stager,
            process_group=self._group,
        )
        return Pending(upload.done, upload.result)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Orbax(Contender):
    """Orbax's asynchronous checkpointer on numpy arrays, which it copies before it returns, as uncompressed zarr3."""

    def __init__(self, root: Path) -> None:
        import orbax.checkpoint as ocp

        super().__init__(root)
        handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
        self._ocp: Any = ocp
        self._checkpointer: Any = ocp.AsyncCheckpointer(handler)

    def save(self, step: int, state: State) -> Pending:
        saver = self._checkpointer
        arrays = {name: _to_array(tensor) for name, tensor in state.items()}
        saver.save(self.path(step), args=self._ocp.args.PyTreeSave(arrays))
        return Pending(lambda: not saver.is_saving_in_progress(), saver.wait_until_finished)

    def load(self, step: int, like: State) -> State:
        types = dict.fromkeys(like, self._ocp.RestoreArgs(restore_type=np.ndarray))
        args = self._ocp.args.PyTreeRestore(restore_args=types)
        arrays = self._checkpointer.restore(self.path(step), args=args)
        return {name: _to_tensor(array) for name, array in arrays.items()}

    def unsynced(self, step: int) -> list[Path]:
        # It writes these itself; tensorstore syncs those with the data.
        files = (self.path(step) / name for name in ("_METADATA", "_CHECKPOINT_METADATA"))
        return [*(file for file in files if file.exists()), *super().unsynced(step)]

    def close(self) -> None:
        self._checkpointer.close()


class Tensorstore(Contender):
    """tensorstore: an uncompressed zarr3 array for each tensor, in files that it syncs.

    A write completes twice: with the copy, after which the array may change, and with the commit.
    """

    def __init__(self, root: Path) -> None:
        import tensorstore as ts

        super().__init__(root)
        self._open: Any = ts.open
        self._context: Any = ts.Context({"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}})

    def save(self, step: int, state: State) -> Pending:
        arrays = {name: _to_array(tensor) for name, tensor in state.items()}
        opening = {name: self._opening(step, name, metadata=_metadata(array)) for name, array in arrays.items()}
        writes = [store.result().write(arrays[name]) for name, store in opening.items()]
        for write in writes:
            write.copy.result()
        commits = [write.commit for write in writes]
        return Pending(lambda: all(c.done() for c in commits), lambda: [c.result() for c in commits])

    def load(self, step: int, like: State) -> State:
        opening = {name: self._opening(step, name) for name in like}
        reading = {name: store.result().read() for name, store in opening.items()}
        return {name: _to_tensor(read.result()) for name, read in reading.items()}

    def _opening(self, step: int, name: str, **metadata: Any) -> Any:
        """Open an array, or create it if it is given metadata."""
        kvstore = {"driver": "file", "path": f"{self.path(step) / name}/"}
        spec = {"driver": "zarr3", "kvstore": kvstore, **metadata}
        return self._open(spec, create=bool(metadata), open=not metadata, context=self._context)


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    "gcore": Gcore,
    "dcp": Dcp,
    "dcp-async-thread": lambda root: DcpAsync(root, "thread"),
    "dcp-async-process": lambda root: DcpAsync(root, "process"),
    "dcp-async-cached": lambda root: DcpAsync(root, "process", caches=True),
    "torch.save": lambda root: SingleFile(root, torch.save, lambda path: torch.load(path, weights_only=True)),
    "safetensors": lambda root: SingleFile(root, save_file, _load_and_clone),
    "orbax": Orbax,
    "tensorstore": Tensorstore,
}
"""Functions that import a library and set it up to save below a folder."""


def _load_and_clone(path: Path) -> State:
    # The loaded tensors are views of the mapped file, which is read when they are.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _metadata(array: _Array) -> dict[str, Any]:
    rows = max(1, _MAX_CHUNK_BYTES // (array.nbytes // array.shape[0]))
    chunk_shape = [min(rows, array.shape[0]), *array.shape[1:]]
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }


def _to_array(tensor: torch.Tensor) -> _Array:
    """View a tensor as an array; bfloat16, which numpy lacks, is the dtype of ml_dtypes."""
    is_bfloat16 = tensor.dtype is torch.bfloat16
    return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy()


def _to_tensor(array: _Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)

"""Checkpoint libraries at their best documented settings; each is imported only in the process that measures it."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One library, saving steps at paths below one folder, which are named by their numbers."""

    save: Callable[[Path, State], Pending]
    """Starts to save; the state may be changed once this returns."""
    load: Callable[[Path, State], State]
    """Loads into newly allocated memory; the state has the shapes, for libraries that need them."""
    load_into: Callable[[Path, State], object] | None = None
    """Loads into the memory of the state; None if the library loads into new memory only."""
    unsynced: Callable[[Path], list[Path]] = lambda path: [path, path.parent]
    """Returns files and folders that the library leaves unsynced, without which a save may not survive a crash."""
    close: Callable[[], object] = lambda: None
    """Releases buffers and processes, if there are any."""


def _gcore(root: Path) -> Contender:
    """gcore-ckpt with its default settings, one checkpointer for the whole run, as in a training loop."""
    from gcore_ckpt import Checkpointer

    checkpointer = Checkpointer(root)

    def save(path: Path, state: State) -> Pending:
        handle = checkpointer.save(int(path.name), state)
        return Pending(handle.done, handle.wait)

    return Contender(
        save=save,
        load=lambda path, _: checkpointer.load(step=int(path.name)),
        load_into=lambda path, template: checkpointer.load(template, step=int(path.name)),
        unsynced=lambda _: [],
        close=checkpointer.close,
    )


def _single_file(write: Callable[[State, Path], object], read: Callable[[Path], State], _: Path) -> Contender:
    """One file for the whole state, by a library's own writer and reader, which do not sync it."""

    def save(path: Path, state: State) -> Pending:
        write(state, path)
        return Pending()

    return Contender(save=save, load=lambda path, _: read(path))


def _load_and_clone(path: Path) -> State:
    # The loaded tensors are views of the mapped file, which is read when they are.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _dcp(root: Path) -> Contender:
    """torch.distributed.checkpoint: `save`, which syncs its files; loads are the same for all kinds."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    if not dist.is_initialized():
        # A process that writes needs a group, and training has one.
        store = root.with_name(f"store-{os.getpid()}")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    def save_all(path: Path, state: State) -> Pending:
        save(state, checkpoint_id=path)
        return Pending()

    def load_fresh(path: Path, like: State) -> State:
        fresh: State = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        load(fresh, checkpoint_id=path)
        return fresh

    return Contender(
        save=save_all, load=load_fresh, load_into=lambda path, template: load(template, checkpoint_id=path)
    )


def _dcp_async(kind: Literal["thread", "process"], caches: bool, root: Path) -> Contender:
    """`async_save` in a thread or a process, with its default stager; none used here returns before the copy is done.

    With ``caches`` the copy goes into shared memory that is kept between saves: the shortest stall on CPU tensors.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

    synchronous = _dcp(root)
    # Collectives of the thread must not mix with those of training.
    group: Any = dist.new_group(backend="gloo") if kind == "thread" else None
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options) if caches else None
    how: dict[str, Any] = {"async_stager": stager, "process_group": group}

    def save(path: Path, state: State) -> Pending:
        # A future of the upload alone, because of the stagers.
        upload: Any = async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType(kind), **how)
        return Pending(upload.done, upload.result)

    return replace(synchronous, save=save, close=synchronous.close if stager is None else stager.close)


def _orbax(_: Path) -> Contender:
    """Orbax's asynchronous checkpointer on numpy arrays, which it copies before it returns, as uncompressed zarr3."""
    import orbax.checkpoint

    ocp: Any = orbax.checkpoint
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True, use_compression=False)
    checkpointer = ocp.AsyncCheckpointer(handler)

    def save(path: Path, state: State) -> Pending:
        arrays = {name: _to_array(tensor) for name, tensor in state.items()}
        checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))
        return Pending(lambda: not checkpointer.is_saving_in_progress(), checkpointer.wait_until_finished)

    def load(path: Path, like: State) -> State:
        types = dict.fromkeys(like, ocp.RestoreArgs(restore_type=np.ndarray))
        arrays = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=types))
        return {name: _to_tensor(array) for name, array in arrays.items()}

    def unsynced(path: Path) -> list[Path]:
        # It writes these itself; tensorstore syncs those with the data.
        files = (path / name for name in ("_METADATA", "_CHECKPOINT_METADATA"))
        return [*(file for file in files if file.exists()), path, path.parent]

    return Contender(save=save, load=load, unsynced=unsynced, close=checkpointer.close)


def _tensorstore(_: Path) -> Contender:
    """tensorstore: an uncompressed zarr3 array for each tensor, in files that it syncs.

    A write completes twice: with the copy, after which the array may change, and with the commit.
    """
    import tensorstore

    ts: Any = tensorstore
    context = ts.Context({"file_io_sync": True, "cache_pool": {"total_bytes_limit": 0}})

    def opening(path: Path, **metadata: Any) -> Any:
        """Open an array, or create it if it is given metadata."""
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, **metadata}
        return ts.open(spec, create=bool(metadata), open=not metadata, context=context)

    def save(path: Path, state: State) -> Pending:
        arrays = {name: _to_array(tensor) for name, tensor in state.items()}
        stores = {name: opening(path / name, metadata=_metadata(array)) for name, array in arrays.items()}
        writes = [store.result().write(arrays[name]) for name, store in stores.items()]
        for write in writes:
            write.copy.result()
        commits = [write.commit for write in writes]
        return Pending(lambda: all(c.done() for c in commits), lambda: [c.result() for c in commits])

    def load(path: Path, like: State) -> State:
        stores = {name: opening(path / name) for name in like}
        reading = {name: store.result().read() for name, store in stores.items()}
        return {name: _to_tensor(read.result()) for name, read in reading.items()}

    return Contender(save=save, load=load)


CONTENDERS: dict[str, Callable[[Path], Contender]] = {
    "gcore": _gcore,
    "dcp": _dcp,
    "dcp-async-thread": partial(_dcp_async, "thread", False),
    "dcp-async-process": partial(_dcp_async, "process", False),
    "dcp-async-cached": partial(_dcp_async, "process", True),
    "torch.save": partial(_single_file, torch.save, partial(torch.load, weights_only=True)),
    "safetensors": partial(_single_file, save_file, _load_and_clone),
    "orbax": _orbax,
    "tensorstore": _tensorstore,
}
"""Functions that import a library and set it up to save below a folder."""


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

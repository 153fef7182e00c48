"""The libraries that `gcore-bench ckpt` compares, at their best documented settings.

Each is imported only in the process that measures it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

State = dict[str, "torch.Tensor"]


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


LIBRARIES: dict[str, Callable[[Path], Library]] = {
    "gcore": GcoreLibrary,
    "dcp": DcpLibrary,
    "dcp-async": DcpAsyncLibrary,
    "torch.save": TorchSaveLibrary,
    "safetensors": SafetensorsLibrary,
}

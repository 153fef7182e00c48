"""torch.distributed.checkpoint: synchronous, and asynchronous with a thread, a process, and reused shared memory."""

import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from gcore_bench.ckpt.contender import Done, InPlaceContender, Pending
from gcore_bench.ckpt.state import State


class Dcp(InPlaceContender):
    """`dcp.save`, which syncs its files; and the loads of all kinds."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        if not dist.is_initialized():
            # A process of its own for the saves needs one, and training has one.
            store = root.with_name(f"store-{os.getpid()}")
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    def save(self, step: int, state: State) -> Pending:
        save(state, checkpoint_id=self.path(step))
        return Done()

    def unsynced(self, step: int) -> list[Path]:
        return [self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        fresh: State = {name: torch.empty_like(tensor) for name, tensor in like.items()}
        self.load_into(step, fresh)
        return fresh

    def load_into(self, step: int, template: State) -> None:
        load(template, checkpoint_id=self.path(step))


class _DcpAsync(Dcp):
    """`dcp.async_save` with the stager that it makes itself; none of the stagers used here returns early."""

    kind: ClassVar[AsyncCheckpointerType]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # A thread's collectives may not meet those of training.
        self._group: dist.ProcessGroup | None = None
        if self.kind is AsyncCheckpointerType.THREAD:
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._stager = self._make_stager()

    def save(self, step: int, state: State) -> Pending:
        response = async_save(
            state,
            checkpoint_id=self.path(step),
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
            process_group=self._group,
        )
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            return _Uploading(response.upload_completion)
        return _Uploading(response)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()

    def _make_stager(self) -> DefaultStager | None:
        return None


class _Thread(_DcpAsync):
    kind = AsyncCheckpointerType.THREAD


class _Process(_DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


class _Cached(_DcpAsync):
    """Its fastest stall on CPU tensors: the copy goes into shared memory that is kept from save to save."""

    kind = AsyncCheckpointerType.PROCESS

    def _make_stager(self) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        return DefaultStager(options)


class _Uploading:
    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


KINDS: dict[str, type[Dcp]] = {
    "dcp": Dcp,
    "dcp-async-thread": _Thread,
    "dcp-async-process": _Process,
    "dcp-async-cached": _Cached,
}

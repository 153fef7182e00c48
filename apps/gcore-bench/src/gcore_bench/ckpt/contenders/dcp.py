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

from gcore_bench.ckpt.contenders.base import Done, InPlaceContender, Pending
from gcore_bench.ckpt.workload import State


class Dcp(InPlaceContender):
    """`dcp.save`, which syncs its files; loads are the same for all kinds."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        if not dist.is_initialized():
            # A process that writes needs a group, and training has one.
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
    """`dcp.async_save` with its default stager; no stager used here returns before the copy is complete."""

    kind: ClassVar[AsyncCheckpointerType]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        # Collectives of the thread must not mix with those of training.
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


class DcpThread(_DcpAsync):
    """`async_save` that writes in a thread."""

    kind = AsyncCheckpointerType.THREAD


class DcpProcess(_DcpAsync):
    """`async_save` that writes in a process."""

    kind = AsyncCheckpointerType.PROCESS


class DcpCached(_DcpAsync):
    """The shortest stall on CPU tensors: the copy goes into shared memory that is kept between saves."""

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

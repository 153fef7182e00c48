"""What a process keeps from its first save to its last: lock, plan, staging memory, background thread."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from gcore_ckpt.agreement import SavePlanner
from gcore_ckpt.errors import CheckpointWriteError
from gcore_ckpt.group import Group
from gcore_ckpt.leaves import Holdings, collect
from gcore_ckpt.plan import HeldBox
from gcore_ckpt.retention import Retention
from gcore_ckpt.saver import Saver
from gcore_ckpt.staging import StagedFile, Stager, Staging
from gcore_ckpt.storage import Storage
from gcore_ckpt.tree import State
from gcore_ckpt.workers import Workers

_Staged: TypeAlias = "StagedFile | Exception | None"


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save; see `Checkpointer`."""

    retention: Retention
    max_in_flight: int
    staging: Staging
    incremental: bool
    threads: int


class SavePipeline:
    """Copies states in the calling thread and writes them, in order, in another.

    Args:
        storage: Where to.
        planning: The ranks that save together, for the calling thread.
        writing: The same ranks, for the background thread.
        options: How.
    """

    def __init__(self, storage: Storage, planning: Group, writing: Group, options: SaveOptions) -> None:
        self._storage = storage
        self._planning = planning
        self._writing = writing
        self._copiers = Workers(options.threads, "gcore-ckpt-copy")
        self._hashers = Workers(2, "gcore-ckpt-hash")
        self._stager = Stager(options.staging, options.max_in_flight, self._copiers)
        limits = [limit for limit in (storage.max_file_bytes, self._stager.max_file_bytes) if limit is not None]
        self._planner = SavePlanner(planning, min(limits, default=None))
        self._saver = Saver(storage, writing, self._hashers, incremental=options.incremental)
        self._retention = options.retention
        self._deletions: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gcore-ckpt")  # so steps commit in order
        self._acquired = False

    def save(self, step: int, state: State, check: Callable[[], None]) -> Future[None]:
        """Copies `state` and starts to write it; the future's outcome is that of the save.

        Args:
            step: Number of the step.
            state: What to save.
            check: Raises why this rank cannot save now.
        """
        held: list[Holdings] = []

        def prepare() -> tuple[HeldBox, ...]:
            check()
            self._raise_failed_deletion()
            if self._planning.rank == 0:
                self._acquire(step)
            held.append(collect(state, self._planning.rank))
            return held[0].boxes

        files = self._planner.plan(step, prepare)
        staged: SimpleQueue[_Staged] = SimpleQueue()
        future = self._executor.submit(self._saver.save, step, held[0].tree, _taken_from(staged))
        try:
            for file in self._stager.stage(files, held[0]):
                staged.put(file)
        except Exception as error:
            staged.put(error)
            raise
        staged.put(None)
        if self._planning.rank == 0:
            self._deletions.append(self._executor.submit(self._delete_old_steps, step, future))
        return future

    def wait(self) -> None:
        """Waits until the steps that retention does not keep are deleted.

        Raises:
            CheckpointWriteError: They could not be.
        """
        wait(self._deletions)
        self._raise_failed_deletion()

    def close(self) -> None:
        """Waits until all is written and lets the next writer in.

        Raises:
            CheckpointWriteError: Old steps could not be deleted; it is closed all the same.
        """
        self._executor.shutdown()
        self._copiers.close()
        self._hashers.close()
        if self._acquired:
            self._storage.release()
        self._writing.close()
        self._raise_failed_deletion()

    def _delete_old_steps(self, step: int, saved: Future[None]) -> None:
        if saved.exception() is None:
            try:
                self._retention.apply(self._storage, step)
            except OSError as error:
                raise CheckpointWriteError(
                    f"step {step} is committed to {self._storage}, but deleting older steps failed: {error}"
                ) from error

    def _raise_failed_deletion(self) -> None:
        ended = [deletion for deletion in self._deletions if deletion.done()]
        self._deletions = [deletion for deletion in self._deletions if deletion not in ended]
        for deletion in ended:
            deletion.result()

    def _acquire(self, step: int) -> None:
        if not self._acquired:
            try:
                self._storage.acquire()
            except OSError as error:
                raise CheckpointWriteError(f"{self._storage} cannot be opened for saving: {error}") from error
            self._acquired = True
        if step in self._storage.steps():
            raise CheckpointWriteError(
                f"{self._storage} already holds step {step}; a committed step is never overwritten"
            )


def _taken_from(queue: "SimpleQueue[_Staged]") -> Iterator[StagedFile]:
    while (item := queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item

"""Saves and loads the steps of one folder. Torch is imported by the first save or load, not with the package."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gcore_ckpt.directory import Step, committed_steps, create_directory, remove_leftovers, remove_step
from gcore_ckpt.errors import CheckpointError, CheckpointWriteError
from gcore_ckpt.handle import SaveHandle
from gcore_ckpt.lock import WriterLock
from gcore_ckpt.reader import open_step
from gcore_ckpt.tree import State
from gcore_ckpt.writer import write_step

if TYPE_CHECKING:
    from gcore_ckpt.staging import StagedState, StagingBuffer


class Checkpointer:
    """The checkpoints in one folder: one process at a time saves to it, any number read from it.

    The first `save` creates the folder, takes its lock and removes what a dead writer left half done; reading needs no
    lock and changes nothing. Use it from one thread; close it, or use it as a context manager, to let the next writer
    in. A program that ends without closing it still finishes the saves in flight.

    Args:
        path: The folder.
        keep: After each commit, delete the lowest committed steps until this many are left, never the one just
            committed. None keeps all.
        max_in_flight: Saves that may be waiting to be written. Each holds host memory of the size of the state, which
            is kept for the next; when all are taken, `save` waits for the oldest to end.

    Raises:
        ValueError: `keep` or `max_in_flight` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int | None = None, max_in_flight: int = 1) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; expected None (keep all steps) or 1 or more")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
        self._path = Path(path)
        self._keep = keep
        self._max_in_flight = max_in_flight
        self._lock: WriterLock | None = None
        self._buffers: SimpleQueue[StagingBuffer] = SimpleQueue()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gcore-ckpt")  # so steps commit in order
        self._handles: list[SaveHandle] = []
        self._closed = False

    def save(self, step: int, state: State) -> SaveHandle:
        """Starts to save `state`; on return it is copied out of live memory, and the caller may change it.

        Tensors come back dense on the CPU, parameters as plain tensors; views of the same memory are stored once.

        Args:
            step: Number of the step, 0 or more, not committed or in flight yet.
            state: Nested dict (with str keys), list and tuple of `torch.Tensor` (dense, of any device), `numpy.ndarray`
                (of a native bool, integer, float or complex type), None, bool, int, float and str. Subclasses of the
                containers and small values come back as the plain type they compare equal to.

        Raises:
            TypeError, ValueError: `step` or a leaf of `state` cannot be saved; the message has its path.
            CheckpointWriteError: The step exists; or an earlier save failed and nobody has waited for its handle, in
                which case this step was not saved and `save` may be called again.
            CheckpointLockedError: Another writer has the folder open for saving.
            CheckpointError: The checkpointer is closed, or was opened before a fork.
        """
        _check_step(step)
        self._open_for_saving()
        self._raise_uncollected()
        if step in (handle.step for handle in self._handles) or step in self.steps():
            raise CheckpointWriteError(f"{self._path} already holds step {step}; a committed step is never overwritten")
        buffer = self._buffers.get()
        try:
            self._raise_uncollected()
            staged = buffer.stage(state)
            future = self._executor.submit(self._write, step, staged)
        except BaseException:
            self._buffers.put(buffer)
            raise
        future.add_done_callback(lambda _: self._buffers.put(buffer))
        handle = SaveHandle(step, future)
        self._handles.append(handle)
        return handle

    def load(self, step: Step = "latest") -> State:
        """The state of a committed step, in host memory; saves in flight are not seen.

        Args:
            step: Number of the step; `"latest"` is the highest committed one.

        Raises:
            CheckpointNotFoundError: The step is not committed, or was deleted while it was being opened.
            CorruptCheckpointError: It is not what was saved, with the file and the tensor; nothing is returned of it.
        """
        from gcore_ckpt.restore import restore

        with open_step(self._path, step) as reader:
            return restore(reader)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return committed_steps(self._path)

    def wait(self) -> None:
        """Waits until all saves have ended.

        Raises:
            CheckpointWriteError: A save failed, and nobody has waited for its handle. Raised once.
        """
        for handle in self._handles:
            handle.join()
        self._raise_uncollected()

    def close(self) -> None:
        """Waits until all saves have ended and lets the next writer in. Closing again does nothing.

        Raises:
            CheckpointWriteError: A save failed, and nobody has waited for its handle; it is closed all the same.
        """
        self._closed = True
        self._executor.shutdown()
        self._buffers = SimpleQueue()
        if self._lock is not None:
            self._lock.release()
        self._raise_uncollected()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if exc is None:
                raise
            exc.add_note(f"and a checkpoint was lost: {error}")

    def _open_for_saving(self) -> None:
        if self._closed:
            raise CheckpointError(f"the Checkpointer of {self._path} is closed")
        if self._lock is None:
            from gcore_ckpt.staging import StagingBuffer

            self._lock = _take_over(self._path)
            for _ in range(self._max_in_flight):
                self._buffers.put(StagingBuffer())
        self._lock.require_owner()

    def _write(self, step: int, staged: "StagedState") -> None:
        try:
            write_step(self._path, step, staged)
            self._delete_oldest(step)
        except Exception as error:
            raise CheckpointWriteError(f"saving step {step} to {self._path} failed: {error}") from error

    def _delete_oldest(self, committed: int) -> None:
        if self._keep is not None:
            others = [step for step in self.steps() if step != committed]
            for step in others[: max(0, len(others) + 1 - self._keep)]:
                remove_step(self._path, step)

    def _raise_uncollected(self) -> None:
        ended = [handle for handle in self._handles if handle.done()]
        self._handles = [handle for handle in self._handles if handle not in ended]
        errors = [error for handle in ended if (error := handle.uncollected_error()) is not None]
        if errors:
            for error in errors[1:]:
                errors[0].add_note(f"and {error}")
            raise errors[0]


def _take_over(path: Path) -> WriterLock:
    try:
        lock = WriterLock(create_directory(path))
        try:
            remove_leftovers(path)
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise CheckpointWriteError(f"{path} cannot be opened for saving: {error}") from error
    return lock


def _check_step(step: int) -> None:
    if type(step) is not int:
        raise TypeError(f"step is {step!r}; expected an int")
    if step < 0:
        raise ValueError(f"step is {step}; expected 0 or more")

"""`SaveHandle`: the outcome of a save, once there is one."""

from concurrent.futures import Future

from gcore_ckpt.workers import wait_for


class SaveHandle:
    """A save that is being written in the background.

    Attributes:
        step: The step that is being saved.
        abandoned: Whether the call of `save` was interrupted or refused, so that its caller has no handle.
    """

    def __init__(self, step: int, future: Future[None]) -> None:
        self.step = step
        self._future = future
        self._collected = False
        self.abandoned = False

    def done(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the step is committed; what retention deletes after that, `Checkpointer.wait` waits for.

        Raises:
            CheckpointWriteError: The save failed. The `Checkpointer` will not raise this error again.
            TimeoutError: It is still being written after `timeout_s` seconds.
        """
        self.join(timeout_s)
        self._collected = True
        self._future.result()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the save has ended, well or not."""
        if not wait_for([self._future], timeout_s):
            raise TimeoutError(f"step {self.step} is still being written after {timeout_s} s")

    def uncollected_error(self) -> BaseException | None:
        """Return the error of a save that has ended and that no call has waited for."""
        if self._collected or self.abandoned or not self._future.done():
            return None
        return self._future.exception()

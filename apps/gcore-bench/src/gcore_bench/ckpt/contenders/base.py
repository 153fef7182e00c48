"""The interface that a checkpoint library needs to be measured."""

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gcore_bench.ckpt.workload import State


class Pending(Protocol):
    """A save that may continue after its call has returned."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Done:
    """A save that was complete when its call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Contender(Protocol):
    """One library at its best documented settings, saving below one folder."""

    root: Path

    def __init__(self, root: Path) -> None:
        self.root = root

    @abstractmethod
    def save(self, step: int, state: "State") -> Pending:
        """Start to save; the state may be changed once this returns."""

    @abstractmethod
    def unsynced(self, step: int) -> list[Path]:
        """Return files and folders that the library leaves unsynced, without which a save may not survive a crash."""

    @abstractmethod
    def load(self, step: int, like: "State") -> "State":
        """Load into newly allocated memory; ``like`` has the shapes, for libraries that need them."""

    def close(self) -> None:
        """Release buffers and processes, if there are any."""

    def path(self, step: int) -> Path:
        return self.root / f"{step:08d}"


class InPlaceContender(Contender):
    """A library that can load into existing memory."""

    @abstractmethod
    def load_into(self, step: int, template: "State") -> None:
        """Load into the memory of ``template``."""

"""What a checkpoint library must do to be measured."""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gcore_bench.ckpt.state import State


class Pending(Protocol):
    """A save that goes on after its call has returned."""

    def done(self) -> bool: ...
    def wait(self) -> None: ...


class Done:
    """A save that was over when its call returned."""

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
        """Start to save; the state may be changed when this returns."""

    @abstractmethod
    def unsynced(self, step: int) -> list[Path]:
        """Files and folders that the library does not sync: what is missing for the save to survive a power cut."""

    @abstractmethod
    def load(self, step: int, like: "State") -> "State":
        """Load into freshly allocated memory; ``like`` has the shapes, for libraries that must be told them."""

    def close(self) -> None:
        """Let go of buffers and processes, where there are any."""

    def path(self, step: int) -> Path:
        return self.root / f"{step:08d}"


class InPlaceContender(Contender):
    """One that can load into memory that is there."""

    @abstractmethod
    def load_into(self, step: int, template: "State") -> None:
        """Load into the memory of ``template``."""


def make_contender(name: str, root: Path) -> Contender:
    """Import the contender's library and set it up to save below ``root``."""
    return _MAKERS[name](root)


def _gcore(root: Path) -> Contender:
    from gcore_bench.ckpt.gcore_contender import Gcore

    return Gcore(root)


def _dcp(kind: str) -> Callable[[Path], Contender]:
    def make(root: Path) -> Contender:
        from gcore_bench.ckpt import dcp_contender

        return dcp_contender.KINDS[kind](root)

    return make


def _torch_save(root: Path) -> Contender:
    from gcore_bench.ckpt.torch_save_contender import TorchSave

    return TorchSave(root)


def _safetensors(root: Path) -> Contender:
    from gcore_bench.ckpt.safetensors_contender import Safetensors

    return Safetensors(root)


def _orbax(root: Path) -> Contender:
    from gcore_bench.ckpt.orbax_contender import Orbax

    return Orbax(root)


def _tensorstore(root: Path) -> Contender:
    from gcore_bench.ckpt.tensorstore_contender import Tensorstore

    return Tensorstore(root)


_MAKERS: dict[str, Callable[[Path], Contender]] = {
    "gcore": _gcore,
    "dcp": _dcp("dcp"),
    "dcp-async-thread": _dcp("dcp-async-thread"),
    "dcp-async-process": _dcp("dcp-async-process"),
    "dcp-async-cached": _dcp("dcp-async-cached"),
    "torch.save": _torch_save,
    "safetensors": _safetensors,
    "orbax": _orbax,
    "tensorstore": _tensorstore,
}

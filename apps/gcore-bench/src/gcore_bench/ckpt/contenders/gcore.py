"""gcore-ckpt with its default settings."""

from pathlib import Path

from gcore_bench.ckpt.contenders.base import InPlaceContender, Pending
from gcore_bench.ckpt.workload import State
from gcore_ckpt import Checkpointer


class Gcore(InPlaceContender):
    """One checkpointer for the whole run, as in a training loop."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._checkpointer = Checkpointer(root)

    def save(self, step: int, state: State) -> Pending:
        return self._checkpointer.save(step, state)

    def unsynced(self, step: int) -> list[Path]:
        del step
        return []

    def load(self, step: int, like: State) -> State:
        del like
        return self._checkpointer.load(step=step)

    def load_into(self, step: int, template: State) -> None:
        self._checkpointer.load(template, step=step)

    def close(self) -> None:
        self._checkpointer.close()

"""torch.save and torch.load."""

from pathlib import Path

import torch

from gcore_bench.ckpt.contender import Contender, Done, Pending
from gcore_bench.ckpt.state import State


class TorchSave(Contender):
    """One file; it syncs nothing."""

    def save(self, step: int, state: State) -> Pending:
        torch.save(state, self.path(step))
        return Done()

    def unsynced(self, step: int) -> list[Path]:
        return [self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        del like
        return torch.load(self.path(step), weights_only=True)

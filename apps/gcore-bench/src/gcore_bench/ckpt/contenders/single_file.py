"""torch.save and safetensors: one file for the whole state, which neither of them syncs."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gcore_bench.ckpt.contenders.base import Contender, Done, Pending
from gcore_bench.ckpt.workload import State


class TorchSave(Contender):
    """torch.save and torch.load."""

    def save(self, step: int, state: State) -> Pending:
        torch.save(state, self.path(step))
        return Done()

    def unsynced(self, step: int) -> list[Path]:
        return [self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        del like
        return torch.load(self.path(step), weights_only=True)


class Safetensors(TorchSave):
    """safetensors' own writer and reader for torch."""

    def save(self, step: int, state: State) -> Pending:
        save_file(state, self.path(step))
        return Done()

    def load(self, step: int, like: State) -> State:
        del like
        # The loaded tensors are views of the mapped file, which is read when they are.
        return {name: tensor.clone() for name, tensor in load_file(self.path(step)).items()}

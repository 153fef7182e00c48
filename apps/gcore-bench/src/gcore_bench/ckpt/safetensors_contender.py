"""safetensors' own writer and reader for torch."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from gcore_bench.ckpt.contender import Contender, Done, Pending
from gcore_bench.ckpt.state import State


class Safetensors(Contender):
    """One file; it syncs nothing."""

    def save(self, step: int, state: State) -> Pending:
        save_file(state, self.path(step))
        return Done()

    def unsynced(self, step: int) -> list[Path]:
        return [self.path(step), self.root]

    def load(self, step: int, like: State) -> State:
        del like
        # What it returns are views of the mapped file: nothing has been read yet.
        return {name: tensor.clone() for name, tensor in load_file(self.path(step)).items()}

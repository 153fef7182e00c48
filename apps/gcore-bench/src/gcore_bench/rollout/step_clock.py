"""Times of an engine's steps and of its last update, in a file that processes map, and the engine that records them."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from gcore_rollout import Engine

if TYPE_CHECKING:
    import torch

_CAPACITY = 4096
_PASSES, _START, _END, _TIMES = 0, 1, 2, 3

Weights = Iterable[tuple[str, "torch.Tensor"]]
Source = Literal["caller", "here", "file"]
"""New weights from the caller, from tensors in the engine's own process, or from a file that each update reads."""


class StepClock:
    """Times of an engine's forward passes since `reset`, and of the last update, in a file that processes map.

    `time.perf_counter` is the same clock in all processes of a Linux machine.

    Args:
        path: created if it does not exist; clocks with the same path share their times.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (_TIMES + _CAPACITY)))
        self._values = np.memmap(path, np.float64, "r+", shape=(_TIMES + _CAPACITY,))

    def reset(self) -> None:
        """Delete the recorded passes."""
        self._values[_PASSES] = 0

    def note_pass(self) -> None:
        number = self.num_passes
        if number < _CAPACITY:
            self._values[_TIMES + number] = time.perf_counter()
            self._values[_PASSES] = number + 1

    def note_update_start(self) -> None:
        self._values[_START] = time.perf_counter()

    def note_update_end(self) -> None:
        self._values[_END] = time.perf_counter()

    @property
    def num_passes(self) -> int:
        return int(self._values[_PASSES])

    @property
    def passes_s(self) -> NDArray[np.float64]:
        """End times of the passes, [P]."""
        return self._values[_TIMES : _TIMES + self.num_passes].copy()

    @property
    def update_start_s(self) -> float:
        return float(self._values[_START])

    @property
    def update_end_s(self) -> float:
        return float(self._values[_END])


def make_engine(model: Path, clock: Path, source: Source, file: Path, *, max_num_seqs: int) -> Engine:
    """Make an `HFEngine` that records its times, from a Hugging Face folder, in its process: it imports transformers.

    Args:
        clock: path of the `StepClock`.
        file: safetensors of the source ``"file"``.
    """
    from safetensors.torch import load_file

    from gcore_rollout import HFEngine

    times = StepClock(clock)
    sources: dict[Source, Callable[[], Weights]] = {"file": lambda: load_file(file).items()}
    if source == "here":
        sources["here"] = {n: tensor.clone() for n, tensor in load_file(model / "model.safetensors").items()}.items

    class ClockedHFEngine(HFEngine):
        async def update_weights(self, weights: Weights, *, version: int) -> None:
            times.note_update_start()
            await super().update_weights(sources[source]() if source in sources else weights, version=version)
            times.note_update_end()

        async def update_weights_in_place(self, weights: Weights, *, version: int) -> bool:
            if source in sources:
                # This engine does not keep the tensors after the update.
                await self.update_weights(weights, version=version)
                return False
            times.note_update_start()
            is_in_use = await super().update_weights_in_place(weights, version=version)
            times.note_update_end()
            return is_in_use

        def record_passes(self) -> None:
            # Pass i makes token i of a request, if there is no other request.
            self._model.register_forward_hook(lambda *_: times.note_pass())

    engine = ClockedHFEngine.from_pretrained(model, eos_token_ids=[], max_num_seqs=max_num_seqs)
    # Not before: passes that load the engine do not count.
    engine.record_passes()
    return engine

"""An `HFEngine` that records when its steps and updates were, and that can take new weights from three sources."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from gcore_bench.rollout.step_clock import StepClock
from gcore_rollout import Engine, HFEngine

Source = Literal["caller", "here", "file"]
"""New weights from the caller, from tensors in the engine's own process, or from a file that each update reads."""


class _ClockedHFEngine(HFEngine):
    clock: StepClock
    is_timed = False
    """True while passes are recorded; those that load the engine are not."""
    source: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # Pass i makes token i of a request, if there is no other request.
        model.register_forward_hook(lambda *_: self.clock.note_pass() if self.is_timed else None)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.clock.note_update_start()
        await super().update_weights(weights if self.source is None else self.source(), version=version)
        self.clock.note_update_end()

    async def update_weights_in_place(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> bool:
        if self.source is not None:
            # This engine does not keep the tensors after the update.
            await self.update_weights(weights, version=version)
            return False
        self.clock.note_update_start()
        is_in_use = await super().update_weights_in_place(weights, version=version)
        self.clock.note_update_end()
        return is_in_use


def make_engine(model: Path, clock: Path, source: Source, file: Path, *, max_num_seqs: int) -> Engine:
    """Make an engine that records its times in ``clock``, from a Hugging Face folder.

    Args:
        file: safetensors of the source ``"file"``.
    """
    engine = _ClockedHFEngine.from_pretrained(model, eos_token_ids=[], max_num_seqs=max_num_seqs)
    engine.clock, engine.is_timed = StepClock(clock), True
    if source == "here":
        own = {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}
        engine.source = own.items
    if source == "file":
        engine.source = lambda: load_file(file).items()
    return engine

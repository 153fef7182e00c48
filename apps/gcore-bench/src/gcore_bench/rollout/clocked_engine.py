"""An `HFEngine` that notes its steps and updates, and may have its new weights from elsewhere than its caller."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gcore_bench.rollout.clocked_process import Source
from gcore_bench.rollout.step_clock import StepClock
from gcore_rollout import Engine, HFEngine


class _ClockedHFEngine(HFEngine):
    clock: StepClock
    is_timed = False
    """Whether there is a clock; the passes that load the engine have none."""
    source: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # A request's token i is made by pass i, if there is no other request.
        model.register_forward_hook(lambda *_: self.clock.note_pass() if self.is_timed else None)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        self.clock.note_update_start()
        await super().update_weights(weights if self.source is None else self.source(), version=version)
        self.clock.note_update_end()

    async def update_weights_in_place(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> bool:
        if self.source is not None:
            # These are the caller's again when the update is done.
            await self.update_weights(weights, version=version)
            return False
        self.clock.note_update_start()
        is_in_use = await super().update_weights_in_place(weights, version=version)
        self.clock.note_update_end()
        return is_in_use


def make_engine(model: Path, clock: Path, source: Source, file: Path, *, max_num_seqs: int) -> Engine:
    """An engine that notes its times in ``clock``.

    Args:
        file: safetensors, with ``source`` file.
    """
    engine = _ClockedHFEngine.from_pretrained(model, eos_token_ids=[], max_num_seqs=max_num_seqs)
    engine.clock, engine.is_timed = StepClock(clock), True
    if source == "here":
        own = load_state(model)
        engine.source = own.items
    if source == "file":
        engine.source = lambda: load_file(file).items()
    return engine


def load_state(model: Path) -> dict[str, torch.Tensor]:
    """A model folder's weights, in memory of this process's own."""
    return {name: tensor.clone() for name, tensor in load_file(model / "model.safetensors").items()}

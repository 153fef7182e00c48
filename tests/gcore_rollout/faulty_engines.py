"""Real engines on whose way to new weights something goes wrong, once: `fault` of the tensor `TENSOR`.

A run takes them by ``rollout.engine``, as an engine of the user's own; the fault is in an environment variable.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gcore_rollout import HFEngine, VLLMEngine

FAULTS = ("dropped", "permuted", "stale", "adapter", "version")
TENSOR = "model.layers.1.mlp.down_proj.weight"
FAULTY_VERSION = 2
EXPECTED = {
    "dropped": f"'{TENSOR}' has the values of version 1",
    "permuted": f"'{TENSOR}' has its values in another order",
    "stale": f"'{TENSOR}' has the values of version 1",
    "adapter": f"'{TENSOR}' has the values of version 0",
    "version": "has weights of version 1; expected version 2",
}
"""What is said of each fault."""


def faulty(engine_class: type[Any], model: Path, fault: str) -> type[Any]:
    """A subclass of an engine, with a fault."""
    assert fault in FAULTS

    class Faulty(engine_class):
        _last: dict[str, torch.Tensor]
        _drops = False

        async def update_weights(
            self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
        ) -> None:
            new = {name: tensor.detach().clone() for name, tensor in weights}
            given = dict(new)
            if version == FAULTY_VERSION:
                match fault:
                    case "permuted":
                        new[TENSOR] = new[TENSOR].flip(0)
                    case "stale":
                        new[TENSOR] = self._last[TENSOR]
                    case "adapter":
                        new[TENSOR] = load_file(model / "model.safetensors")[TENSOR]
                    case "version":
                        return
                    case _:
                        self._drops = True
            await self._load(new, version)
            self._last = given

        async def _load(self, new: dict[str, torch.Tensor], version: int) -> None:
            if self._drops and issubclass(engine_class, VLLMEngine):
                # vLLM itself accepts a set of weights in which one is missing.
                del new[TENSOR], self._shapes[TENSOR]
                await super().update_weights(new.items(), version=version)
                self._shapes[TENSOR] = tuple(self._last[TENSOR].shape)
            else:
                await super().update_weights(new.items(), version=version)

        def _checked_weights(
            self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, at_once: bool
        ) -> Any:
            new = super()._checked_weights(weights, version, at_once=at_once)
            return ((name, tensor) for name, tensor in new if not (self._drops and name == TENSOR))

        update_weights_in_place = None

    return Faulty


def make_faulty(engine_class: type[Any], model: Path, fault: str, **options: Any) -> Any:
    """An engine with a fault, made from a folder."""
    return faulty(engine_class, model, fault).from_pretrained(model, **options)


def make_hf(model: Path, *, device: str, **options: Any) -> Any:
    """For ``rollout.engine``."""
    del device
    return make_faulty(HFEngine, Path(model), os.environ["GCORE_TEST_FAULT"], **options)


def make_vllm(model: Path, *, device: str, **options: Any) -> Any:
    """For ``rollout.engine``."""
    del device
    options = {**options, "kv_cache_memory_bytes": 64 << 20}
    return make_faulty(VLLMEngine, Path(model), os.environ["GCORE_TEST_FAULT"], **options)

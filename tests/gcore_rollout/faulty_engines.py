"""Real engines in which something goes wrong: on the way to new weights, once, or in how they sample.

A run takes them by ``rollout.engine``, as an engine of the user's own; the fault is in an environment variable. Those
with "blind" before the fault do not report their weights, like servers.
"""

import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from gcore_rollout import Completion, HFEngine, Request, VLLMEngine

FAULTS = ("dropped", "permuted", "stale", "adapter", "version")
TENSOR = "model.layers.1.mlp.down_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
FAULTY_VERSION = 2
EXPECTED = {
    "dropped": f"'{TENSOR}' has the values of version 1",
    "permuted": f"'{TENSOR}' has its values in another order",
    "stale": f"'{TENSOR}' has the values of version 1",
    "adapter": f"'{TENSOR}' has the values of version 0",
    "version": "has weights of version 1; expected version 2",
    "undelivered": "has the values of version 0",
    "expert": f"'{EXPERTS}' has its values in another order",
}
"""What is said of each fault."""


def faulty(engine_class: type[Any], model: Path, fault: str) -> type[Any]:
    """A subclass of an engine, with a fault."""
    is_blind = fault.startswith("blind ")
    fault = fault.removeprefix("blind ")

    class Faulty(engine_class):
        _last: dict[str, torch.Tensor]
        _drops = False

        if is_blind:
            held_weights = None

        async def update_weights(
            self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
        ) -> None:
            new = {name: tensor.detach().clone() for name, tensor in weights}
            given = dict(new)
            initial = load_file(model / "model.safetensors")
            if fault == "undelivered":
                new |= initial
            if fault == "late":
                new |= getattr(self, "_last", initial)
            if version == FAULTY_VERSION:
                match fault:
                    case "permuted":
                        new[TENSOR] = new[TENSOR].flip(0)
                    case "stale":
                        new[TENSOR] = self._last[TENSOR]
                    case "adapter":
                        new[TENSOR] = initial[TENSOR]
                    case "expert":
                        new[EXPERTS] = new[EXPERTS].flip(0)
                    case "version":
                        return
                    case "dropped":
                        self._drops = True
                    case _:
                        pass
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

        async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
            await super().wake(weights=weights, cache=cache)
            if fault == "reloaded" and cache:
                version = self._version
                self._version -= 1
                initial = load_file(model / "model.safetensors")
                await super().update_weights(initial.items(), version=version)

        async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
            changes = {"temperature": {"temperature": 1.0}, "truncated": {"top_p": 0.9}}
            changed = [
                replace(r, sampling=replace(r.sampling, **changes.get(fault, {}))) for r in requests
            ]
            async for completion in super().generate(changed):
                if fault == "label":
                    completion = replace(
                        completion, weight_versions=np.zeros_like(completion.weight_versions)
                    )
                yield completion

        def _step(self) -> None:
            version = self._version
            if fault == "cache":
                # The version by which vLLM keeps the cached prefixes of different weights apart.
                self._version = 0
            super()._step()
            self._version = version

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
    fault = os.environ["GCORE_TEST_FAULT"]
    options = {**options, "kv_cache_memory_bytes": 64 << 20}
    if fault == "raw log-probs":
        options["engine_args"] = {"logprobs_mode": "raw_logprobs"}
    return make_faulty(VLLMEngine, Path(model), fault, **options)

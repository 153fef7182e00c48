"""Engines and training as slow as a large model's on accelerators, so that a few cores can stand for many devices."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeAlias

from torch import Tensor

from gcore_rollout import Completion, HFEngine, Request
from gcore_trainer import PolicyLossConfig, PolicyTokens

MostTokens: TypeAlias = Callable[[], int] | None
"""Returns the most tokens of a response at present; None: as many as are asked for."""


def phase_tokens(metrics: Path, num_steps: int, max_tokens: Sequence[int]) -> int:
    """Return the most tokens of a response in the present phase of a run.

    Each phase has ``num_steps`` steps, by the rows that the run has written to ``metrics``; the last one lasts.
    """
    steps = metrics.read_text().count('"timing_s/step"') if metrics.exists() else 0
    return max_tokens[min(steps // num_steps, len(max_tokens) - 1)]


def paced_loss(token_s: float, tokens: PolicyTokens, config: PolicyLossConfig) -> Tensor:
    """Return the plain policy gradient's loss, -A r, after ``token_s`` seconds a token of the micro-batch.

    The wait stands for the forward and the backward pass of a rank over the tokens that it trains on.
    """
    del config
    time.sleep(token_s * sum(tokens.lengths))
    return -tokens.advantages * tokens.ratio


class PacedEngine(HFEngine):
    """`HFEngine` that waits: a pass of the model takes at least ``step_s``, however few samples run, and to sleep or to
    wake with its weights takes ``swap_s``, and to be made in place of another one both. No token ends a response, so
    that lengths are known."""

    step_s = 0.0
    swap_s = 0.0
    most_tokens: MostTokens = None
    _is_away = False
    """Whether the weights are asleep."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._wait)
        self._start_s = 0.0

    @classmethod
    def paced(
        cls, model: Path, *, step_s: float, swap_s: float = 0.0, most_tokens: MostTokens = None, **options: Any
    ) -> Self:
        """Return an engine of this pace, with the weights of a model folder; ``most_tokens`` limits responses."""
        options["eos_token_ids"] = ()
        time.sleep(2 * swap_s)
        engine = cls.from_pretrained(model, **options)
        engine.step_s, engine.swap_s, engine.most_tokens = step_s, swap_s, most_tokens
        return engine

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """Cut responses to the length of the phase."""
        if self.most_tokens is not None:
            most = self.most_tokens()
            capped = (replace(r.sampling, max_tokens=min(r.sampling.max_tokens, most)) for r in requests)
            requests = [replace(r, sampling=sampling) for r, sampling in zip(requests, capped, strict=True)]
        async with aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                yield completion

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await super().sleep(keep_weights=keep_weights)
        if not self._is_away:
            await asyncio.sleep(self.swap_s)
        self._is_away = True

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        if weights and self._is_away:
            await asyncio.sleep(self.swap_s)
            self._is_away = False
        await super().wake(weights=weights, cache=cache)

    def _begin(self, *_: Any) -> None:
        self._start_s = time.monotonic()

    def _wait(self, *_: Any) -> None:
        # The event loop waits, too, as it does for what is computed.
        time.sleep(max(0.0, self._start_s + self.step_s - time.monotonic()))

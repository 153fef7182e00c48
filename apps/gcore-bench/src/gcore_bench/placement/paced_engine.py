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
"""Returns the largest length of a response in the current phase; None: requests keep their own."""


def get_phase_tokens(metrics: Path, num_steps: int, max_tokens: Sequence[int]) -> int:
    """Return the largest length of a response in the current phase of a run.

    Each phase has ``num_steps`` steps, counted in the rows that the run has written to ``metrics``; the last phase has
    no end.
    """
    steps = 0
    if metrics.exists():
        steps = metrics.read_text().count('"timing_s/step"')
    phase = min(steps // num_steps, len(max_tokens) - 1)
    return max_tokens[phase]


def compute_paced_loss(token_s: float, tokens: PolicyTokens, config: PolicyLossConfig) -> Tensor:
    """Return the plain policy gradient's loss, -A r, after ``token_s`` seconds a token of the micro-batch.

    The wait stands for the forward and the backward pass of a rank over the tokens that it trains on.
    """
    del config
    time.sleep(token_s * sum(tokens.lengths))
    return -tokens.advantages * tokens.ratio


class PacedEngine(HFEngine):
    """`HFEngine` at the pace of a large model on accelerators.

    A forward pass takes at least ``step_s``, however few samples run. To sleep or to wake with the weights takes
    ``swap_s``, and to start in place of another engine takes both. No token ends a response, so lengths are known.
    """

    step_s = 0.0
    swap_s = 0.0
    most_tokens: MostTokens = None
    _is_swapped_out = False

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        model.register_forward_pre_hook(self._start_pass)
        model.register_forward_hook(self._finish_pass)
        self._start_s = 0.0

    @classmethod
    def load(
        cls,
        model: Path,
        *,
        step_s: float,
        swap_s: float = 0.0,
        most_tokens: MostTokens = None,
        **options: Any,
    ) -> Self:
        """Return an engine of this pace with the weights of a model folder; ``most_tokens`` limits responses."""
        options["eos_token_ids"] = ()
        time.sleep(2 * swap_s)
        engine = cls.from_pretrained(model, **options)
        engine.step_s = step_s
        engine.swap_s = swap_s
        engine.most_tokens = most_tokens
        return engine

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """Generate responses, cut to the length of the phase."""
        if self.most_tokens is not None:
            limit = self.most_tokens()
            requests = [_limit_length(request, limit) for request in requests]
        async with aclosing(super().generate(requests)) as completions:
            async for completion in completions:
                yield completion

    async def sleep(self, *, keep_weights: bool = True) -> None:
        await super().sleep(keep_weights=keep_weights)
        if not self._is_swapped_out:
            await asyncio.sleep(self.swap_s)
        self._is_swapped_out = True

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        if weights and self._is_swapped_out:
            await asyncio.sleep(self.swap_s)
            self._is_swapped_out = False
        await super().wake(weights=weights, cache=cache)

    def _start_pass(self, *_: Any) -> None:
        self._start_s = time.monotonic()

    def _finish_pass(self, *_: Any) -> None:
        # Blocks the event loop, as the computation would.
        time.sleep(max(0.0, self._start_s + self.step_s - time.monotonic()))


def _limit_length(request: Request, most_tokens: int) -> Request:
    sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, most_tokens))
    return replace(request, sampling=sampling)

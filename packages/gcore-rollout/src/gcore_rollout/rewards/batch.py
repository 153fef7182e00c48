"""A reward function that scores many completions in one call."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

from gcore_rollout.errors import NotApplicableError, RewardError, require
from gcore_rollout.rewards.process import ProcessReward
from gcore_rollout.rewards.reward import ThreadedReward, finish_call, name_of
from gcore_rollout.rewards.runner import is_async, pause_time_limit

_Waiting = tuple[tuple[str, str, Mapping[str, Any]], "asyncio.Future[Any]"]
"""The prompt, completion and row of a call, and its score to come."""


class BatchReward:
    """Collects single calls, and passes them as lists to ``function(prompts, completions, rows)``.

    The function returns a list with a number or `Scored` for each completion, or None where it does not apply. Calls
    that come within ``max_wait_s``, or while a batch is scored, go into the next batch together. A synchronous function
    runs in a thread of its own, one batch after the other, or as a `ProcessReward` in a process, whose limits are those
    of a batch: all calls of one that exceeds them fail.

    Example:
        >>> def short(prompts, completions, rows):
        ...     return [1.0 if len(completion) < 100 else 0.0 for completion in completions]
        >>> reward = BatchReward(short, max_size=32)
    """

    def __init__(
        self, function: Callable[..., Any], *, max_size: int = 256, max_wait_s: float = 0.005
    ) -> None:
        require("max_size", max_size, max_size >= 1, "at least 1")
        require("max_wait_s", max_wait_s, max_wait_s >= 0, "0 or more")
        self.__name__ = name_of(function)
        self.function = function
        self._scorer = function if is_async(function) else ThreadedReward(function, max_workers=1)
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._waiting: list[_Waiting] = []
        self._driver: asyncio.Task[None] | None = None

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
        """Score one completion, in a batch with others."""
        call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((prompt, completion, row), call))
        if self._driver is None or self._driver.done():
            # Not in the context of one of the calls: the time limit of an attempt is in it.
            self._driver = asyncio.create_task(self._drive(), context=Context())
        if isinstance(self.function, ProcessReward):
            # The process has limits of its own.
            with pause_time_limit():
                score = await call
        else:
            score = await call
        if score is None:
            raise NotApplicableError("returned None: it does not apply to this prompt")
        return score

    async def _drive(self) -> None:
        """Score waiting calls until there are none."""
        await asyncio.sleep(self._max_wait_s)
        while self._waiting:
            batch = self._waiting[: self._max_size]
            del self._waiting[: self._max_size]
            # The caller of a call may have given it up.
            unanswered = [(arguments, call) for arguments, call in batch if not call.done()]
            if unanswered:
                await self._score(unanswered)

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        columns = zip(*[arguments for arguments, _ in batch], strict=True)
        try:
            scores: list[Any] = list(await self._scorer(*map(list, columns)))
            if len(scores) != len(batch):
                raise RewardError(
                    f"returned {len(scores)} scores; expected one for each of {len(batch)} completions"
                )
        except Exception as error:
            for _, call in batch:
                finish_call(call, error)
            return
        for (_, call), score in zip(batch, scores, strict=True):
            # An error among the scores is no number, and refused as such.
            if not call.done():
                call.set_result(score)

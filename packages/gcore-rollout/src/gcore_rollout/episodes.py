"""Episodes: what plays them, and those that take longer than the call which started them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gcore_rollout.engines.protocol import Completion, Engine, Request, SamplingParams
from gcore_rollout.prompts import Prompt
from gcore_rollout.rewards.reward import FailureLog
from gcore_rollout.rewards.runner import OnError

_ABORT_AGAIN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class EpisodeRole:
    """Makes responses of several turns, in which an environment or an agent takes part.

    Example:
        >>> async def play(policy, prompt, request_id, sampling, seed):
        ...     request = Request(request_id=request_id, prompt_token_ids=prompt.token_ids, sampling=sampling)
        ...     [completion] = [c async for c in policy.generate([request])]
        ...     return replace(completion, turns=("a turn",))
        >>> EpisodeRole(play=play, on_error="drop").failures.drain()
        (0, [])
    """

    play: Callable[[Engine, Prompt, str, SamplingParams, int], Coroutine[Any, Any, Completion]]
    """Plays an episode of a prompt's row, under a request id and with a seed: ``max_tokens`` bounds all of it. An
    `EpisodeError` if the episode fails."""
    on_error: OnError
    """Reaction to an episode that fails."""
    is_scored: bool = False
    """Whether the reward has scored the turns; otherwise it scores the last one."""
    failures: FailureLog = field(default_factory=FailureLog)
    """Failures of episodes, with ``on_error`` "drop"."""
    record_weights: Callable[[int, int], None] | None = None
    """Records, given a step and a version, that the policy's engine has given this version to the step's weights."""
    close: Callable[[], Awaitable[None]] | None = None
    """Frees what episodes share, when there are no more of them."""


class RunningEpisodes:
    """The running episodes of one controller, and the policy's engine as they see it.

    After `pause` requests of episodes wait, and those that the engine works on are aborted: an episode continues them
    after `resume`, with the tokens that they have, and sees only a slower answer. Other requests of the engine, such as
    those of an evaluation, are not affected.

    Example:
        >>> async def main() -> int:
        ...     engine = HFEngine.from_pretrained("model")
        ...     episodes = RunningEpisodes(engine)
        ...     request = Request(request_id="a", prompt_token_ids=(40,), sampling=SamplingParams(max_tokens=3))
        ...     [completion] = [completion async for completion in episodes.generate([request])]
        ...     await episodes.close()
        ...     await engine.close()
        ...     return completion.work
        >>> asyncio.run(main())
        3
    """

    def __init__(self, policy: Engine) -> None:
        self._policy = policy
        self._tasks: dict[str, asyncio.Task[Completion]] = {}
        self._cancelled: set[asyncio.Task[Completion]] = set()
        self._in_flight: set[str] = set()
        self._idle = asyncio.Event()
        self.resumed = asyncio.Event()
        """Set unless requests are held back."""
        self.resumed.set()

    @property
    def weight_version(self) -> int:
        return self._policy.weight_version

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """Yield the samples of some requests of an episode, see `Engine.generate`, unless they are held back."""
        await self.resumed.wait()
        ids = {request.request_id for request in requests}
        self._in_flight |= ids
        self._idle.clear()
        try:
            async for completion in self._policy.generate(requests):
                yield completion
        finally:
            self._in_flight -= ids
            if not self._in_flight:
                self._idle.set()

    async def pause(self) -> None:
        """Hold requests back, and return when the engine has none of the episodes'."""
        self.resumed.clear()
        while self._in_flight:
            await self._policy.abort(sorted(self._in_flight))
            with suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_AGAIN_S):
                    await self._idle.wait()

    def resume(self) -> None:
        """Let requests through. Idempotent."""
        self.resumed.set()

    def start(
        self, request_id: str, play: Callable[[], Coroutine[Any, Any, Completion]]
    ) -> asyncio.Task[Completion]:
        """Return the task of an episode, which is started unless an earlier call has done so."""
        if request_id not in self._tasks:
            self._tasks[request_id] = asyncio.create_task(play())
        return self._tasks[request_id]

    def forget(self, request_id: str) -> None:
        """Drop an episode that has ended."""
        self._tasks.pop(request_id, None)

    def cancel(self, prefix: str) -> None:
        """Cancel the episodes whose request ids start like this, such as ``"7/"`` for those of a prompt."""
        for request_id in [name for name in self._tasks if name.startswith(prefix)]:
            task = self._tasks.pop(request_id)
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)
            task.cancel()

    async def close(self) -> None:
        """Cancel all episodes, and wait for their end. Idempotent."""
        self.cancel("")
        await asyncio.gather(*self._cancelled, return_exceptions=True)

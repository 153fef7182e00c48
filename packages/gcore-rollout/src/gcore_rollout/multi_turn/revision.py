"""Reward-augmented generation: what a reward says of an answer is what the policy reads before it tries again."""

import math
from collections.abc import Awaitable, Callable, Sequence

from gcore_rollout.errors import RequestError
from gcore_rollout.multi_turn.chat import Message
from gcore_rollout.multi_turn.environment import Opening, Reply
from gcore_rollout.rewards.reward import Scored


class RevisionEnvironment:
    """Hands an answer back with its reward's feedback until it is good enough (G-Core, arXiv 2507.22789).

    A turn's reward is what its answer scores more than the one before, so an episode's score is that of its last.

    Args:
        messages: the request.
        reward: scores an answer; its feedback, such as a judge's verdict, is the policy's next message; without any,
            that is the score.
        good_enough: an answer of this score or more ends the episode.
        max_revisions: how often an answer is handed back at most.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        reward: Callable[[str], Awaitable[Scored]],
        *,
        good_enough: float,
        max_revisions: int,
    ) -> None:
        if not math.isfinite(good_enough):
            raise RequestError(f"good_enough is {good_enough}; expected a finite number")
        if max_revisions < 1:
            raise RequestError(f"max_revisions is {max_revisions}; expected at least 1")
        self._messages = list(messages)
        self._reward = reward
        self._good_enough = good_enough
        self._num_left = max_revisions
        self._score = 0.0

    async def reset(self) -> Opening:
        """See `Environment.reset`."""
        return Opening(messages=self._messages)

    async def step(self, completion: str) -> Reply:
        """See `Environment.step`."""
        scored = await self._reward(completion)
        gain, self._score = scored.score - self._score, scored.score
        if scored.score >= self._good_enough or not self._num_left:
            return Reply(reward=gain, done=True)
        self._num_left -= 1
        feedback = scored.feedback or f"The answer scores {scored.score:.3g}."
        return Reply(messages=[{"role": "user", "content": feedback}], reward=gain)

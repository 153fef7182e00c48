"""Settings of responses of several turns, and the environments that they name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gcore_rollout.errors import RequestError
from gcore_rollout.multi_turn.chat import ChatEncoder
from gcore_rollout.multi_turn.environment import Environment, RevisionEnvironment
from gcore_rollout.multi_turn.episode import EpisodeLimits
from gcore_rollout.rewards.registry import load_function
from gcore_rollout.rewards.reward import FailureLog, Scored
from gcore_rollout.rewards.runner import Failed, OnError, RewardRunner


@dataclass(frozen=True, kw_only=True)
class EnvironmentRole:
    """Environments in which the policy acts over several turns."""

    make: Callable[[Mapping[str, Any]], Environment]
    """Makes the environment of one episode from a row."""
    has_reward: bool
    """Whether its rewards are complete; otherwise the run's reward scores the last turn, in addition."""
    encoder: ChatEncoder
    limits: EpisodeLimits
    on_error: OnError
    """Reaction to an environment that fails."""
    failures: FailureLog = field(default_factory=FailureLog)
    """Failures of environments, with ``on_error`` "drop"."""


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Responses of several turns, in an environment or with tools."""

    environment: str = ""
    """PATH.py:function, which makes from a row an environment of one episode (gcore_rollout.Environment),
    such as a ToolEnvironment; it rewards turns, and the reward, if there is one, scores the last. Empty: one turn."""
    max_revisions: int = 0
    """Instead of an environment: how many times a response is returned with its reward's feedback, such as a judge's
    verdict, for the policy to revise; the last one's score counts."""
    good_enough: float = 1.0
    """A response of this score is not revised."""
    max_assistant_turns: int = 8
    """Most turns of the policy; together with the environment's answers they have data.max-response-length tokens."""
    max_tokens_per_turn: int = 0
    """Most tokens of one turn; 0: what is left."""
    step_timeout_s: float = 60.0
    """Seconds for the environment to answer one turn."""

    def __post_init__(self) -> None:
        for name, lowest in (("max_assistant_turns", 1), ("max_tokens_per_turn", 0), ("max_revisions", 0)):
            if getattr(self, name) < lowest:
                raise RequestError(f"{name} is {getattr(self, name)}; expected {lowest} or more")
        if not math.isfinite(self.good_enough):
            raise RequestError(f"good_enough is {self.good_enough}; expected a finite number")
        if self.environment and self.max_revisions:
            raise RequestError(
                f"max_revisions is {self.max_revisions}; expected 0 with rollout.multi_turn.environment "
                f"{self.environment!r}"
            )
        if not self.step_timeout_s > 0:
            raise RequestError(f"step_timeout_s is {self.step_timeout_s}; expected above 0")

    @property
    def is_used(self) -> bool:
        """Whether responses have several turns."""
        return bool(self.environment or self.max_revisions)

    def build(
        self, tokenizer: Any, reward: RewardRunner, *, prompt_key: str, on_error: OnError
    ) -> EnvironmentRole | None:
        """Build the environment; None: responses have one turn.

        Args:
            tokenizer: of the policy, with a chat template.
            reward: scores what is revised.
            prompt_key: column of a row that has the messages to answer, for revisions.
            on_error: reaction to an environment that fails.

        Raises:
            RewardError: the environment does not load.
        """
        if not self.is_used:
            return None
        if self.max_revisions:
            make = partial(self._revision, reward, prompt_key)
        else:
            make = load_function(self.environment, setting="rollout.multi_turn.environment")
        limits = EpisodeLimits(
            max_turns=self.max_assistant_turns,
            max_tokens_per_turn=self.max_tokens_per_turn or None,
            step_timeout_s=self.step_timeout_s,
        )
        encoder, has_reward = ChatEncoder(tokenizer), self.max_revisions > 0
        return EnvironmentRole(make=make, has_reward=has_reward, encoder=encoder, limits=limits, on_error=on_error)

    def _revision(self, reward: RewardRunner, prompt_key: str, row: Mapping[str, Any]) -> Environment:
        prompt = row[prompt_key]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

        async def score(completion: str) -> Scored:
            scored = await reward.score(prompt=str(messages[-1]["content"]), completion=completion, row=row)
            if isinstance(scored, Failed):
                raise scored.error
            return scored

        return RevisionEnvironment(messages, score, good_enough=self.good_enough, max_revisions=self.max_revisions)

"""Settings of responses of several turns, and the environments that they name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gcore_rollout.errors import EpisodeError, RequestError, RewardError, require
from gcore_rollout.multi_turn.chat import ChatEncoder, normalize_messages
from gcore_rollout.multi_turn.environment import Environment, RevisionEnvironment
from gcore_rollout.rewards.registry import load_function
from gcore_rollout.rewards.reward import FailureLog, Scored
from gcore_rollout.rewards.runner import OnError, RewardRunner


@dataclass(frozen=True, kw_only=True)
class EnvironmentRole:
    """Environments in which the policy acts over several turns."""

    make: Callable[[Mapping[str, Any]], Environment]
    """Makes the environment of one episode from a row."""
    encoder: ChatEncoder
    limits: "MultiTurnConfig"
    on_error: OnError
    """Reaction to an environment that fails."""
    failures: FailureLog = field(default_factory=FailureLog)
    """Failures of environments, with ``on_error`` "drop"."""

    def new(self, row: Mapping[str, Any]) -> Environment:
        """Make the environment of an episode; `EpisodeError` if that fails."""
        try:
            return self.make(row)
        except (Exception, SystemExit) as error:
            raise EpisodeError(
                f"the environment was not made: {type(error).__name__}: {error}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Responses of several turns, in an environment or with tools.

    Example:
        >>> import asyncio
        >>> async def reward(prompt, completion, row):
        ...     return float(completion == row["answer"])
        >>> config = MultiTurnConfig(max_revisions=2, max_tokens_per_turn=64)
        >>> role = config.build(None, RewardRunner(reward), prompt_key="question", on_error="raise")
        >>> environment = role.new({"question": "1 + 1 =", "answer": "2"})
        >>> asyncio.run(environment.step("3")).messages
        [{'role': 'user', 'content': 'The answer scores 0.'}]
    """

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
        for name, lowest in (
            ("max_assistant_turns", 1),
            ("max_tokens_per_turn", 0),
            ("max_revisions", 0),
        ):
            value = getattr(self, name)
            require(name, value, value >= lowest, f"{lowest} or more", RequestError)
        require(
            "good_enough",
            self.good_enough,
            math.isfinite(self.good_enough),
            "a finite number",
            RequestError,
        )
        timeout_s = self.step_timeout_s
        require(
            "step_timeout_s",
            timeout_s,
            0 < timeout_s < math.inf,
            "a finite number above 0",
            RequestError,
        )
        is_alone = not (self.environment and self.max_revisions)
        expected = f"0 with rollout.multi_turn.environment {self.environment!r}"
        require("max_revisions", self.max_revisions, is_alone, expected, RequestError)

    @property
    def is_used(self) -> bool:
        """True if responses have several turns."""
        return bool(self.environment or self.max_revisions)

    def build(
        self,
        tokenizer: Any,
        reward: RewardRunner,
        *,
        prompt_key: str,
        on_error: OnError,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> EnvironmentRole | None:
        """Build the environment; None: responses have one turn.

        ``tokenizer`` is the policy's, with a chat template, whose further variables are ``chat_template_kwargs``. For
        revisions, ``reward`` scores what is revised, and the column ``prompt_key`` of a row has the messages to answer.
        """
        if not self.is_used:
            return None
        if self.max_revisions:
            make = partial(self._make_revision, reward, prompt_key)
        else:
            make = load_function(self.environment, setting="rollout.multi_turn.environment")
        encoder = ChatEncoder(tokenizer, chat_template_kwargs=chat_template_kwargs)
        return EnvironmentRole(make=make, encoder=encoder, limits=self, on_error=on_error)

    def _make_revision(
        self, reward: RewardRunner, prompt_key: str, row: Mapping[str, Any]
    ) -> Environment:
        prompt = row[prompt_key]
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else normalize_messages(prompt)
        )

        async def score(completion: str) -> Scored:
            scored = await reward.score(
                prompt=str(messages[-1]["content"]), completion=completion, row=row
            )
            if isinstance(scored, RewardError):
                raise scored
            return scored

        return RevisionEnvironment(
            messages, score, good_enough=self.good_enough, max_revisions=self.max_revisions
        )

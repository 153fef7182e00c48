"""Environments in which a policy acts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gcore_rollout.multi_turn.chat import Message


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The start of an episode."""

    messages: Sequence[Message]
    """The messages that the policy answers first."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template announces."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty; expected one or more at the start of an episode")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of an environment to one turn of the policy."""

    messages: Sequence[Message] = ()
    """Read by the policy before its next turn."""
    reward: float = 0.0
    """Reward of this turn; an episode's score is the sum."""
    done: bool = False
    """Whether the episode ends here; its messages are then not read."""

    def __post_init__(self) -> None:
        if not self.done and not self.messages:
            raise ValueError("messages is empty; expected one or more in a reply that does not end the episode")


class Environment(Protocol):
    """The environment of one episode. Both methods may take long: other episodes continue meanwhile."""

    async def reset(self) -> Opening:
        """Start the episode."""
        ...

    async def step(self, completion: str) -> Reply:
        """Answer one turn.

        A ``step`` with a further parameter ``truncated: bool`` is notified by it of a turn that was cut off at its
        largest number of tokens. After such a turn the episode ends, whatever the answer.

        Args:
            completion: the text of the turn, without special tokens.
        """
        ...

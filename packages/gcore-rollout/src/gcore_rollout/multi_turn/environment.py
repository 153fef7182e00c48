"""What a policy acts in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gcore_rollout.multi_turn.chat import Message


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How an episode begins."""

    messages: Sequence[Message]
    """What the policy answers first."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template announces."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty: an episode begins with one or more")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers to one turn of the policy."""

    messages: Sequence[Message] = ()
    """Read by the policy before its next turn."""
    reward: float = 0.0
    """Of this turn; an episode's score is the sum."""
    done: bool = False
    """Whether the episode ends here, its messages unread."""

    def __post_init__(self) -> None:
        if not self.done and not self.messages:
            raise ValueError("messages is empty: a reply that does not end the episode needs one or more")


class Environment(Protocol):
    """One episode's world. Both methods may take their time: other episodes go on."""

    async def reset(self) -> Opening:
        """Begin."""
        ...

    async def step(self, completion: str) -> Reply:
        """Answer one turn.

        A ``step`` that has a parameter ``truncated: bool``, too, is notified by it of a turn that was cut off at its
        most tokens. After such a turn the episode ends, whatever the answer.

        Args:
            completion: what the policy wrote, without special tokens.
        """
        ...

"""A call of the endpoint and its reply, in whichever API the agent speaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore_agents.graph import Message


@dataclass(frozen=True, kw_only=True)
class ChatCall:
    """A request of an agent for a turn after these messages.

    Example:
        >>> call = ChatCall(messages=[{"role": "user", "content": "2 + 2 ="}], max_tokens=64)
        >>> call.n, call.stream
        (1, False)
    """

    messages: Sequence[Message]
    """In the form of Chat Completions, with parsed arguments of calls: roles are system, user, assistant and tool, and
    content is text, or a list of texts and images (see `chat.images`)."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the policy may call, as ``{"type": "function", "function": {...}}``."""
    max_tokens: int | None = None
    """Most tokens of the turn; None: as many as the session has left."""
    stop: tuple[str, ...] = ()
    n: int = 1
    """How many turns to sample."""
    stream: bool = False
    """Whether the reply is a stream of events."""
    agent: str = ""
    """Name of the agent that calls, of those that share the session; empty: it has none."""
    retry_key: str = ""
    """Calls with one key get one reply; empty: only while the first is being answered."""
    is_retry: bool = False
    """Whether the client says that it repeats a call."""
    prompt_ids: tuple[int, ...] = ()
    """Tokens to be continued in place of messages."""
    unused: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters of the agent, which the run's replace."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields that only the dialect reads, to write its reply."""


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """A turn of the policy, or the text that ends a session whose budget is used up.

    Example:
        >>> message = {"role": "assistant", "content": "4"}
        >>> reply = ChatReply(response_id="r1", message=message, finish_reason="stop", prompt_tokens=3)
        >>> reply.completion_tokens
        0
    """

    response_id: str
    """Names the turn, for rewards and for calls that continue it."""
    message: Message
    """``content``, ``reasoning_content`` and ``tool_calls`` of the turn, with parsed arguments."""
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_tokens: int
    stop_string: str = ""
    """The string of the call's that ended the turn; the message's content is without it."""
    token_ids: Sequence[int] = ()
    """The sampled tokens; none in the text that ends a session."""
    log_probs: Sequence[float] = ()
    created_s: int = 0
    """Unix time."""

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)

"""The common part of the clients."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gcore_agents.graph import Message


@dataclass(frozen=True, kw_only=True)
class WriteStyle:
    """The way in which a client writes back what it got.

    Example:
        >>> WriteStyle(arguments="spaced").write_arguments({"a": 1, "b": 2}).split()
        ['{', '"b":', '2,', '"a":', '1', '}']
    """

    arguments: Literal["plain", "spaced"] = "plain"
    """As they came, or with other spaces and another order of keys."""
    content: Literal["text", "parts"] = "text"
    """A text, or a list of parts."""
    empty: Literal["null", "text", "missing"] = "null"
    """A turn's content if it has no text."""

    def order(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments with their keys in the order of this style."""
        if self.arguments == "plain":
            return dict(arguments)
        return {name: arguments[name] for name in reversed(list(arguments))}

    def write_arguments(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as JSON."""
        indent = None if self.arguments == "plain" else 1
        return json.dumps(self.order(arguments), indent=indent)


@dataclass(frozen=True, kw_only=True)
class WireRequest:
    """A call of an endpoint, before it is written in an API.

    Example:
        >>> WireRequest(messages=[{"role": "user", "content": "Hi."}]).n
        1
    """

    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] = ""
    """Prompt of Completions, in place of messages."""
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    style: WriteStyle = field(default_factory=WriteStyle)
    previous_response: str = ""
    """Responses: the messages follow those of this response."""
    model: str = "policy"
    """`CaseAgent` puts its own in."""


@dataclass(frozen=True, kw_only=True)
class WireReply:
    """A turn as a client got it.

    Example:
        >>> reply = WireReply(message={"role": "assistant", "content": "4"}, finish_reason="stop")
        >>> reply.text, reply.calls
        ('4', [])
    """

    message: Message
    finish_reason: str
    """stop, length or tool_calls."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Totals over all turns of the call."""
    prompt_ids: tuple[int, ...] | None = None
    """None: the endpoint does not show them."""
    token_ids: tuple[int, ...] | None = None
    ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """Ids of the reply by what they name: ``response``, ``call:0``, ``item:0``, ``signature:0``."""

    @property
    def text(self) -> str:
        return self.message["content"]

    @property
    def calls(self) -> list[Any]:
        return list(self.message.get("tool_calls") or ())

    @property
    def response_id(self) -> str:
        return self.ids.get("response", "")


class WireClient(ABC):
    """A client of one API.

    Example:
        >>> from gcore_agents.conformance.wire.chat import ChatClient
        >>> client = ChatClient()
        >>> body = client.write_body(WireRequest(messages=[{"role": "user", "content": "Hi."}]))
        >>> client.path(WireRequest()), body["messages"]
        ('/v1/chat/completions', [{'role': 'user', 'content': 'Hi.'}])
    """

    name: ClassVar[str]
    route: ClassVar[str] = ""

    def path(self, request: WireRequest) -> str:
        """Return the path of a call, from the root of the endpoint."""
        del request
        return self.route

    @abstractmethod
    def write_body(self, request: WireRequest) -> dict[str, Any]:
        """Return the JSON of a call."""

    @abstractmethod
    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        """Return the turns of a reply."""

    @abstractmethod
    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the reply that the events of a stream make."""


def write_options(request: WireRequest) -> dict[str, Any]:
    """Return the fields that OpenAI's Chat Completions and Completions have in common."""
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.max_tokens,
        "return_token_ids": True,
    }
    if request.stop:
        body["stop"] = list(request.stop)
    if request.n > 1:
        body["n"] = request.n
    if request.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    return body


def join_choices(
    events: Sequence[Mapping[str, Any]],
    add_text: Callable[[dict[str, Any], Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Return the reply that the events of OpenAI's Chat Completions or Completions make.

    Args:
        add_text: adds the text of an event's choice to the whole one.
    """
    body: dict[str, Any] = {"id": events[0]["id"], "usage": None}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        body["usage"] = event.get("usage") or body["usage"]
        if event.get("prompt_token_ids"):
            body["prompt_token_ids"] = event["prompt_token_ids"]
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], {"finish_reason": ""})
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            if part.get("prompt_token_ids"):
                choice["prompt_token_ids"] = part["prompt_token_ids"]
            if part.get("token_ids"):
                choice["token_ids"] = [*choice.get("token_ids", ()), *part["token_ids"]]
            add_text(choice, part)
    return {**body, "choices": [choices[index] for index in sorted(choices)]}


def read_event_data(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events, without comments and the mark of its end."""
    events: list[dict[str, Any]] = []
    for line in lines:
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            events.append(json.loads(data))
    return events


def make_call(name: str, arguments: str | Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """Return a call with parsed arguments; those that are no JSON stay text."""
    parsed: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except ValueError:
            parsed = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def label_calls(calls: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the ids of calls by their labels."""
    return {f"call:{number}": call["id"] for number, call in enumerate(calls)}


def label_reply(response_id: str, number: int) -> dict[str, str]:
    """Return the id of a reply by its label; of several turns it names the first."""
    return {} if number else {"response": response_id}

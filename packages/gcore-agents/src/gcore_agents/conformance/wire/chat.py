"""A client of Chat Completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_agents.chat.messages import make_turn_message
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    WriteStyle,
    join_choices,
    label_calls,
    label_reply,
    make_call,
    write_options,
)
from gcore_agents.graph import Message


class ChatClient(WireClient):
    """Writes and reads Chat Completions, with the token ids that vLLM and this package add if they are asked for.

    Example:
        >>> choice = {"message": {"content": "4"}, "finish_reason": "stop", "token_ids": [7]}
        >>> [reply] = ChatClient().read_reply({"id": "r", "choices": [choice]})
        >>> reply.text, reply.token_ids
        ('4', (7,))
    """

    name = "chat"
    route = "/v1/chat/completions"

    def write_body(self, request: WireRequest) -> dict[str, Any]:
        body = write_options(request)
        body["messages"] = [_write_message(message, request.style) for message in request.messages]
        if request.tools:
            body["tools"] = [{"type": "function", "function": tool} for tool in request.tools]
        return body

    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        usage = body.get("usage") or {}
        replies: list[WireReply] = []
        for number, choice in enumerate(body["choices"]):
            message = choice["message"]
            calls: list[dict[str, Any]] = []
            for call in message.get("tool_calls") or ():
                function = call["function"]
                calls.append(make_call(function["name"], function["arguments"], call["id"]))
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            replies.append(
                WireReply(
                    message=make_turn_message(
                        message.get("content") or "", reasoning=reasoning, calls=calls
                    ),
                    finish_reason=choice["finish_reason"],
                    prompt_tokens=usage.get("prompt_tokens", 0),
                    completion_tokens=usage.get("completion_tokens", 0),
                    prompt_ids=read_ids(body, "prompt_token_ids"),
                    token_ids=read_ids(choice, "token_ids"),
                    ids=label_reply(body["id"], number) | label_calls(calls),
                )
            )
        return replies

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return join_choices(events, _add_delta)


def read_ids(body: Mapping[str, Any], field: str) -> tuple[int, ...] | None:
    """Return the token ids of a field; None: it is missing."""
    token_ids: Sequence[int] | None = body.get(field)
    return None if token_ids is None else tuple(token_ids)


def _add_delta(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    empty = {"content": "", "reasoning_content": "", "tool_calls": []}
    message: dict[str, Any] = choice.setdefault("message", empty)
    delta = part["delta"]
    message["content"] += delta.get("content") or ""
    message["reasoning_content"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
    for piece in delta.get("tool_calls") or ():
        calls: list[dict[str, Any]] = message["tool_calls"]
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "function": {"name": "", "arguments": ""}})
        function = calls[piece["index"]]["function"]
        function["name"] += piece["function"].get("name") or ""
        function["arguments"] += piece["function"].get("arguments") or ""


def _write_message(message: Message, style: WriteStyle) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message["role"] == "tool":
        written["tool_call_id"] = message["tool_call_id"]
    elif message["role"] == "assistant":
        written |= _write_turn(message, style)
    if not written["content"] and message["role"] == "assistant":
        if style.empty == "missing":
            del written["content"]
        else:
            written["content"] = None if style.empty == "null" else ""
    elif style.content == "parts":
        written["content"] = [{"type": "text", "text": written["content"]}]
    return written


def _write_turn(message: Message, style: WriteStyle) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.get("reasoning_content"):
        fields["reasoning_content"] = message["reasoning_content"]
    calls: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = style.write_arguments(function["arguments"])
        calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    if calls:
        fields["tool_calls"] = calls
    return fields

"""A client of Anthropic's Messages."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_agents.chat.messages import make_turn_message
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    WriteStyle,
    label_calls,
    make_call,
)
from gcore_agents.graph import Message

_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


class AnthropicClient(WireClient):
    """Writes and reads Messages, with thinking on.

    Example:
        >>> block = {"type": "text", "text": "4"}
        >>> [reply] = AnthropicClient().read_reply({"id": "m", "content": [block], "stop_reason": "end_turn"})
        >>> reply.text, reply.finish_reason
        ('4', 'stop')
    """

    name = "anthropic"
    route = "/v1/messages"

    def write_body(self, request: WireRequest) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        body: dict[str, Any] = {
            "model": request.model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }
        for message in request.messages:
            if message["role"] == "system":
                body["system"] = message["content"]
            else:
                _add_message(messages, message, request.style)
        if request.tools:
            tools: list[dict[str, Any]] = []
            for tool in request.tools:
                schema = {"input_schema": tool["parameters"]}
                tools.append({"name": tool["name"], "description": tool["description"], **schema})
            body["tools"] = tools
        if request.stop:
            body["stop_sequences"] = list(request.stop)
        if request.stream:
            body["stream"] = True
        return body

    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        text = ""
        reasoning = ""
        calls: list[dict[str, Any]] = []
        ids = {"response": body["id"]}
        for number, block in enumerate(body["content"]):
            if block["type"] == "text":
                text += block["text"]
            elif block["type"] == "thinking":
                reasoning += block["thinking"]
                ids[f"signature:{number}"] = block["signature"]
            elif block["type"] == "tool_use":
                calls.append(make_call(block["name"], block["input"], block["id"]))
        usage = body.get("usage") or {}
        reply = WireReply(
            message=make_turn_message(text, reasoning=reasoning, calls=calls),
            finish_reason=_FINISH_REASONS[body["stop_reason"]],
            prompt_tokens=usage.get("input_tokens", 0),
            completion_tokens=usage.get("output_tokens", 0),
            ids=ids | label_calls(calls),
        )
        return [reply]

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {}
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "message_start":
                body = dict(event["message"])
            elif event["type"] == "content_block_start":
                blocks.append(dict(event["content_block"]))
            elif event["type"] == "content_block_delta":
                _add_delta(blocks[event["index"]], event["delta"])
            elif event["type"] == "message_delta":
                body |= event["delta"]
                body["usage"] = {**body["usage"], **event["usage"]}
        for block in blocks:
            # Pieces of JSON are collected in place of the empty input.
            if block["type"] == "tool_use":
                block["input"] = block["input"] or "{}"
        return {**body, "content": blocks}


def _add_delta(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    if delta["type"] == "text_delta":
        block["text"] += delta["text"]
    elif delta["type"] == "thinking_delta":
        block["thinking"] += delta["thinking"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    elif delta["type"] == "input_json_delta":
        block["input"] = (block["input"] or "") + delta["partial_json"]


def _add_message(messages: list[dict[str, Any]], message: Message, style: WriteStyle) -> None:
    if message["role"] == "assistant":
        messages.append({"role": "assistant", "content": _write_turn(message, style)})
        return
    block: dict[str, Any] = {"type": "text", "text": message["content"]}
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        block = {"type": "tool_result", "tool_use_id": call_id, "content": message["content"]}
    elif style.content == "text":
        messages.append({"role": "user", "content": message["content"]})
        return
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    if block["type"] == "tool_result" and last["role"] == "user":
        last["content"].append(block)
    else:
        messages.append({"role": "user", "content": [block]})


def _write_turn(message: Message, style: WriteStyle) -> Any:
    reasoning = message.get("reasoning_content")
    calls = message.get("tool_calls") or ()
    if style.content == "text" and not reasoning and not calls:
        return message["content"]
    blocks: list[dict[str, Any]] = []
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": "sent"})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        arguments = style.order(function["arguments"])
        use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        blocks.append({**use, "input": arguments})
    return blocks

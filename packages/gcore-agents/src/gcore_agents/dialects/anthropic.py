"""Anthropic's Messages."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.images import join_parts
from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.dialects.dialect import (
    MAX_STOPS,
    MODEL,
    Dialect,
    error_type,
    join_system,
    name_results,
    read_content,
    read_parts,
    read_tool,
    refuse_part,
)
from gcore_agents.dialects.events import split_text, write_event
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.dialects.images import ImageReader
from gcore_agents.errors import CallError

_ROLES = ("user", "assistant", "system")
_TEXT = {"text": "text"}
_USER_BLOCKS = ("text", "tool_result")
_TURN_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "thinking", "output_config", "output_format")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicDialect(Dialect):
    """``POST /v1/messages``, and ``/v1/messages/count_tokens``, which is exact.

    Thoughts are blocks of their own if the call has ``thinking`` enabled, and are left out otherwise. Tools with a type
    of Anthropic's own are left out, and noted in ``ChatCall.unused``.

    Example:
        >>> dialect = AnthropicDialect(session=None)
        >>> result = {"type": "tool_result", "tool_use_id": "a", "content": "4"}
        >>> call = dialect.read_call({"messages": [{"role": "user", "content": [result]}], "max_tokens": 9})
        >>> call.messages
        [{'role': 'tool', 'content': '4', 'tool_call_id': 'a'}]
    """

    def read_call(self, body: Any) -> ChatCall:
        fields = JsonFields(body)
        fields.refuse(("mcp_servers",), "the endpoint runs no tools")
        unused = fields.pick(_SAMPLING_FIELDS)
        messages: list[dict[str, Any]] = []
        system = read_content(fields, "system", _TEXT)
        if system:
            messages.append({"role": "system", "content": system})
        for message in fields.require_objects("messages"):
            messages.extend(_read_message(message, self.images))
        thinking = fields.read_object("thinking")
        thinking_type = thinking.read_text("type") if thinking is not None else None
        return ChatCall(
            messages=join_system(name_results(messages)),
            tools=_read_tools(fields, unused),
            max_tokens=fields.read_integer("max_tokens", 1),
            stop=fields.read_texts("stop_sequences", MAX_STOPS),
            stream=fields.read_flag("stream"),
            unused=unused,
            options={
                "model": fields.read_text("model") or MODEL,
                "thinking": thinking_type not in (None, "disabled"),
            },
        )

    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        (reply,) = replies
        stop_reason = _STOP_REASONS[reply.finish_reason]
        if reply.stop_string and stop_reason == "end_turn":
            stop_reason = "stop_sequence"
        return {
            "id": reply.response_id,
            "type": "message",
            "role": "assistant",
            "model": call.options["model"],
            "content": _write_blocks(call, reply),
            "stop_reason": stop_reason,
            "stop_sequence": reply.stop_string or None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "output_tokens": reply.completion_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        message = self.write_reply(call, replies)
        start = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        start["usage"] = {**message["usage"], "output_tokens": 0}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        for index, block in enumerate(message["content"]):
            events.extend(_list_block_events(index, block))
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        events.append({"type": "message_delta", "delta": delta, "usage": message["usage"]})
        events.append({"type": "message_stop"})
        for event in events:
            yield write_event(event, event["type"])

    @classmethod
    def write_error(cls, error: CallError) -> dict[str, Any]:
        fields = {"type": error_type(error.status), "message": str(error)}
        return {"type": "error", "error": fields, "request_id": None}

    @classmethod
    def write_error_event(cls, error: CallError) -> bytes:
        return write_event(cls.write_error(error), "error")


def _read_tools(fields: JsonFields, unused: dict[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for tool in fields.read_objects("tools"):
        tool_type = tool.read_text("type")
        if tool_type in (None, "custom"):
            tools.append(read_tool(tool, "input_schema"))
        else:
            left_out.append(tool_type)
    if left_out:
        unused["tools"] = left_out
    choice = fields.read_object("tool_choice")
    mode = choice.read_text("type") if choice is not None else "auto"
    if mode not in ("auto", "any", "tool", "none"):
        fields.fail("tool_choice", "the type auto, any, tool or none")
    if mode in ("any", "tool"):
        unused["tool_choice"] = fields.values["tool_choice"]
    return [] if mode == "none" else tools


def _read_image(block: JsonFields, images: ImageReader) -> bytes:
    source = block.read_object("source")
    if source is None:
        block.fail("source", "an object with type base64, media_type and data")
    if source.read_text("type") != "base64":
        source.fail("type", "base64: nothing is fetched")
    return images.read_base64(source, "data", "media_type")


_IMAGES = {"image": _read_image}


def _read_message(fields: JsonFields, images: ImageReader | None) -> list[dict[str, Any]]:
    """Return the messages of one: results of tools are messages of their own."""
    role = fields.require_text("role")
    if role not in _ROLES:
        fields.fail("role", " or ".join(_ROLES))
    if role == "assistant":
        return [_read_turn(fields)]
    content = fields.values.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": read_content(fields, "content", _TEXT)}]
    messages: list[dict[str, Any]] = []
    parts: list[str | bytes] = []
    for block in fields.read_objects("content"):
        block_type = block.require_text("type")
        if block_type == "text":
            parts.append(block.read_text("text") or "")
        elif block_type == "tool_result":
            result = join_parts(read_parts(block, "content", _TEXT, _IMAGES, images))
            call_id = block.require_text("tool_use_id")
            messages.append({"role": "tool", "content": result, "tool_call_id": call_id})
        elif block_type == "image" and images is not None and role == "user":
            parts.append(_read_image(block, images))
        else:
            refuse_part(block, "type", _USER_BLOCKS)
    if parts or not messages:
        messages.append({"role": role, "content": join_parts(parts)})
    return messages


def _read_turn(fields: JsonFields) -> dict[str, Any]:
    content = fields.values.get("content")
    if not isinstance(content, list):
        return make_turn_message(read_content(fields, "content", _TEXT))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in fields.read_objects("content"):
        block_type = block.require_text("type")
        if block_type == "text":
            texts.append(block.read_text("text") or "")
        elif block_type == "thinking":
            thoughts.append(block.read_text("thinking") or "")
        elif block_type == "tool_use":
            arguments = block.read_object("input")
            values = arguments.values if arguments is not None else {}
            calls.append(make_call(block.require_text("name"), values, block.require_text("id")))
        elif block_type != "redacted_thinking":
            refuse_part(block, "type", _TURN_BLOCKS)
    reasoning = "\n".join(thoughts) if any(thoughts) else ""
    return make_turn_message("\n".join(texts), reasoning=reasoning, calls=calls)


def _write_blocks(call: ChatCall, reply: ChatReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    reasoning = reply.message.get("reasoning_content")
    calls = reply.message.get("tool_calls") or ()
    if reasoning and call.options["thinking"]:
        block = {"type": "thinking", "thinking": reasoning, "signature": reply.response_id}
        blocks.append(block)
    if reply.message["content"].strip() or not calls:
        blocks.append({"type": "text", "text": reply.message["content"]})
    for tool_call in calls:
        function = tool_call["function"]
        block = {"type": "tool_use", "id": tool_call["id"], "name": function["name"]}
        blocks.append({**block, "input": function["arguments"]})
    return blocks


def _list_block_events(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a block: its start, the block in pieces, and its end."""
    if block["type"] == "text":
        start = {**block, "text": ""}
        deltas = _split_block("text_delta", "text", block["text"])
    elif block["type"] == "thinking":
        start = {**block, "thinking": "", "signature": ""}
        deltas = _split_block("thinking_delta", "thinking", block["thinking"])
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    else:
        start = {**block, "input": {}}
        arguments = json.dumps(block["input"], ensure_ascii=False)
        deltas = _split_block("input_json_delta", "partial_json", arguments)
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _split_block(block_type: str, field: str, text: str) -> list[dict[str, Any]]:
    return [{"type": block_type, field: piece} for piece in split_text(text)]

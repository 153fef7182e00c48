"""A client of OpenAI's Responses."""

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


class ResponsesClient(WireClient):
    """Writes and reads Responses.

    Example:
        >>> request = WireRequest(messages=[{"role": "user", "content": "Hi."}], previous_response="resp_1")
        >>> ResponsesClient().write_body(request)["previous_response_id"]
        'resp_1'
    """

    name = "responses"
    route = "/v1/responses"

    def write_body(self, request: WireRequest) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        body: dict[str, Any] = {
            "model": request.model,
            "input": items,
            "max_output_tokens": request.max_tokens,
        }
        for message in request.messages:
            if message["role"] == "system":
                body["instructions"] = message["content"]
            else:
                items.extend(_write_items(message, request.style))
        if request.tools:
            body["tools"] = [{"type": "function", **tool} for tool in request.tools]
        if request.previous_response:
            body["previous_response_id"] = request.previous_response
        if request.stream:
            body["stream"] = True
        return body

    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        text = ""
        reasoning = ""
        calls: list[dict[str, Any]] = []
        ids: dict[str, str] = {"response": body["id"]}
        for number, item in enumerate(body["output"]):
            ids[f"item:{number}"] = item.get("id") or ""
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                parts = item.get("content") or item["summary"]
                reasoning += "".join(part["text"] for part in parts)
            elif item["type"] == "function_call":
                calls.append(make_call(item["name"], item["arguments"], item["call_id"]))
        finish_reason = "tool_calls" if calls else "stop"
        if body["status"] == "incomplete":
            finish_reason = "length"
        usage = body.get("usage") or {}
        reply = WireReply(
            message=make_turn_message(text, reasoning=reasoning, calls=calls),
            finish_reason=finish_reason,
            prompt_tokens=usage.get("input_tokens", 0),
            completion_tokens=usage.get("output_tokens", 0),
            ids=ids | label_calls(calls),
        )
        return [reply]

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the response of the last event, with the texts and arguments that the others have."""
        response = dict(events[-1]["response"])
        pieces: dict[tuple[int, str], str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                key = (event["output_index"], event["type"])
                pieces[key] = pieces.get(key, "") + event["delta"]
        output: list[dict[str, Any]] = []
        for index, item in enumerate(response["output"]):
            item = dict(item)
            if item["type"] == "function_call":
                item["arguments"] = pieces.get(
                    (index, "response.function_call_arguments.delta"), ""
                )
            else:
                part_type = "output_text" if item["type"] == "message" else "reasoning_text"
                text = pieces.get((index, f"response.{part_type}.delta"), "")
                item["content"] = [{**item["content"][0], "text": text}]
            output.append(item)
        return {**response, "output": output}


def _write_items(message: Message, style: WriteStyle) -> list[dict[str, Any]]:
    text = message["content"]
    if message["role"] == "tool":
        call_id = message["tool_call_id"]
        return [{"type": "function_call_output", "call_id": call_id, "output": text}]
    if message["role"] == "user":
        content: Any = text
        if style.content == "parts":
            content = [{"type": "input_text", "text": text}]
        return [{"role": "user", "content": content}]
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "id": "rs_sent", "summary": [], "content": [part]})
    calls = message.get("tool_calls") or ()
    if text or not calls:
        content = text
        if style.content == "parts":
            content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    for call in calls:
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": style.write_arguments(function["arguments"]),
            }
        )
    return items

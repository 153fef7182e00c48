"""A client of Google's generateContent."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_agents.chat.messages import make_turn_message
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    WriteStyle,
    label_calls,
    label_reply,
    make_call,
)
from gcore_agents.graph import Message

_FINISH_REASONS = {"STOP": "stop", "MAX_TOKENS": "length"}


class GoogleClient(WireClient):
    """Writes and reads generateContent, with thoughts.

    Example:
        >>> GoogleClient().path(WireRequest(stream=True))
        '/v1beta/models/policy:streamGenerateContent?alt=sse'
    """

    name = "google"

    def path(self, request: WireRequest) -> str:
        action = "streamGenerateContent?alt=sse" if request.stream else "generateContent"
        return f"/v1beta/models/{request.model}:{action}"

    def write_body(self, request: WireRequest) -> dict[str, Any]:
        contents: list[dict[str, Any]] = []
        config: dict[str, Any] = {
            "maxOutputTokens": request.max_tokens,
            "thinkingConfig": {"includeThoughts": True},
        }
        body: dict[str, Any] = {"contents": contents, "generationConfig": config}
        for message in request.messages:
            if message["role"] == "system":
                body["systemInstruction"] = {"parts": [{"text": message["content"]}]}
            else:
                _add_content(contents, message, request.style)
        if request.tools:
            declarations = [_write_tool(tool) for tool in request.tools]
            body["tools"] = [{"functionDeclarations": declarations}]
        if request.stop:
            config["stopSequences"] = list(request.stop)
        if request.n > 1:
            config["candidateCount"] = request.n
        return body

    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        usage = body.get("usageMetadata") or {}
        replies: list[WireReply] = []
        for number, candidate in enumerate(body["candidates"]):
            text = ""
            reasoning = ""
            calls: list[dict[str, Any]] = []
            for part in candidate["content"]["parts"]:
                if "functionCall" in part:
                    call = part["functionCall"]
                    calls.append(make_call(call["name"], call["args"], call["id"]))
                elif part.get("thought"):
                    reasoning += part["text"]
                else:
                    text += part["text"]
            finish_reason = _FINISH_REASONS[candidate["finishReason"]]
            if calls and finish_reason == "stop":
                finish_reason = "tool_calls"
            replies.append(
                WireReply(
                    message=make_turn_message(text, reasoning=reasoning, calls=calls),
                    finish_reason=finish_reason,
                    prompt_tokens=usage.get("promptTokenCount", 0),
                    completion_tokens=usage.get("candidatesTokenCount", 0),
                    ids=label_reply(body.get("responseId", ""), number) | label_calls(calls),
                )
            )
        return replies

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        candidates: dict[int, dict[str, Any]] = {}
        body: dict[str, Any] = {}
        for event in events:
            body |= event
            for part in event["candidates"]:
                index = part.get("index", 0)
                candidate = candidates.setdefault(index, {"content": {"parts": []}})
                candidate["content"]["parts"].extend(part["content"]["parts"])
                if part.get("finishReason"):
                    candidate["finishReason"] = part["finishReason"]
        return {**body, "candidates": [candidates[index] for index in sorted(candidates)]}


def _write_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    description = {"name": tool["name"], "description": tool["description"]}
    return {**description, "parametersJsonSchema": tool["parameters"]}


def _add_content(contents: list[dict[str, Any]], message: Message, style: WriteStyle) -> None:
    if message["role"] == "assistant":
        contents.append({"role": "model", "parts": _write_turn(message, style)})
        return
    part: dict[str, Any] = {"text": message["content"]}
    if message["role"] == "tool":
        response = {"result": message["content"]}
        details = {"id": message["tool_call_id"], "name": message["name"], "response": response}
        part = {"functionResponse": details}
        last = contents[-1]
        if last["role"] == "user":
            last["parts"].append(part)
            return
    contents.append({"role": "user", "parts": [part]})


def _write_turn(message: Message, style: WriteStyle) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"text": message["reasoning_content"], "thought": True})
    calls = message.get("tool_calls") or ()
    if message["content"] or not calls:
        parts.append({"text": message["content"]})
    for call in calls:
        function = call["function"]
        details = {"id": call["id"], "name": function["name"]}
        parts.append({"functionCall": {**details, "args": style.order(function["arguments"])}})
    return parts

"""Google's generateContent."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.images import join_parts
from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.dialects.dialect import (
    CONSTRAINED,
    MAX_STOPS,
    MAX_TURNS,
    MODEL,
    Dialect,
    join_system,
    name_results,
    read_tool,
)
from gcore_agents.dialects.events import split_text, write_event
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.dialects.images import ImageReader
from gcore_agents.errors import CallError

_SAMPLING_FIELDS = (
    "temperature",
    "topP",
    "topK",
    "seed",
    "presencePenalty",
    "frequencyPenalty",
    "thinkingConfig",
    "logprobs",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
)
_FREE_MODES = ("ANY", "AUTO", "MODE_UNSPECIFIED", "VALIDATED")
"""Modes of calling: none of them is enforced."""
_KINDS_OF_PARTS = ("text", "functionCall", "functionResponse")
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    409: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
}


class GoogleDialect(Dialect):
    """``POST /v1beta/models/{model}:generateContent``, ``:streamGenerateContent`` and ``:countTokens``.

    Fields may be written as ``maxOutputTokens`` or ``max_output_tokens``. Thoughts are parts of their own if the call
    has ``includeThoughts``, and are left out otherwise. Tools that Google runs itself are left out, and noted in
    ``ChatCall.unused``.

    Example:
        >>> dialect = GoogleDialect(session=None)
        >>> content = {"role": "user", "parts": [{"text": "2 + 2 ="}]}
        >>> call = dialect.read_call({"contents": [content], "generation_config": {"max_output_tokens": 5}})
        >>> call.max_tokens
        5
    """

    keep_alive: ClassVar[bytes] = write_event({"candidates": []})
    """Google's clients do not know comments."""

    def read_call(self, body: Any) -> ChatCall:
        fields = _rename(JsonFields(body))
        config = _read_object(fields, "generationConfig")
        if config is None:
            config = JsonFields({}, fields.name("generationConfig"))
        config.refuse(("logitBias",), CONSTRAINED)
        _check_outputs(config)
        unused = config.pick(_SAMPLING_FIELDS)
        messages: list[dict[str, Any]] = []
        system = _read_object(fields, "systemInstruction")
        if system is not None:
            messages.append({"role": "system", "content": _read_system(system)})
        for content in _join_turns(map(_rename, fields.require_objects("contents"))):
            messages.extend(_read_content(content, self.images))
        thinking = _read_object(config, "thinkingConfig")
        return ChatCall(
            messages=join_system(name_results(messages)),
            tools=_read_tools(fields, unused),
            max_tokens=config.read_integer("maxOutputTokens", 1),
            stop=config.read_texts("stopSequences", MAX_STOPS),
            n=config.read_integer("candidateCount", 1, MAX_TURNS) or 1,
            unused=unused,
            options={"thoughts": thinking is not None and thinking.read_flag("includeThoughts")},
        )

    def count_tokens(self, body: Any) -> dict[str, Any]:
        """Return the answer to a question for the number of tokens of a call."""
        fields = _rename(JsonFields(body))
        request = _read_object(fields, "generateContentRequest")
        call = self.read_call(body if request is None else request.values)
        return {"totalTokens": self.session.count_tokens(call)}

    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        candidates: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            candidates.append(_write_candidate(index, _write_parts(call, reply), reply))
        return {"candidates": candidates, **_write_head(replies), **_write_usage(replies)}

    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        head = _write_head(replies)
        for index, reply in enumerate(replies):
            # The end is in the chunk of the last part: some clients take a chunk without text for a fault.
            *chunks, last_chunk = _split_parts(_write_parts(call, reply))
            for parts in chunks:
                content = {"role": "model", "parts": parts}
                yield write_event({"candidates": [{"content": content, "index": index}], **head})
            candidate = _write_candidate(index, last_chunk, reply)
            yield write_event({"candidates": [candidate], **head, **_write_usage(replies)})

    @classmethod
    def write_error(cls, error: CallError) -> dict[str, Any]:
        status = _STATUSES.get(error.status, "INTERNAL")
        return {"error": {"code": error.status, "message": str(error), "status": status}}


def _rename(fields: JsonFields) -> JsonFields:
    """Return an object whose fields have the names of JSON: ``maxTokens``, not ``max_tokens``."""
    values: dict[str, Any] = {}
    for name, value in fields.values.items():
        head, *words = name.split("_")
        values[head + "".join(word.capitalize() for word in words)] = value
    return JsonFields(values, fields.path)


def _read_object(fields: JsonFields, field: str) -> JsonFields | None:
    value = fields.read_object(field)
    return None if value is None else _rename(value)


def _check_outputs(config: JsonFields) -> None:
    for modality in config.read_list("responseModalities"):
        if modality not in ("TEXT", "text"):
            config.fail("responseModalities", "TEXT alone")


def _read_system(fields: JsonFields) -> str:
    texts: list[str] = []
    for part in fields.read_objects("parts"):
        if not part.has("text"):
            _refuse(part, ("text",))
        texts.append(part.read_text("text") or "")
    return "\n".join(texts)


def _read_tools(fields: JsonFields, unused: dict[str, Any]) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for tool in map(_rename, fields.read_objects("tools")):
        for declaration in map(_rename, tool.read_objects("functionDeclarations")):
            if declaration.has("parametersJsonSchema"):
                tools.append(read_tool(declaration, "parametersJsonSchema"))
                continue
            parameters = declaration.read_object("parameters")
            if parameters is not None:
                declaration.values["parameters"] = _to_json_schema(parameters.values)
            tools.append(read_tool(declaration, "parameters"))
        left_out.extend(name for name in tool.values if name != "functionDeclarations")
    if left_out:
        unused["tools"] = left_out
    config = _read_object(fields, "toolConfig")
    calling = _read_object(config, "functionCallingConfig") if config is not None else None
    mode = calling.read_text("mode") if calling is not None else None
    if calling is None or mode is None or mode.upper() in _FREE_MODES:
        return tools
    if mode.upper() == "NONE":
        return []
    return calling.fail("mode", "ANY, AUTO, VALIDATED or NONE")


def _to_json_schema(schema: Any) -> Any:
    """Return a schema with types in lower case: Google writes STRING for string."""
    if isinstance(schema, list):
        return [_to_json_schema(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        is_type = name == "type" and isinstance(value, str)
        converted[name] = value.lower() if is_type else _to_json_schema(value)
    return converted


def _join_turns(contents: Iterable[JsonFields]) -> list[JsonFields]:
    """Return contents in which those of the model in a row are one.

    Google's SDK sends back one for each chunk of a stream, and that of a call twice if the chunk has nothing else.
    """
    joined: list[JsonFields] = []
    for content in contents:
        last = joined[-1] if joined else None
        if (
            last is None
            or content.values.get("role") != "model"
            or last.values.get("role") != "model"
        ):
            joined.append(content)
            continue
        parts = list(last.read_list("parts"))
        for part in content.read_list("parts"):
            is_call = isinstance(part, dict) and ("functionCall" in part or "function_call" in part)
            if not is_call or part not in parts:
                parts.append(part)
        joined[-1] = JsonFields({**last.values, "parts": parts}, last.path)
    return joined


def _read_content(fields: JsonFields, images: ImageReader | None) -> list[dict[str, Any]]:
    """Return the messages of a content: results of functions are messages of their own."""
    role = fields.read_text("role") or "user"
    parts = [_rename(part) for part in fields.read_objects("parts")]
    if role == "model":
        return [_read_turn(parts)]
    if role not in ("user", "function"):
        fields.fail("role", "user or model or function")
    messages: list[dict[str, Any]] = []
    content: list[str | bytes] = []
    for part in parts:
        response = _read_object(part, "functionResponse")
        if response is not None:
            messages.append(_read_result(response, images))
        elif part.has("text"):
            content.append(part.read_text("text") or "")
        else:
            content.append(_read_image(part, images, _KINDS_OF_PARTS))
    if content or not messages:
        messages.append({"role": "user", "content": join_parts(content)})
    return messages


def _read_image(part: JsonFields, images: ImageReader | None, kinds: Sequence[str]) -> bytes:
    """Return the image file of a part; a `CallError` if it is none, or the model takes none."""
    data = _read_object(part, "inlineData")
    if data is None or images is None:
        if images is not None:
            kinds = (*kinds, "inlineData")
        _refuse(part, kinds)
    return images.read_base64(data, "data", "mimeType")


def _read_result(fields: JsonFields, images: ImageReader | None) -> dict[str, Any]:
    """Return the result of a function: its only text, or all of it as JSON, and its images."""
    name = fields.require_text("name")
    response = fields.read_object("response")
    values = response.values if response is not None else {}
    content = json.dumps(values, ensure_ascii=False)
    if len(values) == 1:
        value = next(iter(values.values()))
        content = value if isinstance(value, str) else content
    if images is None:
        fields.refuse(("parts",), "the model takes text alone")
    files = [_read_image(_rename(part), images, ()) for part in fields.read_objects("parts")]
    call_id = fields.read_text("id") or name
    return {
        "role": "tool",
        "content": join_parts([content, *files]),
        "tool_call_id": call_id,
        "name": name,
    }


def _read_turn(parts: list[JsonFields]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        call = _read_object(part, "functionCall")
        if call is not None:
            name = call.require_text("name")
            arguments = call.read_object("args")
            values = arguments.values if arguments is not None else {}
            calls.append(make_call(name, values, call.read_text("id") or name))
        elif part.has("text"):
            is_thought = part.read_flag("thought")
            (thoughts if is_thought else texts).append(part.read_text("text") or "")
        elif not part.has("thoughtSignature"):
            _refuse(part, _KINDS_OF_PARTS)
    return make_turn_message("".join(texts), reasoning="".join(thoughts), calls=calls)


def _refuse(part: JsonFields, kinds: Sequence[str]) -> NoReturn:
    """Raise the `CallError` of a part that is none of these kinds, by the name of its field."""
    field = next(iter(part.values), "")
    name = part.name(field) if field else part.path
    data = part.values.get(field)
    mime_type = data.get("mimeType", "") if isinstance(data, dict) else ""
    details = f", {mime_type}" if mime_type else ""
    raise CallError(
        f"{name} is no part that is supported{details}; expected {' or '.join(kinds)}", field=name
    )


def _write_head(replies: Sequence[ChatReply]) -> dict[str, Any]:
    return {"modelVersion": MODEL, "responseId": replies[0].response_id}


def _write_usage(replies: Sequence[ChatReply]) -> dict[str, Any]:
    num_prompt = replies[0].prompt_tokens
    num_candidates = sum(reply.completion_tokens for reply in replies)
    usage = {
        "promptTokenCount": num_prompt,
        "candidatesTokenCount": num_candidates,
        "totalTokenCount": num_prompt + num_candidates,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": num_prompt}],
    }
    return {"usageMetadata": usage}


def _write_candidate(index: int, parts: list[dict[str, Any]], reply: ChatReply) -> dict[str, Any]:
    return {
        "content": {"role": "model", "parts": parts},
        "finishReason": "MAX_TOKENS" if reply.finish_reason == "length" else "STOP",
        "index": index,
    }


def _write_parts(call: ChatCall, reply: ChatReply) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    reasoning = reply.message.get("reasoning_content")
    calls = reply.message.get("tool_calls") or ()
    if reasoning and call.options["thoughts"]:
        parts.append({"text": reasoning, "thought": True})
    if reply.message["content"].strip() or not calls:
        parts.append({"text": reply.message["content"]})
    for tool_call in calls:
        function = tool_call["function"]
        details = {"id": tool_call["id"], "name": function["name"], "args": function["arguments"]}
        parts.append({"functionCall": details})
    return parts


def _split_parts(parts: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the parts of chunks: texts in pieces, and then all calls, of which Google's SDK runs one chunk's alone."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if "functionCall" in part:
            calls.append(part)
            continue
        for piece in split_text(part["text"]) or [""]:
            yield [{**part, "text": piece}]
    if calls:
        yield calls

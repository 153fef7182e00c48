"""OpenAI's Responses."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.images import join_parts
from gcore_agents.chat.messages import make_call
from gcore_agents.dialects.chat_completions import (
    SAMPLING_FIELDS,
    allows_tools,
    pick_unused,
    write_log_probs,
)
from gcore_agents.dialects.dialect import (
    CONSTRAINED,
    MODEL,
    Dialect,
    join_system,
    name_results,
    read_arguments,
    read_content,
    read_parts,
    read_tool,
)
from gcore_agents.dialects.events import split_text, write_event
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.dialects.images import ImageReader
from gcore_agents.errors import CallError
from gcore_agents.session import Session

_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_TEXT = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}
_REASONING = {"reasoning_text": "text", "summary_text": "text", "text": "text"}
_ELSEWHERE = ("background", "conversation", "prompt")
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_SAMPLING_FIELDS = (*SAMPLING_FIELDS, "reasoning", "max_tool_calls", "text", "truncation")


class ResponsesDialect(Dialect):
    """``POST /v1/responses``, and ``GET /v1/responses/{id}`` for earlier ones.

    Every response is stored until the session ends, whatever ``store`` says, so that ``previous_response_id`` and
    references to items work. Tools of the type custom are functions with a text, and their grammars are not enforced;
    tools that OpenAI runs itself are left out. Both are noted in ``ChatCall.unused``.

    Example:
        >>> dialect = ResponsesDialect(session=None)
        >>> call = dialect.read_call({"instructions": "Be brief.", "input": "2 + 2 ="})
        >>> [message["role"] for message in call.messages]
        ['system', 'user']
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._responses: dict[str, dict[str, Any]] = {}
        self._conversations: dict[str, list[dict[str, Any]]] = {}
        """The messages up to each response, without the instructions, which later calls do not have."""
        self._items: dict[str, dict[str, Any]] = {}
        self._turns_of_calls: dict[str, str] = {}
        """The response of each call, by the call's id."""

    def read_call(self, body: Any) -> ChatCall:
        fields = JsonFields(body)
        fields.refuse(_ELSEWHERE, "the endpoint keeps conversations by previous_response_id alone")
        fields.refuse(("logit_bias",), CONSTRAINED)
        unused = pick_unused(fields, _SAMPLING_FIELDS)
        tools, custom_tools = _read_tools(fields, unused)
        instructions = fields.read_text("instructions")
        conversation = [*self._read_previous(fields), *self._read_input(fields)]
        if not conversation:
            fields.fail("input", "a text, or one or more items")
        messages = name_results(conversation)
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        return ChatCall(
            messages=join_system(messages),
            tools=tools,
            max_tokens=fields.read_integer("max_output_tokens", 1),
            stream=fields.read_flag("stream"),
            unused=unused,
            options={
                "model": fields.read_text("model") or MODEL,
                "logprobs": "message.output_text.logprobs" in fields.read_list("include"),
                "custom_tools": custom_tools,
                "conversation": conversation,
                "fields": fields.values,
            },
        )

    def _read_previous(self, fields: JsonFields) -> list[dict[str, Any]]:
        response_id = fields.read_text("previous_response_id")
        if not response_id:
            return []
        if response_id not in self._conversations:
            fields.fail("previous_response_id", "the id of a response of this session")
        return self._conversations[response_id]

    def find_response(self, response_id: str) -> dict[str, Any]:
        """Return an earlier response; `CallError` if there is none of this id."""
        if response_id in self._responses:
            return self._responses[response_id]
        raise CallError(
            f"response_id is {response_id!r}; expected that of a response of this session",
            status=404,
            field="response_id",
        )

    def _read_input(self, fields: JsonFields) -> list[dict[str, Any]]:
        value = fields.values.get("input")
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        messages: list[dict[str, Any]] = []
        for item in fields.read_objects("input"):
            item_type = item.read_text("type")
            if item_type is None:
                item_type = "message" if item.has("role") else "item_reference"
            if item_type == "item_reference":
                item_id = item.require_text("id")
                if item_id not in self._items:
                    item.fail("id", "the id of an item of this session")
                item = JsonFields(self._items[item_id], item.path)
                item_type = item.values["type"]
            results = self._take_results(messages, item)
            _add_item(messages, item, item_type, self.images)
            messages.extend(results)
        return messages

    def _take_results(
        self, messages: list[dict[str, Any]], item: JsonFields
    ) -> list[dict[str, Any]]:
        """Take the results at the end of messages that stand between the calls of one turn, and return them."""
        results: list[dict[str, Any]] = []
        if item.values.get("type") not in ("function_call", "custom_tool_call"):
            return results
        turn = self._turns_of_calls.get(str(item.values.get("call_id")), "")
        while messages and messages[-1]["role"] == "tool":
            if self._turns_of_calls.get(messages[-1]["tool_call_id"]) != turn:
                break
            results.insert(0, messages.pop())
        return results

    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        (reply,) = replies
        output = self._write_output(call, reply)
        response = _write_head(call, reply, output)
        self._responses[reply.response_id] = response
        self._conversations[reply.response_id] = [
            *call.options["conversation"],
            dict(reply.message),
        ]
        for item in output:
            self._items[item["id"]] = item
            if "call_id" in item:
                self._turns_of_calls[item["call_id"]] = reply.response_id
        return response

    def _write_output(self, call: ChatCall, reply: ChatReply) -> list[dict[str, Any]]:
        suffix = reply.response_id.removeprefix("resp_")
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        calls = reply.message.get("tool_calls") or ()
        content = reply.message["content"]
        reasoning = reply.message.get("reasoning_content")
        output: list[dict[str, Any]] = []
        if reasoning:
            output.append(
                {
                    "id": f"rs_{suffix}",
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": reasoning}],
                    "encrypted_content": None,
                    "status": "completed",
                }
            )
        if content.strip() or not calls:
            log_probs: list[dict[str, Any]] = []
            if call.options["logprobs"]:
                log_probs = write_log_probs(self.session, reply)
            part = {"type": "output_text", "text": content, "annotations": []}
            output.append(
                {
                    "id": f"msg_{suffix}",
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [{**part, "logprobs": log_probs}],
                }
            )
        for number, tool_call in enumerate(calls):
            is_custom = tool_call["function"]["name"] in call.options["custom_tools"]
            output.append(_write_call(tool_call, f"{suffix}_{number}", is_custom=is_custom))
        return output

    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        response = self.write_reply(call, replies)
        start = {**response, "status": "in_progress", "output": [], "usage": None}
        start["incomplete_details"] = None
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": start},
            {"type": "response.in_progress", "response": start},
        ]
        for index, item in enumerate(response["output"]):
            events.extend(_list_item_events(index, item))
        events.append({"type": f"response.{response['status']}", "response": response})
        for number, event in enumerate(events):
            yield write_event({**event, "sequence_number": number}, event["type"])

    @classmethod
    def write_error_event(cls, error: CallError) -> bytes:
        fields = cls.write_error(error)["error"]
        failure = {"code": fields["code"] or "server_error", "message": fields["message"]}
        response = {"id": "", "object": "response", "status": "failed", "error": failure}
        failed = {"type": "response.failed", "sequence_number": 0, "response": response}
        event = {"sequence_number": 1, **fields, "type": "error", "error": fields}
        return write_event(failed, "response.failed") + write_event(event, "error")


def _read_tools(
    fields: JsonFields, unused: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions, and the names of those that take a text; others are noted."""
    tools: list[dict[str, Any]] = []
    custom_tools: list[str] = []
    left_out: list[str] = []
    for tool in fields.read_objects("tools"):
        tool_type = tool.require_text("type")
        if tool_type == "function":
            tools.append(read_tool(tool, "parameters"))
        elif tool_type == "custom":
            name = tool.require_text("name")
            description = tool.read_text("description") or ""
            function = {"name": name, "description": description, "parameters": _INPUT_SCHEMA}
            tools.append({"type": "function", "function": function})
            custom_tools.append(name)
            if tool.has("format"):
                left_out.append(f"the format of {name}")
        else:
            left_out.append(tool_type)
    if left_out:
        unused["tools"] = left_out
    if not allows_tools(fields):
        return [], []
    return tools, custom_tools


def _read_image(part: JsonFields, images: ImageReader) -> bytes:
    return images.read_url(part, "image_url")


def _add_item(
    messages: list[dict[str, Any]], item: JsonFields, item_type: str, images: ImageReader | None
) -> None:
    """Add an item to messages: reasoning, text and calls in a row are one turn."""
    if item_type == "message":
        role = item.require_text("role")
        if role not in _ROLES:
            item.fail("role", " or ".join(_ROLES))
        readers = _IMAGES if role == "user" else {}
        content = join_parts(read_parts(item, "content", _TEXT, readers, images))
        if role == "assistant":
            _open_turn(messages, takes_text=True)["content"] = content
        else:
            messages.append({"role": _ROLES[role], "content": content})
    elif item_type == "reasoning":
        reasoning = read_content(item, "content", _REASONING)
        reasoning = reasoning or read_content(item, "summary", _REASONING)
        turn = _open_turn(messages, takes_text=True)
        if reasoning:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning
    elif item_type == "function_call":
        arguments = read_arguments(item, "arguments")
        _add_call(messages, item, arguments)
    elif item_type == "custom_tool_call":
        _add_call(messages, item, {"input": item.read_text("input") or ""})
    elif item_type in ("function_call_output", "custom_tool_call_output"):
        content = join_parts(read_parts(item, "output", _TEXT, _IMAGES, images))
        call_id = item.require_text("call_id")
        messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
    else:
        item.fail("type", "message, reasoning, a call of a function or its output")


_IMAGES = {"input_image": _read_image}


def _open_turn(messages: list[dict[str, Any]], *, takes_text: bool) -> dict[str, Any]:
    """Return the last message if it is a turn that the next item belongs to, or a new one."""
    last = messages[-1] if messages else {"role": ""}
    is_open = last["role"] == "assistant"
    if takes_text and is_open:
        is_open = not last["content"] and not last.get("tool_calls")
    if not is_open:
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_call(messages: list[dict[str, Any]], item: JsonFields, arguments: dict[str, Any]) -> None:
    call = make_call(item.require_text("name"), arguments, item.require_text("call_id"))
    _open_turn(messages, takes_text=False).setdefault("tool_calls", []).append(call)


def _write_call(call: Any, suffix: str, *, is_custom: bool) -> dict[str, Any]:
    function = call["function"]
    item: dict[str, Any] = {
        "id": f"fc_{suffix}",
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        "name": function["name"],
    }
    if is_custom:
        text = str(function["arguments"].get("input", ""))
        return {**item, "id": f"ctc_{suffix}", "type": "custom_tool_call", "input": text}
    return {**item, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


def _write_head(call: ChatCall, reply: ChatReply, output: list[dict[str, Any]]) -> dict[str, Any]:
    fields = call.options["fields"]
    is_cut = reply.finish_reason == "length"
    num_output = reply.completion_tokens
    return {
        "id": reply.response_id,
        "object": "response",
        "created_at": reply.created_s,
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": fields.get("instructions"),
        "max_output_tokens": call.max_tokens,
        "metadata": fields.get("metadata") or {},
        "model": call.options["model"],
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": fields.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": fields.get("tool_choice") or "auto",
        "tools": fields.get("tools") or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + num_output,
        },
        "user": fields.get("user"),
    }


def _list_item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of an item: its start, its parts in pieces, and its end."""
    item_type = item["type"]
    start = {**item, "status": "in_progress"}
    for field in ("content", "arguments", "input"):
        if field in item:
            start[field] = type(item[field])()
    yield {"type": "response.output_item.added", "output_index": index, "item": start}
    where = {"item_id": item["id"], "output_index": index}
    if item_type == "message":
        yield from _list_text_events(where, item["content"][0])
    elif item_type == "reasoning":
        yield from _list_reasoning_events(where, item["content"][0])
    elif item_type == "custom_tool_call":
        for piece in split_text(item["input"]):
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": piece}
        end = {"type": "response.custom_tool_call_input.done", **where}
        yield {**end, "input": item["input"]}
    else:
        for piece in split_text(item["arguments"]):
            yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
        end = {"type": "response.function_call_arguments.done", **where}
        yield {**end, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _list_text_events(where: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {**where, "content_index": 0}
    start = {**part, "text": "", "logprobs": []}
    yield {"type": "response.content_part.added", **where, "part": start}
    log_probs = part["logprobs"]
    for piece in split_text(part["text"]):
        delta = {"type": "response.output_text.delta", **where, "delta": piece}
        yield {**delta, "logprobs": log_probs}
        log_probs = []
    end = {"type": "response.output_text.done", **where, "text": part["text"]}
    yield {**end, "logprobs": part["logprobs"]}
    yield {"type": "response.content_part.done", **where, "part": part}


def _list_reasoning_events(where: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    where = {**where, "content_index": 0}
    yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
    for piece in split_text(part["text"]):
        yield {"type": "response.reasoning_text.delta", **where, "delta": piece}
    yield {"type": "response.reasoning_text.done", **where, "text": part["text"]}
    yield {"type": "response.content_part.done", **where, "part": part}

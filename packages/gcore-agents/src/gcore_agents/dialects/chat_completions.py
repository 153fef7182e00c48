"""OpenAI's Chat Completions."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.images import join_parts
from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.dialects.dialect import (
    CONSTRAINED,
    MAX_STOPS,
    MAX_TURNS,
    MODEL,
    Dialect,
    check_schema,
    join_system,
    name_results,
    read_arguments,
    read_content,
    read_parts,
    refuse_part,
)
from gcore_agents.dialects.events import LAST_EVENT, split_text, write_event
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.dialects.images import ImageReader
from gcore_agents.session import Session

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_TEXT = {"text": "text"}
_ASSISTANT_TEXT = {"text": "text", "refusal": "refusal"}
CONSTRAINTS = (
    "logit_bias",
    "grammar",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "allowed_token_ids",
    "bad_words",
)
_OUTDATED = ("functions", "function_call")
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "reasoning_effort",
    "parallel_tool_calls",
    "top_logprobs",
    "response_format",
    "tool_choice",
)


class ChatCompletionsDialect(Dialect):
    """``POST /v1/chat/completions``; its chunks in a stream end with ``[DONE]``.

    ``tool_choice: none`` announces no tools. Of ``logprobs`` only the sampled tokens' are known: lists of the most
    likely ones are empty. With ``return_token_ids`` choices have ``token_ids``, as vLLM's have.

    Example:
        >>> dialect = ChatCompletionsDialect(session=None)
        >>> body = {"messages": [{"role": "developer", "content": "Be brief."}], "max_tokens": 5}
        >>> dialect.read_call(body).messages
        [{'role': 'system', 'content': 'Be brief.'}]
    """

    def read_call(self, body: Any) -> ChatCall:
        fields = JsonFields(body)
        fields.refuse(CONSTRAINTS, CONSTRAINED)
        fields.refuse(_OUTDATED, "use tools and tool_choice")
        fields.refuse(("audio",), "the endpoint takes text alone")
        _check_modalities(fields)
        objects = fields.require_objects("messages")
        messages = [_read_message(message, self.images) for message in objects]
        max_tokens = fields.read_integer("max_completion_tokens", 1)
        return ChatCall(
            messages=join_system(name_results(messages)),
            tools=read_tools(fields),
            max_tokens=max_tokens or fields.read_integer("max_tokens", 1),
            stop=fields.read_texts("stop", MAX_STOPS),
            n=fields.read_integer("n", 1, MAX_TURNS) or 1,
            stream=fields.read_flag("stream"),
            unused=pick_unused(fields, SAMPLING_FIELDS),
            options={
                "model": fields.read_text("model") or MODEL,
                "logprobs": fields.read_flag("logprobs"),
                "token_ids": fields.read_flag("return_token_ids"),
                "usage": wants_usage(fields),
            },
        )

    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            choices.append(
                {
                    "index": index,
                    "message": _write_message(reply),
                    "finish_reason": reply.finish_reason,
                    **self._write_tokens(call, reply),
                }
            )
        head = _write_head(call, replies, "chat.completion")
        return {**head, "choices": choices, "usage": write_usage(replies)}

    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        head = _write_head(call, replies, "chat.completion.chunk")
        for index, reply in enumerate(replies):
            tokens = self._write_tokens(call, reply)
            for delta in _split_message(reply):
                choice = {"index": index, "delta": delta, "finish_reason": None, **tokens}
                yield write_event({**head, "choices": [choice]})
                tokens = {"logprobs": None}
            choice = {"index": index, "delta": {}, "finish_reason": reply.finish_reason, **tokens}
            yield write_event({**head, "choices": [choice]})
        if call.options["usage"]:
            yield write_event({**head, "choices": [], "usage": write_usage(replies)})
        yield LAST_EVENT

    def _write_tokens(self, call: ChatCall, reply: ChatReply) -> dict[str, Any]:
        tokens: dict[str, Any] = {"logprobs": None}
        if call.options["logprobs"]:
            tokens["logprobs"] = {"content": write_log_probs(self.session, reply), "refusal": None}
        if call.options["token_ids"]:
            tokens["token_ids"] = list(reply.token_ids)
        return tokens


def write_log_probs(session: Session, reply: ChatReply) -> list[dict[str, Any]]:
    """Return the entries of a turn's tokens."""
    entries: list[dict[str, Any]] = []
    for token, log_prob in zip(reply.token_ids, reply.log_probs, strict=True):
        text = session.encoder.turn_text([token], is_ended=False)
        entry = {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
        entries.append({**entry, "top_logprobs": []})
    return entries


def wants_usage(fields: JsonFields) -> bool:
    """Return whether the last chunk of a stream is to have the counts of tokens."""
    options = fields.read_object("stream_options")
    return options is not None and options.read_flag("include_usage")


def pick_unused(fields: JsonFields, names: Sequence[str]) -> dict[str, Any]:
    """Return those of these fields that have a value and no effect."""
    unused = fields.pick(names)
    if not fields.values.get("tools"):
        unused.pop("parallel_tool_calls", None)
    if unused.get("tool_choice") in ("auto", "none"):
        del unused["tool_choice"]
    return unused


def _check_modalities(fields: JsonFields) -> None:
    for modality in fields.read_list("modalities"):
        if modality != "text":
            fields.fail("modalities", "text alone")


def read_tools(fields: JsonFields) -> list[dict[str, Any]]:
    """Return the tools that a body announces; none if its ``tool_choice`` is none."""
    tools: list[dict[str, Any]] = []
    for tool in fields.read_objects("tools"):
        if tool.read_text("type") != "function":
            tool.fail("type", "function")
        function = tool.read_object("function")
        if function is None:
            tool.fail("function", "a function with name and parameters")
        function.require_text("name")
        function.read_text("description")
        parameters = function.read_object("parameters")
        if parameters is not None:
            check_schema(parameters)
        tools.append({"type": "function", "function": function.values})
    if not allows_tools(fields):
        return []
    return tools


def allows_tools(fields: JsonFields) -> bool:
    """Return whether a body's ``tool_choice`` lets the policy call tools.

    ``required``, and a tool that has to be called, are as ``auto``: the policy may answer without a call, and learns
    from what the agent makes of that.
    """
    choice = fields.values.get("tool_choice")
    if not isinstance(choice, dict) and choice not in (None, "auto", "required", "none"):
        fields.fail("tool_choice", "auto, required, none or a tool")
    return choice != "none"


def _read_message(fields: JsonFields, images: ImageReader | None) -> dict[str, Any]:
    role = fields.require_text("role")
    if role not in _ROLES:
        fields.fail("role", " or ".join(_ROLES))
    if role == "assistant":
        return _read_turn(fields)
    if role not in ("user", "tool"):
        images = None
    parts = read_parts(fields, "content", _TEXT, {"image_url": _read_image}, images)
    message: dict[str, Any] = {"role": _ROLES[role], "content": join_parts(parts)}
    if role == "tool":
        call_id = fields.read_text("tool_call_id")
        name = fields.read_text("name")
        if call_id is not None:
            message["tool_call_id"] = call_id
        if name is not None:
            message["name"] = name
    return message


def _read_image(part: JsonFields, images: ImageReader) -> bytes:
    image = part.read_object("image_url")
    if image is None:
        part.fail("image_url", "an object with a url")
    return images.read_url(image, "url")


def _read_turn(fields: JsonFields) -> dict[str, Any]:
    content = read_content(fields, "content", _ASSISTANT_TEXT)
    fields.refuse(("audio",), "the endpoint takes text alone")
    reasoning = fields.read_text("reasoning_content") or fields.read_text("reasoning") or ""
    calls: list[dict[str, Any]] = []
    for call in fields.read_objects("tool_calls"):
        if call.read_text("type") not in (None, "function"):
            refuse_part(call, "type", ("function",))
        function = call.read_object("function")
        if function is None:
            call.fail("function", "a function with name and arguments")
        arguments = read_arguments(function, "arguments")
        call_id = call.read_text("id") or ""
        calls.append(make_call(function.require_text("name"), arguments, call_id))
    return make_turn_message(content, reasoning=reasoning, calls=calls)


def _write_head(call: ChatCall, replies: Sequence[ChatReply], object_type: str) -> dict[str, Any]:
    return {
        "id": replies[0].response_id,
        "object": object_type,
        "created": replies[0].created_s,
        "model": call.options["model"],
        "service_tier": None,
        "system_fingerprint": None,
    }


def _write_message(reply: ChatReply) -> dict[str, Any]:
    calls = _write_calls(reply)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.message["content"] or (None if calls else ""),
        "refusal": None,
    }
    reasoning = reply.message.get("reasoning_content")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _write_calls(reply: ChatReply) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for call in reply.message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append(make_call(function["name"], arguments, call["id"]))
    return calls


def _split_message(reply: ChatReply) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a message."""
    yield {"role": "assistant", "content": ""}
    for piece in split_text(reply.message.get("reasoning_content") or ""):
        yield {"reasoning_content": piece}
    for piece in split_text(reply.message["content"]):
        yield {"content": piece}
    for index, call in enumerate(_write_calls(reply)):
        function = call["function"]
        start = {**call, "function": {"name": function["name"], "arguments": ""}}
        yield {"tool_calls": [{"index": index, **start}]}
        for piece in split_text(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def write_usage(replies: Sequence[ChatReply]) -> dict[str, Any]:
    """Return the counts of tokens; some clients fail if the details are not objects."""
    num_prompt = replies[0].prompt_tokens
    num_completion = sum(reply.completion_tokens for reply in replies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }

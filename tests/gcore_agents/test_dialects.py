"""What each API's JSON becomes, what it is refused for, and that a reply comes back as the turn that it was."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from scripted import make_session

from gcore_agents import CallError, ChatCall
from gcore_agents.calls import ChatReply
from gcore_agents.dialects.anthropic import AnthropicDialect
from gcore_agents.dialects.chat_completions import ChatCompletionsDialect
from gcore_agents.dialects.completions import CompletionsDialect
from gcore_agents.dialects.dialect import Dialect
from gcore_agents.dialects.fields import MAX_DEPTH, parse_json
from gcore_agents.dialects.google import GoogleDialect
from gcore_agents.dialects.responses import ResponsesDialect
from gcore_agents.graph import message_key

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "user", "content": "And?"},
]
"""What all of `BODIES` say, but that of Completions."""
WRITTEN_CALL = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[type[Dialect], dict[str, Any]] = {
    ChatCompletionsDialect: {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning_content": "Hm.",
                "tool_calls": [WRITTEN_CALL],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "max_tokens": 64_000,
        "temperature": 0.2,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    ResponsesDialect: {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "message", "role": "user", "content": "And?"},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
        "max_output_tokens": 64_000,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low"},
    },
    AnthropicDialect: {
        "model": "m",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Well."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "tools": [
            {"name": "add", "description": "Adds.", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 64_000,
        "stop_sequences": ["x"],
    },
    GoogleDialect: {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Add."}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Hm.", "thought": True},
                    {"text": "Well."},
                    {"functionCall": {"id": "c1", "name": "add", "args": {"a": 1}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {
                        "functionResponse": {
                            "id": "c1",
                            "name": "add",
                            "response": {"output": "2"},
                        }
                    },
                    {"text": "And?"},
                ],
            },
        ],
        "tools": [
            {"functionDeclarations": [{**FUNCTION, "parameters": {**SCHEMA, "type": "OBJECT"}}]},
            {"googleSearch": {}},
        ],
        "generationConfig": {"maxOutputTokens": 64_000, "thinkingConfig": {}, "topK": 4},
    },
    CompletionsDialect: {"prompt": "2 + 2 =", "max_tokens": 64_000, "n": 2, "logprobs": 1},
}
CHATS = [kind for kind in BODIES if kind is not CompletionsDialect]

MESSAGES = [
    {"role": "assistant", "content": "Four."},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "\n\nFour.\n", "reasoning_content": "Hm.\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "assistant", "content": "Well.", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "assistant", "content": "\n", "reasoning_content": "Hm.", "tool_calls": [CALL]},
]
TEXT = st.text(st.characters())
"""With halves of surrogate pairs."""
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda values: st.lists(values) | st.dictionaries(TEXT, values),
    max_leaves=12,
)
ODD_VALUES = JSON | st.sampled_from(
    [
        0,
        -1,
        "",
        [],
        {},
        [{}],
        [None],
        "required",
        {"type": "image_url"},
        [{"type": "text"}],
        [{"type": "image"}],
    ]
)


def make_reply(message: Mapping[str, Any], **fields: Any) -> ChatReply:
    values: dict[str, Any] = {
        "response_id": "resp_1",
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        "prompt_tokens": 3,
        "token_ids": [5, 6],
        "log_probs": [-0.5, -1.5],
    }
    return ChatReply(**{**values, **fields})


def read_events(events: Sequence[bytes]) -> list[Any]:
    values: list[Any] = []
    for line in b"".join(events).decode().splitlines():
        if not line.startswith("data: {"):
            continue
        values.append(json.loads(line.removeprefix("data: ")))
    return values


@pytest.mark.parametrize("kind", CHATS)
def test_every_api_says_the_same(kind: type[Dialect]) -> None:
    call = kind(make_session()).read_call(BODIES[kind])
    assert call.messages == CONVERSATION
    assert call.tools == [TOOL]
    assert call.max_tokens == 64_000


def test_a_prompt_is_text_or_tokens() -> None:
    session = make_session()
    dialect = CompletionsDialect(session)
    call = dialect.read_call(BODIES[CompletionsDialect])
    assert call.prompt_ids == tuple(session.encoder.encode("2 + 2 ="))
    for prompt in (list(call.prompt_ids), [list(call.prompt_ids)], ["2 + 2 ="]):
        assert dialect.read_call({"prompt": prompt}).prompt_ids == call.prompt_ids
    assert dialect.read_call({"prompt": "2"}).max_tokens == 16


def send_back(dialect: Dialect, call: ChatCall, reply: ChatReply) -> ChatCall:
    """Return a call that continues a reply as a client does."""
    body = copy.deepcopy(BODIES[type(dialect)])
    written = dialect.write_reply(call, [reply])
    match dialect:
        case ChatCompletionsDialect():
            messages = [written["choices"][0]["message"], {"role": "user", "content": "More."}]
            body["messages"] += messages
        case ResponsesDialect():
            body["input"] += [*written["output"], {"role": "user", "content": "More."}]
        case AnthropicDialect():
            turn = {"role": "assistant", "content": written["content"]}
            body["messages"] += [turn, {"role": "user", "content": "More."}]
        case _:
            user = {"role": "user", "parts": [{"text": "More."}]}
            body["contents"] += [written["candidates"][0]["content"], user]
    return dialect.read_call(json.loads(json.dumps(body)))


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
@pytest.mark.parametrize("kind", CHATS)
def test_a_reply_that_is_sent_back_is_the_same_turn(
    kind: type[Dialect], message: dict[str, Any]
) -> None:
    dialect = kind(make_session())
    call = dialect.read_call(BODIES[kind])
    further = send_back(dialect, call, make_reply(message))
    *first, turn, question = further.messages
    assert first == CONVERSATION
    assert question == {"role": "user", "content": "More."}
    assert message_key(turn) == message_key(message)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
@pytest.mark.parametrize("kind", BODIES)
def test_events_add_up_to_the_reply(kind: type[Dialect], message: dict[str, Any]) -> None:
    dialect = kind(make_session())
    call = dialect.read_call(BODIES[kind])
    reply = make_reply(message)
    events = read_events(list(dialect.write_events(call, [reply])))
    written = dialect.write_reply(call, [reply])
    if isinstance(dialect, ChatCompletionsDialect):
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        assert text == message["content"]
        calls = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
        arguments = "".join(piece["function"]["arguments"] for piece in calls)
        assert arguments == '{"a": 1}' * len(message.get("tool_calls", ()))
        assert events[-2]["choices"][0]["finish_reason"] == reply.finish_reason
        assert events[-1]["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0,
            "audio_tokens": 0,
        }
    elif isinstance(dialect, ResponsesDialect):
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == written["output"] == events[-1]["response"]["output"]
        assert events[-1]["type"] == "response.completed"
    elif isinstance(dialect, AnthropicDialect):
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        assert kinds.count("content_block_stop") == len(written["content"])
        assert events[-2]["delta"]["stop_reason"] == written["stop_reason"]
    elif isinstance(dialect, GoogleDialect):
        parts = [p for e in events for p in e["candidates"][0]["content"]["parts"]]
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        assert text.strip() == message["content"].strip()
        assert events[-1]["candidates"][0]["finishReason"] == "STOP"


SAID = {"messages": [{"role": "user", "content": "Hi."}]}
REFUSED: list[tuple[type[Dialect], dict[str, Any], str]] = [
    (ChatCompletionsDialect, {}, "messages"),
    (ChatCompletionsDialect, {"messages": "Hi."}, "messages"),
    (ChatCompletionsDialect, {"messages": [{"role": "owner", "content": ""}]}, "messages[0].role"),
    (ChatCompletionsDialect, {"messages": [{"role": "user", "content": 4}]}, "messages[0].content"),
    *(
        (
            ChatCompletionsDialect,
            {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]},
            "messages[0].content[0].type",
        )
        for kind in ("image_url", "input_audio", "file", "video_url")
    ),
    *(
        (ChatCompletionsDialect, {**SAID, **more}, field)
        for more, field in [
            ({"n": 0}, "n"),
            ({"n": 65}, "n"),
            ({"n": True}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"logit_bias": {"4": 1}}, "logit_bias"),
            ({"guided_regex": "a*"}, "guided_regex"),
            ({"tool_choice": "sometimes"}, "tool_choice"),
            ({"tool_choice": ["auto"]}, "tool_choice"),
            ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "x", "parameters": "object"}}
                    ]
                },
                "tools[0].function.parameters",
            ),
            ({"functions": [FUNCTION]}, "functions"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"stop": [""]}, "stop"),
            ({"stop": ["x"] * 17}, "stop"),
            ({"stream": "yes"}, "stream"),
        ]
    ),
    (
        ChatCompletionsDialect,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "x", "arguments": "{"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    (ResponsesDialect, {}, "input"),
    (ResponsesDialect, {"input": "Hi.", "previous_response_id": "x"}, "previous_response_id"),
    (ResponsesDialect, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
    (ResponsesDialect, {"input": [{"type": "computer_call"}]}, "input[0].type"),
    (
        ResponsesDialect,
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    (ResponsesDialect, {"input": "Hi.", "tool_choice": 1}, "tool_choice"),
    (ResponsesDialect, {"input": "Hi.", "background": True}, "background"),
    (AnthropicDialect, {"max_tokens": 5}, "messages"),
    (AnthropicDialect, {"messages": [{"role": "tool"}]}, "messages[0].role"),
    (
        AnthropicDialect,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0].type",
    ),
    (
        AnthropicDialect,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}
                    ],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    (AnthropicDialect, {**SAID, "tool_choice": {"type": "some"}}, "tool_choice"),
    (AnthropicDialect, {**SAID, "mcp_servers": [{}]}, "mcp_servers"),
    (GoogleDialect, {}, "contents"),
    (GoogleDialect, {"contents": [{"role": "owner", "parts": []}]}, "contents[0].role"),
    (
        GoogleDialect,
        {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png"}}]}]},
        "contents[0].parts[0].inlineData",
    ),
    (
        GoogleDialect,
        {
            "contents": [{"parts": [{"text": "Hi."}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "SOME"}},
        },
        "toolConfig.functionCallingConfig.mode",
    ),
    (CompletionsDialect, {}, "prompt"),
    (CompletionsDialect, {"prompt": []}, "prompt"),
    (CompletionsDialect, {"prompt": ["a", "b"]}, "prompt"),
    (CompletionsDialect, {"prompt": [1 << 40]}, "prompt"),
    (CompletionsDialect, {"prompt": [-1]}, "prompt"),
    (CompletionsDialect, {"prompt": "a", "echo": True}, "echo"),
    (CompletionsDialect, {"prompt": "a", "n": 1, "best_of": 4}, "best_of"),
]


@pytest.mark.parametrize(("kind", "body", "field"), REFUSED, ids=str)
def test_a_body_that_is_refused_names_the_field(
    kind: type[Dialect], body: dict[str, Any], field: str
) -> None:
    dialect = kind(make_session())
    with pytest.raises(CallError, match="expected") as caught:
        dialect.read_call(body)
    assert caught.value.field == field
    assert caught.value.status == 400
    assert field in json.dumps(kind.write_error(caught.value))


def change_anywhere(data: st.DataObject, body: dict[str, Any]) -> None:
    """Replace a value of a body, at any depth, by another."""
    value: Any = body
    while True:
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        key = data.draw(st.sampled_from(keys), "key")
        is_leaf = not isinstance(value[key], dict | list) or not value[key]
        if is_leaf or data.draw(st.booleans(), "here"):
            value[key] = copy.deepcopy(data.draw(ODD_VALUES, "value"))
            return
        value = value[key]


@pytest.mark.parametrize("kind", BODIES)
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=200)
def test_no_body_is_a_traceback(kind: type[Dialect], data: st.DataObject) -> None:
    body: Any = copy.deepcopy(BODIES[kind])
    for _ in range(data.draw(st.integers(0, 3), "changes")):
        change_anywhere(data, body)
    dialect = kind(make_session())
    with suppress(CallError):
        call = dialect.read_call(parse_json(json.dumps(body), "body"))
        json.dumps([call.messages, call.tools, call.stop, call.unused])
        dialect.session.count_tokens(call)


@pytest.mark.parametrize("kind", BODIES)
@given(body=JSON)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=50)
def test_other_json_is_refused(kind: type[Dialect], body: Any) -> None:
    with pytest.raises(CallError) as caught:
        kind(make_session()).read_call(body)
    assert caught.value.status == 400


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    text = r'{"prompt": "a\ud83d", "user": "\ud83d\ude00"}'
    assert parse_json(text, "body") == {"prompt": "a\ufffd", "user": "\U0001f600"}
    assert parse_json(text.encode(), "body") == parse_json(text, "body")


@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_bombs_of_depth_are_refused(bracket: str) -> None:
    closing = "]" if bracket == "[" else "}"
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(CallError) as caught:
            parse_json(bracket * depth + "1" + closing * depth, "body")
        assert caught.value.field == "body"
    nested = "[" * 200 + "]" * 200
    arguments = {"name": "x", "arguments": f'{{"a": {nested}}}'}
    turn = {"role": "assistant", "tool_calls": [{"function": arguments}]}
    with pytest.raises(CallError, match="levels deep"):
        ChatCompletionsDialect(make_session()).read_call({"messages": [turn]})


def test_no_tools_lose_parallel_calls_and_none_announces_none() -> None:
    dialect = ChatCompletionsDialect(make_session())
    call = dialect.read_call({**SAID, "tools": [], "parallel_tool_calls": True})
    assert not call.tools
    assert not call.unused
    call = dialect.read_call({**SAID, "tools": [TOOL], "tool_choice": "none"})
    assert not call.tools


def test_system_messages_at_the_start_become_one() -> None:
    body = {
        "instructions": "A.",
        "input": [{"role": "developer", "content": "B."}, *SAID["messages"]],
    }
    call = ResponsesDialect(make_session()).read_call(body)
    assert [message["content"] for message in call.messages] == ["A.\n\nB.", "Hi."]


def test_sampling_fields_are_noted() -> None:
    body = {**SAID, "temperature": 0.2, "seed": 4, "top_p": 0.9, "presence_penalty": 1.0}
    call = ChatCompletionsDialect(make_session()).read_call(body)
    assert call.unused == {"temperature": 0.2, "seed": 4, "top_p": 0.9, "presence_penalty": 1.0}


CHAT_TOOLS = {**SAID, "tools": [TOOL]}
RESPONSES_TOOLS = {"input": "Hi.", "tools": [{"type": "function", **FUNCTION}]}
ANTHROPIC_TOOLS = {**SAID, "tools": [{"name": "add", "input_schema": SCHEMA}]}
NOT_ENFORCED: list[tuple[type[Dialect], dict[str, Any], dict[str, Any]]] = [
    (ChatCompletionsDialect, CHAT_TOOLS, {"response_format": {"type": "json_object"}}),
    (ChatCompletionsDialect, CHAT_TOOLS, {"tool_choice": "required"}),
    (ChatCompletionsDialect, CHAT_TOOLS, {"tool_choice": TOOL}),
    (ResponsesDialect, RESPONSES_TOOLS, {"text": {"format": {"type": "json_schema"}}}),
    (ResponsesDialect, RESPONSES_TOOLS, {"tool_choice": {"type": "function", "name": "add"}}),
    (AnthropicDialect, ANTHROPIC_TOOLS, {"output_format": {"type": "json_schema"}}),
    (AnthropicDialect, ANTHROPIC_TOOLS, {"output_config": {"format": {"type": "json_schema"}}}),
    (AnthropicDialect, ANTHROPIC_TOOLS, {"tool_choice": {"type": "tool", "name": "add"}}),
]


@pytest.mark.parametrize(("kind", "body", "fields"), NOT_ENFORCED, ids=str)
def test_constraints_are_not_enforced_but_noted(
    kind: type[Dialect], body: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Also where a call continues one without them, as frameworks ask for an answer in JSON at their end."""
    dialect = kind(make_session())
    free = dialect.read_call(body)
    call = dialect.read_call({**body, **fields})
    assert call.tools == free.tools != []
    assert call.messages == free.messages
    assert call.unused == fields


def test_schemas_of_google_are_not_enforced_but_noted() -> None:
    contents = [{"parts": [{"text": "Hi."}]}]
    config = {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}}
    call = GoogleDialect(make_session()).read_call(
        {"contents": contents, "generationConfig": config}
    )
    assert call.unused == config


def test_tools_that_others_run_are_left_out_and_noted() -> None:
    for kind, name in [
        (ResponsesDialect, "web_search"),
        (AnthropicDialect, "web_search_20250305"),
        (GoogleDialect, "googleSearch"),
    ]:
        call = kind(make_session()).read_call(BODIES[kind])
        assert call.unused["tools"] == [name]


def test_previous_responses_are_continued_without_their_instructions() -> None:
    dialect = ResponsesDialect(make_session())
    call = dialect.read_call({"instructions": "Be brief.", "input": "Add."})
    response = dialect.write_reply(call, [make_reply(MESSAGES[4])])
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    more = {"previous_response_id": "resp_1", "input": [output], "instructions": "Be kind."}
    assert dialect.read_call(more).messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Add."},
        MESSAGES[4],
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    ]
    assert dialect.find_response("resp_1") == response
    references = [{"type": "item_reference", "id": item["id"]} for item in response["output"]]
    items = [{"role": "user", "content": "Add."}, *references, output]
    assert dialect.read_call({"input": items}).messages[:2] == [
        {"role": "user", "content": "Add."},
        MESSAGES[4],
    ]


def test_custom_tools_take_a_text() -> None:
    dialect = ResponsesDialect(make_session())
    grammar = {"type": "grammar", "syntax": "lark", "definition": "x"}
    tool = {"type": "custom", "name": "patch", "format": grammar}
    call = dialect.read_call({"input": "Go.", "tools": [tool]})
    assert call.tools[0]["function"]["parameters"]["required"] == ["input"]
    assert call.unused["tools"] == ["the format of patch"]
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": function}]}
    (item,) = dialect.write_reply(call, [make_reply(message)])["output"]
    assert item["type"] == "custom_tool_call"
    assert item["input"] == "*** Begin"
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."}
    further = dialect.read_call({"input": [{"role": "user", "content": "Go."}, item, output]})
    assert message_key(further.messages[1]) == message_key(message)


def test_thoughts_are_blocks_only_if_the_call_wants_them() -> None:
    dialect = AnthropicDialect(make_session())
    reply = make_reply(MESSAGES[2])
    call = dialect.read_call(SAID)
    assert [b["type"] for b in dialect.write_reply(call, [reply])["content"]] == ["text"]
    call = dialect.read_call({**SAID, "thinking": {"type": "adaptive"}})
    kinds = [b["type"] for b in dialect.write_reply(call, [reply])["content"]]
    assert kinds == ["thinking", "text"]


def test_how_a_turn_ended() -> None:
    reply = make_reply(MESSAGES[0], stop_string="x")
    cut = make_reply(MESSAGES[0], finish_reason="length")
    anthropic = AnthropicDialect(make_session())
    call = anthropic.read_call(SAID)
    assert anthropic.write_reply(call, [reply])["stop_reason"] == "stop_sequence"
    assert anthropic.write_reply(call, [reply])["stop_sequence"] == "x"
    assert anthropic.write_reply(call, [cut])["stop_reason"] == "max_tokens"
    responses = ResponsesDialect(make_session())
    written = responses.write_reply(responses.read_call({"input": "Hi."}), [cut])
    assert written["status"] == "incomplete"
    assert written["incomplete_details"] == {"reason": "max_output_tokens"}

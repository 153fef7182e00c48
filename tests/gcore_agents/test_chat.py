"""Messages after a turn of the policy, and its calls, by the chat templates of 41 models, which come with TRL."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from template_cases import (
    ANSWER,
    MORE,
    QUESTION,
    RESULT,
    TEMPLATES,
    WITHOUT_CALLS,
    WITHOUT_TOOLS,
    make_call,
    make_template,
    make_tokenizer,
    make_tool,
    write_call,
)

from gcore_agents import ChatEncoder, MessageError, render_chat


def render(tokenizer: Any, *messages: dict[str, Any]) -> list[int]:
    text = render_chat(tokenizer, [*messages], tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_there_are_templates_of_many_families() -> None:
    assert len(TEMPLATES) >= 41
    assert {"glm4moe", "gptoss", "phi3", "gemma3", "gemma4_v5", "smolvlm"} | WITHOUT_TOOLS <= {
        *TEMPLATES
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_message_follows_an_answer_as_in_the_template(name: str) -> None:
    """The whole conversation ends with the turn's text, and the tokens behind it."""
    tokenizer = make_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    assert "first" in encoder.text(encoder.first([QUESTION]))
    further = encoder.next([MORE], last_token=tokenizer.convert_tokens_to_ids("d"))
    whole = render(tokenizer, QUESTION, ANSWER, MORE)
    answer = tokenizer("second", add_special_tokens=False)["input_ids"]
    assert whole[-len(further) - len(answer) :] == answer + further
    assert "third" in encoder.text(further)
    # A policy that has written the end itself, or the mark with which the next message starts.
    if further[0] in tokenizer.added_tokens_decoder:
        assert encoder.next([MORE], last_token=further[0]) == further[1:]


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - WITHOUT_TOOLS))
def test_results_of_tools_follow_calls_as_in_the_template(name: str) -> None:
    tokenizer = make_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    further = encoder.next([RESULT], last_token=tokenizer.convert_tokens_to_ids("}"))
    whole = render(tokenizer, QUESTION, make_call(tokenizer), RESULT)
    assert whole[-len(further) :] == further
    assert "third" in encoder.text(further)
    assert "second" not in encoder.text(further)


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_results_that_a_template_does_not_know_are_refused(name: str) -> None:
    tokenizer = make_tokenizer(name)
    with pytest.raises(MessageError, match=r"the chat template (refuses|does not render)"):
        ChatEncoder(tokenizer).next([RESULT], last_token=tokenizer.eos_token_id)


def test_the_end_of_the_last_answer_is_the_end_of_an_answer() -> None:
    """gpt-oss writes <|return|> there, and Phi-3 the end of the text, which a policy learns; nothing ends it twice."""
    for name, last, start in (
        ("gptoss", "<|return|>", "<|start|>"),
        ("gptoss", "<|end|>", "<|start|>"),
        ("phi3", "<eos>", "<|user|>"),
    ):
        tokenizer = make_tokenizer(name)
        token = tokenizer.convert_tokens_to_ids(last)
        assert token != tokenizer.unk_token_id
        further = ChatEncoder(tokenizer).next([MORE], last_token=token)
        assert further[0] == tokenizer.convert_tokens_to_ids(start)


def test_calls_that_end_without_the_mark_of_a_turn_get_it() -> None:
    """And not what closes a call, which the policy has written."""
    for name, start in (
        ("qwen3", "<|im_end|>\n<|im_start|>user\n<tool_response>"),
        ("gptoss", "<|call|><|start|>functions.add"),
        ("gemma4_v5", "<|tool_response>response:add"),
        ("glm4moe", "<|observation|>\n<tool_response>"),
    ):
        tokenizer = make_tokenizer(name)
        further = ChatEncoder(tokenizer).next(
            [RESULT], last_token=tokenizer.convert_tokens_to_ids("}")
        )
        assert tokenizer.decode(further).startswith(start)


def test_text_of_a_message_that_stands_for_a_turn_is_kept() -> None:
    tokenizer = make_tokenizer("qwen3")
    encoder = ChatEncoder(tokenizer)
    message = {"role": "user", "content": "gcoreturn gcoreturnx"}
    further = encoder.next([message], last_token=tokenizer.eos_token_id)
    assert "user\ngcoreturn gcoreturnx" in encoder.text(further)


texts = st.text("abc XYZ019.,:;!?()[]=+-*/_&%@#~", max_size=12)
numbers = st.integers(-1000, 1000)
json_values = st.recursive(
    numbers | st.booleans() | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)
some_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "number": numbers,
        "flag": st.booleans(),
        "list": st.lists(json_values, max_size=3),
        "map": st.dictionaries(st.sampled_from("xyz"), json_values, max_size=3),
    },
).filter(bool)


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - WITHOUT_CALLS))
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    tokenizer = make_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    # LFM2's calls are Python's, which has no such names.
    tool = "weather_of_day" if name.startswith("lfm2") else "weather-of.day"

    @settings(max_examples=20)
    @given(some_arguments)
    def read(arguments: dict[str, Any]) -> None:
        turn = write_call(tokenizer, tool, arguments)
        [call] = encoder.calls(turn, [make_tool(tool)])
        assert (call.name, dict(call.arguments), call.error) == (tool, arguments, "")

    read()
    assert encoder.calls("There is no call (of [weather]) {here}.") == []
    turn = write_call(tokenizer, tool, {"number": 1}).rpartition("</think>")[2]
    assert encoder.calls(f"<think>{turn}") == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_calls_are_read_as_vllm_reads_them() -> None:
    """By its parser of each family, which has to be named."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    arguments = {"text": "5 days", "number": 3, "flag": True, "list": ["a"], "map": {"a": "b"}}
    tool = make_tool("weather")
    for name, parser_name, end in (
        ("qwen2_5", "hermes", "<|im_end|>\n"),
        ("qwen3", "hermes", "<|im_end|>\n"),
        ("qwen3_6", "qwen3_coder", "<|im_end|>\n"),
        ("glm4moe", "glm45", ""),
        ("llama3_1", "llama3_json", "<|eot_id|>"),
        ("lfm2_2_5", "lfm2", "<|im_end|>\n"),
        ("muse_glimmer", "muse_glimmer", "<|eot|>"),
        ("gemma4_v5", "gemma4", "<|tool_response>"),
    ):
        tokenizer = make_tokenizer(name)
        turn = write_call(tokenizer, "weather", arguments).removesuffix(end)
        request = ChatCompletionRequest.model_validate(
            {"model": "", "messages": [QUESTION], "tools": [tool]}
        )
        parser: Any = ToolParserManager.get_tool_parser(parser_name)
        [call] = parser(tokenizer, request.tools).extract_tool_calls(turn, request).tool_calls
        [read] = ChatEncoder(tokenizer).calls(turn, [tool])
        assert (read.name, read.arguments) == (
            call.function.name,
            json.loads(call.function.arguments),
        )
        assert read.arguments == arguments, name


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        pytest.param(
            "<|tools|><|call|>{{ c.id }}<|args|>{{ f.arguments | tojson }}<|/call|><|/tools|>",
            '<|tools|><|call|>functions.add:0<|args|>{"a": 1}<|/call|>'
            '<|call|>functions.sub:1<|args|>{"b": "2"}<|/call|><|/tools|>',
            id="names in ids, as Kimi",
        ),
        pytest.param(
            '[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}]',
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "1"}, '
            '{"name": "sub", "arguments": {"b": "2"}}]',
            id="a list, as Mistral",
        ),
        pytest.param(
            "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"b": "2"}',
            id="as Mistral since version 11",
        ),
        pytest.param(
            '<|START_ACTION|>[\n {"tool_name": "{{ f.name }}", '
            '"parameters": {{ f.arguments | tojson }}}\n]<|END_ACTION|>',
            '<|START_ACTION|>[\n  {"tool_name": "add", "parameters": {"a": 1}},\n'
            '  {"tool_name": "sub", "parameters": {"b": "2"}}\n]<|END_ACTION|>',
            id="a list between marks, as Command",
        ),
        pytest.param(
            '<calls>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
            '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n</calls>',
            '<calls>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
            '<invoke name="sub">\n<parameter name="b">2</parameter>\n</invoke>\n</calls>',
            id="elements, as MiniMax",
        ),
    ],
)
def test_several_calls_of_a_turn(template: str, turn: str) -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = make_template(template)
    properties = {"b": {"type": "string"}}
    tools = [
        {"type": "function", "function": {"name": "sub", "parameters": {"properties": properties}}}
    ]
    calls = ChatEncoder(tokenizer).calls(f"Well.{turn}", tools)
    assert [(call.name, call.arguments) for call in calls] == [
        ("add", {"a": 1}),
        ("sub", {"b": "2"}),
    ]


def test_calls_as_models_write_them_otherwise_than_their_template() -> None:
    gpt_oss = ChatEncoder(make_tokenizer("gptoss"))
    [call] = gpt_oss.calls(
        "<|channel|>analysis<|message|>I call to=functions.no<|message|>{}<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    assert (call.name, call.arguments) == ("add", {"a": 1})
    llama = ChatEncoder(make_tokenizer("llama3_1"))
    [call] = llama.calls('<|python_tag|>{"name": "add", "parameters": {"a": 1}}')
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert llama.calls('{"answer": 5}') == []
    assert llama.calls('{"name": "Bob", "age": 3}') == []
    qwen = ChatEncoder(make_tokenizer("qwen3_6"))
    code = "def f():\n    return '</function>'\n"
    [call] = qwen.calls(
        f"<tool_call><function=run><parameter=code>\n{code}\n</parameter></function></tool_call>"
    )
    assert (call.name, call.arguments) == ("run", {"code": code})


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ({"type": ["string", "null"]}, "5"),
        ({"enum": ["5", "6"]}, "5"),
        ({"type": "integer"}, 5),
        ({}, 5),
    ],
)
def test_schemas_say_what_is_text(schema: dict[str, Any], expected: object) -> None:
    parameters = {"properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    tools.append({"type": "web_search"})
    turn = "<function=add>\n<parameter=a>\n5\n</parameter>\n</function>"
    [call] = ChatEncoder(make_tokenizer("qwen3_6")).calls(turn, tools)
    assert call.arguments == {"a": expected}


@pytest.mark.parametrize(
    ("name", "turn", "error"),
    [
        ("qwen3", "<tool_call>{</tool_call>", "the call is not JSON: "),
        ("gptoss", " to=functions.add<|message|>{", "the call is not JSON: "),
        (
            "qwen3_6",
            "<function=add>\n<parameter=a>\n1\n</function>",
            "an argument does not end",
        ),
        ("gemma4_v5", "<|tool_call>call:add{a:}<tool_call|>", "the arguments cannot be read: "),
        ("lfm2_2_5", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "the call is not Python: "),
        (
            "lfm2_2_5",
            "<|tool_call_start|>[add(a=f())]<|tool_call_end|>",
            "the call is not Python: ",
        ),
    ],
)
def test_calls_that_cannot_be_read_say_why(name: str, turn: str, error: str) -> None:
    [call] = ChatEncoder(make_tokenizer(name)).calls(turn)
    assert call.error.startswith(error)


def test_calls_with_more_behind_their_arguments_say_so() -> None:
    turn = "<function=add>\n<parameter=a>\n1\n</parameter>\nand so on</function>"
    [call] = ChatEncoder(make_tokenizer("qwen3_6")).calls(turn)
    assert call.error == "after its name and arguments stands 'and so on</function>'"


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("qwen3_6", "<tool_call>\n<function=f>\n<parameter=code>\nx\n" * 1_500),
        ("qwen3_6", "<function=f>\n<parameter=code>" + "<div class='a'>text</div>\n" * 3_000),
        ("qwen3_6", "<function=f>\n<parameter=code>" + ">" * 60_000),
        ("glm4moe", "<tool_call>n\n<arg_key>k</arg_key>\n<arg_value>v\n" * 1_500),
        ("gptoss", " to=functions." + "a" * 60_000),
        ("gptoss", " to=functions.x " * 4_000),
        ("gemma4_v5", "<|tool_call>call:f{" * 4_000),
        ("lfm2_2_5", "<|tool_call_start|>[f(" * 4_000),
        ("qwen3", "<tool_call>{" * 6_000),
    ],
)
def test_long_texts_are_read_in_no_time(name: str, turn: str) -> None:
    """They took seconds to hours, in which no other episode went on."""
    encoder = ChatEncoder(make_tokenizer(name))
    encoder.calls("")
    start_s = time.process_time()
    encoder.calls(turn)
    assert time.process_time() - start_s < 2.0


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 10_000, '{"a":' * 50_000])
def test_hostile_arguments_are_errors_of_their_call(value: str) -> None:
    for name, turn in (
        ("qwen3", f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>'),
        ("gptoss", f' to=functions.add<|message|>{{"a": {value}}}'),
        ("gemma4_v5", f"<|tool_call>call:add{{a:{value}}}<tool_call|>"),
        ("lfm2_2_5", f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>"),
    ):
        [call] = ChatEncoder(make_tokenizer(name)).calls(turn)
        assert call.error
    [call] = ChatEncoder(make_tokenizer("qwen3_6")).calls(
        f"<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>"
    )
    assert call.arguments == {"a": value}


@pytest.mark.parametrize(
    ("template", "turn", "name"),
    [
        # Without a mark behind the last argument.
        (
            "<call {{ f.name }}>{% for k, v in f.arguments.items() %}\n{{ k }}: {{ v }}{% endfor %}",
            None,
            "",
        ),
        # Its words are those of an answer in the middle of a mark.
        (
            '<tool_call>{"name": "{{ f.name }}", "args": {{ f.arguments | tojson }}}</tool_call>',
            None,
            "add",
        ),
        # Arguments as OpenAI's API has them.
        (
            '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments }}}</tool_call>',
            '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
            "add",
        ),
        (">>>{{ f.name }}\n{{ f.arguments | tojson }}", "The set {1, 2} is it", ""),
    ],
)
def test_forms_that_cannot_be_found_are_those_of_hermes(
    template: str, turn: str | None, name: str
) -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = make_template(template).replace(
        "{{ m.content }}", "{% if not m.tool_calls %}<t>{% endif %}{{ m.content }}"
    )
    turn = turn or '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>'
    calls = ChatEncoder(tokenizer).calls(turn)
    if name:
        [call] = calls
        assert (call.name, call.arguments, call.error) == (name, {"a": 1}, "")
    else:
        assert all(call.error or not call.arguments for call in calls)


def test_a_template_whose_last_turn_ends_otherwise_leaves_no_message_out() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    further = ChatEncoder(tokenizer).next([MORE], last_token=tokenizer.eos_token_id)
    assert tokenizer.decode(further) == "<|user|>third<|assistant|>"


def test_templates_that_write_no_calls_have_those_of_hermes() -> None:
    for name in WITHOUT_CALLS & {*TEMPLATES}:
        tokenizer = make_tokenizer(name)
        turn = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        [call] = ChatEncoder(tokenizer).calls(turn)
        assert (call.name, call.arguments) == ("add", {"a": 1})
        with suppress(MessageError):
            assert "second" not in write_call(tokenizer, "add", {"text": "second"})

"""Turns as the messages that agents get, by the chat templates of 41 models, and of Kimi, Mistral and MiniMax."""

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from template_cases import (
    KIMI,
    MINIMAX,
    MISTRAL,
    QUESTION,
    TEMPLATES,
    make_template_tokenizer,
    make_tokenizer,
    make_tool,
    write_turn,
)

from gcore_agents import ChatEncoder

TOOL = make_tool("add")
ARGUMENTS = {"text": "5 days", "number": 3, "flag": True, "list": ["a"], "map": {"a": "b"}}
OTHERS = {"kimi": KIMI, "minimax": MINIMAX, "mistral": MISTRAL}


def make_encoder(name: str) -> ChatEncoder:
    if name in OTHERS:
        return ChatEncoder(make_template_tokenizer(OTHERS[name]))
    return ChatEncoder(make_tokenizer(name))


def read(encoder: ChatEncoder, text: str, **options: Any) -> dict[str, Any]:
    """Return the message of a text after which the turn ends."""
    tokens = [*encoder.encode(text), encoder.encode("<eos>")[0]]
    return encoder.read_turn(tokens, tools=[TOOL], is_ended=True, **options)


def split_parts(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return message.get("reasoning_content", ""), message["content"], calls


HERMES = '<tool_call>\n{"name": "add", "arguments": {"number": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=number>\n1\n</parameter>\n</function>\n</tool_call>"
HARMONY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"number": 1}<|call|>'
ADD = [("add", {"number": 1})]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        ("qwen3", f"<think>\n\n</think>\n\nOne.\n{HERMES}\n{HERMES}", ("", "One.", ADD * 2)),
        ("qwen3", f"{HERMES}\nThat was one.", ("", "That was one.", ADD)),
        # The prompt ends with the mark of a thought.
        ("qwen3_6", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.", [])),
        ("qwen3_6", f"<think>Hm.</think>\n\n{XML}", ("Hm.", "", ADD)),
        ("qwen3_6", f"Hm. {XML}", (f"Hm. {XML}", "", [])),
        ("qwen3_5_nothink", f"Well.\n\n{XML}\n{XML}", ("", "Well.", ADD * 2)),
        # No mark opens the thought, which one ends all the same.
        ("qwen3", f"Hm. {HERMES}</think>Yes.", (f"Hm. {HERMES}", "Yes.", [])),
        ("qwen3", f"<think>Hm. {HERMES}", (f"Hm. {HERMES}", "", [])),
        ("qwen3", f"<think>Hm.</think>Yes.<think>Or {HERMES}</think>", (f"Hm.\nOr {HERMES}", "Yes.", [])),
        # What cannot be read stays.
        ("qwen3", f"No: <tool_call>{{</tool_call>\n{HERMES}", ("", "No: <tool_call>{</tool_call>", ADD)),
        ("qwen3_6", "</think><function=add>1</function>", ("", "<function=add>1</function>", [])),
        ("gptoss", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{HARMONY}", ("Hm.", "", ADD)),
        (
            "gptoss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add."
            f"<|end|><|start|>assistant{HARMONY}",
            ("Hm.", "I add.", ADD),
        ),
        ("gptoss", '<|channel|>analysis to=functions.add<|message|>{"number": 1}', ("", "", ADD)),
        ("gptoss", "<|channel|>final<|message|>Say to=functions.add<|message|>{}", ("", "Say to=functions.add{}", [])),
        ("gptoss", "<|channel|>commentary to=functions.add<|message|>{", ("", "{", [])),
        ("gptoss", "Yes.", ("", "Yes.", [])),
        ("muse_glimmer", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", ("Hm.", "Yes.", [])),
        (
            "gemma4_v5",
            "<|channel>thought\nHm.\n<channel|>One.<|tool_call>call:add{number:1}<tool_call|><|tool_response>",
            ("Hm.", "One.", ADD),
        ),
        ("llama3_1", '<|python_tag|>{"name": "add", "parameters": {"number": 1}}', ("", "", ADD)),
        ("llama3_1", '{"name": "add"}', ("", '{"name": "add"}', [])),
        (
            "deepseekv3",
            "Hm.</think>One.<|tool▁calls▁begin|><|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
            '{"number": 1}\n```<|tool▁call▁end|><|tool▁calls▁end|>',
            ("Hm.", "One.", ADD),
        ),
        (
            "glm4moe",
            "\n<think>Hm.</think>\nOne.\n<tool_call>add\n<arg_key>number</arg_key>\n<arg_value>1</arg_value>\n"
            "</tool_call>",
            ("Hm.", "One.", ADD),
        ),
        ("mistral", '[THINK]Hm.[/THINK]One.[TOOL_CALLS]add[ARGS]{"number": 1}', ("", '[THINK]Hm.[/THINK]One.', ADD)),
        ("lfm2_2_5", "<think>Hm.</think>One.<|tool_call_start|>[add(number=1)]<|tool_call_end|>", ("Hm.", "One.", ADD)),
        ("phi3", f"One. {HERMES}<|end|>", ("", "One.", ADD)),
        ("qwen3", "<tool_call>{\"name\": \"add\", \"arguments\": {\"number\": 1e999}}</tool_call>", None),
        ("qwen3", "<tool_call>{\"name\": \"add\", \"arguments\": {\"number\": NaN}}</tool_call>", None),
        ("qwen3", "<tool_call>{\"name\": \"add\", \"arguments\": {\"text\": \"\\ud800\"}}</tool_call>", None),
    ],
)  # fmt: skip
def test_a_turn_has_reasoning_content_and_calls(
    name: str, text: str, expected: tuple[str, str, list[Any]] | None
) -> None:
    """Without an expectation, the text is a call that cannot be sent."""
    if name.startswith("deepseek"):
        text = text.replace("|", "\N{FULLWIDTH VERTICAL LINE}")
    message = read(make_encoder(name), text)
    assert split_parts(message) == (expected or ("", text, []))


def test_a_turn_that_was_cut_off_has_no_calls() -> None:
    encoder = make_encoder("qwen3")
    message = encoder.read_turn(encoder.encode(f"<think>Hm.</think>{HERMES}"), is_ended=False)
    assert split_parts(message) == ("Hm.", HERMES, [])


def test_the_prompt_says_whether_a_turn_starts_inside_a_thought() -> None:
    """DeepSeek's template opens none after the results of tools."""
    encoder = make_encoder("deepseekv3")
    assert split_parts(read(encoder, "Yes."))[:2] == ("Yes.", "")
    result = {"role": "tool", "tool_call_id": "a", "content": "1"}
    prompt = encoder.next([result], last_token=encoder.encode("<eos>")[0])
    assert split_parts(read(encoder, "Yes.", prompt_ids=prompt))[:2] == ("", "Yes.")


def test_ids_of_calls_are_those_that_templates_take() -> None:
    encoder = make_encoder("qwen3")
    ids: list[str] = []
    for prompt in ([1], [2]):
        message = read(encoder, f"{HERMES}{HERMES}", prompt_ids=prompt)
        ids.extend(call["id"] for call in message["tool_calls"])
        assert message == read(encoder, f"{HERMES}{HERMES}", prompt_ids=prompt)
    assert len(set(ids)) == 4
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_ids_that_the_policy_writes_stay() -> None:
    call = "<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    message = read(make_encoder("kimi"), f"<|tool_calls_section_begin|>{call}")
    assert [call["id"] for call in message["tool_calls"]] == ["functions.add:7"]
    assert message["content"] == ""


def test_strings_that_end_a_turn_are_a_part_of_it() -> None:
    encoder = make_encoder("qwen3")
    message = encoder.read_turn(encoder.encode(HERMES), stop=["</tool_call>"], is_ended=True)
    assert split_parts(message) == ("", "", ADD)


def make_turns() -> Iterator[dict[str, Any]]:
    """Yield turns with and without reasoning, text and calls."""
    for reasoning in ("", "Hm, so\n\nit is."):
        for content, num_calls in (
            ("Yes:\n 1.", 0),
            ("", 1),
            ("I add.", 1),
            ("", 2),
            ("I add.", 2),
        ):
            turn: dict[str, Any] = {"role": "assistant", "content": content}
            if reasoning:
                turn["reasoning_content"] = reasoning
            calls: list[dict[str, Any]] = []
            for number in range(num_calls):
                function = {"name": "add", "arguments": {**ARGUMENTS, "number": number}}
                call_id = f"functions.add:{number}"
                calls.append({"type": "function", "id": call_id, "function": function})
            if calls:
                turn["tool_calls"] = calls
            yield turn


@pytest.mark.parametrize("name", [*TEMPLATES, *OTHERS])
def test_a_turn_that_is_read_is_rendered_as_it_was(name: str) -> None:
    encoder = make_encoder(name)
    num_turns = 0
    for turn in make_turns():
        written = write_turn(encoder, turn)
        if written is None:
            continue
        prompt, tokens = written
        message = encoder.read_turn(tokens, tools=[TOOL], is_ended=True, prompt_ids=prompt)
        assert write_turn(encoder, message) == written
        text = encoder.turn_text(tokens, is_ended=False)
        has_all = all(
            not part or part in text for part in (turn["content"], turn.get("reasoning_content"))
        )
        if name == "gptoss" and turn["content"] and "tool_calls" in turn:
            # Its template writes a text before a call as a thought.
            continue
        if has_all and text.count("5 days") == len(turn.get("tool_calls", ())):
            assert split_parts(message) == split_parts(turn)
            num_turns += 1
    assert num_turns >= 1


FAMILIES = (
    *("qwen3", "qwen3_6", "glm4moe", "deepseekv3", "gptoss", "muse_glimmer", "gemma4_v5"),
    *("llama3_1", "lfm2_2_5", "nemotron_3_nano", *OTHERS),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_tokens_are_a_message(name: str) -> None:
    """Whole turns are cut up, so that marks, names and braces come in any order."""
    encoder = make_encoder(name)
    pieces: list[list[int]] = [[token] for token in range(encoder.vocab_size)]
    for turn in make_turns():
        written = write_turn(encoder, turn)
        if written is not None:
            tokens = written[1]
            pieces.extend([tokens, tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]])
    marks = [[token] for token in range(encoder.vocab_size) if encoder.is_mark(token)]
    piece = st.sampled_from(pieces) | st.sampled_from(marks)

    @settings(max_examples=60)
    @given(st.lists(piece, max_size=12), st.booleans(), st.booleans())
    def read_pieces(parts: list[list[int]], is_ended: bool, is_open: bool) -> None:
        tokens = [token for part in parts for token in part]
        prompt = encoder.encode("<think>\n" if is_open else "a")
        message = encoder.read_turn(tokens, tools=[TOOL], is_ended=is_ended, prompt_ids=prompt)
        assert json.loads(json.dumps(message, allow_nan=False)) == message
        json.dumps(message, ensure_ascii=False).encode()
        assert is_ended or "tool_calls" not in message

    read_pieces()


PARSERS = {
    "qwen2_5": ("hermes", ""),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_5_think": ("qwen3_xml", "qwen3"),
    "qwen3_6": ("qwen3_coder", "qwen3"),
    "nemotron_3_nano": ("qwen3_coder", "nemotron_v3"),
    "glm4moe": ("glm45", "glm45"),
    "deepseekv3": ("deepseek_v3", "deepseek_r1"),
    "llama3_1": ("llama3_json", ""),
    "lfm2_v2": ("lfm2", ""),
    "muse_glimmer": ("muse_glimmer", "muse_glimmer"),
    "gemma4_v5": ("gemma4", "gemma4"),
    "kimi": ("kimi_k2", ""),
    "minimax": ("minimax_m2", ""),
    "mistral": ("mistral", ""),
}
"""vLLM's parsers of calls and of reasoning. That of gpt-oss needs a vocabulary that it downloads."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", PARSERS)
def test_turns_are_read_as_vllm_reads_them(name: str) -> None:
    """But for Gemma's text after calls, which it drops, and spaces at the ends of texts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

    tokenizer = make_template_tokenizer(OTHERS[name]) if name in OTHERS else make_tokenizer(name)
    encoder = ChatEncoder(tokenizer)
    tool_parser, reasoning_parser = PARSERS[name]
    num_turns = 0
    for turn in make_turns():
        if turn.get("reasoning_content") and not reasoning_parser:
            continue
        if name == "gemma4_v5" and turn["content"] and "tool_calls" in turn:
            continue
        written = write_turn(encoder, turn)
        if written is None:
            continue
        prompt, tokens = written
        reasoning: str | None = None
        content: str | None = encoder.turn_text(tokens, is_ended=True)
        request = ChatCompletionRequest.model_validate(
            {"model": "", "messages": [QUESTION], "tools": [TOOL]}
        )
        is_open = encoder.opened_thought and prompt == encoder.first([QUESTION])
        if reasoning_parser and (is_open or not encoder.opened_thought):
            make: Any = ReasoningParserManager.get_reasoning_parser(reasoning_parser)
            reasoning, content = make(tokenizer).extract_reasoning(content, request)
        parser: Any = ToolParserManager.get_tool_parser(tool_parser)
        output = parser(tokenizer, request.tools).extract_tool_calls(content or "", request)
        functions = [call.function for call in output.tool_calls]
        expected_calls = [(function.name, json.loads(function.arguments)) for function in functions]
        message = encoder.read_turn(tokens, tools=[TOOL], is_ended=True, prompt_ids=prompt)
        assert split_parts(message) == (
            (reasoning or "").strip(),
            (output.content or "").strip(),
            expected_calls,
        )
        num_turns += 1
    assert num_turns >= 2

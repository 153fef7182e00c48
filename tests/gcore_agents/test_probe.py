"""The check of chat templates before a run."""

import time
from typing import Any

import pytest
from template_cases import (
    KIMI,
    MINIMAX,
    MISTRAL,
    TEMPLATES,
    WITHOUT_CALLS,
    WITHOUT_TOOLS,
    make_template_tokenizer,
    make_tokenizer,
    make_tool,
)

from gcore_agents import ChatEncoder, MessageError
from gcore_agents.chat.probe import TemplateFacts, check_template

THOUGHTS_OPENED = {"deepseek_r1_distill", "deepseekv3", "qwen3_5_think", "qwen3_6", "qwen3_8"}
"""And Nemotron's."""


def check(name: str, **options: Any) -> TemplateFacts:
    return check_template(ChatEncoder(make_tokenizer(name)), **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_continue_conversations(name: str) -> None:
    start_s = time.process_time()
    facts = check(name)
    assert time.process_time() - start_s < 10.0
    assert facts.renders_tool_results == (name not in WITHOUT_TOOLS)
    assert facts.renders_calls == (name not in WITHOUT_CALLS)
    assert facts.opens_thought == (name in THOUGHTS_OPENED or name.startswith("nemotron"))
    assert facts.ends_turns == (name != "glm4moe")
    assert facts.is_consistent == (name != "deepseekv3")
    assert facts.num_checked or name == "deepseek_r1_distill"
    assert facts.renders_reasoning or not facts.keeps_reasoning
    assert not facts.renders_reasoning or not facts.is_append_only or facts.keeps_reasoning


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_templates_without_results_of_tools_are_refused_if_tools_are_used(name: str) -> None:
    expected = r'the chat template cannot continue conversations: .*"role": "tool"'
    with pytest.raises(MessageError, match=expected):
        check(name, uses_tools=True)


@pytest.mark.parametrize("template", [KIMI, MINIMAX, MISTRAL])
def test_templates_of_other_families(template: str) -> None:
    facts = check_template(ChatEncoder(make_template_tokenizer(template)), tools=[make_tool("add")])
    assert facts.is_append_only
    assert facts.renders_several_calls
    assert facts.renders_tool_results


def test_contents_without_a_template() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = None
    facts = check_template(ChatEncoder(tokenizer))
    assert facts.is_append_only
    assert not facts.renders_calls
    with pytest.raises(MessageError, match="no chat template that could announce them"):
        check_template(ChatEncoder(tokenizer), tools=[make_tool("add")])


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        # A message of the user is written otherwise after a turn.
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ loop.length }}{{ m.content }}{% endfor %}",
            "",
        ),
        (
            "{% for m in messages %}{% if loop.index0 %}{{ raise_exception('one message') }}{% endif %}"
            "{{ m.content }}{% endfor %}",
            "the chat template refuses the messages: one message",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' and loop.last %}<|u|>{{ m.content }}{% endif %}"
            "{% endfor %}",
            "does not render messages of user",
        ),
    ],
)
def test_templates_that_cannot_continue(template: str, fault: str) -> None:
    """The first only counts its messages, which shows after the first turn."""
    encoder = ChatEncoder(make_template_tokenizer(template))
    if not fault:
        facts = check_template(encoder)
        assert not facts.is_consistent
        assert not facts.is_append_only
        return
    with pytest.raises(MessageError, match=f"{fault}.*; for example "):
        check_template(encoder)


def make_named(templates: dict[str, str], *, as_list: bool = False) -> Any:
    tokenizer = make_template_tokenizer("".join(templates.values()))
    tokenizer.chat_template = templates
    if as_list:
        tokenizer.chat_template = [
            {"name": name, "template": template} for name, template in templates.items()
        ]
    return tokenizer


NAMED = {
    "default": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "tool_use": "<|tools|>{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|t{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
}


def test_the_template_for_tools_is_used_with_tools() -> None:
    """As transformers does; messages after a turn are of the same template."""
    user = {"role": "user", "content": "Hello"}
    result = {"role": "tool", "tool_call_id": "a", "content": "5"}
    for as_list in (False, True):
        encoder = ChatEncoder(make_named(NAMED, as_list=as_list))
        last_token = encoder.encode("a")[0]
        tools = [make_tool("add")]
        assert encoder.render([user]) == "<|user|>Hello<|end|><|assistant|>"
        assert encoder.render([user], tools=tools).startswith("<|tools|>add<|tuser|>Hello")
        for further, start in (([user], "<|end|><|user|>"), ([result], "<|end|><|tool|>")):
            tokens = encoder.next(further, last_token=last_token)
            assert encoder.turn_text(tokens, is_ended=False).startswith(start)
            tokens = encoder.next(further, last_token=last_token, tools=tools)
            expected = start.replace("<|user|>", "<|tuser|>").replace("<|tool|>", "<|ttool|>")
            assert encoder.turn_text(tokens, is_ended=False).startswith(expected)
        text = 'Yes.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|end|>'
        message = encoder.read_turn(encoder.encode(text), is_ended=True)
        assert message["content"] == "Yes."
        assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert check_template(encoder, tools=tools).renders_calls


def test_named_templates_need_one_for_conversations_without_tools() -> None:
    encoder = ChatEncoder(make_named({"rag": NAMED["default"]}))
    with pytest.raises(MessageError, match="are named \\['rag'\\]; expected one that is named"):
        encoder.first([{"role": "user", "content": "Hello"}])

"""Chat templates of 41 models, which come with TRL, and tokenizers for them."""

import json
import re
import string
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gcore_agents import ChatEncoder, MessageError, render_chat
from gcore_agents.chat.tool_calls import count_common
from gcore_agents.conformance.templates import list_model_templates, read_template

TEMPLATES = list_model_templates()
assert TEMPLATES
MARK = re.compile(r"<\|?[^<>|\s{}'\"]+\|?>|<[^\x00-\x7f][^<>]*>|\[/?[A-Z_]{4,}\]")
PLAIN_MARK = re.compile(r"</?(?:think|function|parameter|tool_\w+|arg_\w+)>")
"""Marks that decoding does not skip, as in Qwen's and GLM's tokenizers."""
WITHOUT_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""They refuse results of tools, or leave them out."""
WITHOUT_CALLS = WITHOUT_TOOLS | {
    "deepseek_r1_distill",
    "idefics3",
    "lfm2",
    "llama3",
    "qwen2_5_vl",
    "smolvlm",
}
"""They write no calls: a policy's are read as Hermes writes them."""

QUESTION = {"role": "user", "content": "first"}
ANSWER = {"role": "assistant", "content": "second"}
MORE = {"role": "user", "content": "third"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "third"}


def make_tokenizer(name: str) -> Any:
    """Characters, and a token for each of a template's marks."""
    return make_template_tokenizer(read_template(name))


def make_template_tokenizer(template: str) -> Any:
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *string.printable])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    for mark in sorted(set(MARK.findall(template))):
        is_text = PLAIN_MARK.fullmatch(mark) is not None
        words.add_tokens([AddedToken(mark, special=not is_text, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template,
    )


def make_call(
    tokenizer: Any, name: str = "add", arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a turn with a call, whose arguments some templates expect as JSON."""
    function: dict[str, Any] = {"name": name, "arguments": arguments or {"text": "second"}}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        render_chat(tokenizer, [QUESTION, turn], tokenize=False)
    except MessageError:
        function["arguments"] = json.dumps(function["arguments"])
    return turn


def write_call(tokenizer: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a turn with a call, and what ends it."""
    turn = make_call(tokenizer, name, arguments)
    prompt = render_chat(tokenizer, [QUESTION], tokenize=False, add_generation_prompt=True)
    text: str = render_chat(tokenizer, [QUESTION, turn], tokenize=False)
    return text.removeprefix(prompt.removesuffix("<think>\n"))


TYPES = {"text": "string", "number": "integer", "flag": "boolean", "list": "array", "map": "object"}


def make_tool(name: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in TYPES.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def make_template(call: str) -> str:
    """Return a template that writes calls so, with ``c`` for a call, ``f`` for its function."""
    return (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set f = c.function %}" + call + "{% endfor %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


KIMI = make_template(
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
)
MISTRAL = make_template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")
MINIMAX = make_template(
    '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n</minimax:tool_call>"
)


def write_turn(encoder: ChatEncoder, turn: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """Return a turn's prompt and its tokens as the template writes them, with one that ends it; None: it does not.

    The prompt ends earlier than the template's where that opens a thought, and the turn has none.
    """
    prompt = encoder.encode(encoder.render([QUESTION]))
    try:
        whole = encoder.encode(encoder.render([QUESTION, turn], prompt=False))
    except MessageError:
        return None
    start = count_common(prompt, whole)
    tokens = whole[start:]
    while tokens and encoder.turn_text(tokens[-1:], is_ended=False).isspace():
        tokens.pop()
    if (
        not tokens
        or not encoder.is_mark(tokens[-1])
        or encoder.turn_text(tokens, is_ended=False).endswith("</tool_call>")
    ):
        tokens += encoder.encode("<|user|>")
    return prompt[:start], tokens

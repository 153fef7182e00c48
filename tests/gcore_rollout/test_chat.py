"""Messages after a turn of the policy, by the chat templates of 41 families of models, which come with TRL."""

import json
import re
import string
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gcore_rollout import ChatEncoder, RolloutError, render_chat

TRL = find_spec("trl")
assert TRL is not None
assert TRL.origin is not None
TEMPLATES = {
    file.stem: file
    for file in sorted((Path(TRL.origin).parent / "chat_templates").glob("*.jinja"))
    if not file.stem.endswith("_training")
}
MARK = re.compile(r"<\|?[^<>|\s{}'\"]+\|?>|<[^\x00-\x7f][^<>]*>|\[/?INST\]")
WITHOUT_TOOLS = {"cohere", "cohere2", "gemma", "gemma3", "llava_next", "phi3", "phi3_5"}
"""They refuse results of tools, or leave them out."""

QUESTION = {"role": "user", "content": "first"}
ANSWER = {"role": "assistant", "content": "second"}
MORE = {"role": "user", "content": "third"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "abcdefghi", "content": "third"}


def make_tokenizer(name: str) -> Any:
    """Characters, and a token for each of a template's marks."""
    template = TEMPLATES[name].read_text()
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<unk>", *string.printable])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    for mark in sorted(set(MARK.findall(template))):
        words.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template,
    )


def make_call(tokenizer: Any) -> dict[str, Any]:
    """Return a turn with a call, whose arguments some templates expect as JSON."""
    function: dict[str, Any] = {"name": "add", "arguments": {"text": "second"}}
    call = {"type": "function", "id": "abcdefghi", "function": function}
    turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        render_chat(tokenizer, [QUESTION, turn], tokenize=False)
    except RolloutError:
        function["arguments"] = json.dumps(function["arguments"])
    return turn


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
    with pytest.raises(RolloutError, match=r"the chat template (refuses|does not render)"):
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

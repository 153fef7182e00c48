"""A tokenizer of characters, and an engine whose turns are written in advance: what tests of the endpoint run on."""

import asyncio
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gcore_agents import ChatEncoder, SampledTokens, Session, SessionBudget

END = "<|end|>"
MARKS = ("<|start|>", END, "<think>", "</think>")
TEMPLATE = """
{%- if tools %}{{ '<|start|>tools ' + tools | map('tojson') | join('\n') + '<|end|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + '\n' }}
    {%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Return a tokenizer of printable characters and the template's marks."""
    vocabulary: dict[str, int] = {}
    for token in ("<unk>", *string.printable):
        vocabulary[token] = len(vocabulary)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    for mark in MARKS:
        words.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=END, unk_token="<unk>", chat_template=template
    )


@dataclass
class ScriptedSampler:
    """Answers with given texts, one turn after the other; the last one again and again.

    A turn ends with the token of the end, or at the first stop string; an error in place of a text is raised.
    """

    tokenizer: Any
    texts: Sequence[str | Exception]
    delay_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    sessions: list[str] = field(default_factory=list[str])
    seeds: list[int] = field(default_factory=list[int])
    max_tokens: list[int] = field(default_factory=list[int])

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        stop: Sequence[str] = (),
        **images: Any,
    ) -> SampledTokens:
        assert not images
        text = self.texts[min(len(self.prompts), len(self.texts) - 1)]
        self.sessions.append(session)
        self.prompts.append(list(prompt_ids))
        self.seeds.append(seed)
        self.max_tokens.append(max_tokens)
        await asyncio.sleep(self.delay_s)
        if isinstance(text, Exception):
            raise text
        ends = [text.index(end) + len(end) for end in stop if end in text]
        text = text[: min(ends)] if ends else text + END
        tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        is_cut = len(tokens) > max_tokens
        tokens = tokens[:max_tokens]
        return SampledTokens(
            token_ids=tokens,
            log_probs=[-0.5 - position for position in range(len(tokens))],
            weight_versions=[0] * len(tokens),
            routed_experts=np.arange(len(prompt_ids) + len(tokens) - 1, dtype=np.int16)[
                :, None, None
            ],
            finish_reason="length" if is_cut else "stop",
        )


def make_session(*texts: str | Exception, delay_s: float = 0.0, **budget: Any) -> Session:
    """Return a session whose turns are these texts."""
    tokenizer = make_tokenizer()
    return Session(
        session_id="session",
        sampler=ScriptedSampler(tokenizer, texts or ("Yes.",), delay_s),
        encoder=ChatEncoder(tokenizer),
        budget=SessionBudget(**{"max_tokens": 100_000, **budget}),
    )


def call_tool(name: str, arguments: str = "{}") -> str:
    """Return the text of a call, as the policy writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

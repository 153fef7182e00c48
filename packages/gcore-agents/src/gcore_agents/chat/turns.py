"""Turns of the policy as the messages that agents get: reasoning, text and calls."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.chat.reasoning import (
    MESSAGE,
    find_open_thought,
    split_messages,
    split_thoughts,
)
from gcore_agents.chat.tool_calls import (
    CallForm,
    ToolCall,
    index_properties,
    remove_calls,
)

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Mistral's templates refuse ids of another length."""


@dataclass(frozen=True, kw_only=True)
class TurnReader:
    """Reads the text of turns as the model's chat template writes them.

    Example:
        >>> from gcore_agents.chat.tool_calls import HERMES
        >>> marks = [("<think>", "</think>")]
        >>> reader = TurnReader(form=HERMES, thought_marks=marks, special_tokens=re.compile("<eos>"))
        >>> turn = reader.read("<think>1 + 1 is 2</think>2<eos>")
        >>> turn.reasoning, turn.content, turn.calls
        ('1 + 1 is 2', '2', [])
    """

    form: CallForm
    thought_marks: Sequence[tuple[str, str]]
    special_tokens: re.Pattern[str]
    """Left out of texts."""

    def find_open_thought(self, prompt: str) -> str:
        """Return the mark with which a prompt's end opens a thought; empty: it opens none."""
        return find_open_thought(prompt, self.thought_marks)

    def read(
        self,
        text: str,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        opened: str = "",
        has_calls: bool = True,
    ) -> "TurnText":
        """Return the parts of a turn.

        Args:
            opened: see `find_open_thought`.
            has_calls: read calls; otherwise they are text.
        """
        reasoning, answer = split_thoughts(text, self.thought_marks, opened=opened)
        if MESSAGE in answer and self.special_tokens.fullmatch(MESSAGE):
            return self._read_messages(reasoning, answer, tools, has_calls=has_calls)
        calls: list[ToolCall] = []
        if has_calls:
            calls = self.form.read(answer, index_properties(tools))
        return TurnText(
            reasoning=self._clean(reasoning),
            content=self._clean(remove_calls(answer, calls, self.form)),
            calls=[call for call in calls if not call.error],
        )

    def _read_messages(
        self,
        reasoning: str,
        text: str,
        tools: Sequence[Mapping[str, Any]],
        *,
        has_calls: bool,
    ) -> "TurnText":
        properties = index_properties(tools)
        thoughts = [self._clean(reasoning)]
        texts: list[str] = []
        calls: list[ToolCall] = []
        for message in split_messages(text):
            if message.purpose == "reasoning":
                thoughts.append(self._clean(message.text))
                continue
            added: list[ToolCall] = []
            if message.purpose == "call" and has_calls:
                added = self.form.read(message.header + MESSAGE + message.text, properties)
            readable = [call for call in added if not call.error]
            calls.extend(readable)
            if not readable:
                texts.append(self._clean(message.text))
        return TurnText(reasoning=_join(thoughts), content=_join(texts), calls=calls)

    def _clean(self, text: str) -> str:
        return self.special_tokens.sub("", text).strip()


@dataclass(frozen=True, kw_only=True)
class TurnText:
    """The parts of a turn.

    Example:
        >>> TurnText(reasoning="", content="2", calls=[]).make_message(seed=b"", form=None)
        {'role': 'assistant', 'content': '2'}
    """

    reasoning: str
    content: str
    calls: Sequence[ToolCall]
    """Calls that can be read; the others are a part of the content."""

    def make_message(self, *, seed: bytes, form: CallForm | None) -> dict[str, Any]:
        """Return the message that an agent gets; the seed and the number of a call determine its id."""
        tool_calls: list[dict[str, Any]] = []
        for number, call in enumerate(self.calls):
            call_id = call.call_id
            if not call_id and form is not None and form.has_named_ids:
                call_id = f"functions.{call.name}:{number}"
            if not call_id:
                call_id = make_call_id(seed, number)
            tool_calls.append(make_call(call.name, dict(call.arguments), call_id))
        return make_turn_message(self.content, reasoning=self.reasoning, calls=tool_calls)


def make_call_id(seed: bytes, number: int) -> str:
    """Return an id of nine letters and digits."""
    digest = blake2b(seed + number.to_bytes(4, "big"), digest_size=8).digest()
    value = int.from_bytes(digest, "big")
    letters: list[str] = []
    for _ in range(_ID_LENGTH):
        value, digit = divmod(value, len(_DIGITS))
        letters.append(_DIGITS[digit])
    return "".join(letters)


def compile_tokens(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of any of these tokens; one that matches nothing if there are none."""
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _join(texts: Sequence[str]) -> str:
    return "\n".join(filter(None, texts))

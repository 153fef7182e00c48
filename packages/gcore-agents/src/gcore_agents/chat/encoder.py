"""Conversations as tokens: the policy's turns are kept as they were sampled, and only other messages are tokenized.

Decoding a turn and tokenizing it again sometimes gives other tokens than those sampled, whose log-probs would be of
another text. Templates may also render earlier turns differently later, such as without their reasoning. So each
message of an environment is rendered after a turn that stands in for the policy's, and the text before it is dropped.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from gcore_rollout.errors import RequestError, RolloutError
from gcore_rollout.multi_turn.messages import normalize_messages, render_chat
from gcore_rollout.multi_turn.tool_calls import (
    ReadCalls,
    ToolCall,
    count_common,
    find_call_form,
    make_call,
    make_call_turn,
    read_calls,
    read_hermes,
)

Message = Mapping[str, Any]
"""``role`` and ``content``, and other fields that the model's chat template knows."""

_MakeTurn: TypeAlias = Callable[[str, Sequence[Message]], dict[str, Any]]
"""Makes a turn of the policy with a text, which messages can follow."""
_QUESTION = {"role": "user", "content": "?"}
_STAND_IN = "gcoreturn"


def _answer(text: str, messages: Sequence[Message]) -> dict[str, Any]:
    del messages
    return {"role": "assistant", "content": text}


def _call(text: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Return a turn of calls, with the text as their argument, whose results are the first messages."""
    calls: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            break
        call_id = message.get("tool_call_id") or f"call{len(calls):05}"
        calls.append(make_call(message.get("name") or "tool", {"text": text}, call_id))
    return make_call_turn(calls)


def _call_in_json(text: str, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the turn of `_call` with arguments as JSON, as in OpenAI's API, which some templates expect."""
    turn = _call(text, messages)
    for call in turn["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return turn


class ChatEncoder:
    """Renders and tokenizes messages by a tokenizer's chat template; without one, contents as they are.

    ``chat_template_kwargs`` are further variables of the template, such as ``enable_thinking``. Methods that take
    messages raise a `RequestError` for messages that are malformed, have images, or are refused by the template.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        >>> encoder = ChatEncoder(tokenizer)
        >>> ids = encoder.first([{"role": "user", "content": "1 + 1?"}])
        >>> encoder.text(ids)
        '<user>1 + 1?;'
        >>> further = encoder.next([{"role": "user", "content": "Sure?"}], last_token=tokenizer("2")["input_ids"][0])
        >>> encoder.text(further)
        ';<user>Sure?;'
    """

    def __init__(
        self, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._turns: dict[tuple[str, ...], _MakeTurn] = {}
        self._read_calls: ReadCalls | None = None

    def first(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens [P] of the first messages, up to where the policy starts.

        ``tools`` are JSON schemas of the functions that the template is to announce. A `RolloutError` if there are
        tools, and no template.
        """
        normalized = normalize_messages(messages)
        if self._tokenizer.chat_template is not None:
            return self._tokens(
                self._render(normalized, tools=[dict(tool) for tool in tools] or None)
            )
        if tools:
            raise RolloutError(
                "tools are given: the tokenizer has no chat template that could announce them"
            )
        return self._tokenizer("".join(m["content"] for m in normalized))["input_ids"]

    def next(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """Return the tokens of further messages, from after the policy's last token to where its next turn starts.

        If ``last_token`` does not end a turn in the template, the end is added; in templates without one, such as
        GLM's, it may be the token with which the next message starts. A `RolloutError` if the template leaves out one
        of the messages, or does not render them after the policy's turn.
        """
        normalized = normalize_messages(messages)
        if self._tokenizer.chat_template is None:
            return self._tokens("".join(m["content"] for m in normalized))
        make_turn = self._find_turn(normalized)
        last_end, end, further = self._render_after(make_turn, normalized)
        if self._is_mark(last_token):
            if last_token in end:
                return end[end.index(last_token) + 1 :] + further
            if last_token in last_end:
                return further
        if further[:1] == [last_token] and (not end or self._is_mark(last_token)):
            return further[1:]
        if make_turn is _answer:
            return end + further
        # The policy has written its calls to their end, and only what ends a turn is missing.
        _, end_of_answer, _ = self._render_after(_answer, [_QUESTION])
        if end[len(end) - len(end_of_answer) :] == end_of_answer:
            return end_of_answer + further
        last_mark = len(end)
        for i, token in enumerate(end):
            if self._is_mark(token):
                last_mark = i
        return end[last_mark:] + further

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def turn_text(
        self, token_ids: Sequence[int], *, stop: Sequence[str] = (), is_ended: bool
    ) -> str:
        """Decode a turn, with its special tokens, which may be those of tool calls.

        If ``is_ended`` the text is without the last token, which ends the turn, unless it has one of the strings
        ``stop``: these are a part of it.
        """
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        if is_ended and not any(string in text for string in stop):
            return self._tokenizer.decode(token_ids[:-1], skip_special_tokens=False)
        return text

    def calls(self, turn: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
        """Return the calls in a turn's text (see `turn_text`), read as the chat template writes them.

        ``tools`` are JSON schemas of the functions, whose types some forms of calls need.
        """
        if self._read_calls is None:
            self._read_calls = read_hermes
            if self._tokenizer.chat_template is not None:
                self._read_calls = find_call_form(partial(self._render, prompt=False))
        return read_calls(turn, self._read_calls, tools)

    def _find_turn(self, messages: Sequence[dict[str, Any]]) -> _MakeTurn:
        """Return a form of the policy's turn after which the template renders messages of these roles.

        Results of tools come after their calls where they can: some templates refuse or leave out others.
        """
        roles = tuple(message["role"] for message in messages)
        if roles in self._turns:
            return self._turns[roles]
        words: list[str] = []
        probes: list[dict[str, Any]] = []
        for message in messages:
            words.append(f"gcoreword{len(words)}x")
            probes.append({**message, "content": words[-1]})
        refusal: RequestError | None = None
        for make_turn in (_call, _call_in_json, _answer) if roles[0] == "tool" else (_answer,):
            turns = [_QUESTION, make_turn(_STAND_IN, probes)]
            try:
                _, stand_in, text = self._render([*turns, *probes]).rpartition(_STAND_IN)
            except RequestError as error:
                refusal = error
                continue
            positions = [text.find(word) for word in words]
            if stand_in and -1 not in positions and positions == sorted(positions):
                self._turns[roles] = make_turn
                return make_turn
        raise refusal or RolloutError(
            f"the chat template does not render messages of {' and '.join(dict.fromkeys(roles))} after the policy's, "
            "or leaves them out; conversations of several turns need them"
        )

    def _render_after(
        self, make_turn: _MakeTurn, messages: Sequence[dict[str, Any]]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the end of a turn of the policy that is the last, its end before messages, and those messages."""
        stand_in = _STAND_IN
        while stand_in in repr(messages):
            stand_in += "x"
        turns = [_QUESTION, make_turn(stand_in, messages)]
        # Only from the stand-in on: the text before it may change with the messages after it.
        last_end = self._tokens(self._render(turns, prompt=False).rpartition(stand_in)[2])
        tail = self._tokens(self._render([*turns, *messages]).rpartition(stand_in)[2])
        num_end = count_common(last_end, tail)
        if last_end and not num_end:
            # gpt-oss ends an answer with another token if messages follow it. All of them start with one mark.
            question = self._render([_QUESTION], prompt=False)
            start = self._tokens(self._render([_QUESTION]).removeprefix(question))[:1]
            if start and self._is_mark(start[0]) and start[0] in self._tokens(question):
                num_end = tail.index(start[0]) if start[0] in tail else 0
        return last_end, tail[:num_end], tail[num_end:]

    def _render(
        self, messages: list[dict[str, Any]], *, prompt: bool = True, tools: Any = None
    ) -> str:
        options = {
            **self._template_kwargs,
            "add_generation_prompt": prompt,
            "tokenize": False,
            "tools": tools,
        }
        return render_chat(self._tokenizer, messages, **options)

    def _is_mark(self, token: int) -> bool:
        """Return whether a token stands for one of the tokenizer's marks, and not for text that is written like one."""
        return (
            token == self._tokenizer.eos_token_id or token in self._tokenizer.added_tokens_decoder
        )

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

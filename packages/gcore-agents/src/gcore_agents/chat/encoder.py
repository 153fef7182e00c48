"""Conversations as tokens: the policy's turns are kept as they were sampled, and only other messages are tokenized.

Decoding a turn and tokenizing it again sometimes gives other tokens than those sampled, whose log-probs would be of
another text. Templates may also render earlier turns differently later, such as without their reasoning. So each
message of an environment is rendered after a turn that stands in for the policy's, and the text before it is dropped.
"""

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, TypeAlias

from gcore_agents.chat.images import ImageProcessor, convert_images, list_images
from gcore_agents.chat.messages import (
    choose_template,
    make_call,
    make_turn_message,
    normalize_messages,
    render_chat,
)
from gcore_agents.chat.reasoning import choose_thought_marks
from gcore_agents.chat.tool_calls import (
    HERMES,
    CallForm,
    ToolCall,
    count_common,
    find_call_form,
    read_calls,
)
from gcore_agents.chat.turns import TurnReader, compile_tokens
from gcore_agents.errors import MessageError
from gcore_agents.graph import Message

_QUESTION = {"role": "user", "content": "?"}
_STAND_IN = "gcoreturn"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning in chat templates."""
_PROMPT_END = 32
"""Tokens at the end of a prompt among which is the mark that opens a thought."""


_MakeTurn: TypeAlias = Callable[..., dict[str, Any]]
"""Makes a turn that stands in for the policy's: of a text, the messages that follow it, and the policy's ``turn``."""


def _answer(text: str, messages: Sequence[Message], turn: Message) -> dict[str, Any]:
    del messages, turn
    return make_turn_message(text)


def _call(text: str, messages: Sequence[Message], turn: Message) -> dict[str, Any]:
    """Return a turn of calls, with the text as their argument, whose results are the first messages.

    Results seldom have the name of their function, which gpt-oss and Gemma write: the policy's call has it.
    """
    sampled: list[dict[str, Any]] = list(turn.get("tool_calls") or ())
    by_id = {call.get("id"): call for call in sampled}
    calls: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            break
        call = by_id.get(message.get("tool_call_id"))
        if call is None:
            call = sampled[number] if number < len(sampled) else {}
        name = message.get("name") or call.get("function", {}).get("name") or "tool"
        call_id = message.get("tool_call_id") or call.get("id") or f"call{number:05}"
        calls.append(make_call(name, {"text": text}, call_id))
    return make_turn_message("", calls=calls)


def _call_in_json(text: str, messages: Sequence[Message], turn: Message) -> dict[str, Any]:
    """Return the turn of `_call` with arguments as JSON, as in OpenAI's API, which some templates expect."""
    stand_in = _call(text, messages, turn)
    for call in stand_in["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return stand_in


class ChatEncoder:
    """Renders and tokenizes messages by a tokenizer's chat template; without one, contents as they are.

    ``chat_template_kwargs`` are further variables of the template, such as ``enable_thinking``; ``vision`` counts the
    tokens of images, and without it there can be none. Methods that take messages raise a `MessageError` for messages
    that are malformed, or are refused by the template or by ``vision``.

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
        self,
        tokenizer: Any,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vision: ImageProcessor | None = None,
    ) -> None:
        self.vision = vision
        self._tokenizer = tokenizer
        self._template_kwargs = dict(chat_template_kwargs or {})
        self._turns: dict[tuple[bool, tuple[str, ...]], _MakeTurn] = {}
        self._ends_of_answers: dict[bool, list[int]] = {}

    def first(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens [P] of the first messages, up to where the policy starts.

        ``tools`` are JSON schemas of the functions that the template is to announce. A `MessageError` if there are
        tools, and no template.
        """
        text = self.render(messages, tools=tools)
        if self._tokenizer.chat_template is None:
            return self._tokenizer(text)["input_ids"]
        return self._expand(self.encode(text), messages)

    def find_images(self, token_ids: Sequence[int]) -> list[int]:
        """Return where images start in the tokens of messages."""
        if self.vision is None:
            return []
        return [start for start, _ in self.vision.places(token_ids)]

    def _expand(self, token_ids: list[int], messages: Sequence[Message]) -> list[int]:
        """Return tokens in which the messages' images have as many as the model reads."""
        if self.vision is None:
            return token_ids
        images = list_images(messages)
        try:
            expanded = list(self.vision.expand(token_ids, images))
        except ValueError as error:
            raise MessageError(
                f"{error}; texts may not have the token that stands for an image"
            ) from error
        if len(self.find_images(expanded)) != len(images):
            raise MessageError(
                "the chat template writes images without a token between them, or the model's processor writes other "
                "tokens within an image"
            )
        return expanded

    def _normalize(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in one form, in which images are parts without their bytes."""
        has_template = self._tokenizer.chat_template is not None
        keeps_parts = has_template and self.vision is not None
        normalized = normalize_messages(messages, keeps_parts=keeps_parts)
        return convert_images(normalized, lambda _: "")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt: bool = True,
    ) -> str:
        """Return messages as the chat template writes them; with ``prompt``, up to where the policy starts."""
        normalized = self._normalize(messages)
        if self._tokenizer.chat_template is not None:
            adapted = [self._adapt(message) for message in normalized]
            return self._render(adapted, tools=tools, prompt=prompt)
        if tools:
            raise MessageError(
                "tools are given: the tokenizer has no chat template that could announce them"
            )
        return "".join(message["content"] for message in normalized)

    def next(
        self,
        messages: Sequence[Message],
        *,
        last_token: int,
        turn: Message | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        num_images: int = 0,
    ) -> list[int]:
        """Return the tokens of further messages, from after the policy's last token to where its next turn starts.

        If ``last_token`` does not end a turn in the template, the end is added; in templates without one, such as
        GLM's, it may be the token with which the next message starts. A `MessageError` if the template leaves out one
        of the messages, or does not render them after the policy's turn.

        Args:
            turn: the policy's message, whose calls have the names of the functions.
            tools: as those of the first messages; some tokenizers have another chat template for them.
            num_images: images before these messages, from which some templates number them.
        """
        normalized = self._normalize(messages)
        if self._tokenizer.chat_template is None:
            return self.encode("".join(m["content"] for m in normalized))
        has_tools = bool(tools)
        make_turn = partial(self._find_turn(normalized, has_tools=has_tools), turn=turn or {})
        last_end, end, further = self._render_after(
            make_turn, normalized, has_tools=has_tools, num_images=num_images
        )
        further = self._expand(further, messages)
        if self.is_mark(last_token):
            if last_token in end:
                return end[end.index(last_token) + 1 :] + further
            if last_token in last_end:
                return further
        if further[:1] == [last_token] and (not end or self.is_mark(last_token)):
            return further[1:]
        if make_turn.func is _answer:
            return end + further
        # The policy has written its calls to their end, and only what ends a turn is missing.
        end_of_answer = self._find_end_of_answer(has_tools=has_tools)
        if end[len(end) - len(end_of_answer) :] == end_of_answer:
            return end_of_answer + further
        last_mark = len(end)
        for i, token in enumerate(end):
            if self.is_mark(token):
                last_mark = i
        return end[last_mark:] + further

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows."""
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text in which special tokens are written out."""
        return self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

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
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        if not is_ended:
            return decode(token_ids)
        if stop:
            text: str = decode(token_ids)
            if any(string in text for string in stop):
                return text
        return decode(token_ids[:-1])

    def calls(self, turn: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
        """Return the calls in a turn's text (see `turn_text`), read as the chat template writes them.

        ``tools`` are JSON schemas of the functions, whose types some forms of calls need.
        """
        return read_calls(turn, self._reader.form.read, tools)

    def read_turn(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        is_ended: bool,
        prompt_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return a turn as the message that an agent gets.

        It has ``content`` without special tokens, ``reasoning_content`` if there is any, and ``tool_calls`` with parsed
        arguments. A turn that was cut off has no calls. A call that cannot be read stays in the content, and one in a
        thought is a part of it.

        Args:
            prompt_ids: tokens before the turn, which say whether it starts inside a thought; without them, it does if
                the chat template opens one after a question.
        """
        text = self.turn_text(token_ids, stop=stop, is_ended=is_ended)
        if prompt_ids:
            prompt = self._tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)
            opened = self._reader.find_open_thought(prompt)
        else:
            opened = self.opened_thought
        parts = self._reader.read(text, tools=tools, opened=opened, has_calls=is_ended)
        seed = array("q", [*prompt_ids, *token_ids]).tobytes()
        return parts.make_message(seed=seed, form=self._reader.form)

    @cached_property
    def _reader(self) -> TurnReader:
        tokens: dict[int, Any] = self._tokenizer.added_tokens_decoder
        special = {str(token) for token in tokens.values() if token.special}
        special.update(self._tokenizer.all_special_tokens)
        form = HERMES
        template = choose_template(self._tokenizer, has_tools=True)
        if template is not None:
            form = find_call_form(partial(self._render, prompt=False, has_tools=True))
        return TurnReader(
            form=form,
            thought_marks=choose_thought_marks([template or "", *map(str, tokens.values())]),
            special_tokens=compile_tokens([*special]),
        )

    @cached_property
    def opened_thought(self) -> str:
        """The mark with which the template opens a thought after a question; empty: it opens none."""
        if self._tokenizer.chat_template is None:
            return ""
        return self._reader.find_open_thought(self._render([_QUESTION]))

    @cached_property
    def _reasoning_key(self) -> str:
        """Name of a turn's reasoning in the template; that of OpenAI's API if it renders none."""
        word = "gcoreword"
        call = self._adapt(
            make_turn_message("", calls=[make_call("tool", {"a": "b"}, "call00000")])
        )
        for key in _REASONING_KEYS:
            for turn in (_answer("", [], {}), call):
                try:
                    text = self._render(
                        [_QUESTION, {**turn, key: word}], prompt=False, has_tools=True
                    )
                except MessageError:
                    continue
                if word in text:
                    return key
        return _REASONING_KEYS[0]

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its calls and reasoning as the template expects them."""
        adapted = dict(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if calls:
            form = self._reader.form
            adapted["tool_calls"] = [
                _adapt_call(call, number, form) for number, call in enumerate(calls)
            ]
        reasoning = adapted.get("reasoning_content")
        if reasoning and self._reasoning_key != "reasoning_content":
            del adapted["reasoning_content"]
            adapted[self._reasoning_key] = reasoning
            if calls and self._reasoning_key == "thinking":
                # The template of gpt-oss refuses a text between a thought and a call.
                adapted["content"] = ""
        return adapted

    def _find_turn(self, messages: Sequence[dict[str, Any]], *, has_tools: bool) -> _MakeTurn:
        """Return a form of the policy's turn after which the template renders messages of these roles.

        Results of tools come after their calls where they can: some templates refuse or leave out others.
        """
        roles = tuple(message["role"] for message in messages)
        if (has_tools, roles) in self._turns:
            return self._turns[has_tools, roles]
        words: list[str] = []
        probes: list[dict[str, Any]] = []
        for message in messages:
            words.append(f"gcoreword{len(words)}x")
            probes.append({**message, "content": words[-1]})
        refusal: MessageError | None = None
        for make_turn in (_call, _call_in_json, _answer) if roles[0] == "tool" else (_answer,):
            turns = [_QUESTION, make_turn(_STAND_IN, probes, {})]
            try:
                rendered = self._render([*turns, *probes], has_tools=has_tools)
            except MessageError as error:
                refusal = error
                continue
            _, stand_in, text = rendered.rpartition(_STAND_IN)
            positions = [text.find(word) for word in words]
            if stand_in and -1 not in positions and positions == sorted(positions):
                self._turns[has_tools, roles] = make_turn
                return make_turn
        raise refusal or MessageError(
            f"the chat template does not render messages of {' and '.join(dict.fromkeys(roles))} after the policy's, "
            "or leaves them out; conversations of several turns need them"
        )

    def _render_after(
        self,
        make_turn: "partial[dict[str, Any]]",
        messages: Sequence[dict[str, Any]],
        *,
        has_tools: bool,
        num_images: int = 0,
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the end of a turn of the policy that is the last, its end before messages, and those messages."""
        stand_in = _STAND_IN
        while stand_in in repr(messages):
            stand_in += "x"
        question: dict[str, Any] = _QUESTION
        if num_images:
            question = {"role": "user", "content": [{"type": "image", "image": ""}] * num_images}
        turns = [question, make_turn(stand_in, messages)]
        # Only from the stand-in on: the text before it may change with the messages after it.
        last = self._render(turns, prompt=False, has_tools=has_tools)
        rendered = self._render([*turns, *messages], has_tools=has_tools)
        last_end = self.encode(last.rpartition(stand_in)[2])
        tail = self.encode(rendered.rpartition(stand_in)[2])
        num_end = count_common(last_end, tail)
        if last_end and not num_end and self._message_mark in tail:
            # gpt-oss ends an answer with another token if messages follow it.
            num_end = tail.index(self._message_mark)
        return last_end, tail[:num_end], tail[num_end:]

    def _find_end_of_answer(self, *, has_tools: bool) -> list[int]:
        """Return what the template writes between an answer and a message of the user."""
        if has_tools not in self._ends_of_answers:
            answer = partial(_answer, turn={})
            _, end, _ = self._render_after(answer, [_QUESTION], has_tools=has_tools)
            self._ends_of_answers[has_tools] = end
        return self._ends_of_answers[has_tools]

    @cached_property
    def _message_mark(self) -> int:
        """The mark that all messages start with, those of the policy included; -1: there is none."""
        question = self._render([_QUESTION], prompt=False)
        start = self.encode(self._render([_QUESTION]).removeprefix(question))[:1]
        if start and self.is_mark(start[0]) and start[0] in self.encode(question):
            return start[0]
        return -1

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        has_tools: bool = False,
    ) -> str:
        """Apply the chat template; with ``has_tools`` the one for conversations with tools, where there is one."""
        options = {
            **self._template_kwargs,
            "add_generation_prompt": prompt,
            "tokenize": False,
            "chat_template": choose_template(self._tokenizer, has_tools=bool(tools) or has_tools),
        }
        announced = [dict(tool) for tool in tools] or None
        try:
            return render_chat(self._tokenizer, list(messages), tools=announced, **options)
        except MessageError:
            described = [_describe_tool(tool) for tool in tools]
            if described == (announced or []):
                raise
        # The template of gpt-oss refuses functions without a description, which OpenAI's API does not ask for.
        return render_chat(self._tokenizer, list(messages), tools=described, **options)

    def is_mark(self, token: int) -> bool:
        """Return whether a token stands for one of the tokenizer's marks, and not for text that is written like one."""
        return token == self._tokenizer.eos_token_id or token in self._marks

    @cached_property
    def _marks(self) -> set[int]:
        return set(self._tokenizer.added_tokens_decoder)


def _adapt_call(call: Mapping[str, Any], number: int, form: CallForm) -> dict[str, Any]:
    function: dict[str, Any] = dict(call["function"])
    arguments = function.get("arguments")
    if form.takes_json and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments or {}, ensure_ascii=False)
    if not form.takes_json and isinstance(arguments, str):
        # The template may take text, too.
        with suppress(ValueError):
            function["arguments"] = json.loads(arguments or "{}")
    adapted: dict[str, Any] = {**call, "function": function}
    if form.has_named_ids and not str(call.get("id")).startswith("functions."):
        adapted["id"] = f"functions.{function['name']}:{number}"
    return adapted


def _describe_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose function has a description and parameters, which may be empty."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = {"type": "object", "properties": {}}
    return {**tool, "function": {"description": "", "parameters": parameters, **function}}

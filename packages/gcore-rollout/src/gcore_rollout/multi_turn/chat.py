"""Conversations as tokens: the policy's turns are kept as they were sampled, and only other messages are tokenized.

Decoding a turn and tokenizing it again sometimes gives other tokens than those sampled, whose log-probs would be of
another text. Templates may also render earlier turns differently later, such as without their reasoning. So each
message of an environment is rendered after a turn that stands in for the policy's, and the text before it is dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RolloutError
from gcore_rollout.multi_turn.messages import normalize_messages, render_chat

Message = Mapping[str, Any]
"""``role`` and ``content``, and other fields that the model's chat template knows."""


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
        GLM's, it may be the token with which the next message starts. A `RolloutError` if the template cannot continue
        after a turn.
        """
        normalized = normalize_messages(messages)
        if self._tokenizer.chat_template is None:
            return self._tokens("".join(m["content"] for m in normalized))
        stand_in = "gcore-turn"
        while stand_in in repr(normalized):
            stand_in += "-"
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": stand_in}]
        # Only from the stand-in on: the text before it may change with the messages after it.
        end_of_turn = self._render(before, prompt=False).rpartition(stand_in)[2]
        continued = self._render([*before, *normalized]).rpartition(stand_in)[2]
        if not continued.startswith(end_of_turn) or continued == end_of_turn:
            raise RolloutError(
                "the chat template does not render further messages after those before them; conversations of several "
                "turns need that"
            )
        added = continued.removeprefix(end_of_turn)
        written: str = self._tokenizer.decode([last_token])
        if not end_of_turn:
            return self._tokens(added.removeprefix(written))
        if self._is_mark(last_token) and last_token in self._tokens(end_of_turn):
            end_of_turn = end_of_turn.partition(written)[2]
        return self._tokens(end_of_turn + added)

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

"""Conversations as tokens: the policy's turns are kept as they were sampled, and only other messages are tokenized.

Decoding a turn and tokenizing it again sometimes gives other tokens than those sampled, whose log-probs would be of
another text. Templates may also render earlier turns differently later, such as without their reasoning. So each
message of an environment is rendered after a turn that stands in for the policy's, and the text before it is dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RolloutError

Message = Mapping[str, Any]
"""``role`` and ``content``, and other fields that the model's chat template knows."""

_STAND_IN = "gcore-turn"
_BEFORE: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]


class ChatEncoder:
    """Renders and tokenizes messages by a tokenizer's chat template; without one, contents as they are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def first(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens [P] of the first messages, up to where the policy starts.

        ``tools`` are JSON schemas of the functions that the template is to announce. A `RolloutError` if there are
        tools, and no template; or images.
        """
        text = _text(messages)
        if self._tokenizer.chat_template is not None:
            return self._tokens(self._render(messages, tools=[dict(tool) for tool in tools] or None))
        if tools:
            raise RolloutError("tools are given: the tokenizer has no chat template that could announce them")
        return self._tokenizer(text)["input_ids"]

    def next(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """Return the tokens of further messages, from after the policy's last token to where its next turn starts.

        If ``last_token`` does not end a turn in the template, the end is added. A `RolloutError` if the template cannot
        continue after a turn; or there are images.
        """
        text = _text(messages)
        if self._tokenizer.chat_template is None:
            return self._tokens(text)
        # Only from the stand-in on: the text before it may change with the messages after it.
        end_of_turn = self._render(_BEFORE, prompt=False).rpartition(_STAND_IN)[2]
        continued = self._render([*_BEFORE, *messages]).rpartition(_STAND_IN)[2]
        if not end_of_turn or not continued.startswith(end_of_turn) or continued == end_of_turn:
            does_not = "the chat template does not render further messages after those before them"
            raise RolloutError(f"{does_not}; conversations of several turns need that")
        written: str = self._tokenizer.decode([last_token])
        rest = end_of_turn.partition(written)[2] if written and written in end_of_turn else end_of_turn
        return self._tokens(rest + continued.removeprefix(end_of_turn))

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _render(self, messages: Sequence[Message], *, prompt: bool = True, tools: Any = None) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], add_generation_prompt=prompt, tokenize=False, tools=tools
            )
        except Exception as error:
            # A template is a program, which may fail in any way.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RolloutError(f"the chat template refuses a conversation: {reason}") from error

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _text(messages: Sequence[Message]) -> str:
    """Return the contents as they are; a `RolloutError` if there are images."""
    parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"] or ()]
    if any(part.get("type") in ("image", "image_url") for part in parts):
        raise RolloutError("a message has an image: episodes are of text alone, a Request can have images")
    return "".join(str(m["content"]) for m in messages)

"""A conversation as tokens: what the policy wrote is kept as it was sampled, and only what it reads is tokenized.

To decode a turn and tokenize it again gives other tokens than those sampled, now and then: their log-probs would be of
another text. Templates may also render earlier turns differently later on, as those do that drop reasoning. So each
message of an environment is rendered behind a turn that stands in for the policy's, and what comes before is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RolloutError

Message = Mapping[str, Any]
"""``role`` and ``content``, and what else the model's chat template knows."""

_STAND_IN = "gcore-turn"
_BEFORE: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]


class ChatEncoder:
    """Renders and tokenizes messages by a tokenizer's chat template; without one, contents as they are.

    Args:
        tokenizer: of transformers.
        template_options: further variables of the template, such as ``enable_thinking``.
    """

    def __init__(self, tokenizer: Any, *, template_options: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})

    def first(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Tokens [P] of the first messages, up to where the policy begins.

        Args:
            messages: one or more.
            tools: JSON schemas of the functions that the template is to announce.

        Raises:
            RolloutError: there are tools, and no template; or images.
        """
        _refuse_images(messages)
        if self._tokenizer.chat_template is not None:
            return self._tokens(self._render(messages, tools=[dict(tool) for tool in tools] or None))
        if tools:
            raise RolloutError("tools are given: the tokenizer has no chat template that could announce them")
        return self._tokenizer(_joined(messages))["input_ids"]

    def next(self, messages: Sequence[Message], *, last_token: int) -> list[int]:
        """Tokens of further messages, from behind the policy's last token to where its next turn begins.

        Args:
            messages: one or more.
            last_token: of the policy's turn; if it is not what ends a turn in the template, the end is added.

        Raises:
            RolloutError: the template cannot go on behind a turn; or there are images.
        """
        _refuse_images(messages)
        if self._tokenizer.chat_template is None:
            return self._tokens(_joined(messages))
        # Only from the stand-in on: what stands before it may change with what comes after.
        end_of_turn = self._render(_BEFORE, prompt=False).rpartition(_STAND_IN)[2]
        going_on = self._render([*_BEFORE, *messages]).rpartition(_STAND_IN)[2]
        if not end_of_turn or not going_on.startswith(end_of_turn) or going_on == end_of_turn:
            raise RolloutError(
                "the chat template does not render further messages behind those before them: "
                "conversations of several turns need it to"
            )
        written: str = self._tokenizer.decode([last_token])
        rest = end_of_turn.partition(written)[2] if written and written in end_of_turn else end_of_turn
        return self._tokens(rest + going_on.removeprefix(end_of_turn))

    def text(self, token_ids: Sequence[int]) -> str:
        """What was written, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _render(self, messages: Sequence[Message], *, prompt: bool = True, tools: Any = None) -> str:
        return self._tokenizer.apply_chat_template(
            [dict(m) for m in messages], add_generation_prompt=prompt, tokenize=False, tools=tools, **self._options
        )

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _refuse_images(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message["content"]
        kinds = [] if isinstance(content, str) else [part.get("type") for part in content or ()]
        if "image" in kinds or "image_url" in kinds:
            raise RolloutError("a message has an image: episodes are of text alone, a Request can have images")


def _joined(messages: Sequence[Message]) -> str:
    return "".join(str(m["content"]) for m in messages)

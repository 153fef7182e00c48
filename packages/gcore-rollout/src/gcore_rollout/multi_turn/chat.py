"""Chat messages: the one form of them that chat templates take, and conversations as tokens.

Of a conversation the policy's turns are kept as they were sampled, and only other messages are tokenized. Decoding a
turn and tokenizing it again sometimes gives other tokens than those sampled, whose log-probs would be of another text.
Templates may also render earlier turns differently later, such as without their reasoning. So each message of an
environment is rendered after a turn that stands in for the policy's, and the text before it is dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RequestError, RolloutError

_IMAGE_TYPES = ("image", "image_url")

Message = Mapping[str, Any]
"""``role`` and ``content``, and other fields that the model's chat template knows."""


def normalize_messages(messages: object, *, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """Return chat messages in one form: no key is None, and content is text.

    Parquet, as `datasets` writes it, gives every message the keys of all messages: those that are None are dropped, at
    any depth. Content that is a list of text parts is joined. Content that is None is empty text if the message has
    tool calls.

    Args:
        messages: a list of mappings with ``role``, and ``content`` or ``tool_calls``.
        keeps_parts: keep content that is a list of parts, for models that read images.

    Raises:
        RequestError: anything else; it names the message and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestError(
            f"messages are {messages!r:.80}; expected a list of messages with role and content"
        )
    return [
        _normalize_message(message, number, keeps_parts)
        for number, message in enumerate(messages, 1)
    ]


def drop_none(value: Any, where: str) -> Any:
    """Return a value of mappings, lists and text without the keys that are None, at any depth.

    ``where`` names the value in errors. `RequestError` if a text has a lone surrogate, which is no character.
    """
    if isinstance(value, str):
        check_text(value, where)
        return value
    if isinstance(value, Mapping):
        entries: Mapping[Any, Any] = value
        return {
            key: drop_none(entry, f"{where}.{key}")
            for key, entry in entries.items()
            if entry is not None
        }
    if isinstance(value, list | tuple):
        return [drop_none(entry, where) for entry in value]
    return value


def check_text(text: str, where: str) -> None:
    """Raise a `RequestError` if a text cannot be encoded; ``where`` names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} has a lone surrogate, {text[error.start]!r} at character {error.start + 1}; expected Unicode text"
        ) from None


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Apply the tokenizer's chat template to normalized messages; `RequestError` if the template refuses them."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        # A template is a program, which may fail in any way.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"the chat template refuses the messages: {reason}") from error


def _normalize_message(message: object, number: int, keeps_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"message {number} is {message!r:.80}; expected a mapping with role and content"
        )
    where = f"message {number}"
    normalized: dict[str, Any] = drop_none(message, where)
    if not isinstance(normalized.get("role"), str):
        raise RequestError(
            f"{where} has the role {normalized.get('role')!r}; expected text, such as 'user'"
        )
    content: Any = normalized.get("content")
    if content is None:
        if not normalized.get("tool_calls"):
            fault = "is None" if "content" in message else "is missing"
            raise RequestError(
                f"{where}.content {fault}; expected text, which may be None next to tool_calls alone"
            )
        normalized["content"] = ""
    elif isinstance(content, list):
        if not keeps_parts:
            normalized["content"] = _join_parts(content, f"{where}.content")
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content is {content!r:.80}; expected text, or a list of parts of type text"
        )
    return normalized


def _join_parts(parts: list[Any], where: str) -> str:
    texts: list[str] = []
    for part in parts:
        text: object = part
        if isinstance(part, Mapping):
            entries: Mapping[str, Any] = part
            kind = entries.get("type", "text")
            if kind in _IMAGE_TYPES:
                raise RequestError(f"{where} has an image; expected text alone")
            text = None
            if kind == "text":
                text = entries.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where} has the part {part!r:.80}; expected parts of type text")
        texts.append(text)
    return "".join(texts)


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

"""Chat messages of environments, JSON and Parquet, in the one form that chat templates take."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gcore_agents.errors import MessageError

_IMAGE_TYPES = ("image", "image_url")


def normalize_messages(messages: object, *, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """Return chat messages in one form: no key is None, and content is text.

    Parquet, as `datasets` writes it, gives every message the keys of all messages: those that are None are dropped, at
    any depth. Content that is a list of text parts is joined. Content that is None is empty text if the message has
    tool calls.

    Args:
        messages: a list of mappings with ``role``, and ``content`` or ``tool_calls``.
        keeps_parts: keep content that is a list of parts, for models that read images.

    Raises:
        MessageError: anything else; it names the message and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise MessageError(
            f"messages are {messages!r:.80}; expected a list of messages with role and content"
        )
    return [
        _normalize_message(message, number, keeps_parts)
        for number, message in enumerate(messages, 1)
    ]


def make_call(name: str, arguments: object, call_id: str) -> dict[str, Any]:
    """Return a call of a tool as messages have it: ``arguments`` are a mapping, or JSON."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def make_turn_message(
    content: str, *, reasoning: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return a turn of the policy as a message, which has reasoning and calls only if there are any."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def drop_none(value: Any, where: str) -> Any:
    """Return a value of mappings, lists and text without the keys that are None, at any depth.

    ``where`` names the value in errors. `MessageError` if a text has a lone surrogate, which is no character.
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
    """Raise a `MessageError` if a text cannot be encoded; ``where`` names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageError(
            f"{where} has a lone surrogate, {text[error.start]!r} at character {error.start + 1}; expected Unicode text"
        ) from None


def choose_template(tokenizer: Any, *, has_tools: bool) -> str | None:
    """Return the chat template of a tokenizer that may have several by name, as transformers chooses it.

    Command-R and Hermes 2 have one for conversations with tools. A `MessageError` if there is none of that name.
    """
    template: Any = tokenizer.chat_template
    if isinstance(template, list | tuple):
        entries: Sequence[Mapping[str, str]] = template
        template = {entry["name"]: entry["template"] for entry in entries}
    if not isinstance(template, Mapping):
        return template
    templates: Mapping[str, str] = template
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        raise MessageError(
            f"the chat templates are named {sorted(templates)}; expected one that is named 'default'"
        )
    return templates["default"]


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Apply the tokenizer's chat template to normalized messages; `MessageError` if the template refuses them.

    Text becomes a list of one part for templates that read nothing else, as those of many models with images do.
    """
    template = options.pop("chat_template", None)
    if template is None:
        template = choose_template(tokenizer, has_tools=bool(options.get("tools")))
    if _reads_parts_alone(tokenizer, template):
        messages = [_split_into_parts(message) for message in messages]
    return _render(tokenizer, messages, {**options, "chat_template": template})


def _render(tokenizer: Any, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        # A template is a program, which may fail in any way.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MessageError(f"the chat template refuses the messages: {reason}") from error


@lru_cache(maxsize=8)
def _reads_parts_alone(tokenizer: Any, template: str | None) -> bool:
    """Return whether a template leaves out a message's text unless it is in a part."""
    word = "gcoreword"
    message = {"role": "user", "content": word}
    for messages in ([message], [_split_into_parts(message)]):
        try:
            text = _render(tokenizer, messages, {"tokenize": False, "chat_template": template})
        except MessageError:
            continue
        if word in text:
            return messages != [message]
    return False


def _split_into_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": [{"type": "text", "text": content}]}
    return message


def _normalize_message(message: object, number: int, keeps_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MessageError(
            f"message {number} is {message!r:.80}; expected a mapping with role and content"
        )
    where = f"message {number}"
    normalized: dict[str, Any] = drop_none(message, where)
    if not isinstance(normalized.get("role"), str):
        raise MessageError(
            f"{where} has the role {normalized.get('role')!r}; expected text, such as 'user'"
        )
    content: Any = normalized.get("content")
    if content is None:
        if not normalized.get("tool_calls"):
            fault = "is None" if "content" in message else "is missing"
            raise MessageError(
                f"{where}.content {fault}; expected text, which may be None next to tool_calls alone"
            )
        normalized["content"] = ""
    elif isinstance(content, list):
        if not keeps_parts:
            normalized["content"] = _join_parts(content, f"{where}.content")
    elif not isinstance(content, str):
        raise MessageError(
            f"{where}.content is {content!r:.80}; expected text, or a list of parts of type text"
        )
    return normalized


def _join_parts(parts: list[Any], where: str) -> str:
    texts: list[str] = []
    for part in parts:
        text: object = part
        if isinstance(part, Mapping):
            entries: Mapping[str, Any] = part
            part_type = entries.get("type", "text")
            if part_type in _IMAGE_TYPES:
                raise MessageError(f"{where} has an image; expected text alone")
            text = None
            if part_type == "text":
                text = entries.get("text")
        if not isinstance(text, str):
            raise MessageError(f"{where} has the part {part!r:.80}; expected parts of type text")
        texts.append(text)
    return "".join(texts)

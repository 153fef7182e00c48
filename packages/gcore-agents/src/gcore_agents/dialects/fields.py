"""The fields of a JSON body: each is checked where it is read, and an error names it."""

from collections.abc import Sequence
from typing import Any, NoReturn

from gcore_agents.chat.json_values import STRICT_DECODER, is_deeper
from gcore_agents.errors import CallError

MAX_DEPTH = 100
"""Deepest nesting of JSON in a body."""
_MAX_SHOWN = 40


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text; `CallError` if it is none, or nested too deeply.

    A lone half of a surrogate pair becomes U+FFFD: clients in JavaScript send them when they cut a text.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value: Any = STRICT_DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise CallError(
            f"{where} is not JSON ({error}); expected JSON", field=where, code="invalid_json"
        ) from None
    # Code that walks the value is recursive. A text of few brackets need not be measured.
    if text.count("{") + text.count("[") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise CallError(
            f"{where} is nested more than {MAX_DEPTH} levels deep; expected fewer", field=where
        )
    if "\\u" in text and "\\ud" in text.lower():
        value = _replace_surrogates(value)
    return value


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_replace_surrogates(entry) for entry in value]
    if isinstance(value, dict):
        replaced: dict[str, Any] = {}
        for name, entry in value.items():
            replaced[_replace_surrogates(name)] = _replace_surrogates(entry)
        return replaced
    return value


def describe(value: object) -> str:
    """Return a short text for a value of JSON, whatever its size."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > _MAX_SHOWN:
        return f"{value[:_MAX_SHOWN]!r}..."
    if isinstance(value, int) and abs(value) >= 10**_MAX_SHOWN:
        return "a huge number"
    return repr(value)


class JsonFields:
    """An object of a body, and its path there. A field that is null counts as missing.

    Example:
        >>> fields = JsonFields({"n": 3, "messages": [{"role": "user"}]})
        >>> fields.read_integer("n", 1, 64)
        3
        >>> fields.read_objects("messages")[0].name("role")
        'messages[0].role'
    """

    def __init__(self, value: object, path: str = "") -> None:
        if not isinstance(value, dict):
            raise CallError(
                f"{path or 'the body'} is {describe(value)}; expected an object", field=path
            )
        self.path = path
        self.values: dict[str, Any] = value

    def name(self, field: str) -> str:
        """Return a field's path in the body."""
        return f"{self.path}.{field}" if self.path else field

    def fail(self, field: str, expected: str) -> NoReturn:
        """Raise a `CallError` that says what a field is, and what it should be."""
        name = self.name(field)
        value = self.values.get(field)
        description = "missing" if value is None else describe(value)
        raise CallError(f"{name} is {description}; expected {expected}", field=name)

    def has(self, field: str) -> bool:
        return self.values.get(field) is not None

    def read_text(self, field: str) -> str | None:
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            self.fail(field, "text")
        return value

    def require_text(self, field: str) -> str:
        value = self.read_text(field)
        if not value:
            self.fail(field, "a text that is not empty")
        return value

    def read_flag(self, field: str) -> bool:
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            self.fail(field, "true or false")
        return bool(value)

    def read_integer(self, field: str, minimum: int, maximum: int | None = None) -> int | None:
        """Return an integer within bounds; None: the field is missing."""
        value = self.values.get(field)
        if value is None:
            return None
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(field, f"an integer {bounds}")
        if maximum is not None and value > maximum:
            self.fail(field, f"an integer {bounds}")
        return value

    def read_object(self, field: str) -> "JsonFields | None":
        value = self.values.get(field)
        return None if value is None else JsonFields(value, self.name(field))

    def read_list(self, field: str) -> list[Any]:
        value = self.values.get(field)
        if value is None:
            return []
        if not isinstance(value, list):
            self.fail(field, "a list")
        return value

    def read_objects(self, field: str) -> "list[JsonFields]":
        """Return the objects of a list; none if the field is missing."""
        name = self.name(field)
        objects: list[JsonFields] = []
        for number, value in enumerate(self.read_list(field)):
            objects.append(JsonFields(value, f"{name}[{number}]"))
        return objects

    def require_objects(self, field: str) -> "list[JsonFields]":
        objects = self.read_objects(field)
        if not objects:
            self.fail(field, f"one or more {field}")
        return objects

    def read_texts(self, field: str, max_count: int) -> tuple[str, ...]:
        """Return a text, or a list of them, as several; none of them is empty."""
        value = self.values.get(field)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > max_count:
            self.fail(field, f"a text, or up to {max_count} of them")
        for text in texts:
            if not isinstance(text, str) or not text:
                self.fail(field, "texts that are not empty")
        return tuple(texts)

    def read_token_ids(self, field: str, vocab_size: int) -> list[int]:
        """Return a list of tokens, all of which the tokenizer knows."""
        tokens = self.read_list(field)
        for token in tokens:
            is_integer = isinstance(token, int) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < vocab_size:
                self.fail(field, f"tokens from 0 to {vocab_size - 1}")
        return tokens

    def refuse(self, fields: Sequence[str], reason: str) -> None:
        """Raise a `CallError` if one of these fields has a value."""
        for field in fields:
            if self.values.get(field):
                self.fail(field, f"none: {reason}")

    def pick(self, fields: Sequence[str]) -> dict[str, Any]:
        """Return those of these fields that have a value."""
        return {field: self.values[field] for field in fields if self.has(field)}

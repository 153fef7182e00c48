"""Tables of settings whose entries are checked by the fields of a dataclass, such as a library's options."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gcore_runs.errors import UserError
from gcore_trainer import ConfigError

ConfigT = TypeVar("ConfigT")

cached_adapter = cache(TypeAdapter[Any])
"""Returns a cached adapter: making one takes longer than using it."""


def override(base: ConfigT, table: Mapping[str, Any], section: str) -> ConfigT:
    """Return a dataclass with the entries of a table, the setting ``section``, in place of its fields.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value that the dataclass refuses.
    """
    types = get_type_hints(type(base))
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in types:
            from gcore_runs.settings.other_names import hint

            settings = [f"{section}.{field}" for field in types]
            raise UserError(
                f"unknown field {section}.{name}; {hint(f'{section}.{name}', settings)}"
            )
        values[name] = converted(f"{section}.{name}", value, types[name])
    try:
        return replace(base, **values)  # pyright: ignore[reportArgumentType]  # a dataclass
    except ConfigError as error:
        raise UserError(f"{section}.{error}") from None


def converted(field: str, value: object, kind: Any) -> Any:
    """Return a value as the type ``kind``: lists as tuples, text as enumerations or dates; else `UserError`."""
    try:
        return cached_adapter(kind).validate_python(value)
    except ValidationError as error:
        raise UserError(
            f"{field} is {value!r:.200}; {describe_expected(error.errors()[0])}"
        ) from None


def describe_expected(error: Mapping[str, Any]) -> str:
    """Return what pydantic would accept, as the second half of an error."""
    if error["type"] == "dataclass_type":
        return "expected a table"
    expected: str = error["msg"].replace("Input should be ", "expected ")
    return expected.partition(",")[0] if error["type"].endswith("_parsing") else expected

"""Checks of settings: bounds in their types, settings that only some values of others read, and tables of options.

A config class lists as `read_with` what is read only with some values of other settings, and is refused otherwise; the
docs list it. A setting without an entry is always read.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from inspect import get_annotations
from operator import attrgetter
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import TypeAdapter, ValidationError

from gcore_runs.errors import UserError
from gcore_runs.migration.keys import hint
from gcore_trainer import ConfigError

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Bound:
    """A condition on a value, and its wording in the error. NaN satisfies none of those below.

    Example:
        >>> even = Bound(lambda value: value % 2 == 0, "an even number")
        >>> @dataclass(frozen=True)
        ... class ModelConfig(Checked, section="model"):
        ...     num_heads: Annotated[int, even] = 2
        >>> ModelConfig(num_heads=3)
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: model.num_heads is 3; expected an even number
    """

    holds: Callable[[Any], bool]
    expected: str


def at_least(lowest: float, expected: str = "") -> Bound:
    """Accept numbers from ``lowest`` on."""
    return Bound(lambda value: value >= lowest, expected or f"{lowest:g} or more")


def above(limit: float, expected: str = "") -> Bound:
    """Accept numbers greater than ``limit``."""
    return Bound(lambda value: value > limit, expected or f"a number above {limit:g}")


def within(low: float, high: float) -> Bound:
    """Accept numbers of the half-open interval."""
    return Bound(lambda value: low <= value < high, f"a number in [{low:g}, {high:g})")


def multiple_of(factor: int) -> Bound:
    """Accept multiples of ``factor``."""
    return Bound(lambda value: value % factor == 0, f"a multiple of {factor}")


Count: TypeAlias = Annotated[int, at_least(1)]
NonNegative: TypeAlias = Annotated[int, at_least(0)]
Amount: TypeAlias = Annotated[
    float, Bound(lambda value: 0 <= value < math.inf, "a finite number, 0 or more")
]
Positive: TypeAlias = Annotated[
    float, Bound(lambda value: 0 < value < math.inf, "a finite number above 0")
]
Fraction: TypeAlias = Annotated[float, Bound(lambda value: 0 <= value <= 1, "a number in [0, 1]")]
FractionAbove0: TypeAlias = Annotated[
    float, Bound(lambda value: 0 < value <= 1, "a number in (0, 1]")
]
FractionBelow1: TypeAlias = Annotated[float, within(0, 1)]

EXISTING_FOLDER = Bound(
    lambda path: path in (None, "") or Path(path).absolute().parent.is_dir(),
    "a file in an existing folder",
)
"""Accept files that can be written, and none."""


class Checked:
    """Base of a dataclass whose fields are checked by the bounds in their types: ``n: Annotated[int, at_least(2)]``.

    The bounds of ``tuple[Annotated[int, at_least(1)], ...]`` are checked entry by entry. A field that a subclass
    declares again keeps its bounds, unless it has others there. What depends on several fields is a `require`.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class LengthConfig(Checked, section="length"):
        ...     shortest: Count = 1
        ...     longest: Count = 8
        ...     def __post_init__(self):
        ...         super().__post_init__()
        ...         self.require("longest", self.longest >= self.shortest, f"at least shortest={self.shortest}")
        >>> LengthConfig(shortest=9)
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: length.longest is 8; expected at least shortest=9
    """

    section: ClassVar[str] = ""
    """Dotted place of the fields, named in errors: ``class DataConfig(Checked, section="data")``."""
    error: ClassVar[type[Exception]] = UserError
    """Type of the errors."""

    def __init_subclass__(cls, *, section: str | None = None) -> None:
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        check_bounds(self, self.section, self.error)

    def require(self, name: str, holds: object, expected: str) -> None:
        """Raise the error of a field, by its name or by a dotted one in a section, unless a condition holds."""
        if not holds:
            section = f"{self.section}.".lstrip(".")
            raise self.error(
                f"{section}{name} is {format_value(attrgetter(name)(self))}; expected {expected}"
            )


def format_value(value: object) -> str:
    """Return a setting's value as errors show it: true and false as in TOML, anything else as in Python."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def check_bounds(settings: Any, section: str = "", error: type[Exception] = UserError) -> None:
    """Raise ``error`` if a field is out of the bounds in its type, also in a section that is not `Checked` itself."""
    prefix = f"{section}.".lstrip(".")
    for name, bound, is_of_entries in _bounds(type(settings)):
        values = getattr(settings, name)
        verb = "holds"
        if not is_of_entries:
            values = (values,)
            verb = "is"
        for value in values:
            if bound.holds(value):
                continue
            if isinstance(value, Path):
                value = str(value)
            raise error(f"{prefix}{name} {verb} {value!r}; expected {bound.expected}")
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, Checked):
            check_bounds(value, prefix + field.name, error)


@cache
def _bounds(settings_type: type) -> list[tuple[str, Bound, bool]]:
    """Return the name of each bounded field, the bound, and whether it is of the entries of a tuple."""
    bounds: list[tuple[str, Bound, bool]] = []
    for field in fields(cast(Any, settings_type)):
        for owner in settings_type.__mro__:
            hint = get_annotations(owner).get(field.name)
            is_of_entries = get_origin(hint) is tuple
            if is_of_entries:
                hint = get_args(hint)[0]
            declared = [
                bound for bound in getattr(hint, "__metadata__", ()) if isinstance(bound, Bound)
            ]
            if declared:
                bounds.extend((field.name, bound, is_of_entries) for bound in declared)
                break
    return bounds


@dataclass(frozen=True, kw_only=True)
class ReadWith:
    """Settings that are read only with some values of others.

    Example:
        >>> entry = ReadWith(settings=("algorithm.adv_clip_max",), chosen_by={"algorithm.name": one_of("nft")})
        >>> entry.is_read({"algorithm.name": "dpo"})
        False
        >>> entry.readers
        'algorithm.name nft'
    """

    settings: tuple[str, ...]
    """Dotted names; that of a section stands for all of its settings."""
    chosen_by: Mapping[str, Bound]
    """The values of other settings, by dotted name, with which these are read: one that holds is enough."""
    hint: str = ""
    """Another way to what the setting seems to be for."""

    def concerns(self, name: str) -> bool:
        """Return whether a setting is one of these, or in one of these sections."""
        return any(f"{name}.".startswith(f"{setting}.") for setting in self.settings)

    def is_read(self, values: Mapping[str, Any]) -> bool:
        """Return whether the settings are read with the values of others, by dotted name."""
        return any(bound.holds(values[name]) for name, bound in self.chosen_by.items())

    @property
    def readers(self) -> str:
        """The others' values in words."""
        return " or ".join(
            f"{name} {bound.expected}".strip() for name, bound in self.chosen_by.items()
        )


def one_of(*values: str, own: bool = False) -> Bound:
    """Accept some names; with ``own`` also a user's function, ``PATH.py:function``, which may read anything."""
    words = ", ".join(values)
    if own:
        words += ", or PATH.py:function"
    return Bound(lambda value: value in values or (own and ".py:" in value), words or "of no value")


ABOVE_0 = Bound(lambda value: value > 0, "above 0")
IS_TRUE = Bound(lambda value: value is True, "true")
IS_SET = Bound(bool, "set")


@cache
def default_settings(config_type: type) -> Mapping[str, Any]:
    """Return the default of every setting of a config class, by dotted name."""
    defaults: dict[str, Any] = {}
    for field in fields(config_type):
        value: Any = field.default
        if field.default_factory is not MISSING:
            value = field.default_factory()
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        defaults[field.name] = value
    return flatten(defaults, setting_types(config_type))


@cache
def conditional_settings(config_type: type) -> list[tuple[str, ReadWith]]:
    """Return the settings of a config class that are not always read, each with its condition."""
    settings: list[tuple[str, ReadWith]] = []
    entries: tuple[ReadWith, ...] = getattr(config_type, "read_with", ())
    for entry in entries:
        settings.extend(
            (name, entry) for name in default_settings(config_type) if entry.concerns(name)
        )
    return settings


def check_read(config: object) -> None:
    """Raise `UserError` for a setting that differs from its default and is not read with the others' values."""
    defaults = default_settings(type(config))
    for name, entry in conditional_settings(type(config)):
        value = attrgetter(name)(config)
        if value == defaults[name]:
            continue
        chosen = {chooser: attrgetter(chooser)(config) for chooser in entry.chosen_by}
        if not entry.is_read(chosen):
            raise UserError(_refusal(name, value, defaults[name], chosen, entry))


def _refusal(
    name: str, value: Any, default: Any, chosen: Mapping[str, Any], entry: ReadWith
) -> str:
    context = " and ".join(f"{chooser} {format_value(value)}" for chooser, value in chosen.items())
    expected = f"expected {format_value(default)} with {context}: it is read with {entry.readers}"
    if entry.hint:
        expected += f"; {entry.hint}"
    return f"{name} is {format_value(value)}; {expected}"


@cache
def setting_types(kind: type, prefix: str = "") -> Mapping[str, Any]:
    """Return the type of every setting of a dataclass, by its dotted name: ``{"rollout.n": int, ...}``."""
    hints = get_type_hints(kind)
    types: dict[str, Any] = {}
    for field in fields(kind):
        name = prefix + field.name
        field_type = hints[field.name]
        if isinstance(field_type, type) and is_dataclass(field_type):
            types |= setting_types(field_type, f"{name}.")
        else:
            types[name] = field_type
    return types


def flatten(
    values: Mapping[str, Any], leaves: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Return every value by its dotted name; a mapping is a value if it is empty, or one of the ``leaves``."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in leaves:
            flat |= flatten(value, leaves, f"{name}.")
        else:
            flat[name] = value
    return flat


def flatten_settings(settings: object, leaves: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a dataclass by their dotted names; see `flatten`."""
    return flatten(asdict(cast(Any, settings)), leaves)


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by their dotted names as nested tables."""
    tables: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        if value == {}:
            table.setdefault(last, {})
        else:
            table[last] = value
    return tables


cached_adapter = cache(TypeAdapter[Any])
"""Returns a cached adapter: making one takes longer than using it."""


def override(base: ConfigT | type[ConfigT], table: Mapping[str, Any], section: str) -> ConfigT:
    """Return a dataclass, or one of a class, whose fields have the entries of a table, the setting ``section``.

    Raises:
        UserError: an unknown field (with the nearest known one), a wrong type, a value that the dataclass refuses.
    """
    make: Any = base if isinstance(base, type) else partial(replace, base)  # pyright: ignore[reportArgumentType]  # a dataclass
    types = get_type_hints(base if isinstance(base, type) else type(base))
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in types:
            settings = [f"{section}.{field}" for field in types]
            raise UserError(
                f"unknown field {section}.{name}; {hint(f'{section}.{name}', settings)}"
            )
        values[name] = convert_value(f"{section}.{name}", value, types[name])
    try:
        return make(**values)
    except ConfigError as error:
        raise UserError(f"{section}.{error}") from None


def convert_value(field: str, value: object, kind: Any) -> Any:
    """Return a value as the type ``kind``: lists as tuples, text as enumerations or dates; else `UserError`."""
    if isinstance(value, bool) and kind in (int, float):
        raise UserError(f"{field} is {format_value(value)}; expected a number")
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

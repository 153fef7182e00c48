"""Columns that are computed from others by expressions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gcore_runs.data.rows import LazySequence, RowSource
from gcore_runs.errors import UserError
from gcore_runs.logs import one_line


def with_columns(rows: RowSource, columns: Mapping[str, str]) -> RowSource:
    """Return the rows with further columns; of rows in memory they are computed at once.

    Expressions are Jinja's, in its sandbox: they have the row's columns as variables, and all of them as ``row``, but
    neither files nor modules. An expression sees the columns as they are in the data, not those that others make.

    Raises:
        UserError: an expression is malformed, or fails on a row.
    """
    mapped = MappedRows(rows, columns)
    if not rows.identity:
        return replace(rows, rows=list(mapped))
    # The first row has the errors that all have.
    mapped[0]
    return replace(rows, rows=mapped, identity=rows.identity + repr(sorted(columns.items())))


class MappedRows(LazySequence[Mapping[str, Any]]):
    """Rows with further columns, each computed when its row is read; see `with_columns`."""

    def __init__(self, rows: RowSource, columns: Mapping[str, str]) -> None:
        self._name = rows.name
        self._rows = rows.rows
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> Mapping[str, Any]:
        return self._add_columns(index, self._rows[index])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for index, row in enumerate(self._rows):
            yield self._add_columns(index, row)

    def __getstate__(self) -> dict[str, Any]:
        # Compiled expressions stay in the process.
        return {name: value for name, value in vars(self).items() if name != "_expressions"}

    @cached_property
    def _expressions(self) -> dict[str, Callable[..., Any]]:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        expressions: dict[str, Callable[..., Any]] = {}
        for name, text in self._columns.items():
            try:
                expressions[name] = environment.compile_expression(text, undefined_to_none=False)
            except TemplateSyntaxError as error:
                raise UserError(
                    f"data.columns.{name} is {text!r}; expected a Jinja expression: {one_line(error)}"
                ) from None
        return expressions

    def _add_columns(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        extended = dict(row)
        for name, expression in self._expressions.items():
            try:
                value = expression({"row": row, **row})
                if isinstance(value, StrictUndefined):
                    str(value)
            except (
                TemplateError,
                TypeError,
                ValueError,
                AttributeError,
                LookupError,
                ArithmeticError,
            ) as error:
                reason = f"{one_line(error)} (data.columns.{name} is {self._columns[name]!r})"
                raise UserError(f"{self._name}: row {index + 1}: {reason}") from None
            extended[name] = value
        return extended


def values_of(rows: Sequence[Mapping[str, Any]], key: str) -> Iterator[Any]:
    """Yield the values of one column, without reading the others where that is possible; None where it is missing."""
    read: Callable[[str], Iterator[Any]] | None = getattr(rows, "values", None)
    if read:
        return read(key)
    return (row.get(key) for row in rows)

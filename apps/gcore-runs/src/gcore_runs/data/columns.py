"""Columns that are computed from others by expressions."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gcore_runs.errors import UserError, one_line
from gcore_runs.inputs import Rows


def with_columns(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """Return the rows with further columns; of rows in memory they are computed at once.

    Raises:
        UserError: an expression is malformed, or fails on a row.
    """
    mapped = MappedRows(rows, columns)
    if not rows.identity:
        return Rows(rows.name, list(mapped), folder=rows.folder)
    # The first row has the errors that all have.
    mapped[0]
    return mapped


class MappedRows(Rows):
    """Rows with further columns; each is computed when its row is read.

    Expressions are Jinja's, in its sandbox: they have the row's columns as variables, and all of them as ``row``, but
    neither files nor modules. An expression sees the columns as they are in the data, not those that others make.
    """

    def __init__(self, rows: Rows, columns: Mapping[str, str]) -> None:
        identity = rows.identity and rows.identity + repr(sorted(columns.items()))
        super().__init__(rows.name, rows.rows, folder=rows.folder, identity=identity)
        self.columns = columns

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._mapped(index, self.rows[index])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self._mapped(i, row) for i, row in enumerate(self.rows))

    def __getstate__(self) -> dict[str, Any]:
        # Compiled expressions stay in the process.
        return {name: value for name, value in vars(self).items() if name != "_expressions"}

    @cached_property
    def _expressions(self) -> dict[str, Callable[..., Any]]:
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        found: dict[str, Callable[..., Any]] = {}
        for name, text in self.columns.items():
            try:
                found[name] = environment.compile_expression(text, undefined_to_none=False)
            except TemplateSyntaxError as error:
                raise UserError(
                    f"data.columns.{name} is {text!r}; expected a Jinja expression: {one_line(error)}"
                ) from None
        return found

    def _mapped(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any]:
        made: dict[str, Any] = {}
        for name, expression in self._expressions.items():
            try:
                made[name] = expression({"row": row, **row})
                if isinstance(made[name], StrictUndefined):
                    str(made[name])
            except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                reason = f"{one_line(error)} (data.columns.{name} is {self.columns[name]!r})"
                raise UserError(f"{self.name}: row {index % len(self) + 1}: {reason}") from None
        return {**row, **made}


def texts(rows: Rows, key: str) -> Iterator[Any]:
    """Yield the values of one column, without reading the others where that is possible; None where it is missing."""
    read: Callable[[str], Iterator[Any]] | None = getattr(rows.rows, "values", None)
    if read is None or isinstance(rows, MappedRows):
        return (row.get(key) for row in rows)
    return read(key)

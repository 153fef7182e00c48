"""Results of cases as text."""

from collections.abc import Sequence

from gcore_agents.conformance.runner import CaseResult


def write_table(results: Sequence[CaseResult]) -> str:
    """Return a table with a row for each case and a column for each dialect.

    A cell counts the templates for which the case was run; it is ``-`` if there is none.

    Example:
        >>> result = CaseResult(case="two-turns", dialect="chat", template="chatml", outcome="ok")
        >>> print(write_table([result]))
        case       chat
        two-turns  ok 1
    """
    cells: dict[str, dict[str, list[str]]] = {}
    dialects: list[str] = []
    for result in results:
        if result.dialect not in dialects:
            dialects.append(result.dialect)
        outcomes = cells.setdefault(result.case, {}).setdefault(result.dialect, [])
        outcomes.append(result.outcome)
    rows = [["case", *dialects]]
    for case, row in cells.items():
        texts = [_write_cell(row[dialect]) if dialect in row else "" for dialect in dialects]
        rows.append([case, *texts])
    return _align(rows)


def _write_cell(outcomes: Sequence[str]) -> str:
    num_ok = outcomes.count("ok")
    num_failed = outcomes.count("FAIL")
    if num_failed:
        return f"FAIL {num_failed}/{num_failed + num_ok}"
    return f"ok {num_ok}" if num_ok else "-"


def write_failures(results: Sequence[CaseResult]) -> str:
    """Return a line for each case that failed, with the first difference."""
    lines: list[str] = []
    for result in results:
        if result.outcome == "FAIL":
            where = f"{result.case}, {result.dialect}, {result.template}"
            lines.append(f"FAIL {where}: {result.detail}")
    return "\n".join(lines)


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

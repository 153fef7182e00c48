"""Results of cases as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gcore_agents.conformance.runner import CaseResult


@dataclass
class _Cell:
    num_ok: int = 0
    num_run: int = 0
    failures: list[CaseResult] = field(default_factory=list[CaseResult])

    def write(self) -> str:
        if self.failures:
            return f"FAIL {len(self.failures)}/{self.num_run}"
        return f"ok {self.num_ok}" if self.num_run else "-"


def write_table(results: Sequence[CaseResult]) -> str:
    """Return a table with a row for each case and a column for each dialect.

    A cell counts the templates for which the case was run; it is ``-`` if there is none.

    Example:
        >>> result = CaseResult(case="two-turns", dialect="chat", template="chatml", outcome="ok")
        >>> print(write_table([result]))
        case       chat
        two-turns  ok 1
    """
    cells: dict[str, dict[str, _Cell]] = {}
    dialects: list[str] = []
    for result in results:
        if result.dialect not in dialects:
            dialects.append(result.dialect)
        cell = cells.setdefault(result.case, {}).setdefault(result.dialect, _Cell())
        if result.outcome == "-":
            continue
        cell.num_run += 1
        if result.outcome == "ok":
            cell.num_ok += 1
        else:
            cell.failures.append(result)
    rows = [["case", *dialects]]
    for case, row in cells.items():
        texts = [row[dialect].write() if dialect in row else "" for dialect in dialects]
        rows.append([case, *texts])
    return _align(rows)


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

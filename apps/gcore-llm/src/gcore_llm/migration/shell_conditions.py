"""Conditions and arithmetic of shell scripts: ``test``, ``[[ ]]`` and ``(( ))`` of words that are already expanded."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

_UNARY: Mapping[str, Callable[[str], bool]] = {
    "-n": bool,
    "-z": operator.not_,
    "-e": lambda path: Path(path).exists(),
    "-f": lambda path: Path(path).is_file(),
    "-d": lambda path: Path(path).is_dir(),
    "-s": lambda path: Path(path).is_file() and Path(path).stat().st_size > 0,
}
_TEXT: Mapping[str, Callable[[str, str], bool]] = {
    "=": fnmatchcase,
    "==": fnmatchcase,
    "!=": lambda text, pattern: not fnmatchcase(text, pattern),
    "=~": lambda text, pattern: re.search(pattern, text) is not None,
    "<": operator.lt,
    ">": operator.gt,
}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left - right * int(left / right),
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate_test(words: Sequence[str]) -> bool | None:
    """Return whether a test holds; None if it has an operator that is not known here.

    Example:
        >>> evaluate_test(["gpu", "=", "npu", "-o", "2", "-gt", "1"])
        True
    """
    test = _Test(words)
    try:
        value = test.read_alternatives()
    except (IndexError, ValueError, re.error):
        return None
    return value if test.is_read else None


class _Test:
    """A test that is read from left to right, by precedence."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)

    @property
    def is_read(self) -> bool:
        return not self._words

    def read_alternatives(self) -> bool:
        value = self._read_conjunction()
        while self._words[:1] in (["-o"], ["||"]):
            self._words.pop(0)
            right = self._read_conjunction()
            value = value or right
        return value

    def _read_conjunction(self) -> bool:
        value = self._read_term()
        while self._words[:1] in (["-a"], ["&&"]):
            self._words.pop(0)
            right = self._read_term()
            value = value and right
        return value

    def _read_term(self) -> bool:
        if not self._words:
            return False
        word = self._words.pop(0)
        following = self._words[0] if self._words else ""
        if following in _TEXT:
            return _TEXT[self._words.pop(0)](word, self._words.pop(0))
        if following in _NUMBERS:
            return _NUMBERS[self._words.pop(0)](int(word), int(self._words.pop(0)))
        if word == "!" and self._words:
            return not self._read_term()
        if word == "(":
            value = self.read_alternatives()
            self._words.remove(")")
            return value
        if word in _UNARY and self._words:
            return _UNARY[word](self._words.pop(0))
        if word.startswith("-") and self._words:
            raise ValueError(word)
        return bool(word)


def compute_arithmetic(text: str, variables: Mapping[str, Sequence[str]]) -> int:
    """Return the value of an arithmetic expression of whole numbers and variables; comparisons are 0 or 1.

    Raises:
        ValueError: it has something else in it, or divides by zero.
    """
    plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
    plain = plain.replace("&&", " and ").replace("||", " or ")
    plain = re.sub(r"!(?!=)", " not ", plain)
    try:
        return _compute(ast.parse(plain.strip(), mode="eval").body, variables)
    except (SyntaxError, KeyError, IndexError, ZeroDivisionError):
        raise ValueError(text) from None


def _compute(node: ast.expr, variables: Mapping[str, Sequence[str]]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(variables[name][0] or "0")
        case ast.BinOp(left=left, op=sign, right=right):
            return _ARITHMETIC[type(sign)](_compute(left, variables), _compute(right, variables))
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            return int(
                _ARITHMETIC[type(sign)](_compute(left, variables), _compute(right, variables))
            )
        case ast.BoolOp(op=sign, values=values):
            parts = [bool(_compute(value, variables)) for value in values]
            return int(all(parts) if isinstance(sign, ast.And) else any(parts))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand, variables)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _compute(operand, variables))
        case _:
            raise ValueError(node)

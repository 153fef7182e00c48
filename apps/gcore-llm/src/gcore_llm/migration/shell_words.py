"""Words of a shell script with its variables put in, and conditions and arithmetic of them; nothing is run."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
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


_NAME = re.compile(r"[A-Za-z_]\w*")
_EXPANSION = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#])(?:\[([@*0])\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r":?([-=+?])(.*)", re.DOTALL)
_REPLACEMENT = re.compile(r"(//?)((?:\\.|[^/])*)(?:/(.*))?", re.DOTALL)


class ShellWords:
    """A place in the text of a script, and the variables that have a value there.

    Variables that the script does not set stay as they are written, and so do commands that are substituted, unless
    ``substitute`` returns what they print.
    """

    def __init__(
        self, text: str, *, script: str, folder: str, substitute: Callable[[str], str | None]
    ) -> None:
        self.text = text + "\n"
        self.at = 0
        self.arguments: list[str] = []
        self.variables: dict[str, list[str]] = {
            "HOME": [str(Path.home())],
            "PWD": [folder],
            "BASH_SOURCE": [script],
            "0": [script],
        }
        self.unset: list[str] = []
        """Variables and commands that could not be put in, as they are written."""
        self._substitute = substitute

    def startswith(self, text: str) -> bool:
        """Return whether the text continues so."""
        return self.text.startswith(text, self.at)

    def skip_blanks(self) -> None:
        """Skip spaces and continued lines."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t":
                self.at += 1
            elif self.startswith("\\\n"):
                self.at += 2
            else:
                return

    def assign(self, name: str, *, adds: bool) -> None:
        """Read the value after ``name=`` or ``name+=``."""
        before = self.variables.get(name, []) if adds else []
        if self.startswith("("):
            self.variables[name] = [*before, *self._read_array()]
            return
        value = "".join(self.read_word(splits=False))
        self.variables[name] = ["".join(before[:1]) + value, *before[1:]]

    def _read_array(self) -> list[str]:
        values: list[str] = []
        self.at += 1
        while not self.startswith(")"):
            self.skip_blanks()
            if self.startswith("\n"):
                self.at += 1
            elif self.startswith("#"):
                self.at = self.text.index("\n", self.at)
            elif not self.startswith(")"):
                before = self.at
                values += self.read_word()
                if self.at == before:
                    raise ValueError(self.text[before])
        self.at += 1
        return values

    def read_word(self, *, splits: bool = True) -> list[str]:
        """Read a word; it is none, or several, where it is an array, or has a value with spaces and no quotes."""
        words = [""]
        has_text = False
        quote = ""
        while True:
            if quote and self.at >= len(self.text):
                raise ValueError(quote)
            char = self.text[self.at] if self.at < len(self.text) else "\n"
            if not quote and (char.isspace() or char in ";&|<>()"):
                if char in "<>" and words[-1].isdigit() and not has_text:
                    # The descriptor that is redirected.
                    return []
                return words if has_text or words != [""] else []
            self.at += 1
            if char == quote:
                quote = ""
            elif char == "'" and not quote:
                has_text = True
                end = self.text.index("'", self.at)
                words[-1] += self.text[self.at : end]
                self.at = end + 1
            elif char == '"' and not quote:
                has_text = True
                quote = char
            elif char == "\\":
                words[-1] += self._read_escaped(is_quoted=bool(quote))
            elif char in "$`":
                values = self._read_backquoted() if char == "`" else self._expand()
                is_left = bool(values) and values[0].startswith("$")
                if splits and not quote and not is_left:
                    values = " ".join(values).split()
                if values:
                    words[-1] += values[0]
                    words += values[1:]
                elif quote:
                    # "${EMPTY[@]}" and "$@" are no word at all.
                    has_text = False
            else:
                words[-1] += char

    def _read_escaped(self, *, is_quoted: bool) -> str:
        char = self.text[self.at] if self.at < len(self.text) else "\n"
        self.at += 1
        if char == "\n":
            return ""
        return char if not is_quoted or char in '"\\$`' else f"\\{char}"

    def _read_backquoted(self) -> list[str]:
        end = self.text.index("`", self.at)
        command = self.text[self.at : end]
        self.at = end + 1
        return self._put_in_command(command)

    def _expand(self) -> list[str]:
        """Return the values of what follows a dollar sign."""
        if self.startswith("(("):
            inner = self.read_balanced("(", ")")[1:-1]
            try:
                return [str(compute_arithmetic(inner, self.variables))]
            except ValueError:
                return [self._leave(f"$(({inner}))")]
        if self.startswith("("):
            return self._put_in_command(self.read_balanced("(", ")"))
        if self.startswith("{"):
            return self._expand_braces(self.read_balanced("{", "}"))
        name = self.text[self.at]
        if name in "@*#" or name.isdigit():
            self.at += 1
            return self._value(name)
        match = _NAME.match(self.text, self.at)
        if match is None:
            return ["$"]
        self.at = match.end()
        return self._value(match[0])

    def _value(self, name: str, subscript: str | None = None) -> list[str]:
        if name in self.variables:
            values = self.variables[name]
            if subscript == "*":
                return [" ".join(values)]
            return values if subscript == "@" else values[:1]
        if name == "#":
            return [str(len(self.arguments))]
        if name in "@*":
            return self.arguments
        if name.isdigit():
            return self.arguments[int(name) - 1 : int(name)]
        return [self._leave(f"${name}")]

    def _expand_braces(self, inner: str) -> list[str]:
        match = _EXPANSION.fullmatch(inner)
        if match is None:
            return [self._leave(f"${{{inner}}}")]
        counts, name, subscript, change = match.groups()
        default = _DEFAULT.fullmatch(change)
        is_set = name in self.variables or (
            (name in "@*#" or name.isdigit()) and bool(self._value(name))
        )
        if default is not None:
            values = self._value(name, subscript) if is_set else []
            is_filled = is_set and (not change.startswith(":") or values not in ([], [""]))
            if is_filled and default[1] != "+":
                return values
            return self._expand_default(name, *default.groups(), is_set=is_filled)
        if counts and not change:
            values = self.variables.get(name, [])
            return [str(len(values) if subscript else len("".join(values[:1])))]
        values = self._value(name, subscript)
        if not change or not is_set:
            return values
        changed = [_change(value, change) for value in values]
        unfilled = [value for value in values if any(text in value for text in self.unset)]
        if None in changed or unfilled:
            return [self._leave(f"${{{inner}}}")]
        return [value for value in changed if value is not None]

    def _expand_default(self, name: str, how: str, text: str, *, is_set: bool) -> list[str]:
        if how == "+":
            return self._expand_text(text) if is_set else [""]
        if how == "?":
            return [self._leave(f"${name}")]
        values = self._expand_text(text)
        if how == "=":
            self.variables[name] = values
        return values

    def _expand_text(self, text: str) -> list[str]:
        """Expand the text of a default value."""
        outer = (self.text, self.at)
        self.text = f'"{text.replace(chr(34), "")}"' if "[@]" not in text else text
        self.at = 0
        try:
            return self.read_word()
        finally:
            self.text, self.at = outer

    def _put_in_command(self, command: str) -> list[str]:
        printed = self._substitute(command)
        return [self._leave(f"$({command})") if printed is None else printed]

    def read_balanced(self, opening: str, closing: str) -> str:
        """Read from one bracket to the one that closes it, and return what is between them."""
        start = self.at + 1
        depth = 0
        while True:
            char = self.text[self.at]
            self.at += 1
            if char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
            if not depth:
                return self.text[start : self.at - 1]

    def _leave(self, text: str) -> str:
        self.unset.append(text)
        return text


def _change(value: str, change: str) -> str | None:
    """Return a value after ``#``, ``%``, ``/``, ``,,`` or ``^^`` with a pattern; None for another change."""
    if change in (",,", "^^"):
        return value.lower() if change == ",," else value.upper()
    replacement = _REPLACEMENT.fullmatch(change)
    if replacement is not None:
        how, pattern, new = replacement.groups()
        regex = translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
        return re.sub(regex, lambda _: new or "", value, count=0 if how == "//" else 1)
    how = change[: 2 if change[:2] in ("##", "%%") else 1]
    pattern = re.compile(translate(change[len(how) :]))
    cuts = range(len(value) + 1)
    if how in ("#", "##"):
        order = cuts if how == "#" else reversed(cuts)
        return next((value[cut:] for cut in order if pattern.match(value[:cut])), value)
    if how in ("%", "%%"):
        order = reversed(cuts) if how == "%" else cuts
        return next((value[:cut] for cut in order if pattern.match(value[cut:])), value)
    return None

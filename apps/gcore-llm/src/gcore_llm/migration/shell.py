"""The words of a shell script's commands, with its own variables put in; nothing of it is run."""

import ast
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_EXPANSION = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?::?([-=])(.*))?", re.DOTALL)
_KEYWORDS = ("if", "then", "else", "elif", "fi", "do", "done", "while", "until", "for", "case", "esac", "{", "}", "!")
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_CONDITIONS = ("if", "elif", "else", "while", "until", "for", "case")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class ShellScript:
    """The commands of a script for a POSIX shell or bash, as far as the launch scripts of training runs need it.

    Variables that the script does not set stay as they are written, but for HOME, and so do substituted commands.
    Conditions are not decided: of several assignments to a variable the last one before a command counts.
    """

    def __init__(self, text: str) -> None:
        self._text = text.replace("\\\n", " ") + "\n"
        self._at = 0
        self._variables: dict[str, list[str]] = {"HOME": [str(Path.home())]}
        self.unset: list[str] = []
        """Names of variables and commands that could not be put in."""
        self.has_conditions = False

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without keywords and assignments."""
        words: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t":
                self._at += 1
            elif char == "#":
                self._at = self._text.index("\n", self._at)
            elif char in "<>":
                self._skip_redirection()
            elif char in "\n;&|()":
                self._at += 1
                if words:
                    yield words
                    words = []
            elif not words and (found := _ASSIGNMENT.match(self._text, self._at)):
                self._assign(found)
            else:
                start = self._at
                new = self._word()
                bare = self._text[start : self._at]
                self.has_conditions |= not words and bare in _CONDITIONS
                if words or bare not in (*_KEYWORDS, *_DECLARATIONS):
                    words += new

    def _skip_redirection(self) -> None:
        """Skip a redirection and the file or descriptor that it names."""
        while self._text[self._at] in "<>&|":
            self._at += 1
        while self._text[self._at] in " \t":
            self._at += 1
        self._word()

    def _assign(self, found: re.Match[str]) -> None:
        self._at = found.end()
        name, adds = found.groups()
        values: list[str] = []
        if self._text[self._at] == "(":
            self._at += 1
            while self._text[self._at] != ")":
                if self._text[self._at].isspace():
                    self._at += 1
                elif self._text[self._at] == "#":
                    self._at = self._text.index("\n", self._at)
                else:
                    values += self._word()
            self._at += 1
        else:
            values = ["".join(self._word(splits=False))]
        self._variables[name] = [*self._variables.get(name, []), *values] if adds else values

    def _word(self, *, splits: bool = True) -> list[str]:
        """Read a word; it is none, or several, where it is an array, or has a value with spaces and no quotes."""
        words, has_text, quote = [""], False, ""
        while True:
            char = self._text[self._at] if self._at < len(self._text) else "\n"
            if not quote and (char.isspace() or char in ";&|<>()"):
                if char in "<>" and words[-1].isdigit() and not has_text:
                    # The descriptor that is redirected.
                    return []
                return words if has_text or words != [""] else []
            self._at += 1
            if char == quote:
                quote = ""
            elif char in "'\"" and not quote:
                quote, has_text = char, True
                if char == "'":
                    end = self._text.index("'", self._at)
                    words[-1] += self._text[self._at : end]
                    quote, self._at = "", end + 1
            elif char == "\\":
                is_escape = not quote or self._text[self._at] in '"\\$`'
                words[-1] += self._text[self._at] if is_escape else f"\\{self._text[self._at]}"
                self._at += 1
            elif char == "$":
                values = self._expansion()
                if splits and not quote:
                    is_left = values[:1] and values[0].startswith("$")
                    values = values if is_left else [part for value in values for part in value.split()]
                if values:
                    words[-1] += values[0]
                    words += values[1:]
                elif quote:
                    # "${EMPTY[@]}" and "$@" are no word at all.
                    has_text = False
            else:
                words[-1] += char

    def _expansion(self) -> list[str]:
        """Return the values of what follows a dollar sign."""
        text = self._text
        if text.startswith("((", self._at):
            inner = self._balanced("(", ")")
            return [self._number(inner[1:-1])]
        if text.startswith("(", self._at):
            return [self._left(f"$({self._balanced('(', ')')})")]
        if text.startswith("{", self._at):
            inner = self._balanced("{", "}")
            found = _EXPANSION.fullmatch(inner)
            if found is None and inner[:1] in "@*":
                return []
            if found is None:
                return [self._left(f"${inner}")]
            name, _, how, default = found.groups()
            if name in self._variables and (self._variables[name] != [""] or default is None):
                return self._variables[name]
            if default is not None:
                values = list(self._inside(default))
                if how == "=":
                    self._variables[name] = values
                return values
            return [] if name in "@*" or name.isdigit() else [self._left(f"${name}")]
        if text[self._at] in "@*" or text[self._at].isdigit():
            self._at += 1
            return []
        found = _NAME.match(text, self._at)
        if found is None:
            return ["$"]
        self._at = found.end()
        return self._variables.get(found[0]) or [self._left(f"${found[0]}")]

    def _inside(self, text: str) -> list[str]:
        """Expand the text of a default value."""
        outer, self._text, self._at = (self._text, self._at), f'"{text.replace(chr(34), "")}"', 0
        try:
            return self._word()
        finally:
            self._text, self._at = outer

    def _balanced(self, opening: str, closing: str) -> str:
        start, depth = self._at + 1, 0
        while True:
            depth += {opening: 1, closing: -1}.get(self._text[self._at], 0)
            self._at += 1
            if not depth:
                return self._text[start : self._at - 1]

    def _left(self, text: str) -> str:
        self.unset.append(text)
        return text

    def _number(self, text: str) -> str:
        """Compute an arithmetic expression of whole numbers and variables."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        try:
            return str(self._computed(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
            return self._left(f"$(({text}))")

    def _computed(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return int(self._variables[name][0])
            case ast.BinOp(left=left, op=op, right=right):
                return _OPERATORS[type(op)](self._computed(left), self._computed(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._computed(operand)
            case _:
                raise ValueError(node)

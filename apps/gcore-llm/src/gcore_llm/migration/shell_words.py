"""Words of a shell script with its variables put in; nothing of it is run."""

import re
from collections.abc import Callable
from fnmatch import translate
from pathlib import Path

from gcore_llm.migration.shell_conditions import compute_arithmetic

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

"""The commands of a shell script, with its own variables put in and its conditions decided; nothing of it is run."""

import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from gcore_llm.migration.shell_words import ShellWords, compute_arithmetic, evaluate_test

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_FUNCTION = re.compile(r"(?:function\s+)?([\w-]+)\s*\(\)\s*|function\s+([\w-]+)\s*")
_BARE_WORD = re.compile(r"[^\s;&|()<>]*")
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_IMPORT = re.compile(r"import (\w+)[\w.]*;?")
_DECLARATIONS = ("export", "local", "declare", "readonly", "typeset")
_MOST_ROUNDS = 100
_MOST_CALLS = 20


class ShellScript:
    """The commands of a script for a POSIX shell or bash, as far as the launch scripts of training runs need it.

    Conditions are decided as bash decides them where the variables that they ask for have values here. A variable that
    the script does not set counts as empty in a condition. The status of a program is not known: ``if`` takes it as a
    failure, ``&&`` and ``||`` as a success, and ``undecided`` has the conditions whose commands would set something.
    """

    def __init__(self, text: str, *, path: str = "", folder: str = "") -> None:
        self._words = ShellWords(
            text, script=path, folder=folder or str(Path.cwd()), substitute=self._substitute
        )
        self._status: int | None = 0
        self._commands: list[list[str]] = []
        self._functions: dict[str, int] = {}
        self._here_documents: list[str] = []
        self._printed: list[str] = []
        self._num_calls = 0
        self.unset = self._words.unset
        """Variables and commands that could not be put in, as they are written."""
        self.taken_as_empty: list[str] = []
        """Variables that conditions ask for and the script does not set."""
        self.undecided: list[str] = []
        """Conditions that could not be decided, with their lines."""
        self.skipped_commands: list[list[str]] = []
        """Words of the commands of branches that are not taken."""
        self.exits: list[int] = []
        """Lines at which the script would end before its last command."""

    def commands(self) -> list[list[str]]:
        """Return the words of each command that the script runs, without keywords and assignments."""
        while self._words.at < len(self._words.text):
            before = self._words.at
            self._run_list(())
            if self._words.at == before:
                # A bracket or keyword without its counterpart.
                self._words.at += 1
        return self._commands

    def _run_list(self, ends: Collection[str]) -> None:
        """Run commands until one of some keywords, which is not read, or a closing bracket or ``;;``."""
        words = self._words
        while True:
            self._skip_separators()
            if words.at >= len(words.text) or words.startswith(")") or words.startswith(";;"):
                return
            if self._peek() in ends:
                return
            before = words.at
            self._run_and_or()
            if words.at == before:
                return

    def _skip_separators(self) -> None:
        words = self._words
        while words.at < len(words.text):
            words.skip_blanks()
            if words.startswith(";;") or words.at >= len(words.text):
                return
            if words.startswith("#"):
                words.at = words.text.index("\n", words.at)
            elif words.startswith("\n"):
                words.at += 1
                self._skip_here_documents()
            elif words.text[words.at] in ";&":
                words.at += 1
            else:
                return

    def _skip_here_documents(self) -> None:
        words = self._words
        for end in self._here_documents:
            line = ""
            while line.strip() != end and words.at < len(words.text):
                newline = words.text.index("\n", words.at)
                line = words.text[words.at : newline]
                words.at = newline + 1
        self._here_documents = []

    def _peek(self) -> str:
        match = _BARE_WORD.match(self._words.text, self._words.at)
        return match[0] if match else ""

    def _read_keyword(self, keyword: str) -> None:
        self._skip_separators()
        if self._peek() != keyword:
            raise ValueError(keyword)
        self._words.at += len(keyword)

    def _line(self) -> int:
        return self._words.text.count("\n", 0, self._words.at) + 1

    def _run_branch(self, run: Callable[[], None], *, is_taken: bool, undecided: str = "") -> None:
        """Run commands, and undo what they set unless they are taken; ``undecided`` is reported if they do anything."""
        words = self._words
        variables = {name: list(values) for name, values in words.variables.items()}
        num_commands = len(self._commands)
        num_unset = len(words.unset)
        num_printed = len(self._printed)
        reports = (list(self.exits), list(self.taken_as_empty), list(self.undecided))
        status = self._status
        run()
        has_effect = words.variables != variables or len(self._commands) > num_commands
        if not is_taken:
            words.variables = variables
            self.skipped_commands += self._commands[num_commands:]
            del self._commands[num_commands:]
            del words.unset[num_unset:]
            del self._printed[num_printed:]
            self.exits, self.taken_as_empty, self.undecided = reports
            self._status = status
        if undecided and has_effect:
            self.undecided.append(undecided)

    def _run_and_or(self) -> None:
        words = self._words
        start = words.at
        self._run_pipeline()
        words.skip_blanks()
        while words.startswith("&&") or words.startswith("||"):
            is_and = words.startswith("&&")
            condition = "" if self._status is not None else self._quote(start)
            words.at += 2
            self._skip_separators()
            is_success = self._status in (0, None)
            # Of a program that succeeds in `program && more`, more is what a reader expects to run.
            is_reported = condition and not is_and
            self._run_branch(
                self._run_pipeline,
                is_taken=is_success == is_and,
                undecided=condition if is_reported else "",
            )
            words.skip_blanks()

    def _quote(self, start: int) -> str:
        text = " ".join(self._words.text[start : self._words.at].split())
        line = self._words.text.count("\n", 0, start) + 1
        return f"line {line}: {text.removesuffix(';').strip()}"

    def _run_pipeline(self) -> None:
        words = self._words
        is_negated = self._peek() == "!"
        if is_negated:
            words.at += 1
            words.skip_blanks()
        self._run_command()
        words.skip_blanks()
        while words.startswith("|") and not words.startswith("||"):
            words.at += 2 if words.startswith("|&") else 1
            self._skip_separators()
            self._run_command()
            self._status = None
            words.skip_blanks()
        if is_negated and self._status is not None:
            self._status = int(not self._status)

    def _run_command(self) -> None:
        words = self._words
        compound: dict[str, Callable[[], None]] = {
            "if": self._run_if,
            "case": self._run_case,
            "for": self._run_for,
            "while": self._run_while,
            "until": self._run_while,
            "{": self._run_group,
            "[[": self._run_double_brackets,
        }
        keyword = self._peek()
        function = _FUNCTION.match(words.text, words.at)
        if keyword in compound:
            compound[keyword]()
        elif function is not None:
            words.at = function.end()
            self._functions[function[1] or function[2]] = words.at
            self._run_branch(self._run_command, is_taken=False)
        elif words.startswith("(("):
            self._run_arithmetic()
        elif words.startswith("("):
            self._run_subshell()
        else:
            self._run_simple()
            return
        words.skip_blanks()
        while words.text[words.at : words.at + 1] in ("<", ">", "2") and self._peek() in ("", "2"):
            words.at += len(self._peek())
            self._skip_redirection()
            words.skip_blanks()

    def _run_if(self) -> None:
        words = self._words
        is_decided = False
        keyword = "if"
        while keyword in ("if", "elif"):
            self._read_keyword(keyword)
            start = words.at
            self._run_branch(lambda: self._run_list(("then",)), is_taken=not is_decided)
            is_true = not is_decided and self._status == 0
            undecided = "" if is_decided or self._status is not None else self._quote(start)
            self._read_keyword("then")
            self._run_branch(
                lambda: self._run_list(("elif", "else", "fi")),
                is_taken=is_true,
                undecided=undecided,
            )
            is_decided = is_decided or is_true
            self._skip_separators()
            keyword = self._peek()
        if keyword == "else":
            self._read_keyword("else")
            self._run_branch(lambda: self._run_list(("fi",)), is_taken=not is_decided)
        self._read_keyword("fi")

    def _run_case(self) -> None:
        words = self._words
        self._read_keyword("case")
        words.skip_blanks()
        start = words.at
        value = self._fill("".join(words.read_word(splits=False)))
        undecided = self._quote(start) if value is None else ""
        self._read_keyword("in")
        self._skip_separators()
        is_decided = False
        while self._peek() != "esac":
            patterns = self._read_patterns()
            is_match = value is not None and any(
                fnmatchcase(value, pattern) for pattern in patterns
            )
            self._run_branch(
                lambda: self._run_list(("esac",)),
                is_taken=is_match and not is_decided,
                undecided=undecided,
            )
            is_decided = is_decided or is_match
            if words.startswith(";;"):
                words.at += 2
            self._skip_separators()
        self._read_keyword("esac")

    def _read_patterns(self) -> list[str]:
        words = self._words
        if words.startswith("("):
            words.at += 1
        patterns: list[str] = []
        while not words.startswith(")"):
            words.skip_blanks()
            patterns.append("".join(words.read_word(splits=False)))
            words.skip_blanks()
            if words.startswith("|"):
                words.at += 1
            elif not words.startswith(")"):
                raise ValueError(words.text[words.at])
        words.at += 1
        return patterns

    def _run_for(self) -> None:
        words = self._words
        self._read_keyword("for")
        words.skip_blanks()
        start = words.at
        name = self._peek()
        words.at += len(name)
        self._skip_separators()
        values = list(words.arguments)
        undecided = ""
        if words.startswith("(("):
            words.read_balanced("(", ")")
            undecided = self._quote(start)
        elif self._peek() == "in":
            self._read_keyword("in")
            values = self._read_values()
            if any("$(" in value for value in values):
                undecided = self._quote(start)
        self._read_keyword("do")
        body = words.at
        rounds = [] if undecided else values[:_MOST_ROUNDS]
        for value in rounds:
            words.at = body
            words.variables[name] = [value]
            self._run_list(("done",))
        if not rounds:
            self._run_branch(lambda: self._run_list(("done",)), is_taken=False, undecided=undecided)
        self._read_keyword("done")

    def _read_values(self) -> list[str]:
        words = self._words
        values: list[str] = []
        words.skip_blanks()
        while words.text[words.at] not in ";\n":
            before = words.at
            values += words.read_word()
            words.skip_blanks()
            if words.at == before:
                raise ValueError(words.text[before])
        return values

    def _run_while(self) -> None:
        words = self._words
        keyword = self._peek()
        self._read_keyword(keyword)
        start = words.at
        for _ in range(_MOST_ROUNDS):
            words.at = start
            self._run_list(("do",))
            undecided = self._quote(start) if self._status is None else ""
            is_true = self._status is not None and (self._status == 0) == (keyword == "while")
            self._read_keyword("do")
            self._run_branch(
                lambda: self._run_list(("done",)), is_taken=is_true, undecided=undecided
            )
            if not is_true:
                break
        self._read_keyword("done")

    def _run_group(self) -> None:
        self._read_keyword("{")
        self._run_list(("}",))
        self._read_keyword("}")

    def _run_subshell(self) -> None:
        words = self._words
        variables = {name: list(values) for name, values in words.variables.items()}
        words.at += 1
        self._run_list(())
        if not words.startswith(")"):
            raise ValueError(")")
        words.at += 1
        words.variables = variables

    def _run_arithmetic(self) -> None:
        inner = self._words.read_balanced("(", ")")[1:-1]
        try:
            self._status = int(not compute_arithmetic(inner, self._words.variables))
        except ValueError:
            self._status = None

    def _run_double_brackets(self) -> None:
        words = self._words
        words.at += 2
        test: list[str] = []
        words.skip_blanks()
        while self._peek() != "]]":
            if words.at >= len(words.text):
                raise ValueError("[[")
            sign = next(
                (sign for sign in ("&&", "||", "(", ")", "<", ">", "\n") if words.startswith(sign)),
                "",
            )
            if sign:
                words.at += len(sign)
                if sign != "\n":
                    test.append(sign)
            elif test[-1:] == ["=~"]:
                end = words.text.index("]]", words.at)
                test.append(words.text[words.at : end].strip().strip("\"'"))
                words.at = end
            else:
                test.append("".join(words.read_word(splits=False)))
            words.skip_blanks()
        words.at += 2
        self._decide(test)

    def _decide(self, test: list[str]) -> None:
        """Set the status to that of a test."""
        filled = [self._fill(word) for word in test]
        if test[:1] == ["-v"]:
            self._status = int(test[1] not in self._words.variables)
        elif None in filled:
            self._status = None
        else:
            value = evaluate_test([word for word in filled if word is not None])
            self._status = None if value is None else int(not value)

    def _fill(self, word: str) -> str | None:
        """Return a word of a condition, with variables that are not set as empty; None if a command is left in it."""
        for text in sorted(set(self._words.unset), key=len, reverse=True):
            if text not in word:
                continue
            if text.startswith(("$(", "${")):
                return None
            word = word.replace(text, "")
            if text not in self.taken_as_empty:
                self.taken_as_empty.append(text)
        return word

    def _skip_redirection(self) -> None:
        """Skip a redirection and the file or descriptor that it names."""
        words = self._words
        document = _HERE_DOCUMENT.match(words.text, words.at)
        if document is not None:
            self._here_documents.append(document[2])
            words.at = document.end()
            return
        while words.text[words.at] in "<>&|":
            words.at += 1
        words.skip_blanks()
        words.read_word()

    def _run_simple(self) -> None:
        words = self._words
        command: list[str] = []
        declares = False
        num_unset = len(words.unset)
        while True:
            words.skip_blanks()
            char = words.text[words.at : words.at + 1]
            assignment = _ASSIGNMENT.match(words.text, words.at)
            if (char in "<>" and char) or words.startswith("&>"):
                self._skip_redirection()
            elif not char or char in "\n;&|)#":
                break
            elif assignment is not None and (declares or not command):
                words.at = assignment.end()
                words.assign(assignment[1], adds=bool(assignment[2]))
            elif char == "(":
                raise ValueError(char)
            else:
                command += words.read_word()
                declares = declares or (command[:1] != [] and command[0] in _DECLARATIONS)
        if words.startswith("#"):
            words.at = words.text.index("\n", words.at)
        if declares or not command:
            is_known = not any(text.startswith("$(") for text in words.unset[num_unset:])
            self._status = 0 if is_known else None
        else:
            self._execute(command)

    def _execute(self, command: list[str]) -> None:
        """Do what a command of the shell does to its variables; other commands are kept."""
        name = command[0]
        words = self._words
        if name in ("[", "test"):
            self._decide(command[1:-1] if name == "[" else command[1:])
        elif name in self._functions and self._num_calls < _MOST_CALLS:
            self._call(name, command[1:])
        elif name in ("true", ":", "false"):
            self._status = int(name == "false")
        elif name == "unset":
            for variable in command[1:]:
                words.variables.pop(variable, None)
        elif name == "shift":
            words.arguments = words.arguments[int(command[1]) if len(command) > 1 else 1 :]
        elif name == "cd" and len(command) > 1:
            words.variables["PWD"] = [str(Path(words.variables["PWD"][0], command[-1]))]
            self._status = 0
        elif name == "exit":
            self.exits.append(self._line())
        elif (
            command[1:2] == ["-c"]
            and len(command) > 2
            and (module := _IMPORT.fullmatch(command[2].strip()))
        ):
            self._status = int(find_spec(module[1]) is None)
        else:
            printed = _print(command, words.variables["PWD"][0])
            if printed is not None:
                self._printed.append(printed)
            else:
                self._commands.append(command)
            self._status = None if printed is None else 0

    def _call(self, name: str, arguments: list[str]) -> None:
        words = self._words
        outer = words.at
        outer_arguments = words.arguments
        words.at = self._functions[name]
        words.arguments = arguments
        self._num_calls += 1
        self._run_command()
        self._num_calls -= 1
        words.at = outer
        words.arguments = outer_arguments

    def _substitute(self, command: str) -> str | None:
        """Return what a command prints, if it is made of such as echo, dirname and pwd alone."""
        words = self._words
        outer = (words.text, words.at, self._commands, self._printed, self._functions, self._status)
        variables = {name: list(values) for name, values in words.variables.items()}
        words.text = command + "\n"
        words.at = 0
        self._commands = []
        self._printed = []
        self._functions = {}
        unset = len(words.unset)
        try:
            self._run_list(())
            is_known = not self._commands and len(words.unset) == unset
            return "\n".join(self._printed) if is_known else None
        except (ValueError, IndexError):
            return None
        finally:
            words.text, words.at, self._commands, self._printed, self._functions, self._status = (
                outer
            )
            words.variables = variables


def _print(command: list[str], folder: str) -> str | None:
    """Return what a command prints; None for a command that is not known."""
    name = command[0]
    if name == "echo":
        return " ".join(word for word in command[1:] if word not in ("-n", "-e"))
    arguments = [word for word in command[1:] if not word.startswith("-")]
    if name == "pwd":
        return folder
    if name == "dirname" and arguments:
        return str(PurePosixPath(arguments[0]).parent)
    if name == "basename" and arguments:
        return PurePosixPath(arguments[0]).name.removesuffix("".join(arguments[1:2]))
    if name in ("realpath", "readlink") and arguments:
        return str(Path(folder, arguments[0]).resolve())
    return None

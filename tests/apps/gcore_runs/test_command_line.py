"""What ends a command: here the reader of its output, and other pipes."""

import os
import subprocess
import sys

import pytest

COMMANDS = """
import os
import sys
from gcore_runs.command_line import run_command

def lines(args):
    for number in range(100_000):
        print(number)

def other_pipe(args):
    reading, writing = os.pipe()
    os.close(reading)
    os.write(writing, b"x")

run_command("app", {"lines": lines, "other-pipe": other_pipe}, sys.argv[1:], usage="usage: app\\n" * 10_000)
"""


def app(*args: str) -> "subprocess.Popen[str]":
    # Without a buffer Python loses what a pipe does not take at once, and notices nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", COMMANDS, *args]
    return subprocess.Popen(command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("args", [["lines"], ["--help"]])
def test_a_command_ends_in_silence_with_the_reader_of_its_output(args: list[str]) -> None:
    """As with `gcore-llm train --help | head -1`."""
    with app(*args) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 141


@pytest.mark.parametrize("args", [["lines"], ["--help"]])
def test_a_command_without_standard_output(args: list[str]) -> None:
    """As with `gcore-llm train --help >&-`."""
    closed = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-c", COMMANDS, *args]
    finished = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_another_pipe_without_a_reader_is_an_error() -> None:
    with app("other-pipe") as process:
        assert process.communicate() == ("", f"app: error: {os.strerror(32)}\n")
        assert process.returncode == 2

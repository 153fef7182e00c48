"""What commands have in common: their versions, completion in shells, and ends."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from gcore_bench.cli import main as bench_main
from gcore_diffusion.cli import main as diffusion_main
from gcore_llm.cli import main as llm_main

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
    return subprocess.Popen(
        command, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    "module", ["gcore_llm", "gcore_diffusion", "gcore_bench", "gcore_ckpt", "gcore_placement"]
)
def test_python_m_and_version(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--version"])
    with suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    name = module.replace("_", "-")
    assert capsys.readouterr().out == f"{name} {version(name)}\n"


COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_tyro_${2//-/_}
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("main", "words", "expected"),
    [
        (llm_main, ["gcore-llm", "tra"], ["train", "trace"]),
        (llm_main, ["gcore-llm", "train", "--actor.optim.l"], ["--actor.optim.lr"]),
        (llm_main, ["gcore-llm", "logs", "--fol"], ["--follow"]),
        (diffusion_main, ["gcore-diffusion", "sample", "--gui"], ["--guidance-scale"]),
        (bench_main, ["gcore-bench", "place"], ["placement"]),
    ],
)
def test_completion(
    main: Callable[[list[str]], None],
    words: list[str],
    expected: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with suppress(SystemExit):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    # The script asks the interpreter on the path.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-c", COMPLETE, "bash", script, *words]
    found = subprocess.check_output(command, text=True, env=environment).split()
    assert set(expected) <= set(found), found
    assert all(word.startswith(words[-1]) for word in found)


def test_completion_of_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        llm_main(["--print-completion", "fish"])
    assert capsys.readouterr().err == "gcore-llm: error: expected --print-completion bash or zsh\n"


@pytest.mark.parametrize("module", ["gcore_ckpt", "gcore_placement"])
def test_the_output_of_a_package_is_closed(module: str) -> None:
    """Its reader has gone, as with `gcore-ckpt --help | head -0`, or there is none, as with `>&-`."""
    command = [sys.executable, "-m", module, "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")
    closed = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


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

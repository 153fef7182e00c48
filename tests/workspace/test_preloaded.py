"""Processes that are forked from `tests/startup/preloaded_server.py` are what they would be by themselves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded_client import FOLDER
from process_tree import grandchildren, left_after

pytestmark = pytest.mark.slow

MARK = "'from gcore_rollout.engines.remote.fork_server import serve'; "
"""Lets a program be taken for one that imports torch first."""


def started(
    program: str,
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    pass_fds: tuple[int, ...] = (),
) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", MARK + program, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=env, pass_fds=pass_fds
    )


def test_a_fork_is_what_was_started(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    program = (
        "import json, os, sys; forked = 'torch' in sys.modules; os.write(int(sys.argv[1]), b'through'); "
        "print(json.dumps([forked, sys.argv, os.getcwd(), os.environ['MARKED'], os.getppid(), input()])); "
        "print('aside', file=sys.stderr); sys.exit(3)"
    )
    with started(program, str(theirs), cwd=tmp_path, env=os.environ | {"MARKED": "yes"}, pass_fds=(theirs,)) as process:
        os.close(theirs)
        out, err = process.communicate("a line\n", timeout=300)
    expected = [True, ["-c", str(theirs)], str(tmp_path), "yes", os.getpid(), "a line"]
    assert (process.returncode, json.loads(out), err) == (3, expected, "aside\n")
    assert os.read(ours, 100) == b"through"
    assert os.read(ours, 100) == b"", "nothing else holds the descriptor"
    os.close(ours)


def test_by_itself_where_there_is_no_folder() -> None:
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    with started("import sys; print('torch' in sys.modules)", env=environment) as process:
        assert process.communicate(timeout=300)[0] == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(number: signal.Signals) -> None:
    program = f"import os, signal, time; signal.signal({number:d}, signal.SIG_DFL) if {number:d} != 9 else 0; "
    with started(program + "print(os.getpid(), flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        assert fork != process.pid
        process.send_signal(number)
        assert process.wait(60) == -number
    assert not left_after([fork], 60)


def test_a_fork_that_is_killed_ends_what_asked_for_it() -> None:
    with started("import os, time; print(os.getpid(), flush=True); time.sleep(600)") as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        os.kill(fork, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL


def test_a_fork_stands_where_the_process_does_that_asked() -> None:
    program = "import os, time; child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    with started(program) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert child in grandchildren(os.getpid())
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_fork_ends_with_the_parent_of_what_asked() -> None:
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {MARK + program!r}]); p.wait()"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fork = int(process.stdout.readline())
        process.kill()
    assert not left_after([fork], 60)

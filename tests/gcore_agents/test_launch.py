"""Agents as programs: their environment, how they fail, and that none of their processes and threads is left."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import make_session

from gcore_agents import AgentFailedError, AgentTask, run_command, run_function

# Its first argument is the folder for the pids of: the program, its child, a child in a session of its own, and the
# child of that; then it does what the second one says.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleeps)
other = subprocess.Popen(["sh", "-c", f"sleep 300 & echo $! > {folder}/grandchild; wait"], start_new_session=True)
while not (folder / "grandchild").exists() or not (folder / "grandchild").read_text():
    time.sleep(0.01)
(folder / "pids").write_text(f"{os.getpid()} {child.pid} {other.pid} {(folder / 'grandchild').read_text()}")
exec(sys.argv[2])
"""


def make_task() -> AgentTask:
    session = make_session()
    return AgentTask(
        row={"a": 1}, base_url="http://127.0.0.1:1/v1", api_key=session.key, session=session
    )


@pytest.fixture
def make_command(tmp_path: Path) -> Callable[[str], str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda action: f"{sys.executable} {program} {tmp_path} '{action}'"


def check_all_ended(folder: Path) -> None:
    """Check that the four processes are gone; those without a parent may be zombies for a moment."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 4
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


async def test_a_command_ends_with_all_that_it_started(
    make_command: Callable[[str], str], tmp_path: Path
) -> None:
    task = make_task()
    await run_command(make_command("pass"), task, timeout_s=60)
    check_all_ended(tmp_path)
    assert task.session.is_closed


async def test_its_environment_is_its_own(tmp_path: Path) -> None:
    task = make_task()
    command = f"env > {tmp_path}/env; cp $GCORE_ROW {tmp_path}; pwd > {tmp_path}/folder"
    await run_command(command, task, timeout_s=60)
    lines = (tmp_path / "env").read_text().splitlines()
    assert f"OPENAI_API_KEY={task.api_key}" in lines
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:1" in lines
    assert (tmp_path / "row.json").read_text() == '{"a": 1}'
    assert "GCORE_ROW" not in os.environ
    assert not Path((tmp_path / "folder").read_text().strip()).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("print(1); os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("print(1, flush=True); os.killpg(0, signal.SIGKILL)", "was killed by SIGKILL"),
        ('child.kill(); sys.exit(f"child: {child.wait()}")', "ended with code 1: child: -9"),
        ("other.kill(); sys.exit(other.wait())", "ended with code 247"),
        ("time.sleep(300)", "took longer than 2 s"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "took longer than 2 s"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)", "took longer than 2 s"),
    ],
)
async def test_a_command_that_is_killed_or_idle(
    make_command: Callable[[str], str], tmp_path: Path, action: str, expected: str
) -> None:
    task = make_task()
    with pytest.raises(AgentFailedError, match=expected):
        await run_command(make_command(action), task, timeout_s=2)
    check_all_ended(tmp_path)
    assert task.session.is_closed


@pytest.mark.slow
async def test_a_program_may_clean_up_after_a_timeout(
    make_command: Callable[[str], str], tmp_path: Path
) -> None:
    """Also behind a shell, which ends at once."""
    clean = 'lambda *_: (time.sleep(0.3), (folder / "clean").touch(), os._exit(0))'
    action = f"signal.signal(signal.SIGTERM, {clean}); time.sleep(300)"
    with pytest.raises(AgentFailedError, match="took longer than 2 s"):
        await run_command(f"true && {make_command(action)}; true", make_task(), timeout_s=2)
    assert (tmp_path / "clean").exists()
    check_all_ended(tmp_path)


@pytest.fixture
async def idle_run(make_command: Callable[[str], str], tmp_path: Path) -> asyncio.Task[None]:
    """The run of a command whose processes sleep."""
    run = asyncio.create_task(
        run_command(make_command("time.sleep(300)"), make_task(), timeout_s=60)
    )
    while not (tmp_path / "pids").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    return run


@pytest.mark.slow
async def test_a_command_that_is_killed_from_outside(
    idle_run: asyncio.Task[None], tmp_path: Path
) -> None:
    os.kill(int((tmp_path / "pids").read_text().split()[0]), signal.SIGKILL)
    with pytest.raises(AgentFailedError, match="was killed by SIGKILL"):
        await idle_run
    check_all_ended(tmp_path)


@pytest.mark.slow
async def test_a_run_that_is_interrupted(idle_run: asyncio.Task[None], tmp_path: Path) -> None:
    idle_run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await idle_run
    check_all_ended(tmp_path)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_command(
    make_command: Callable[[str], str], tmp_path: Path
) -> None:
    """Neither a program, nor a folder, also if all of its children are killed first, as by a worker of Ray."""
    command = make_command("time.sleep(300)")
    program = (
        "import asyncio, sys; from scripted import make_session; from gcore_agents import *\n"
        "session = make_session()\n"
        "task = AgentTask(row={}, base_url='http://127.0.0.1:1/v1', api_key='a', session=session)\n"
        "asyncio.run(run_command(sys.argv[1], task, timeout_s=60))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program, command], env=environment) as process:
        while not (tmp_path / "pids").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        assert list(tmp_path.glob("gcore-agents-*/*"))
        process.send_signal(signal.SIGSTOP)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        process.kill()
    check_all_ended(tmp_path)
    deadline = time.monotonic() + 5
    while list(tmp_path.glob("gcore-agents-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_plain_functions_have_threads_of_their_own() -> None:
    """More at once than asyncio has threads; one that does not end is not waited for."""
    at_once = threading.Barrier(100)

    def agent(task: AgentTask) -> float:
        del task
        at_once.wait(30)
        return 1.0

    before = set(threading.enumerate())
    tasks = [make_task() for _ in range(100)]
    await asyncio.gather(*(run_function(agent, task, timeout_s=60) for task in tasks))
    assert [task.session.score for task in tasks] == [1.0] * 100
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)

    may_end = threading.Event()

    def wait(task: AgentTask) -> None:
        del task
        may_end.wait(60)

    with pytest.raises(AgentFailedError, match=r"wait took longer than 0\.1 s"):
        await run_function(wait, make_task(), timeout_s=0.1)
    [left] = set(threading.enumerate()) - before
    assert left.daemon
    may_end.set()
    left.join(5)


async def test_a_plain_function_may_stop_an_iteration() -> None:
    def take_next(task: AgentTask) -> float:
        del task
        return next(iter(()))

    with pytest.raises(AgentFailedError, match="StopIteration"):
        await run_function(take_next, make_task(), timeout_s=5)


async def test_time_in_which_an_engine_holds_turns_back_does_not_count() -> None:
    """Neither for the agent nor for its calls; any other time does."""
    task = make_task()
    clock = task.session.clock

    async def waits(task: AgentTask) -> float:
        start_s = clock.now_s()
        with clock.stopped():
            await asyncio.sleep(0.5)
        assert clock.now_s() - start_s < 0.2
        return 1.0

    await run_function(waits, task, timeout_s=0.3)
    assert task.session.score == 1.0

    async def works(task: AgentTask) -> None:
        await waits(task)
        await asyncio.sleep(60)

    with pytest.raises(AgentFailedError, match=r"works took longer than 0\.3 s"):
        await run_function(works, make_task(), timeout_s=0.3)


@pytest.mark.parametrize("reward", [np.float32(0.5), {"a": np.float32(0.5)}], ids=str)
async def test_rewards_may_be_numbers_of_numpy(reward: Any) -> None:
    task = make_task()
    await run_function(lambda _: reward, task, timeout_s=5)
    assert task.session.score == 0.5


async def test_the_error_of_an_agent_is_short() -> None:
    async def agent(task: AgentTask) -> float:
        raise ValueError(task.row["a"] * "x" * 1_000_000)

    with pytest.raises(AgentFailedError, match="ValueError: xxx") as caught:
        await run_function(agent, make_task(), timeout_s=5)
    assert len(str(caught.value)) < 3_000
    program = "print('x' * 1_000_000 + 'y'); raise SystemExit(3)"
    with pytest.raises(AgentFailedError, match=r"ended with code 3: xxx.*y$") as caught:
        await run_command(f'{sys.executable} -c "{program}"', make_task(), timeout_s=60)
    assert len(str(caught.value)) < 3_000


async def test_an_agent_that_cancels_itself_has_failed() -> None:
    async def leak(task: AgentTask) -> float:
        del task
        raise asyncio.CancelledError

    async def wait(task: AgentTask) -> None:
        del task
        await asyncio.sleep(5)

    async def cancel(task: AgentTask) -> float:
        del task
        this_task = asyncio.current_task()
        assert this_task is not None
        this_task.cancel()
        await asyncio.sleep(1)
        return 1.0

    for agent in (leak, cancel):
        with pytest.raises(AgentFailedError, match="cancelled itself"):
            await run_function(agent, make_task(), timeout_s=5)
    run = asyncio.create_task(run_function(wait, make_task(), timeout_s=5))
    await asyncio.sleep(0.05)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

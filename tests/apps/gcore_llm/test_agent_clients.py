"""`gcore-llm train` with the programs of `tests/agents`: agents of others, by their own clients, as they are.

Their policy is a tiny model that has learned turns which were written in advance, so that it calls their tools.
"""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, read_rows, step_rows, write_rows
from process_tree import is_running
from scripted_agents import play, train_tiny_model

from gcore_agents import Session

PROGRAMS = Path(__file__).parents[2] / "agents"
ROW = {"prompt": "1+2=", "task": 1}
CALL = '[calc {"sum": "1+2"}]'
TWO_CALLS = CALL + '[calc {"sum": "3+4"}]'
NEWEST = "2026-11-15T00:00:00Z"
FRAMEWORKS = (
    "langgraph==1.2.22",
    "langchain-openai==1.7.4",
    "smolagents==1.26.0",
    "mini-swe-agent==2.4.6",
)
"""These can be in one environment."""
VERIFIERS = ("verifiers==0.4.0",)
"""It needs an older openai."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program of `tests/agents`, and what the policy is to write."""

    program: str
    """With its function, which runs in this process, or with its arguments."""
    turns: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """Of the program's environment; none: it runs in this process."""
    findings: tuple[str, ...] = ()
    """Why its conversations have branches; none: each continues as it was."""
    error_findings: tuple[str, ...] = ()
    """Further causes, if the policy does not write these turns."""


IN_PROCESS = {
    "chat": Client(program="chat_completions.py:agent", turns=(TWO_CALLS, "3 7", "yes")),
    "responses": Client(program="responses.py:agent", turns=(TWO_CALLS, "3 7")),
    "messages": Client(program="messages.py:agent", turns=(TWO_CALLS, "3 7")),
    "agents_sdk": Client(program="agents_sdk.py:agent", turns=(TWO_CALLS, "3 7", "yes")),
}
COMMANDS = {
    "langgraph": Client(
        program="langgraph_tools.py", turns=(TWO_CALLS, "3 7"), packages=FRAMEWORKS
    ),
    # smolagents adds the calls that it has read in a turn to that turn, as text. After its last step it asks for an
    # answer with other instructions.
    "smolagents_code": Client(
        program="smol_agents.py code",
        turns=(
            "<code>\nx = calc('1+2')\nprint(x)\n</code>",
            "<code>\nfinal_answer(3)\n</code>",
        ),
        packages=FRAMEWORKS,
        findings=("fork_text",),
        error_findings=("fork_system",),
    ),
    "smolagents_tools": Client(
        program="smol_agents.py tools",
        turns=(CALL, '[final_answer {"answer": "3"}]'),
        packages=FRAMEWORKS,
        findings=("fork_calls",),
        error_findings=("fork_text", "fork_system"),
    ),
    "mini_swe": Client(
        program="mini_swe.py",
        turns=(
            '[bash {"command": "echo 3 > answer.txt; ls"}]',
            '[bash {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}]',
        ),
        packages=FRAMEWORKS,
        # A turn without a command is left out of the conversation; only the complaint about it remains.
        error_findings=("fork_context",),
    ),
    "verifiers": Client(program="verifiers_task.py sums-taskset", turns=("2",), packages=VERIFIERS),
}


@pytest.fixture(scope="module")
def to_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Client], str]:
    """Returns a client's rollout.agent.run; environments are made once."""
    pythons: dict[tuple[str, ...], Path] = {}

    def make_run(client: Client) -> str:
        if not client.packages:
            return str(PROGRAMS / client.program)
        if client.packages not in pythons:
            folder = tmp_path_factory.mktemp("environment") / "venv"
            pythons[client.packages] = python = folder / "bin/python"
            install = ["uv", "pip", "install", "-q", "--exclude-newer", NEWEST]
            subprocess.run(["uv", "venv", "-q", "--python", sys.executable, folder], check=True)
            subprocess.run([*install, "--python", python, *client.packages], check=True)
        # A harness of verifiers downloads packages: with this process's certificates, of which commands have none.
        names = ("SSL_CERT_FILE", "SSL_CERT_DIR")
        command = ["env", "-u", names[0], "-u", names[1]]
        command += [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        command += [str(pythons[client.packages]), *f"{PROGRAMS}/{client.program}".split()]
        return f"command: {shlex.join(command)}"

    return make_run


def count_tool_calls(nodes: list[dict[str, Any]]) -> int:
    messages = [message for node in nodes for message in node["messages"]]
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def check_written_turns(client: Client, session: Session) -> None:
    """Check that the agent got each turn, and that conversations have only the branches that are known."""
    turns = list(session.graph.turns())
    assert {turn.messages[0]["role"] for turn in turns} == {"assistant"}
    assert len(turns) >= len(client.turns)
    assert all(turn.is_delivered for turn in turns)
    assert set(session.graph.findings) == set(client.findings)
    if not client.findings:
        path = [node for node in turns[-1].path() if node.is_turn]
        assert len(path) == len(client.turns)


def make_args(cli: Cli, model: Path, run: str, *, batch_size: int) -> list[str]:
    """Return a command of two steps of these many prompts with two responses."""
    (cli.cwd / "evens.py").write_text(
        "def reward(prompt, completion, row):\n"
        "    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)\n"
    )
    write_rows(cli.cwd / "train.jsonl", [ROW] * 8)
    args = ["train", "--threads", "1", "--device", "cpu", "--model", str(model)]
    args += ["--data.train-files", "train.jsonl", "--data.train-batch-size", str(batch_size)]
    args += ["--data.max-prompt-length", "512", "--data.max-response-length", "1024"]
    args += [
        "--data.val-size",
        "0",
        "--rollout.n",
        "2",
        "--rollout.multi-turn.max-assistant-turns",
        "6",
    ]
    args += ["--algorithm.filter-groups", "False", "--actor.optim.lr", "1e-5"]
    args += ["--trainer.total-training-steps", "2", "--reward", "evens.py:reward"]
    return [*args, "--rollout.agent.run", run]


def train(cli: Cli, args: list[str]) -> list[dict[str, float]]:
    """Run a command of two steps; return their metrics, after a check of the log-probs."""
    finished = cli(*args)
    assert finished.code == 0, finished
    rows = step_rows(cli.cwd / "runs/default")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
        assert 0 <= row["reward/agent/fork_text/mean"] <= row["reward/turns/mean"]
        assert row["sampling/dropped_groups"] == 0
    return rows


def check_sessions(run: Path, client: Client) -> None:
    """Check that the policy called tools, if the client has some, and that conversations branch as they should."""
    sessions: list[Any] = []
    for file in (run / "sessions").glob("*.jsonl"):
        sessions.extend(read_rows(file))
    assert len(sessions) >= 4
    findings = {name for session in sessions for name in session["findings"]}
    assert findings <= {*client.findings, *client.error_findings}
    assert findings >= set(client.findings)
    num_called = sum(count_tool_calls(session["nodes"]) > 0 for session in sessions)
    if client.turns[0].startswith("["):
        assert num_called > len(sessions) / 2


@pytest.fixture(scope="module")
def calling(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that calls a tool twice at once, as the clients in this process want it."""
    client = IN_PROCESS["chat"]
    session = asyncio.run(play(str(PROGRAMS / client.program), ROW, client.turns))
    check_written_turns(client, session)
    folder = tmp_path_factory.mktemp("calling") / "model"
    train_tiny_model(folder, tiny=tiny, sessions=[session], num_steps=80)
    return folder


@pytest.mark.parametrize("name", IN_PROCESS)
def test_training(cli: Cli, calling: Path, name: str) -> None:
    client = IN_PROCESS[name]
    rows = train(cli, make_args(cli, calling, str(PROGRAMS / client.program), batch_size=2))
    assert all(row["reward/turns/mean"] > 1.5 for row in rows)
    assert all(row["reward/agent/fork_context/mean"] == 0 for row in rows)
    # Without a difference in a group there is no gradient.
    assert any(row.get("actor/grad_norm", 0) > 0 for row in rows)
    check_sessions(cli.cwd / "runs/default", client)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_training_with_an_environment_of_its_own(
    cli: Cli, tiny: Path, tmp_path: Path, to_run: Callable[[Client], str], name: str
) -> None:
    client = COMMANDS[name]
    run = to_run(client)
    session = asyncio.run(play(run, ROW, client.turns))
    check_written_turns(client, session)
    train_tiny_model(tmp_path / "model", tiny=tiny, sessions=[session], num_steps=80)
    rows = train(cli, make_args(cli, tmp_path / "model", run, batch_size=1))
    check_sessions(cli.cwd / "runs/default", client)
    if name == "mini_swe":
        assert any(row["reward/solved/mean"] > 0 for row in rows)
    if name == "verifiers":
        assert all(0 <= row["reward/right_digits/mean"] <= 1 for row in rows)


@pytest.mark.slow
def test_training_with_vllm(vllm_cli: Cli, calling: Path) -> None:
    client = IN_PROCESS["chat"]
    args = make_args(vllm_cli, calling, str(PROGRAMS / client.program), batch_size=2)
    rows = train(vllm_cli, [*args, "--rollout.engine", "vllm"])
    assert all(row["reward/turns/mean"] > 1.5 for row in rows)
    check_sessions(vllm_cli.cwd / "runs/default", client)


KILLED_AT_TIMES = """
import json, os, signal, subprocess, sys, urllib.request

body = json.dumps({"messages": [{"role": "user", "content": "1+2="}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{child.pid}\\n")
with open(sys.argv[1]) as file:
    number = len(file.readlines())
if number == 2:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 5:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_programs_that_are_killed_or_stop(cli: Cli, calling: Path) -> None:
    """Their groups are dropped, the others are trained on, and no process is left."""
    program = cli.cwd / "killed.py"
    program.write_text(KILLED_AT_TIMES)
    run = f"command: {sys.executable} {program} {cli.cwd}/children.txt"
    args = make_args(cli, calling, run, batch_size=2)
    args += ["--rollout.agent.timeout-s", "10", "--reward-calls.max-failed-share", "1"]
    finished = cli(*args)
    # 3: by chance the sessions of each group that is left have equal scores.
    assert finished.code in (0, 3), finished
    rows = step_rows(cli.cwd / "runs/default")
    assert len(rows) == 2
    assert sum(row["sampling/dropped_groups"] for row in rows) == 2
    children = [int(pid) for pid in (cli.cwd / "children.txt").read_text().split()]
    assert len(children) >= 8
    assert not any(is_running(pid) for pid in children)

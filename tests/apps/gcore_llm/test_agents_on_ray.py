"""`gcore-llm train` with agents on Ray: processes of each kind are killed, and no finished session is lost."""

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Command, option_set, read_rows, step_rows, write_rows
from process_tree import descendants, is_running, left_after

pytestmark = pytest.mark.slow

NUM_STEPS = 4
NUM_PROMPTS = 10
N = 4

# It notes its process and that of a child, which it starts in a session of its own and does not end.
AGENT = """
import http.client, json, os, subprocess, time
from urllib.parse import urlsplit

child = subprocess.Popen(["sleep", "300"], start_new_session=True)
row = json.load(open(os.environ["GCORE_ROW"]))["answer"]


def note(what, pid):
    with open(f"{os.environ['NOTES']}/{what}", "a") as file:
        file.write(f"{pid}\\n")


def post(path, body):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + path, json.dumps(body), headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    return json.loads(reply.read())


note("started", os.getpid())
note("children", child.pid)
messages = [{"role": "user", "content": f"{row}: "}]
length = 0
for _ in range(2):
    reply = post("/chat/completions", {"messages": messages, "max_tokens": 12})
    text = reply["choices"][0]["message"]["content"]
    length += len(text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": " more: "}]
    time.sleep(0.05)
post("/session/reward", {"value": float(length)})
note("ended", os.getpid())
"""


class WatchedRun:
    """A run whose agents note their work in a folder, and processes of which are killed."""

    def __init__(self, command: Command, run: Path, notes: Path) -> None:
        self.command = command
        self.run = run
        self._notes = notes

    def pids(self, what: str) -> list[int]:
        file = self._notes / what
        if not file.exists():
            return []
        return [int(line) for line in file.read_text().split()]

    def journal(self, step: str = "*") -> list[dict[str, Any]]:
        """Return the finished sessions, of one step or all, each with the step whose weights it began with."""
        records: list[dict[str, Any]] = []
        for file in sorted((self.run / "sessions").glob(f"{step}-*.jsonl")):
            number = int(file.name.partition("-")[0])
            records.extend({**record, "step": number} for record in read_rows(file))
        return records

    def wait_for_sessions(self, step: int, number: int) -> list[dict[str, Any]]:
        """Wait until so many sessions after a step have finished, and return them."""
        finished: list[dict[str, Any]] = []

        def has_finished() -> bool:
            finished[:] = self.journal(f"{step:08}")
            return len(finished) >= number

        self.command.wait_until(has_finished)
        return finished

    def kill(self, title: str) -> None:
        os.kill(descendants(self.command.pid, title)[0], signal.SIGKILL)

    def kill_an_agent(self) -> None:
        """Kill an agent that is at work."""

        def kill() -> bool:
            for pid in set(self.pids("started")) - set(self.pids("ended")):
                # Those of killed controllers have not ended, and are gone.
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
                    return True
            return False

        self.command.wait_until(kill)


def test_nothing_that_is_killed_costs_a_session(
    cli: Cli, own_args: list[str], chatty: Path
) -> None:
    """Of 160 sessions, in the middle of steps: an engine, a controller and an agent are killed."""
    notes = cli.cwd / "notes"
    notes.mkdir()
    script = cli.cwd / "agent.py"
    script.write_text(AGENT)
    rows = [{"prompt": f"{i}=", "answer": i} for i in range(64)]
    args = option_set(own_args, "--reward", "")
    for name, value in {
        "--model": chatty,
        "--data.train-files": write_rows(cli.cwd / "train.jsonl", rows),
        "--data.max-response-length": 128,
        "--data.train-batch-size": NUM_PROMPTS,
        "--rollout.n": N,
        "--trainer.total-training-steps": NUM_STEPS,
        "--actor.optim.lr": 1e-4,
    }.items():
        args = option_set(args, name, str(value))
    agent = f"command: NOTES={notes} {sys.executable} -I -S {script}"
    command = cli.start(
        *args,
        *("--rollout.agent.run", agent, "--reward-calls.max-failed-share", "0.5"),
        *("--runtime", "ray", "--controllers", "2", "--rollout.num-processes", "2"),
        *("--data.val-size", "4", "--trainer.test-freq", "1000", "--trainer.tensorboard", "False"),
        *("--trainer.log-samples", "1000", "--algorithm.filter-groups", "False"),
    )
    watched = WatchedRun(command, cli.cwd / "runs/default", notes)
    watched.wait_for_sessions(1, 8)
    watched.kill("ray::EngineActor")
    before_loss = watched.wait_for_sessions(2, 12)
    watched.kill("ray::ControllerActor")
    watched.wait_for_sessions(3, 8)
    watched.kill_an_agent()
    finished = command.wait()
    assert finished.code == 0, finished
    assert re.search(r"engine \d is gone: .* died", finished.out)
    assert "another one takes over its share; continuing after step 2" in finished.out

    # What had finished is taken from there: no session is there twice.
    records = watched.journal()
    counts = Counter((record["step"], record["key"]) for record in records)
    assert set(counts.values()) == {1}
    assert len(before_loss) < NUM_PROMPTS * N
    versions = {record["key"]: record["version"] for record in records if record["step"] == 2}
    assert {versions[record["key"]] for record in before_loss} == {2}
    assert set(versions.values()) == {2, 3}

    # All were trained on once, but for the group of the agent that was killed.
    num_dropped = sum(row["sampling/dropped_groups"] for row in step_rows(watched.run))
    assert num_dropped == 1
    samples = read_rows(watched.run / "samples.jsonl")
    trained = [(row["step"], row["prompt_index"], row["index"]) for row in samples]
    assert len(set(trained)) == len(trained) == (NUM_STEPS * NUM_PROMPTS - num_dropped) * N
    assert all(index // NUM_PROMPTS == step - 1 for step, index, _ in trained)

    num_cut_short = len(watched.pids("started")) - len(watched.pids("ended"))
    assert 1 <= num_cut_short < NUM_PROMPTS * N
    assert not left_after([*watched.pids("started"), *watched.pids("children")], 10.0)

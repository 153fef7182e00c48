"""Runs of the command line, and what they leave behind, for the tests of this folder."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
from forks import SOCKET
from process_tree import grandchildren, is_running

TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended; ``code`` is -9 if it was killed."""

    code: int
    out: str
    err: str


class Command:
    """A running `gcore-llm` process."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self._folder = folder
        self._pidfd = os.pidfd_open(pid)

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text() if (self._folder / "out").exists() else ""

    def send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the command does before it ends."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert not self.has_ended(), self.wait()
            assert time.monotonic() < deadline, self.out
            time.sleep(0.02)

    def wait_for_steps(self, run: Path, count: int) -> None:
        """Wait until a run has recorded so many training steps."""
        metrics = run / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and len(step_rows(run)) >= count)

    def wait(self) -> Finished:
        if not self.has_ended(TIMEOUT_S):
            self.send(signal.SIGKILL)
            pytest.fail(f"the command did not end in {TIMEOUT_S} s: {self.out}")
        os.close(self._pidfd)
        code = self._folder / "code"
        return Finished(
            code=int(code.read_text()) if code.exists() else -9,
            out=self.out,
            err=(self._folder / "err").read_text(),
        )


class Server:
    """Forks commands from a process that has imported what they need."""

    def __init__(self, requests: IO[str], replies: IO[str], logs: Path) -> None:
        self._requests = requests
        self._replies = replies
        self._logs = logs
        self._count = 0

    def start(self, cwd: Path, *args: object) -> Command:
        self._count += 1
        folder = self._logs / str(self._count)
        folder.mkdir()
        print(
            json.dumps([str(folder), str(cwd), [str(a) for a in args]]),
            file=self._requests,
            flush=True,
        )
        return Command(int(self._replies.readline()), folder)


# What a command sets before it imports torch and transformers, which the server has done by then.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # No certificates: an SDK's client, which each session of an agent makes, reads all of them, for 20 ms.
    "SSL_CERT_FILE": "",
    "SSL_CERT_DIR": os.devnull,
}


@contextmanager
def served(app: str, logs: Path) -> Generator[Server]:
    """A server of an app's commands, such as gcore_llm's, and of the forks that `forks.py` asks for."""
    forks = Path(os.environ[SOCKET]).with_name(app)
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("cli_server.py"), app],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | _ENVIRONMENT | {SOCKET: str(forks)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Server(process.stdin, process.stdout, logs)
        process.stdin.close()


class Cli:
    """A command line in one working folder."""

    def __init__(self, server: Server, cwd: Path) -> None:
        self._server = server
        self.cwd = cwd

    def start(self, *args: object) -> Command:
        return self._server.start(self.cwd, *args)

    def __call__(self, *args: object) -> Finished:
        """Run a command to its end, however that is."""
        return self.start(*args).wait()

    def ok(self, *args: object) -> str:
        """Run a command that must succeed and say nothing on stderr; its output."""
        finished = self(*args)
        assert (finished.code, finished.err) == (0, ""), f"{finished}{''.join(self._crashes())}"
        return finished.out

    def _crashes(self) -> Iterator[str]:
        """The tracebacks of processes that died of a signal, from the logs of all runs."""
        for path in sorted(self.cwd.glob("runs/*/logs/*.log*")):
            text = path.read_text(errors="replace")
            if (begin := text.find("Fatal Python error")) >= 0:
                yield f"\n{path}:\n{text[begin : begin + 8000]}"

    def refused(self, *args: object) -> str:
        """Run a command that must end with exit code 2 and one line; that line."""
        finished = self(*args)
        assert finished.code == 2, finished
        assert "Traceback" not in finished.err, finished.err
        *_, last = finished.err.splitlines()
        # The options of gcore-bench are read by tyro, which draws a box.
        assert re.match("gcore-[a-z]+: error: |╰", last), finished.err
        return finished.err


def option_set(args: list[str], name: str, value: str) -> list[str]:
    """The arguments with another value of an option that they hold."""
    i = args.index(name)
    return [*args[:i], name, value, *args[i + 2 :]]


def write_rows(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[Any]:
    """The complete lines of a file that may still be written to."""
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def reproducible(row: dict[str, float]) -> dict[str, float]:
    """A row of metrics without what depends on the machine, or is rounding alone."""
    counts = ("perf/total_num_tokens", "perf/computed_tokens")
    rounding = ("training/rollout_log_probs_diff", "training/rollout_distribution_kl")
    left_out = ("timing_s/", "perf/", "ledger/", "forecast/", *rounding)
    return {k: v for k, v in row.items() if not k.startswith(left_out) or k in counts}


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [reproducible(row) for row in read_rows(run / "metrics.jsonl")]


def assert_same_metrics(run: Path, expected: Path) -> None:
    rows, others = metrics_of(run), metrics_of(expected)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        for name in other:
            if not name.startswith(("perf/", "sampling/oldest_version")):
                assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), (
                    row["step"],
                    name,
                )


def step_rows(run: Path) -> list[dict[str, float]]:
    """The rows of training steps."""
    return [row for row in read_rows(run / "metrics.jsonl") if "sampling/waves" in row]


def val_rows(run: Path) -> list[dict[str, float]]:
    """The rows of held-out evaluations."""
    return [row for row in read_rows(run / "metrics.jsonl") if "val/greedy/score/mean" in row]


def signal_a_rank(command: Command, run: Path, number: signal.Signals) -> list[int]:
    """Send a signal to the second of two local training ranks after some steps; return their processes."""
    metrics = run / "metrics.jsonl"
    before = len(read_rows(metrics)) if metrics.exists() else 0
    command.wait_until(lambda: len(read_rows(metrics) if metrics.exists() else []) >= before + 4)
    ranks = grandchildren(command.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], number)
    return ranks


def kill_a_rank(command: Command, run: Path) -> None:
    """Kill the second of two local training ranks after some steps: the command ends, and names it."""
    ranks = signal_a_rank(command, run, signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 2, finished
    assert f"training rank 1 (process {ranks[1]}) was killed by SIGKILL" in finished.err
    assert "Traceback" not in finished.err
    assert not any(is_running(pid) for pid in ranks)

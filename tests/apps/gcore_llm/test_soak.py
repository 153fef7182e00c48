"""A long run holds as much memory at its end as near its start, in every process; one that does not is warned of."""

import html
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import Cli, option_set, read_rows, step_rows
from process_tree import grandchildren

pytestmark = pytest.mark.slow

REWARD = """
def reward(prompt, completion, row):
    return float(sum(map(ord, completion)) % 3 == 0)
"""
NUM_STEPS = 200
SETTLED, LAST = range(60, 100), range(160, NUM_STEPS + 1)
"""Steps over which the memory is taken: the first checkpoints, evaluations and longest rows are behind them."""
ARGS = [
    *("train", "--threads", "1", "--device", "cpu", "--name", "soak"),
    *("--warmup.max-steps", "8", "--warmup.batch-size", "64", "--warmup.test-freq", "4"),
    *("--task.num-train", "500", "--task.num-val", "8", "--task.params.max-terms", "2"),
    *("--data.train-batch-size", "4", "--rollout.n", "4", "--data.max-response-length", "8"),
    *(
        "--trainer.total-training-steps",
        str(NUM_STEPS),
        "--trainer.save-freq",
        "20",
        "--trainer.test-freq",
        "50",
    ),
]


def resident_bytes(pids: list[int]) -> int:
    """Memory that is resident and not shared with others, of all of these processes."""
    total = 0
    for pid in pids:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        total += (int(resident) - int(shared)) * 4096
    return total


def num_steps(metrics: Path) -> int:
    """The training steps in the file of metrics, which is looked at too often to parse it."""
    return metrics.read_text().count('"sampling/waves"') if metrics.exists() else 0


@pytest.mark.parametrize("num_processes", [0, 1])
def test_memory_does_not_grow(cli: Cli, num_processes: int) -> None:
    """Over 200 steps, with the engine in the run's process and in one of its own."""
    (cli.cwd / "thirds.py").write_text(REWARD)
    run = cli.cwd / "runs" / "soak"
    command = cli.start(
        *ARGS, "--reward", "thirds.py:reward", "--rollout.num-processes", num_processes
    )
    found: dict[int, int] = {}
    while not command.has_ended():
        time.sleep(0.03)
        step = num_steps(run / "metrics.jsonl")
        if step not in found and (step in SETTLED or step in LAST):
            try:
                found[step] = resident_bytes([command.pid, *grandchildren(command.pid)])
            except FileNotFoundError:
                break  # it has just ended
    assert command.wait().code == 0
    assert len(found) > 30
    # The least of each: what is taken for a moment, as for a garbage collection that is late, is no growth.
    settled = min(found[step] for step in SETTLED if step in found)
    last = min(found[step] for step in LAST if step in found)
    assert last < 1.01 * settled, f"{settled / 1e6:.1f} MB, then {last / 1e6:.1f} MB"
    assert growth_warnings(run) == {}
    names = ["main"] + ["engine-0"] * num_processes
    rows = read_rows(run / "memory.jsonl")
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    # The first reading of an engine may come late.
    assert rows[-1].keys() == {"step", *(f"resident_gb/{name}" for name in names)}
    own_bytes = {name: 1e9 * rows[-1][f"resident_gb/{name}"] for name in names}
    assert 0.7 * last < sum(own_bytes.values()) < 1.1 * last
    metrics = step_rows(run)[-1]
    assert metrics["perf/resident_gb/main"] == rows[-1]["resident_gb/main"]


LEAK = """
kept = []

def reward(prompt, completion, row):
    kept.append(b"x" * 200_000)
    return float(sum(map(ord, completion)) % 3 == 0)
"""


def growth_warnings(run: Path) -> dict[str, str]:
    """The first warning of each process that grows."""
    path = run / "warnings.jsonl"
    rows = read_rows(path) if path.exists() else []
    return {row["key"]: row["message"] for row in reversed(rows) if "grows" in row["message"]}


def test_a_leak_is_warned_of(cli: Cli) -> None:
    """A reward's list that grows by 3.2 MB in each step."""
    (cli.cwd / "leak.py").write_text(LEAK)
    args = option_set(ARGS, "--trainer.total-training-steps", "60")
    out = cli.ok(*args, "--reward", "leak.py:reward")
    run = cli.cwd / "runs" / "soak"
    [(name, message)] = growth_warnings(run).items()
    assert name == "resident_gb/main"
    lows = [float(number) for number in re.findall(r"\d\.\d+", message)]
    assert len(lows) == 4
    for low, later in pairwise(lows):
        assert low + 0.02 < later < low + 0.08
    assert f"warning: step 40: {message}" in out
    assert message in html.unescape((run / "report.html").read_text())
    assert "Memory: resident_gb/main" in (run / "report.html").read_text()

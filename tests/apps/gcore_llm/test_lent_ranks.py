"""`gcore-llm train` whose training ranks lend their devices to engines while the policy samples."""

from pathlib import Path

import pytest
from command_line import Cli, metrics_of, option_set, read_rows, step_rows

LENT = ["--placement.lend-ranks", "true"]
# Its calls are in the middle of sampling; the second engine on a rank's device is killed once.
REWARD = """
import os, re, signal
from pathlib import Path

num_calls = 0

def reward(prompt, completion, row):
    global num_calls
    num_calls += 1
    if num_calls == 20 and Path("KILL").exists():
        Path("KILL").unlink()
        log = Path("runs/killed/logs/lent-1.log").read_text()
        os.kill(int(re.search(r"process (\\d+) on", log)[1]), signal.SIGKILL)
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""


def comparable(run: Path) -> list[dict[str, float]]:
    """Metrics but for the load, the number of lent engines, and the rounding that is between engine and trainer."""
    left_out = ("training/rollout_", "controller/", "placement/lent")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in metrics_of(run)]


@pytest.mark.slow
def test_ranks_lend_their_devices_while_the_policy_samples(cli: Cli, own_args: list[str]) -> None:
    """An engine and two ranks, each a process: every sample trains once, to the bit as without lending.

    Once an engine on a rank's device is killed while it samples.
    """
    (cli.cwd / "killing.py").write_text(REWARD)
    args = [
        *option_set(own_args, "--reward", "killing.py:reward"),
        "--algorithm.old-log-probs",
        "trainer",
    ]
    args = [*args, "--trainer.num-processes", "2", "--rollout.num-processes", "1"]
    said: dict[str, str] = {}
    for name, options in {
        "static": [],
        "killed": LENT,
        "cluster": [*LENT, "--runtime", "ray"],
    }.items():
        if name == "killed":
            (cli.cwd / "KILL").touch()
        said[name] = cli.ok(*args, *options, "--name", name)
    assert "lent 1 is gone: engine process" in said["killed"]
    assert not (cli.cwd / "KILL").exists()
    expected = comparable(cli.cwd / "runs/static")
    for name in ("killed", "cluster"):
        assert comparable(cli.cwd / "runs" / name) == expected
        assert [row["placement/lent"] for row in step_rows(cli.cwd / "runs" / name)] == [2.0, 2.0]
        for row in read_rows(cli.cwd / "runs" / name / "spans.jsonl"):
            assert {*row["devices"]} == {"engine 0", "device 0", "device 1"}
            for device, spans in row["devices"].items():
                own = (
                    {"gen", "sync"}
                    if device == "engine 0"
                    else {"gen", "swap", "prepare", "train", "sync"}
                )
                found = {stage for stage, *_ in spans}
                # A replacement may not be there before the next step is over.
                assert found == own or (
                    name == "killed" and device == "device 1" and own - found <= {"gen"}
                )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--trainer.schedule", "async"],
            "trainer.schedule 'async', whose ranks train while the policy samples",
        ),
        (
            ["--rollout.colocated", "true"],
            "rollout.colocated true, where all engines share the devices of ranks",
        ),
        (
            ["--rollout.num-processes", "0"],
            "rollout.num_processes 0 or servers; 1 or more engines have devices of",
        ),
    ],
)
def test_lending_is_refused(
    cli: Cli, own_args: list[str], options: list[str], expected: str
) -> None:
    error = cli.refused(*own_args, "--rollout.num-processes", "1", *LENT, *options)
    assert f"placement.lend_ranks is true; expected false with {expected}" in error
    assert not (cli.cwd / "runs").exists()

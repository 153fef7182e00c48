"""The bench of checkpoints: one quick real run, and its bytes and arithmetic by themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore_bench.ckpt import LIMITS, METRICS, CkptOptions, compare, is_same, make_state
from gcore_bench.harness.report import BenchError, Rounds, Turn


def make_run(contender: str, number: int, **rows: dict[str, float]) -> Turn:
    named = {row.replace("_", "-"): seconds for row, seconds in rows.items()}
    return Turn(part="ckpt", contender=contender, round=number, load=1.0, rows=named)


RUNS = [
    make_run(LIMITS, 1, buffered={"durable": 4.0, "load_cold": 2.0}, direct={"durable": 1.0}),
    make_run("gcore", 1, gcore={"stall": 0.5, "durable": 2.0, "load_cold": 3.0}),
    Turn(part="ckpt", contender="dcp", round=1, load=1.0, failure="ImportError: no dcp"),
    make_run(LIMITS, 2, buffered={"durable": 6.0, "load_cold": 4.0}, direct={"durable": 3.0}),
    make_run("gcore", 2, gcore={"stall": 1.5, "durable": 4.0, "load_cold": 6.0}),
]


def rounds_of(*runs: Turn) -> Rounds:
    rounds = Rounds("ckpt", 2, say=print)
    rounds.runs.extend(runs)
    return rounds


def test_ratios_are_taken_to_the_fastest_limit() -> None:
    rows, lines = compare(rounds_of(*RUNS))
    assert list(rows) == ["buffered", "direct", "gcore"]
    gcore = {"stall": 1.0, "durable": 3.0, "load_cold": 4.5}
    assert rows["gcore"] == gcore | {"durable_ratio": 1.5, "load_cold_ratio": 1.5}
    assert (rows["buffered"]["durable"], rows["direct"]["durable"]) == (5.0, 2.0)
    assert lines == ["dcp failed: ImportError: no dcp"]


def test_aims_are_judged_where_there_are_figures() -> None:
    limits = make_run(LIMITS, 1, memcpy={"stall": 1.0})
    _, lines = compare(rounds_of(limits, make_run("gcore", 1, gcore={"stall": 1.2})))
    assert lines == [
        "aim: the stall of a save takes at most 1.15 times a copy of memory: 1.20 (not met)"
    ]
    assert compare(rounds_of(limits))[1] == []


def test_a_state_has_its_size_and_number_of_tensors() -> None:
    state = make_state(10**7, 20)
    assert 10**7 <= sum(tensor.nbytes for tensor in state.values()) < 1.1e7
    assert len(state) == 20
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.float32}


def test_no_two_tensors_are_equal() -> None:
    state = make_state(40_000_000, 10)
    first, *others = [
        tensor.view(-1)[:1000] for tensor in state.values() if tensor.dtype == torch.float32
    ]
    assert not any(torch.equal(first, other) for other in others)


def test_one_bit_is_a_difference() -> None:
    tensor = torch.randn(7, 3)
    changed = tensor.clone()
    assert is_same(changed, tensor)
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    assert not is_same(changed, tensor)
    assert not is_same(None, tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        ({"tensors": 2}, "tensors is 2; expected 3 or more"),
        ({"size_gb": float("nan")}, "size_gb is nan"),
        ({"contenders": ()}, "contenders is empty"),
        (
            {"json": Path("/nowhere/figures.json")},
            "json is '/nowhere/figures.json'; expected a file in an existing folder",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        CkptOptions(**options)


def bench(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "gcore_bench",
        "ckpt",
        "--dir",
        str(tmp_path / "files"),
        *options,
    ]
    return subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_saves_and_loads(tmp_path: Path) -> None:
    options = "--quick --contenders gcore dcp torch.save --json"
    done = bench(tmp_path, *options.split(), str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "failed" not in done.stdout
    # Nothing is left of a run.
    assert not (tmp_path / "files").exists()
    (part,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    rows = part["rows"]
    assert list(rows)[-3:] == ["gcore", "dcp", "torch.save"]
    assert set(METRICS) <= rows["gcore"].keys() & rows["dcp"].keys()
    assert rows["torch.save"].keys() & set(METRICS) == {
        "stall",
        "durable",
        "load_cold",
        "load_warm",
    }
    for metric in METRICS:
        assert rows["gcore"][metric] > 0
        assert rows["gcore"][f"{metric}_ratio"] > 0


@pytest.mark.slow
def test_wrong_options_end_with_one_message(tmp_path: Path) -> None:
    done = bench(tmp_path, "--tensors", "0")
    assert done.returncode == 2
    assert done.stderr == "gcore-bench: error: tensors is 0; expected 3 or more\n"
    assert bench(tmp_path, "--contenders", "pickle").returncode == 2

"""The bench of checkpoints: two quick real runs, and the bytes, the arithmetic and the table by themselves."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gcore_bench.ckpt.bench import aims, check_machine, part_table, scratch_folder, summarise_part
from gcore_bench.ckpt.options import LIMITS, PARTS, CkptOptions
from gcore_bench.ckpt.workload import is_same, plan_state
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Run

SMALL = ["--size-gb", "0.01", "--tensors", "20", "--rounds", "1"]


def run(contender: str, number: int, **rows: dict[str, float]) -> Run:
    named = {row.replace("_", "-"): seconds for row, seconds in rows.items()}
    if contender in named:
        named[contender]["peak_bytes"] = number * 2.0**20
    return Run(part="single", contender=contender, round=number, load=1.0, rows=named)


RUNS = [
    run(LIMITS, 1, buffered={"durable": 4.0, "load_cold": 2.0}, direct={"durable": 1.0}),
    run("gcore", 1, gcore={"stall": 0.5, "durable": 2.0, "load_cold": 3.0}),
    Run(part="single", contender="orbax", round=1, load=1.0, failure="ImportError: no orbax"),
    run(LIMITS, 2, buffered={"durable": 6.0, "load_cold": 4.0}, direct={"durable": 3.0}),
    run("gcore", 2, gcore={"stall": 1.5, "durable": 4.0, "load_cold": 6.0}),
]


def test_ratios_are_taken_to_the_fastest_limit() -> None:
    summary = summarise_part("single", RUNS)
    gcore, orbax = summary["lines"]
    assert gcore["seconds"] == {"stall": 1.0, "durable": 3.0, "load_cold": 4.5}
    assert gcore["ratios"] == {"durable": 1.5, "load_cold": 1.5}
    assert gcore["peak_extra_bytes"] == 2 * 2**20
    assert summary["best"] == {"durable": "direct", "load_cold": "buffered"}
    assert [line["seconds"]["durable"] for line in summary["limits"]] == [5.0, 2.0]
    assert orbax == {"row": "orbax", "seconds": {}, "ratios": {}, "peak_extra_bytes": None}
    assert summary["failures"] == {"orbax": "ImportError: no orbax"}


def test_steps_are_compared_with_those_of_the_same_contender() -> None:
    quiet_and_saving = {"matmul_quiet": 0.2, "matmul_saving": 0.3, "python_quiet": 0.2, "python_saving": 0.2}
    (line,) = summarise_part("loop", [run("gcore", 1, gcore=quiet_and_saving)])["lines"]
    assert line["ratios"] == {"matmul_saving": pytest.approx(1.5), "python_saving": 1.0}


def test_small_tensors_are_compared_with_torch_save() -> None:
    rows = {
        "gcore": {"stall": 0.1, "load_warm": 2.0, "in_place_warm": 1.0, "index_mb": 9.0},
        "torch.save": {"stall": 2.0, "load_warm": 5.0},
    }
    runs = [Run(part="small", contender=name, round=1, load=1.0, rows={name: row}) for name, row in rows.items()]
    summary = summarise_part("small", runs)
    assert summary["lines"][0]["ratios"] == {"stall": 0.05, "load_warm": 0.4, "in_place_warm": 0.2}
    assert [line.partition(" of them")[0] for line in aims(summary, CkptOptions())] == [
        "aim: the stall of a later save",
        "aim: a load",
        "aim: a load",
        "aim: their index has at most 80 bytes for each: 90 (not met)",
    ]
    assert ["(met)" in line for line in aims(summary, CkptOptions())] == [True, False, True, False]


def test_loads_are_compared_with_those_of_a_peer() -> None:
    gcore = run("gcore", 1, gcore={"columns_cold": 2.0, "columns_warm": 1.0, "stall": 0.1})
    found = aims(summarise_part("ranks", [gcore, run("dcp", 1, dcp={"columns_cold": 3.0})]), CkptOptions())
    assert found == ["aim: such a load of cold files takes at most 0.5 times dcp: 0.667 (not met)"]
    assert aims(summarise_part("ranks", [run("dcp", 1, dcp={"stall": 1.0})]), CkptOptions()) == []


def test_the_table_shows_a_dash_for_missing_measurements() -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(part_table(summarise_part("single", RUNS), CkptOptions(rounds=2)))
    rows = [[cell.strip() for cell in line.split("│")] for line in captured.get().splitlines()]
    cells = {row[1]: row[2:-1] for row in rows if len(row) > 2}
    assert cells["gcore"] == ["1.000", "3.000 (1.50x)", "-", "4.500 (1.50x)", "-", "-", "-", "2"]
    assert cells["orbax"] == ["-"] * 8
    assert cells["direct"][1] == "2.000 (1.00x)"


def test_a_state_has_its_size_and_number_of_tensors() -> None:
    plans = plan_state(10**7, 20)
    state = {plan.name: plan.full() for plan in plans}
    assert 10**7 <= sum(tensor.nbytes for tensor in state.values()) < 1.1e7
    assert len(state) == 20
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16, torch.float32}


def test_no_two_tensors_are_equal() -> None:
    first, *others = [plan.full().view(-1)[:1000] for plan in plan_state(40_000_000, 10) if plan.number % 2]
    assert not any(torch.equal(first, other) for other in others)


def test_one_bit_is_a_difference() -> None:
    plan = plan_state(10**6, 3)[-1]
    found = plan.full()
    assert is_same(found, plan.full())
    found.view(-1).view(torch.uint8)[-1] ^= 1
    assert not is_same(found, plan.full())
    assert not is_same(None, plan.full())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"ranks": 1}, "ranks is 1; expected at least 2"),
        ({"size_gb": float("nan")}, "size_gb is nan"),
        ({"contenders": ()}, "contenders is empty"),
        (
            {"contenders": ("orbax",), "part": "loop"},
            "contenders is orbax; expected gcore, dcp-async-thread, dcp-async-process in part loop",
        ),
        (
            {"json": Path("/nowhere/figures.json")},
            "json is '/nowhere/figures.json'; expected a file in an existing folder",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        CkptOptions(**options)


def test_a_machine_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="GB of free disk space there, found"):
        check_machine(tmp_path, 10**18)
    monkeypatch.setattr("gcore_bench.ckpt.bench.shutil.disk_usage", lambda _folder: SimpleNamespace(free=10**20))
    with pytest.raises(BenchError, match="GB of available memory for it, found"):
        check_machine(tmp_path, 10**18)


def test_nothing_is_left_of_a_run(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "made") as folder:
        (folder / "files").mkdir()
    assert not (tmp_path / "made").exists()
    with scratch_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def bench(tmp_path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gcore_bench", "ckpt", *SMALL, "--dir", str(tmp_path / "files"), *options]
    return subprocess.run(
        command, env=os.environ.copy(), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )


def figures_of(tmp_path: Path, *options: str) -> dict[str, Any]:
    done = bench(tmp_path, *options, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert not (tmp_path / "files").exists()
    (part,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    assert part["summary"]["failures"] == {}
    for line in (*part["summary"]["lines"], *part["summary"]["limits"]):
        assert all(seconds > 0 for seconds in line["seconds"].values())
        assert f"{line['row']} " in done.stdout
    return part


@pytest.mark.slow
def test_bench_measures_saves_and_loads(tmp_path: Path) -> None:
    part = figures_of(tmp_path, "--part", "single", "--contenders", "gcore", "dcp", "torch.save")
    metrics = set(PARTS["single"].columns)
    gcore, dcp, torch_save = part["summary"]["lines"]
    assert (gcore["row"], dcp["row"], torch_save["row"]) == ("gcore", "dcp", "torch.save")
    assert gcore["seconds"].keys() == dcp["seconds"].keys() == metrics
    assert torch_save["seconds"].keys() == metrics - {"in_place_cold", "in_place_warm"}
    for line in (gcore, dcp, torch_save):
        assert line["ratios"].keys() == line["seconds"].keys() - {"load_after"}, "which no limit has"


@pytest.mark.slow
def test_bench_measures_ranks(tmp_path: Path) -> None:
    part = figures_of(tmp_path, "--part", "ranks", "--ranks", "2", "--contenders", "gcore")
    (gcore,) = part["summary"]["lines"]
    assert gcore["seconds"].keys() == PARTS["ranks"].columns.keys()
    assert gcore["ratios"].keys() == {"stall", "durable"}


@pytest.mark.slow
def test_bench_measures_many_small_tensors(tmp_path: Path) -> None:
    part = figures_of(tmp_path, "--part", "small", "--quick")
    gcore, torch_save = part["summary"]["lines"]
    assert gcore["seconds"].keys() == gcore["ratios"].keys() | {"index_mb"} == PARTS["small"].columns.keys()
    assert torch_save["seconds"].keys() == PARTS["small"].columns.keys() - {"in_place_warm", "index_mb"}
    assert set(torch_save["ratios"].values()) == {1.0}


@pytest.mark.slow
def test_wrong_options_end_with_one_message(tmp_path: Path) -> None:
    done = bench(tmp_path, "--ranks", "0")
    assert done.returncode == 2
    assert done.stderr == "gcore-bench: error: ranks is 0; expected at least 2\n"
    assert bench(tmp_path, "--contenders", "pickle").returncode == 2

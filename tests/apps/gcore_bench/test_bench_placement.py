"""The bench of placement: one quick real run next to verl, and its pieces with figures made by hand."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_bench.harness.report import BenchError, Row
from gcore_bench.placement import balancer, planner
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.planner import fit_laws, predict_bytes, predict_seconds
from gcore_bench.placement.small_runs import make_small_runs
from gcore_bench.placement.tables import FigureTable, format_rows
from gcore_placement import Efficiency
from gcore_placement.ledger import CAUSES

ROW: Row = {
    **{"lengths": "lognormal", "samples": 100_352, "ranks": 8, "counts": "free", "random": 0.1},
    **{"ours": 1e-10, "ours_s": 0.1, "verl": 0.0, "verl_s": 3.0, "speedup": 30.0},
}


def test_lengths_have_a_long_tail() -> None:
    for lengths in ("lognormal", "pareto"):
        work = balancer.simulate_work(lengths, 4096, seed=0)
        assert work.max() > 20 * np.median(work)
        assert work.dtype == np.int64


def test_aims_are_judged_to_the_printed_precision() -> None:
    even, fast = balancer.check_aims([ROW])
    assert even.endswith("in 1 cases (met)")
    assert fast.endswith("free counts: 30.0 to 30.0 times (met)")
    even, fast = balancer.check_aims(
        [ROW, ROW | {"ours": 0.01, "speedup": 3.0}, ROW | {"samples": 8}]
    )
    assert even.endswith("(not met: 100,352 over 8 (lognormal, free))")
    assert fast.endswith("3.0 to 30.0 times (not met)")
    close = ROW | {"counts": "close", "ours": 9e-4}
    assert balancer.check_aims([close])[0].endswith("(met)")
    assert "not met" in balancer.check_aims([close | {"ours": 1.1e-3}])[0]
    assert len(balancer.check_aims([ROW | {"samples": 8}])) == 1


def test_verl_is_not_asked_for_more_than_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch is always measured; nothing is known of its time before."""
    monkeypatch.setattr(balancer, "VERL_LIMIT_S", 0.0)
    rows: list[Row] = []
    for counts in balancer.BOUNDS:
        rows += balancer.divide_batches(
            "pareto", 8, counts, samples=(2048, 4096), seed=0, say=print
        )
    assert ["verl" in row for row in rows] == [True, False] * 3
    assert all(0 <= row["ours"] <= row["random"] for row in rows)
    cells = format_rows(FigureTable(title="", columns=balancer.COLUMNS, rows=rows))
    assert cells[1][-1] == cells[1][-2] == "-"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ()}, "parts is empty"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        (
            {"json": Path("/nowhere/x.json")},
            "json is '/nowhere/x.json'; expected a file in an existing folder",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        PlacementOptions(**options)


def bench(tmp_path: Path, part: str, *more: str) -> tuple[dict[str, Any], str]:
    """Figures of a part, and what was printed."""
    options = ["--parts", part, "--quick", "--json", "figures.json", *more]
    done = subprocess.run(
        [sys.executable, "-m", "gcore_bench", "placement", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["quick"] is True
    (found,) = figures["parts"]
    assert found["part"] == part
    assert all(line in done.stdout for line in found["aims"])
    return found, done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_the_balancer(tmp_path: Path) -> None:
    part, _ = bench(tmp_path, "balancer")
    assert len(part["rows"]) == 24
    for row in part["rows"]:
        tolerance = 1e-3 if row["counts"] == "close" else 0
        assert 0 <= row["ours"] <= max(row["verl"], tolerance) + 1e-9
        assert row["ours"] <= row["random"]
    assert "in 24 cases (met)" in part["aims"][0]


@pytest.mark.slow
def test_bench_measures_the_planner(tmp_path: Path) -> None:
    part, printed = bench(tmp_path, "planner")
    rows = {row["name"]: row for row in part["rows"]}
    assert {(row["stage"], row["held_out"]) for row in rows.values()} == {
        ("training", ""),
        ("training", "yes"),
        ("generation", ""),
        ("generation", "yes"),
        ("step", "yes"),
    }
    for name, row in rows.items():
        assert name in printed
        assert min(row["measured_s"], row["predicted_s"]) > 0
        assert np.isfinite(row["predicted_s"])
        if row["stage"] == "training":
            assert row["measured_mb"] / 2 < row["predicted_mb"] < 2 * row["measured_mb"]
        else:
            assert not {"measured_mb", "predicted_mb"} & set(row)
    assert "constants with 1 training ranks" in printed
    assert "constants with 2 training ranks" in printed
    assert [line.split(" of held-out")[0] for line in part["aims"]] == [
        "aim: predicted step time",
        "aim: predicted peak memory",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_live_runs(tmp_path: Path) -> None:
    # Two runs, whose samples and training are compared; the others differ in options of gcore-llm only.
    part, printed = bench(tmp_path, "live")
    rows = {row["run"]: row for row in part["rows"]}
    assert list(rows) == ["split 1 + 1 + 1", "dynamic"]
    for name, row in rows.items():
        assert name in printed
        assert len(row["phases"].split()) == 3
        assert 0 < row["idle_percent"] < 100
        assert sum(row[cause] for cause in CAUSES) == pytest.approx(row["idle_percent"])
        assert 0 < row["training_percent"] < 100
    assert rows["dynamic"]["swap"] > rows["split 1 + 1 + 1"]["swap"] == 0
    assert "no request is lost (met" in part["aims"][0]


@pytest.mark.parametrize("quick", [True, False])
def test_laws_are_found_from_the_runs_that_they_are_fitted_to(quick: bool) -> None:
    """Of a machine that follows them, so that held-out runs are predicted."""
    alone = Efficiency(
        training=0.06,
        prefill=0.08,
        decode=0.05,
        memory=0.09,
        activations=1.1,
        decode_step_s=1e-3,
        decode_sequence_s=3e-5,
        micro_batch_s=0.02,
        overlap=0.0,
    )
    true = {1: alone, 2: replace(alone, training=0.04, micro_batch_s=0.05, links=0.01)}
    runs = make_small_runs(seed=0, quick=quick)
    assert len({run.name for run in runs}) == len(runs)
    fitted = [run for run in runs if not run.is_held_out]
    measured = {run.name: {"step_s": predict_seconds(run, true[run.ranks])} for run in fitted}
    for run in fitted:
        if run.stage == "training":
            measured[run.name]["process_bytes"] = predict_bytes(run, alone)
    laws = fit_laws(fitted, measured)
    for run in runs:
        found = predict_seconds(run, laws[run.ranks])
        assert found == pytest.approx(predict_seconds(run, true[run.ranks]), rel=0.02), run.name
        assert predict_bytes(run, laws[run.ranks]) == pytest.approx(
            predict_bytes(run, alone), rel=1e-3
        )


def test_only_held_out_runs_are_judged() -> None:
    row: Row = {
        "name": "a run",
        "stage": "training",
        "held_out": "yes",
        "error_s": 0.19,
        "error_mb": -0.14,
    }
    wild = row | {"name": "fitted", "held_out": "", "error_s": 8.0, "error_mb": -0.9}
    seconds, memory = planner.check_aims([row, wild])
    assert seconds == "aim: predicted step time of held-out runs within 20%: +19.0% to +19.0% (met)"
    assert (
        memory == "aim: predicted peak memory of held-out runs within 15%: -14.0% to -14.0% (met)"
    )
    slow: Row = {"name": "slow", "stage": "step", "held_out": "yes", "error_s": -0.3}
    seconds, memory = planner.check_aims([row, slow])
    assert seconds.endswith("-30.0% to +19.0% (not met: slow -30.0%)")
    assert memory.endswith("(met)")

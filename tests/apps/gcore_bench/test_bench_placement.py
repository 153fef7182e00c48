"""The bench of placement: one quick real run next to verl, and its pieces with figures made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Row
from gcore_bench.placement import balancer, planner
from gcore_bench.placement.balancer import simulated_work
from gcore_bench.placement.live import run_options
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.planner import fit_laws, predicted_bytes, predicted_seconds
from gcore_bench.placement.small_runs import small_runs
from gcore_placement import Efficiency

ROW: Row = {
    **{"lengths": "lognormal", "samples": 100_352, "ranks": 8, "counts": "free", "random": 1.1, "tolerance": 0.0},
    **{"ours": 1 + 1e-10, "ours_s": 0.1, "verl": 1.0, "verl_s": 3.0},
}


def test_lengths_have_a_long_tail() -> None:
    for lengths in ("lognormal", "pareto"):
        work = simulated_work(lengths, 4096, seed=0)
        assert work.max() > 20 * np.median(work)
        assert work.dtype == np.int64


def test_aims_are_judged_to_the_printed_precision() -> None:
    even, fast = balancer.aims([ROW])
    assert even.endswith("(met in all 1)")
    assert fast.endswith("free counts: 30.0 to 30.0 times (met)")
    even, fast = balancer.aims([ROW, ROW | {"ours": 1.01, "ours_s": 1.0}, ROW | {"samples": 8}])
    assert even.endswith("(not met: 100,352 over 8 (lognormal, free))")
    assert fast.endswith("3.0 to 30.0 times (not met)")
    close = ROW | {"counts": "close", "ours": 1.0009, "tolerance": 1e-3}
    assert balancer.aims([close])[0].endswith("(met in all 1)")
    assert "not met" in balancer.aims([close | {"ours": 1.0011}])[0]
    assert balancer.aims([ROW | {"verl": None, "verl_s": None}]) == []
    assert len(balancer.aims([ROW | {"samples": 8}])) == 1


def test_verl_is_not_asked_for_more_than_it_may_take() -> None:
    options = PlacementOptions(samples=(64, 512), ranks=(8,), verl_s=0, lengths=("pareto",))
    said: list[str] = []
    rows = balancer.run(options, say=said.append)["rows"]
    assert [row["verl"] for row in rows] == [None] * 6
    assert all("verl not asked" in line for line in said)
    assert all(1 <= row["ours"] <= row["random"] for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ()}, "parts is empty"),
        ({"ranks": (0,)}, "ranks holds 0; expected at least 1"),
        ({"samples": (100,), "ranks": (8,)}, "samples holds 100; expected multiples of 8, a number of ranks"),
        ({"verl_s": -1.0}, "verl_s is -1.0; expected at least 0"),
        ({"tolerance": -0.1}, "tolerance is -0.1; expected at least 0"),
        ({"seed": -1}, "seed is -1; expected at least 0"),
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"steps": 0}, "steps is 0; expected at least 1"),
        (
            {"study_folder": Path("/nowhere/study")},
            "study_folder is '/nowhere/study'; expected a path in an existing folder",
        ),
        ({"json": Path("/nowhere/x.json")}, "json is '/nowhere/x.json'; expected a file in an existing folder"),
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
        env=os.environ.copy(),
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
def test_bench_measures_the_balancer(tmp_path: Path) -> None:
    part, _ = bench(tmp_path, "balancer")
    assert len(part["rows"]) == 24
    for row in part["rows"]:
        assert 1 <= row["ours"] <= max(row["verl"], 1 + row["tolerance"]) * (1 + 1e-9)
        assert row["tolerance"] == (1e-3 if row["counts"] == "close" else 0)
        assert row["ours"] <= row["random"]
    assert "(met in all 24)" in part["aims"][0]


@pytest.mark.slow
def test_bench_measures_the_planner(tmp_path: Path) -> None:
    part, printed = bench(tmp_path, "planner")
    rows = {row["name"]: row for row in part["rows"]}
    assert {(row["kind"], row["is_held_out"]) for row in rows.values()} == {
        ("training", False),
        ("training", True),
        ("generation", False),
        ("generation", True),
        ("step", True),
    }
    for name, row in rows.items():
        assert name in printed
        assert min(row["measured_s"], row["predicted_s"]) > 0
        assert np.isfinite(row["predicted_s"])
        if row["kind"] == "training":
            assert row["measured_bytes"] / 2 < row["predicted_bytes"] < 2 * row["measured_bytes"]
        else:
            assert row["measured_bytes"] is row["predicted_bytes"] is None
    assert set(part["efficiencies"]) == {"1", "2"}
    assert [line.split(" of held-out")[0] for line in part["aims"]] == [
        "aim: predicted step time",
        "aim: predicted peak memory",
    ]


def test_live_runs_of_three_roles_start_with_every_division_of_the_devices() -> None:
    runs = run_options(6, ("static", "even", "dynamic"), 2)
    assert [name for name in runs if name.startswith("static")][::3] == [f"static {n}" for n in DIVISIONS]
    assert runs["even 2 + 2 + 2"] == runs["static 2 + 2 + 2"]
    dynamic = dict(zip(runs["dynamic"][::2], runs["dynamic"][1::2], strict=False))
    assert dynamic["--rollout.num-processes"] == dynamic["--reward-model.judge.num-processes"] == "2"
    assert runs["dynamic"][-1] == "--reward-model.judges.second.num-processes=2"
    assert "even 2 + 2" not in run_options(4)


DIVISIONS = ("1 + 1 + 4", "1 + 4 + 1", "2 + 3 + 1", "4 + 1 + 1")


@pytest.mark.slow
def test_bench_measures_live_runs(tmp_path: Path) -> None:
    # Two runs, whose samples and training are compared; the others differ in options of gcore-llm only.
    part, printed = bench(tmp_path, "live", "--live-strategies", "split", "dynamic")
    rows = {row["strategy"]: row for row in part["rows"]}
    assert list(rows) == ["split 1 + 1 + 1", "dynamic"]
    for name, row in rows.items():
        assert name in printed
        assert row["is_alike"]
        assert len(row["phase_s"]) == 3
        assert sum(row["phase_s"]) <= row["seconds"] + 1e-6
        assert 0 < row["idle_share"] < 1
        assert sum(row["shares"].values()) == pytest.approx(row["idle_share"])
        assert 0 < row["train_share"] < 1
    assert rows["dynamic"]["shares"]["swap"] > rows["split 1 + 1 + 1"]["shares"]["swap"] == 0
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
    runs = small_runs(seed=0, quick=quick)
    assert len({run.name for run in runs}) == len(runs)
    fitted = [run for run in runs if not run.is_held_out]
    measured = {run.name: {"step_s": predicted_seconds(run, true[run.ranks])} for run in fitted}
    for run in fitted:
        if run.kind == "training":
            measured[run.name]["process_bytes"] = predicted_bytes(run, alone)
    laws = fit_laws(fitted, measured)
    for run in runs:
        found = predicted_seconds(run, laws[run.ranks])
        assert found == pytest.approx(predicted_seconds(run, true[run.ranks]), rel=0.02), run.name
        assert predicted_bytes(run, laws[run.ranks]) == pytest.approx(predicted_bytes(run, alone), rel=1e-3)


def test_only_held_out_runs_are_judged() -> None:
    row: Row = {
        **{"name": "a run", "kind": "training", "is_held_out": True, "rounds_s": [1.0]},
        **{"measured_s": 1.0, "predicted_s": 1.19, "measured_bytes": 100.0, "predicted_bytes": 86.0},
    }
    wild = row | {"name": "fitted", "is_held_out": False, "predicted_s": 9.0, "predicted_bytes": 9.0}
    seconds, memory = planner.aims([row, wild])
    assert seconds == "aim: predicted step time of held-out runs within 20%: +19.0% to +19.0% (met in all 1)"
    assert memory == "aim: predicted peak memory of held-out runs within 15%: -14.0% to -14.0% (met in all 1)"
    slow = row | {"name": "slow", "predicted_s": 0.7, "kind": "step", "measured_bytes": None, "predicted_bytes": None}
    seconds, memory = planner.aims([row, slow])
    assert seconds.endswith("-30.0% to +19.0% (not met: slow -30.0%)")
    assert memory.endswith("(met in all 1)")

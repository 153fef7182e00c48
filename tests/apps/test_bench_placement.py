"""The bench of placement: one quick real run beside verl, and its pieces with figures made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_bench.grpo.errors import BenchError
from gcore_bench.placement.balancer import BalancerRow, run_balancer, simulated_work
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.table import aims

ROW = BalancerRow(
    lengths="lognormal",
    samples=100_352,
    ranks=8,
    counts="free",
    ours=1 + 1e-10,
    ours_s=0.1,
    verl=1.0,
    verl_s=3.0,
    random=1.1,
)


def test_lengths_have_a_long_tail() -> None:
    for lengths in ("lognormal", "pareto"):
        work = simulated_work(lengths, 4096, seed=0)
        assert work.max() > 20 * np.median(work)
        assert work.dtype == np.int64


def test_aims_are_judged_to_the_precision_that_is_told() -> None:
    even, fast = aims([ROW])
    assert even.endswith("(met in all 1)")
    assert fast.endswith("free counts: 30.0 to 30.0 times (met)")
    even, fast = aims([ROW, replace(ROW, ours=1.01, ours_s=1.0), replace(ROW, samples=8)])
    assert even.endswith("(not met: 100,352 over 8 (lognormal, free))")
    assert fast.endswith("3.0 to 30.0 times (not met)")
    assert aims([replace(ROW, verl=None, verl_s=None)]) == []
    assert len(aims([replace(ROW, samples=8)])) == 1


def test_verl_is_not_asked_for_more_than_it_may_take() -> None:
    options = PlacementOptions(samples=(64, 512), ranks=(8,), verl_s=0, lengths=("pareto",))
    said: list[str] = []
    rows = run_balancer(options, say=said.append)
    assert [row.verl for row in rows] == [None] * 4
    assert all("verl not asked" in line for line in said)
    assert all(1 <= row.ours <= row.random for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ()}, "parts is empty"),
        ({"ranks": (0,)}, "ranks holds 0: 1 or more is needed"),
        ({"samples": (100,), "ranks": (8,)}, "samples holds 100: multiples of 8, a number of ranks"),
        ({"verl_s": -1.0}, "verl_s is -1.0: 0 or more is needed"),
        ({"seed": -1}, "seed is -1: 0 or more is needed"),
        ({"json": Path("/nowhere/x.json")}, "json is /nowhere/x.json: /nowhere is no folder"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        PlacementOptions(**options)


def test_bench_measures_the_balancer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcore_bench.cli", "placement", "--quick", "--json", "figures.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ.copy(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["quick"] is True
    (part,) = figures["parts"]
    assert len(part["rows"]) == 16
    for row in part["rows"]:
        assert 1 <= row["ours"] <= row["verl"] * (1 + 1e-9)
        assert row["ours"] <= row["random"]
    assert "(met in all 16)" in part["aims"][0]
    assert part["aims"][0] in done.stdout

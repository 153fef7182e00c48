"""The parts convergence and recovery of the bench of checkpoints: quick real runs, and their arithmetic."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import t as student

from gcore_bench.ckpt.convergence import NONE, band, compared, write_page
from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.recovery import (
    aims,
    by_condition,
    daly_s,
    failures_table,
    figures_of,
    lost_of,
    optima_table,
    stretch_of,
    young_s,
)
from gcore_bench.ckpt.training_runs import REWARD, Attempt, Outcome, Saving


def outcome(rewards: list[float], *attempts: Attempt, weights: str = "same") -> Outcome:
    metrics = [{"step": step, REWARD: reward} for step, reward in enumerate(rewards, start=1)]
    return Outcome(metrics=metrics, weights=weights, attempts=attempts)


WHOLE = Attempt(started_s=0.0, training_s=2.0, ended_s=8.0, steps_s=(3.0, 4.0, 5.0, 6.0, 7.0), stalls_s=(0.1, 0.2, 0.3))


def test_a_band_is_the_interval_of_students_t() -> None:
    curves = np.random.default_rng(0).normal(size=(5, 3))
    mean, half = band(curves.tolist())
    low, high = student.interval(0.95, 4, loc=curves.mean(axis=0), scale=curves.std(axis=0, ddof=1) / np.sqrt(5))
    np.testing.assert_allclose(mean - half, low)
    np.testing.assert_allclose(mean + half, high)
    assert np.isnan(band([[1.0, 2.0]]).half).all()


def test_runs_are_compared_with_the_run_of_the_same_seed() -> None:
    way = Saving(period=4).name
    found = {
        NONE.name: [outcome([0.1, 0.2], WHOLE), outcome([0.3, 0.4], WHOLE)],
        way: [outcome([0.1, 0.2], WHOLE), outcome([0.3, 0.45], WHOLE)],
    }
    none, other = compared(found)
    assert (none["num_same"], none["difference"]) == (2, 0.0)
    assert (other["num_same"], other["num_runs"]) == (1, 2)
    assert other["difference"] == pytest.approx(0.05)
    assert (other["stall_s"], other["step_s"]) == (0.2, 1.0)
    assert not outcome([0.1], WHOLE).is_same(outcome([0.1], WHOLE, weights="other"))


def test_a_page_shows_every_way(tmp_path: Path) -> None:
    runs = [outcome([0.1, 0.2, 0.4], WHOLE), outcome([0.3, 0.4, 0.5], WHOLE)]
    write_page(tmp_path / "page.html", {NONE.name: runs, Saving(period=2, waits=True).name: runs})
    text = (tmp_path / "page.html").read_text()
    assert "synchronous, every 2" in text
    assert "none before the end" in text


def test_a_failure_undoes_what_follows_the_checkpoint_that_is_resumed_from() -> None:
    killed = Attempt(
        started_s=0.0, training_s=2.0, ended_s=5.5, was_killed=True, work=3.25, steps_s=(3.0, 4.0, 5.0), stalls_s=(0.1,)
    )
    resumed = Attempt(started_s=6.0, training_s=7.0, first_step=2, ended_s=11.0, steps_s=(8.0, 9.0, 10.0))
    row = figures_of(outcome([0.5], killed, resumed), outcome([0.5], WHOLE))
    # Step 2 ended at 4.0, and the third step was complete.
    assert (row["lost"], row["lost_s"], row["repeated"], row["restart_s"]) == ([1.25], [1.5], [1], [1.5])
    assert row["stretch"] == pytest.approx((3.25 + 3) / 5)
    assert row["is_same"]
    early = replace(killed, first_step=2, steps_s=(), ended_s=2.25, work=0.5)
    row = figures_of(outcome([0.5], early, resumed), outcome([0.5], WHOLE, weights="other"))
    assert (row["lost"], row["lost_s"], row["repeated"]) == ([0.5], [0.25], [0])
    assert not row["is_same"]


def test_conditions_hold_the_failures_of_all_seeds() -> None:
    killed = replace(WHOLE, ended_s=4.5, was_killed=True, work=2.5, steps_s=(3.0, 4.0))
    resumed = replace(WHOLE, training_s=5.0)
    facts = {"mean": 2.0, "period": 1, "load": 1.0, "wait_s": 0.4}
    base = outcome([0.5], WHOLE)
    rows = [
        {**facts, "seed": 0} | figures_of(outcome([0.5], killed, replace(resumed, first_step=2)), base),
        {**facts, "seed": 1} | figures_of(outcome([0.5], killed, replace(resumed, first_step=1)), base),
        {**facts, "seed": 2} | figures_of(None, base),
    ]
    (row,) = by_condition(rows)
    assert (row["num_failures"], row["num_ended"], row["num_runs"], row["num_same"]) == (2, 2, 3, 2)
    assert (row["lost"], row["repeated"], row["restart_s"]) == (1.0, 0.5, 0.5)
    assert failures_table([row], CkptOptions()).row_count == optima_table([row]).row_count == 1
    assert aims(rows)[0].rpartition(": ")[2] == "2 of 2, with 2 failures (met)"
    assert aims(rows)[1].startswith("1 runs were given up")


def simulated(period: float, mean: float, cost: float, *, work: float) -> tuple[float, float]:
    """Work and checkpoints under exponential failures: the time over the work, and the work lost a failure."""
    rng = np.random.default_rng(0)
    done, spent, lost = 0.0, 0.0, list[float]()
    while done < work:
        failure = rng.exponential(mean)
        if failure < period + cost:
            lost.append(failure)
            spent += failure
        else:
            done, spent = done + period, spent + period + cost
    return spent / work, float(np.mean(lost))


@pytest.mark.parametrize(("period", "mean", "cost"), [(1.0, 2.0, 0.0), (4.0, 2.0, 0.0), (4.0, 10.0, 0.5)])
def test_formulas_are_those_of_simulated_failures(period: float, mean: float, cost: float) -> None:
    stretch, lost = simulated(period, mean, cost, work=40_000.0)
    assert stretch_of(period, mean, cost) == pytest.approx(stretch, rel=0.03)
    assert lost_of(period + cost, mean) == pytest.approx(lost, rel=0.03)


@given(mean=st.floats(1.0, 1e5), share=st.floats(1e-4, 0.1))
def test_dalys_period_is_that_of_least_time(mean: float, share: float) -> None:
    cost = share * mean
    found: Any = minimize_scalar(stretch_of, bounds=(1e-3 * mean, 3 * mean), args=(mean, cost), method="bounded")
    assert daly_s(cost, mean) == pytest.approx(found.x, rel=0.03)
    assert daly_s(cost, mean) < young_s(cost, mean)
    assert daly_s(3 * mean, mean) == mean


def quick(tmp_path: Path, part: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "gcore_bench", "ckpt", "--quick", "--part", part]
    command += ["--json", "figures.json", "--html", "page.html", "--dir", "files"]
    done = subprocess.run(
        command, env=os.environ.copy(), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "files").exists()
    assert "plotly" in (tmp_path / "page.html").read_text()
    (found,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    return found, done.stdout


@pytest.mark.slow
def test_asynchronous_checkpoints_do_not_change_a_run(tmp_path: Path) -> None:
    found, text = quick(tmp_path, "convergence")
    assert [row["way"] for row in found["rows"]] == [NONE.name, "asynchronous, every 1", "synchronous, every 1"]
    assert [(row["num_same"], row["difference"]) for row in found["rows"]] == [(1, 0.0)] * 3
    assert "2 of 2 runs (met)" in text


@pytest.mark.slow
def test_runs_that_are_killed_end_as_those_that_are_not(tmp_path: Path) -> None:
    found, text = quick(tmp_path, "recovery")
    (row,) = found["conditions"]
    assert row["num_same"] == row["num_runs"] == 1
    assert row["num_failures"] >= 1
    assert "(met)" in text

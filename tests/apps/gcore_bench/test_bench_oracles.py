"""Published steps and statements of other systems, and what the bench of placement prints for them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_bench.placement.oracles.part import (
    AIM,
    SAVINGS,
    SYNCS,
    check_aims,
    predict_savings,
    predict_syncs,
)
from gcore_bench.placement.oracles.prediction import (
    Fit,
    find_lengths,
    predict_imbalance,
    predict_stages,
)
from gcore_bench.placement.oracles.steps import read_steps
from gcore_placement import Efficiency, Lengths

PUBLISHED = read_steps()
FITTED = ("response_tokens", "sigma", *(field.name for field in fields(Efficiency)))


def test_published_steps_are_whole() -> None:
    """Each has a source with a version or a date, a model that is known, and a measured step; few are fitted to."""
    for step in PUBLISHED:
        assert re.match(r"(NeMo-RL 0\.\d|verl), docs/\S+\.md", step.study), step.study
        assert re.search(r"NeMo-RL 0\.\d|\(20\d\d-\d\d\)", step.study), step.study
        assert step.step_s > 0
        assert step.prompts % step.ppo_mini_batch_size == 0
        assert set(step.fits.split()) <= set(FITTED)
        assert step.response_tokens or step.study.startswith("verl")
    rows = {(step.study, step.name) for step in PUBLISHED}
    assert len(rows) == len(PUBLISHED)
    assert sum(bool(step.fits) for step in PUBLISHED) <= len(PUBLISHED) / 5
    for step in PUBLISHED:
        if step.tokens_per_s:
            devices = step.engine_devices * (1 if step.schedule == "turns" else 2)
            tokens = step.prompts * step.n * (step.prompt_tokens + (step.response_tokens or 0))
            # One row, 235B one step off in 0.6, has the rate of the release before; the others differ by averaging.
            assert step.tokens_per_s * devices * step.step_s == pytest.approx(tokens, rel=0.17), (
                step.name
            )
    shapes = {step.model: step.shape for step in PUBLISHED}
    for name, named in (
        ("Llama 3.1 8B", 8.0),
        ("Qwen3 32B", 32.8),
        ("Qwen3 235B-A22B", 235),
        ("DeepSeek-V3", 671),
    ):
        assert shapes[name].num_parameters == pytest.approx(named * 1e9, rel=0.01)


def test_the_page_has_every_published_step() -> None:
    """Rows are those of the data, with their measurement and whether they are fitted to."""
    page = (Path(__file__).parents[3] / "docs/measurements/placement.md").read_text()
    rows = re.findall(
        r"^\| (0\.\d|verl) \| (.+?) \| ([\d,]+) \| \S+ \| (\S+) \|", page, flags=re.MULTILINE
    )
    assert [row[:3] for row in rows] == [
        (step.release.removeprefix("NeMo-RL "), step.name, f"{step.step_s:,.0f}")
        for step in PUBLISHED
    ]
    assert [row[3] == "fitted" for row in rows] == [bool(step.fits) for step in PUBLISHED]


def test_constants_of_nemo_rl_are_fitted_to_few_rows() -> None:
    """Each to a row of its own; all rows of the last release are held out."""
    nemo = [step for step in PUBLISHED if step.program == "NeMo-RL"]
    assert {step.device for step in nemo} == {"H100", "GB200"}
    assert {step.model for step in nemo} >= {"DeepSeek-V3", "Qwen3 235B-A22B", "Llama 3.1 8B"}
    fitted = [step for step in nemo if step.fits]
    assert {step.release for step in fitted} == {"NeMo-RL 0.4", "NeMo-RL 0.5"}
    assert all(len(step.fits.split()) == 1 for step in fitted)
    assert len(fitted) == 7


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_prints_every_published_step(tmp_path: Path) -> None:
    """Each has its measurement and predictions; what a row is fitted to is met, and what is held out is not all."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gcore_bench",
            "placement",
            "--parts",
            "oracles",
            "--json",
            "figures.json",
        ],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "240"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps, syncs, lending = json.loads((tmp_path / "figures.json").read_text())["parts"]
    rows = steps["rows"]
    measured = [(row["study"], row["name"], row["stage"], row["measured_s"]) for row in rows]
    expected: list[tuple[str, str, str, float]] = []
    for step in PUBLISHED:
        assert step.study in done.stdout
        for stage, seconds in step.measured_s.items():
            expected.append((step.study, step.name, stage, seconds))
            line = next(
                line
                for line in done.stdout.splitlines()
                if f"{step.release}: {step.name}: {stage} " in line
            )
            assert (" yes " in line) == bool(step.fits)
            assert f" {seconds:,.0f} " in line
    assert measured == expected
    for row in syncs["rows"]:
        assert f"{row['model']} over {row['devices']} devices" in done.stdout
    for row in lending["rows"]:
        assert f"against {row['devices']} devices" in done.stdout
    dense = [
        row
        for row in rows
        if row["name"].startswith(("Llama", "Qwen3 32B")) and "H100" in row["study"]
    ]
    assert len(dense) == 8
    assert max(abs(row["as_is_error"]) for row in dense) <= AIM
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        if row["study"].startswith("NeMo") and row["fitted"]:
            assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.02)
    assert steps["aims"] == check_aims(rows)
    assert steps["aims"][0] in " ".join(done.stdout.split())


def test_only_held_out_steps_are_judged() -> None:
    row: dict[str, Any] = {
        "name": "a step",
        "release": "X 1",
        "stage": "step",
        "fitted": "",
        "error": 0.19,
    }
    rows = [
        row,
        row | {"error": -0.3, "release": "X 2"},
        row | {"error": -0.9, "fitted": "yes"},
        row | {"error": -0.9, "stage": "training"},
    ]
    assert check_aims(rows[:1]) == [
        "aim: predicted steps that were held out within 20%: 1 of 1 (met)"
    ]
    assert check_aims(rows)[0].endswith("1 of 2 (not met: a step (X 2) -30%)")


def test_schedules_of_published_steps() -> None:
    """One step off takes the longer of generation and training, a stream the last part after it, and turns both."""
    step = next(step for step in PUBLISHED if step.schedule == "one step off")
    fit = Fit()
    off = predict_stages(step, fit)
    training_s = off["preparation"] + off["training"]
    assert off["step"] == pytest.approx(max(off["generation"], training_s), rel=0.02)
    stream = predict_stages(replace(step, schedule="stream"), fit)
    assert stream["step"] == pytest.approx(
        max(off["generation"], 0.75 * training_s) + 0.25 * training_s, rel=0.02
    )
    stale = predict_stages(replace(step, schedule="stale stream"), fit)
    assert stale["generation"] < off["generation"]
    assert find_lengths(800.0, 1.2, 4096.0).mean == pytest.approx(800.0, rel=1e-6)


def test_the_slowest_rank_of_an_update() -> None:
    """Of one rank or of equal lengths it is the mean; the more samples each has, the closer."""
    spread = Lengths.log_normal(median=800, sigma=1.0, longest=8192)
    assert predict_imbalance(spread, ranks=1, samples=64) == 1
    assert predict_imbalance(Lengths.recorded([700]), ranks=8, samples=4) == 1
    # The larger of two exponential variables has a mean of 3 / 2.
    exponential = Lengths.recorded(-np.log(1 - (np.arange(20_000) + 0.5) / 20_000))
    assert predict_imbalance(exponential, ranks=2, samples=1) == pytest.approx(1.5, rel=0.1)
    few, many = (predict_imbalance(spread, ranks=8, samples=samples) for samples in (4, 64))
    assert 1 < many < few
    uneven = next(step for step in PUBLISHED if not step.is_even)
    fit = Fit()
    assert (
        predict_stages(uneven, fit)["training"]
        > predict_stages(replace(uneven, is_even=True), fit)["training"]
    )


def test_lending_saves_at_most_what_fixed_parts_leave_idle() -> None:
    """Both predictions are of the same seconds, and above what was measured, which has losses."""
    saved = {row["devices"]: row["predicted"] for row in predict_savings()}
    assert (1 - saved["16 + 16"]) / (1 - saved["8 + 24"]) == pytest.approx(
        (1 - SAVINGS["16 + 16"]) / (1 - SAVINGS["8 + 24"])
    )
    assert all(saved[devices] > SAVINGS[devices] for devices in SAVINGS)


def test_weight_syncs_are_predicted_for_every_published_one() -> None:
    rows = predict_syncs()
    assert [(row["model"], row["devices"], row["least_s"], row["most_s"]) for row in rows] == list(
        SYNCS
    )
    assert all(0 < row["predicted_s"] < row["most_s"] for row in rows)

"""Published steps and statements of other systems, and what the bench of placement prints for them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_bench.placement.oracles.models import CONFIGS
from gcore_bench.placement.oracles.part import AIM, PUBLISHED, aims
from gcore_bench.placement.oracles.prediction import Fit, lengths_of_mean, predicted, slowest_rank
from gcore_bench.placement.oracles.staleness import staleness_shares
from gcore_bench.placement.oracles.statements import ROLLOUTS, SAVED, lending_savings, statement_rows, tail_of
from gcore_placement import Efficiency, Lengths, ModelShape

FITTED = ("response_tokens", "sigma", *(field.name for field in fields(Efficiency)))


def test_published_steps_are_whole() -> None:
    """Each has a source with a version or a date, a model that is known, and a measured step; few are fitted to."""
    for step in PUBLISHED:
        assert re.match(r"(NeMo-RL 0\.\d|verl), docs/\S+\.md", step.study), step.study
        assert re.search(r"NeMo-RL 0\.\d|\(20\d\d-\d\d\)", step.study), step.study
        assert step.model in CONFIGS
        assert step.measured["step"] > 0
        assert step.prompts % step.ppo_mini_batch_size == 0
        assert set(step.fits) <= set(FITTED)
        assert step.response_tokens or step.study.startswith("verl")
    rows = {(step.study, step.name) for step in PUBLISHED}
    assert len(rows) == len(PUBLISHED)
    assert sum(bool(step.fits) for step in PUBLISHED) <= len(PUBLISHED) / 5
    for step in PUBLISHED:
        if step.tokens_per_s:
            devices = step.engine[0] * (1 if step.schedule == "turns" else 2)
            tokens = step.prompts * step.n * (step.prompt_tokens + (step.response_tokens or 0))
            # One row, 235B one step off in 0.6, has the rate of the release before; the others differ by averaging.
            assert step.tokens_per_s * devices * step.measured["step"] == pytest.approx(tokens, rel=0.17), step.name
    for name, named in (("Llama 3.1 8B", 8.0), ("Qwen3 32B", 32.8), ("Qwen3 235B-A22B", 235), ("DeepSeek-V3", 671)):
        assert ModelShape.from_config(CONFIGS[name]).num_parameters == pytest.approx(named * 1e9, rel=0.01)


def test_the_page_has_every_published_step() -> None:
    """Rows are those of the data, with their measurement and whether they are fitted to."""
    page = (Path(__file__).parents[3] / "docs/measurements/placement.md").read_text()
    rows = re.findall(r"^\| (NeMo-RL \S+|verl) \| (.+?) \| (yes)? ?\| ([\d,]+) \|", page, flags=re.MULTILINE)
    assert rows == [
        (step.release, step.name, "yes" if step.fits else "", f"{step.measured['step']:,.0f}") for step in PUBLISHED
    ]


def test_constants_of_nemo_rl_are_fitted_to_few_rows() -> None:
    """Each to a row of its own; all rows of the last release are held out."""
    nemo = [step for step in PUBLISHED if step.program == "NeMo-RL"]
    assert {step.device for step in nemo} == {"H100", "GB200"}
    assert {step.model for step in nemo} >= {"DeepSeek-V3", "Qwen3 235B-A22B", "Llama 3.1 8B"}
    fitted = [step for step in nemo if step.fits]
    assert {step.release for step in fitted} == {"NeMo-RL 0.4", "NeMo-RL 0.5"}
    assert all(len(step.fits) == 1 for step in fitted)
    assert len(fitted) == 7


@pytest.mark.slow
def test_bench_prints_every_published_step(tmp_path: Path) -> None:
    """Each has its measurement and predictions; what a row is fitted to is met, and what is held out is not all."""
    done = subprocess.run(
        [sys.executable, "-m", "gcore_bench", "placement", "--parts", "oracles", "--json", "figures.json"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "240"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    rows = part["rows"]
    measured = [(row["study"], row["name"], row["stage"], row["measured_s"]) for row in rows]
    assert measured == [
        (step.study, step.name, stage, seconds) for step in PUBLISHED for stage, seconds in step.measured.items()
    ]
    for step in PUBLISHED:
        assert step.study in done.stdout
        for stage, seconds in step.measured.items():
            line = next(line for line in done.stdout.splitlines() if f"{step.release}: {step.name}: {stage} " in line)
            assert ("fitted to" in line) == bool(step.fits)
            assert f" {seconds:,.0f} " in done.stdout
    for row in part["statements"]:
        assert f"{row['source'].split(',')[0]}: {row['name']}" in done.stdout
        assert row["assumed"] in done.stdout
    dense = [row for row in rows if row["name"].startswith(("Llama", "Qwen3 32B")) and "H100" in row["study"]]
    assert len(dense) == 8
    assert max(abs(row["as_is_s"] / row["measured_s"] - 1) for row in dense) <= AIM
    for row in rows:
        if row["study"].startswith("NeMo") and not row["is_held_out"]:
            assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.02)
    assert part["aims"] == aims(rows)
    assert part["aims"][0] in " ".join(done.stdout.split())


def test_only_held_out_steps_are_judged() -> None:
    row: dict[str, Any] = {
        "name": "a step",
        "release": "X 1",
        "stage": "step",
        "measured_s": 100.0,
        "is_held_out": True,
    }
    rows = [
        row | {"predicted_s": 119.0},
        row | {"predicted_s": 70.0, "release": "X 2"},
        row | {"predicted_s": 9.0, "is_held_out": False},
        row | {"predicted_s": 9.0, "stage": "training"},
    ]
    assert aims(rows[:1]) == ["aim: predicted steps that were held out within 20%: 1 of 1 (met in all 1)"]
    assert aims(rows)[0].endswith("1 of 2 (not met: a step (X 2) -30%)")


def test_schedules_of_published_steps() -> None:
    """One step off takes the longer of generation and training, a stream the last part after it, and turns both."""
    step = next(step for step in PUBLISHED if step.schedule == "one step off")
    fit = Fit(efficiency=Efficiency())
    off = predicted(step, fit)
    training_s = off["preparation"] + off["training"]
    assert off["step"] == pytest.approx(max(off["generation"], training_s), rel=0.02)
    stream = predicted(replace(step, schedule="stream"), fit)
    assert stream["step"] == pytest.approx(max(off["generation"], 0.75 * training_s) + 0.25 * training_s, rel=0.02)
    stale = predicted(replace(step, schedule="stale stream"), fit)
    assert stale["generation"] < off["generation"]
    assert lengths_of_mean(800.0, 1.2, 4096.0).mean == pytest.approx(800.0, rel=1e-6)


def test_the_slowest_rank_of_an_update() -> None:
    """Of one rank or of equal lengths it is the mean; the more samples each has, the closer."""
    spread = Lengths.log_normal(median=800, sigma=1.0, longest=8192)
    assert slowest_rank(spread, ranks=1, samples=64) == 1
    assert slowest_rank(Lengths.recorded([700]), ranks=8, samples=4) == 1
    # The larger of two exponential variables has a mean of 3 / 2.
    exponential = Lengths.recorded(-np.log(1 - (np.arange(20_000) + 0.5) / 20_000))
    assert slowest_rank(exponential, ranks=2, samples=1) == pytest.approx(1.5, rel=0.1)
    few, many = (slowest_rank(spread, ranks=8, samples=samples) for samples in (4, 64))
    assert 1 < many < few
    uneven = next(step for step in PUBLISHED if not step.is_even)
    fit = Fit(efficiency=Efficiency())
    assert predicted(uneven, fit)["training"] > predicted(replace(uneven, is_even=True), fit)["training"]


def simulated_staleness(lengths: Lengths, *, in_flight: int, batch: int) -> list[float]:
    """Shares of each age, of responses that take the next place as soon as one ends."""
    rng = np.random.default_rng(0)

    def drawn() -> float:
        return float(lengths.values[np.searchsorted(lengths.edges, rng.random(), side="right") - 1])

    # When each ends, and the version by which it started: all at once at first, so that early ones are left out.
    running = [(drawn(), 0) for _ in range(in_flight)]
    heapify(running)
    counts: dict[int, int] = {}
    for number in range(120 * batch):
        end, started = heappop(running)
        version = number // batch
        if version >= 40:
            counts[version - started] = counts.get(version - started, 0) + 1
        heappush(running, (end + drawn(), (number + 1) // batch))
    return [counts.get(age, 0) / sum(counts.values()) for age in range(max(counts) + 1)]


@pytest.mark.parametrize("in_flight", [64, 192, 512])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.2])
def test_staleness_is_that_of_a_simulation(in_flight: int, sigma: float) -> None:
    lengths = Lengths.log_normal(median=800, sigma=sigma, longest=8192)
    if not sigma:
        # Equal lengths that all start together stay together; the closed form is of any phase.
        lengths = Lengths.recorded(np.linspace(700, 900, 64))
    shares = staleness_shares(lengths, in_flight=in_flight, batch=128)
    assert shares.sum() == pytest.approx(1)
    assert shares @ np.arange(shares.size) == pytest.approx(in_flight / 128)
    found = np.zeros(shares.size)
    simulated = simulated_staleness(lengths, in_flight=in_flight, batch=128)[: shares.size]
    found[: len(simulated)] = simulated
    assert np.abs(found - shares).max() < 0.03


def test_lending_saves_at_most_what_fixed_parts_leave_idle() -> None:
    """Both predictions are of the same seconds, and above what was measured, which has losses."""
    saved = lending_savings()
    assert (1 - saved["16 + 16"]) / (1 - saved["8 + 24"]) == pytest.approx(
        (1 - SAVED["16 + 16"]) / (1 - SAVED["8 + 24"])
    )
    assert all(saved[parts] > SAVED[parts] for parts in SAVED)


def test_equal_responses_have_no_tail_that_repacking_could_save() -> None:
    rollout = replace(ROLLOUTS[0], num_devices=4, prompts=16)
    tail, _ = tail_of(rollout, lengths_of_mean(20_000.0, 1.0, 65_536.0))
    assert 0.1 < tail < 0.9
    even = Lengths.recorded(np.linspace(1000, 1001, 50))
    assert tail_of(rollout, even)[0] < 0.01


def test_statements_name_their_source_and_what_was_assumed() -> None:
    rows = statement_rows()
    assert len(rows) == 12
    for row in rows:
        assert re.search(r"arXiv \d|docs/\S+\.md|verl/experimental", row["source"])
        assert row["assumed"]
        assert 0 <= row["stated_least"] <= row["stated_most"]
        assert 0 <= row["predicted_least"] <= row["predicted_most"]
        assert row["unit"] == "s" or max(row["stated_most"], row["predicted_most"]) <= 1

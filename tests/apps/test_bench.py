"""The bench: one quick real run, and the arithmetic and the table on figures made by hand."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gcore_bench.grpo.errors import BenchError
from gcore_bench.grpo.measure import StepFigures, TimedReward
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.rounds import FLOOR, Run
from gcore_bench.grpo.settings import train_config
from gcore_bench.grpo.summary import summarise
from gcore_bench.grpo.table import notes, table
from gcore_bench.grpo.workload import WORKLOADS


def step(wall_s: float, *, cpu_s: float = 1.0, lengths: tuple[int, ...] = (2, 4)) -> StepFigures:
    return StepFigures(
        wall_s=wall_s, cpu_s=cpu_s, gen_s=0.25, reward_s=0.125, train_s=0.5, score=0.5, lengths=list(lengths)
    )


def run(contender: str, *steps: StepFigures, number: int = 1, peak_rss_bytes: int = 2**30, load: float = 1.0) -> Run:
    return Run(contender=contender, round=number, load=load, peak_rss_bytes=peak_rss_bytes, steps=list(steps))


RUNS = [
    run("gcore", step(1.0), step(2.0), step(3.0), load=3.0),
    run("trl", step(6.0, cpu_s=5.0), step(8.0, cpu_s=5.0), step(9.0, cpu_s=5.0)),
    run(FLOOR, step(0.5)),
    run("gcore", step(2.0), step(2.0), step(9.0, lengths=(3, 256)), number=2, peak_rss_bytes=2**31),
]


def test_seconds_are_medians_over_all_rounds() -> None:
    gcore, trl = summarise(RUNS).lines
    assert (gcore.contender, gcore.num_steps, gcore.step_s, gcore.samples_per_s) == ("gcore", 6, 2.0, 1.0)
    assert (trl.contender, trl.num_steps, trl.step_s, trl.cpu_s) == ("trl", 3, 8.0, 5.0)
    assert (gcore.gen_s, gcore.reward_s, gcore.train_s, gcore.other_s) == (0.25, 0.125, 0.5, 2.0 - 0.875)
    assert (gcore.peak_rss_bytes, gcore.max_length, gcore.mean_length) == (2**31, 256, (5 * 6 + 259) / 12)


def test_ratios_are_gcores_speed_over_the_peers() -> None:
    summary = summarise(RUNS)
    assert summary.speed_ratios == {"gcore": {"trl": 4.0}}
    assert summary.cpu_ratios == {"gcore": {"trl": 5.0}}
    assert summary.floor is not None
    assert summary.floor.step_s == 0.5
    assert summary.load == 1.5


def test_a_contender_alone_has_no_ratio() -> None:
    summary = summarise([run("trl", step(1.0))])
    assert (summary.speed_ratios, summary.cpu_ratios, summary.floor) == ({}, {}, None)


def test_the_table_shows_every_contender_and_ratio() -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(WORKLOADS["short"], summarise(RUNS)))
    rows = [[cell.strip() for cell in line.split("│")] for line in captured.get().splitlines()]
    cells = {row[1]: row[2:] for row in rows if len(row) > 2}
    assert cells["gcore"][:2] == ["1", "2.000"]
    assert cells["trl"][6:8] == ["5.000", "1,024"]
    assert cells["gcore / trl"][0] == "4.00x"
    assert FLOOR in " ".join(cells)


def test_the_correction_of_the_peer_is_told_where_it_runs() -> None:
    assert any("corrected" in note for note in notes(GrpoOptions(contenders=("gcore", "trl-vllm"))))
    assert not any("corrected" in note for note in notes(GrpoOptions(contenders=("gcore", "trl"))))


def test_a_timed_reward_hands_over_what_it_noted_once() -> None:
    reward = TimedReward(lambda _prompt, completion, _row: float(len(completion)))
    assert [reward("", "ab", {}), reward("", "abcd", {})] == [2.0, 4.0]
    seconds, score = reward.drain()
    assert seconds > 0
    assert score == 3.0
    assert reward.drain() == (0.0, 0.0)


def test_bad_options_are_refused() -> None:
    with pytest.raises(BenchError, match="rounds is 0: 1 or more is needed"):
        GrpoOptions(rounds=0)
    with pytest.raises(BenchError, match="steps is -1: 0 or more is needed"):
        GrpoOptions(steps=-1)
    with pytest.raises(BenchError, match="contenders is empty"):
        GrpoOptions(contenders=())


@pytest.mark.parametrize("name", WORKLOADS)
def test_gcore_gets_no_dynamic_sampling_and_one_update(name: str) -> None:
    config = train_config(WORKLOADS[name])
    assert not config.algorithm.filter_groups
    assert (config.actor.ppo_mini_batch_size, config.actor.ppo_epochs) == (0, 1)
    assert config.actor.loss.kl_loss_coef == 0


def test_bench_measures_gcore_and_trl(tmp_path: Path) -> None:
    options = ["--workload", "short", "--contenders", "gcore", "trl", "--rounds", "1", "--steps", "2"]
    options += ["--warmup-steps", "1", "--threads", "1", "--work-dir", str(tmp_path / "work")]
    command = [sys.executable, "-m", "gcore_bench.cli", "grpo", *options, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "gcore / trl" in done.stdout

    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["rounds"] == 1
    (workload,) = figures["workloads"]
    assert workload["workload"] == "short"
    gcore, trl = workload["summary"]["lines"]
    assert (gcore["contender"], trl["contender"]) == ("gcore", "trl")
    assert workload["summary"]["speed_ratios"]["gcore"]["trl"] > 0
    assert workload["summary"]["floor"]["step_s"] > 0
    for line in (gcore, trl):
        assert (line["num_steps"], line["samples_per_step"]) == (2, 256)
        assert 1 <= line["mean_length"] <= line["max_length"] <= 6
        assert 0.1 < line["score"] < 0.9
        for field in ("samples_per_s", "step_s", "gen_s", "reward_s", "train_s", "other_s", "cpu_s", "peak_rss_bytes"):
            assert line[field] > 0, field
    runs = {r["contender"]: r["steps"] for r in workload["runs"]}
    assert all(len(s["lengths"]) == 256 for name in ("gcore", "trl") for s in runs[name])

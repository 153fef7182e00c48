"""The bench of GRPO steps: one quick real run, and its figures and ratios with steps made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_tree import left_after

from gcore_bench.grpo import (
    WORKLOADS,
    GrpoOptions,
    Step,
    StepRecorder,
    Task,
    Workload,
    compare,
    count_even_digits,
    summarise_steps,
    train_config,
)
from gcore_bench.harness.processes import Program, run_program
from gcore_bench.harness.report import BenchError, Rounds, Row, summarise


def make_step(step_s: float, *, max_length: int = 4, mean_length: float = 3.0) -> Step:
    seconds = {"step_s": step_s, "cpu_s": 1.0, "gen_s": 0.25, "reward_s": 0.125, "train_s": 0.5}
    return {**seconds, "score": 0.5, "mean_length": mean_length, "max_length": max_length}


def task_of(workload: Workload) -> Task:
    return Task(
        contender="gcore", workload=workload, model=Path("model"), steps=1, threads=1, seed=0
    )


def test_seconds_are_medians_over_steps() -> None:
    steps = [make_step(1.0), make_step(2.0), make_step(9.0, mean_length=6.0, max_length=256)]
    assert summarise_steps(steps, 256) == {
        **{
            "step_s": 2.0,
            "cpu_s": 1.0,
            "gen_s": 0.25,
            "reward_s": 0.125,
            "train_s": 0.5,
            "samples_per_s": 128.0,
        },
        **{"mean_length": 4.0, "max_length": 256.0, "score": 0.5},
    }


def test_ratios_are_gcores_speed_over_the_peers() -> None:
    rounds = Rounds("short", 2, say=print)
    for turn in rounds.turns(("gcore", "gcore-vllm", "trl")):
        step_s = {"gcore": 1.0, "gcore-vllm": 2.0, "trl": 4.0}[turn.contender]
        turn.done({turn.contender: {"step_s": step_s, "cpu_s": 1.0}}, "")
    rows: dict[str, Row] = dict(summarise("short", rounds.runs).rows)
    assert compare("short", rows, rounds) == [
        "gcore / trl: 4.00x the speed, 1.00x by CPU seconds (aim: at least 3.3x, met)",
        "gcore-vllm / trl: 2.00x the speed, 1.00x by CPU seconds",
    ]
    assert compare("long", rows, rounds)[0] == "gcore / trl: 4.00x the speed, 1.00x by CPU seconds"
    assert compare("short", {"trl": rows["trl"]}, rounds) == []


def test_the_reward_counts_even_digits() -> None:
    assert [count_even_digits("", text, {}) for text in ("", "24", "1a4b")] == [0.0, 1.0, 0.25]


def test_a_step_has_the_seconds_and_scores_of_its_rewards() -> None:
    recorder = StepRecorder(lambda _prompt, completion, _row: float(len(completion)))
    assert [recorder.score("", "ab", {}), recorder.score("", "abcd", {})] == [2.0, 4.0]
    for _ in range(2):
        recorder.end_step([2, 4], gen_s=0.0, train_s=0.0)
    first, second = recorder.steps
    assert first["reward_s"] > 0
    assert first["score"] == 3.0
    assert (second["reward_s"], second["score"]) == (0.0, 0.0)


def test_bad_options_are_refused() -> None:
    with pytest.raises(BenchError, match="rounds is 0; expected at least 1"):
        GrpoOptions(rounds=0)
    with pytest.raises(BenchError, match="steps is -1; expected at least 0"):
        GrpoOptions(steps=-1)


@pytest.mark.slow
def test_a_program_is_watched_with_what_it_starts_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '100'], start_new_session=True); "
    )
    code += "print(p.pid, flush=True); memory = b'x' * 2**27; p.wait(2.5)"
    program = Program(
        command=[sys.executable, "-c", code], environment={}, folder=tmp_path, read=list
    )
    with pytest.raises(BenchError, match=r"it failed: .*TimeoutExpired.* \(see "):
        run_program(program, name="it", log=tmp_path / "log")
    pid = int((tmp_path / "log").read_text().split()[0])
    assert left_after([pid], timeout_s=300) == []

    footprint = run_program(
        replace(
            program,
            command=[
                sys.executable,
                "-c",
                code.replace("p.wait(2.5)", "import time; time.sleep(2.5)"),
            ],
        ),
        name="it",
        log=tmp_path / "log",
    )
    assert footprint.num_processes == 2
    assert 2**27 < footprint.pss_bytes < 2**28


@pytest.mark.parametrize("name", WORKLOADS)
def test_gcore_gets_no_dynamic_sampling_and_one_update(name: str) -> None:
    config = train_config(task_of(WORKLOADS[name]))
    assert not config.algorithm.filter_groups
    assert (config.actor.ppo_mini_batch_size, config.actor.ppo_epochs) == (0, 1)
    assert config.actor.loss.kl_loss_coef == 0


@pytest.mark.slow
def test_bench_measures_gcore_and_trl(tmp_path: Path) -> None:
    options = [
        "--workload",
        "short",
        "--contenders",
        "gcore",
        "trl",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    options += ["--warmup-steps", "1", "--threads", "1", "--work-dir", str(tmp_path / "work")]
    command = [
        sys.executable,
        "-m",
        "gcore_bench",
        "grpo",
        *options,
        "--json",
        str(tmp_path / "figures.json"),
    ]
    done = subprocess.run(
        command, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gcore / trl" in done.stdout

    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["rounds"] == 1
    (workload,) = figures["parts"]
    assert workload["part"] == "short"
    assert list(workload["rows"]) == ["gcore", "trl"]
    for row in workload["rows"].values():
        assert 1 <= row["mean_length"] <= row["max_length"] <= 6
        assert 0.1 < row["score"] < 0.9
        for field in (
            "samples_per_s",
            "step_s",
            "gen_s",
            "reward_s",
            "train_s",
            "cpu_s",
            "peak_bytes",
        ):
            assert row[field] > 0, field

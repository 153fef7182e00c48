"""The bench of GRPO steps: one quick real run, and its figures and ratios with steps made by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from process_tree import left_after

from gcore_bench.grpo import (
    WORKLOADS,
    GrpoOptions,
    add_seconds,
    compare,
    count_even_digits,
    list_options,
    read_step,
    summarise_steps,
)
from gcore_bench.harness.processes import highest_bytes, run_program
from gcore_bench.harness.report import BenchError, Rounds
from gcore_llm.cli import parse_train


def test_figures_of_gcore_are_those_of_its_metrics() -> None:
    metrics = {
        "timing_s/step": 2.0,
        "timing_s/gen": 0.5,
        "timing_s/sync": 0.25,
        "timing_s/train": 1.0,
    }
    assert read_step(metrics) == {"gen_s": 0.75, "train_s": 1.0}
    assert read_step(metrics | {"timing_s/reward": 0.125})["gen_s"] == 0.875


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    steps = [{"gen_s": 0.75, "train_s": 1.0}, {"gen_s": 1.0}]
    ends_s = [(10.0, 1.0), (12.0, 2.5), (16.0, 3.5)]
    assert add_seconds(steps, ends_s) == [
        {"gen_s": 0.75, "train_s": 1.0, "step_s": 2.0, "cpu_s": 1.5},
        {"gen_s": 1.0, "train_s": 3.0, "step_s": 4.0, "cpu_s": 1.0},
    ]


def test_seconds_are_medians_over_steps() -> None:
    step = {
        "step_s": 1.0,
        "cpu_s": 1.0,
        "gen_s": 0.25,
        "train_s": 0.5,
    }
    steps = [step, step | {"step_s": 2.0}, step | {"step_s": 9.0}]
    assert summarise_steps(steps, 256) == step | {
        "step_s": 2.0,
        "samples_per_s": 128.0,
    }


def test_ratios_are_gcores_speed_over_the_peers() -> None:
    rounds = Rounds("short", 2, say=print)
    for turn in rounds.turns(("gcore", "gcore-vllm", "trl")):
        step_s = {"gcore": 1.0, "gcore-vllm": 2.0, "trl": 4.0}[turn.contender]
        turn.done({"step_s": step_s, "cpu_s": 1.0}, "")
    rows = rounds.summarise()
    assert compare("short", rows, rounds) == [
        "gcore / trl: 4.00x the speed, 1.00x by CPU seconds (aim: at least 3.3x, met)",
        "gcore-vllm / trl: 2.00x the speed, 1.00x by CPU seconds",
    ]
    assert compare("long", rows, rounds)[0] == "gcore / trl: 4.00x the speed, 1.00x by CPU seconds"
    assert compare("short", {"trl": rows["trl"]}, rounds) == []
    only_gcore = Rounds("short", 1, say=print)
    for turn in only_gcore.turns(["gcore"]):
        turn.done({"step_s": 1.0, "cpu_s": 1.0}, "")
    assert compare("short", only_gcore.summarise(), only_gcore) == []


def test_the_reward_counts_even_digits() -> None:
    assert [count_even_digits("", text, {}) for text in ("", "24", "1a4b")] == [0.0, 1.0, 0.25]


def test_bad_options_are_refused() -> None:
    with pytest.raises(BenchError, match="rounds is 0; expected 1 or more"):
        GrpoOptions(rounds=0)
    with pytest.raises(BenchError, match="steps is -1; expected 0 or more"):
        GrpoOptions(steps=-1)


@pytest.mark.slow
def test_a_program_is_watched_with_what_it_starts_and_leaves_nothing(tmp_path: Path) -> None:
    started = "memory = b'x' * 2**27; print(flush=True); import time; time.sleep(1000)"
    code = (
        "import subprocess, sys; "
        f'command = [sys.executable, "-c", "{started}"]; '
        "p = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE); "
        "p.stdout.readline(); print(p.pid, flush=True); p.wait(2.5)"
    )
    log = tmp_path / "log"
    with pytest.raises(BenchError, match=r"it failed: .*TimeoutExpired.* \(see "):
        run_program([sys.executable, "-c", code], name="it", folder=tmp_path, log=log)
    pid = int(log.read_text().split()[0])
    assert left_after([pid], timeout_s=300) == []

    code = code.replace("p.wait(2.5)", "import time; time.sleep(2.5)")
    sizes = run_program(
        [sys.executable, "-c", code], name="it", folder=tmp_path, log=log, poll_s=0.2
    )
    assert 2**27 < highest_bytes(sizes) < 2**28
    pid = int(log.read_text().split()[0])
    assert left_after([pid], timeout_s=300) == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_gcore_gets_no_dynamic_sampling_and_one_update(name: str) -> None:
    config = parse_train(list_options(WORKLOADS[name], 1))
    assert not config.algorithm.filter_groups
    assert (config.actor.ppo_mini_batch_size, config.actor.ppo_epochs) == (0, 1)
    assert config.actor.loss.kl_loss_coef == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_gcore_and_trl(tmp_path: Path) -> None:
    options = "--workload short --contenders gcore trl --rounds 1 --steps 2 --warmup-steps 1"
    command = [
        *(sys.executable, "-m", "gcore_bench", "grpo", *options.split(), "--threads", "1"),
        *("--work-dir", str(tmp_path / "work"), "--json", str(tmp_path / "figures.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "gcore / trl" in done.stdout

    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["rounds"] == 1
    (workload,) = figures["parts"]
    assert workload["part"] == "short"
    assert list(workload["rows"]) == ["gcore", "trl"]
    for row in workload["rows"].values():
        for field in (
            "samples_per_s",
            "step_s",
            "gen_s",
            "train_s",
            "cpu_s",
            "peak_bytes",
        ):
            assert row[field] > 0, field

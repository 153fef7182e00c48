"""The bench: one quick real run, and the arithmetic and the table on figures made by hand."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from typing import Any, cast

import pyarrow.parquet
import pytest
from process_tree import left_after
from rich.console import Console

from gcore_bench.grpo.contenders.commands import verl_program
from gcore_bench.grpo.measure import Step, StepRecorder, step_figures
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.report import StepRun, Summary, aims, notes, summarise_steps, table
from gcore_bench.grpo.setup import load_train_prompts, train_config
from gcore_bench.grpo.workload import FLOOR, WORKLOADS, Task, Workload
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Footprint, Program, run_program
from gcore_llm.sampling import reward_function
from gcore_llm.tiny_model import make_tiny_model, tiny_tokenizer
from gcore_rollout import Scored
from gcore_runs import build_tokenizer

VERL = os.environ.get("GCORE_VERL_PYTHON", "")
VERL_SCRIPTS = Path(__file__).parents[3] / "scripts" / "verl-cpu"


def step(wall_s: float, *, cpu_s: float = 1.0, lengths: tuple[int, ...] = (2, 4)) -> Step:
    return step_figures(lengths, wall_s=wall_s, cpu_s=cpu_s, gen_s=0.25, reward_s=0.125, train_s=0.5, score=0.5)


def run(
    contender: str,
    *steps: Step,
    number: int = 1,
    pss_bytes: int = 2**30,
    num_processes: int = 1,
    load: float = 1.0,
) -> StepRun:
    footprint = Footprint(pss_bytes=pss_bytes, num_processes=num_processes)
    return StepRun(part="short", contender=contender, round=number, load=load, footprint=footprint, steps=list(steps))


def task_of(workload: Workload) -> Task:
    return Task(contender="gcore", workload=workload, model=Path("model"), steps=1, threads=1, seed=0)


RUNS = [
    run("gcore", step(1.0), step(2.0), step(3.0), load=3.0),
    run("trl", step(6.0, cpu_s=5.0), step(8.0, cpu_s=5.0), step(9.0, cpu_s=5.0)),
    run(FLOOR, step(0.5)),
    run("gcore", step(2.0), step(2.0), step(9.0, lengths=(3, 256)), number=2, pss_bytes=2**31),
]


def test_seconds_are_medians_over_all_rounds() -> None:
    gcore, trl = summarise_steps(RUNS).lines
    assert gcore == {
        **{"contender": "gcore", "num_steps": 6, "samples_per_step": 2, "samples_per_s": 1.0, "step_s": 2.0},
        **{"gen_s": 0.25, "reward_s": 0.125, "train_s": 0.5, "other_s": 2.0 - 0.875, "cpu_s": 1.0, "score": 0.5},
        **{"peak_pss_bytes": 2**31, "num_processes": 1, "max_length": 256, "mean_length": (5 * 6 + 259) / 12},
    }
    assert [trl[name] for name in ("contender", "num_steps", "step_s", "cpu_s")] == ["trl", 3, 8.0, 5.0]


def test_ratios_are_gcores_speed_over_the_peers() -> None:
    summary = summarise_steps(RUNS)
    assert summary.speed_ratios == {"gcore": {"trl": 4.0}}
    assert summary.cpu_ratios == {"gcore": {"trl": 5.0}}
    assert summary.floor is not None
    assert summary.floor["step_s"] == 0.5
    assert summary.load == 1.5


def test_a_contender_alone_has_no_ratio() -> None:
    summary = summarise_steps([run("trl", step(1.0))])
    assert (summary.speed_ratios, summary.cpu_ratios, summary.floor) == ({}, {}, None)


def shown(summary: Summary) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(WORKLOADS["short"], summary))
    return captured.get()


def cells_of(summary: Summary) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("│")] for line in shown(summary).splitlines()]
    return {row[1]: row[2:] for row in rows if len(row) > 2}


def test_the_table_shows_every_contender_and_ratio() -> None:
    cells = cells_of(summarise_steps(RUNS))
    assert cells["gcore"][:2] == ["1", "2.000"]
    assert cells["trl"][6:8] == ["5.000", "1,024"]
    assert cells["gcore / trl"][0] == "4.00x"
    assert FLOOR in " ".join(cells)


def test_the_peers_correction_is_stated_where_it_runs() -> None:
    assert any("corrected" in note for note in notes(GrpoOptions(contenders=("gcore", "trl-vllm"))))
    assert not any("corrected" in note for note in notes(GrpoOptions(contenders=("gcore", "trl"))))


def test_differences_to_verl_are_stated_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCORE_VERL_PYTHON", sys.executable)
    assert any("every 2 s" in note for note in notes(GrpoOptions(peer="verl")))
    assert not any("every 2 s" in note for note in notes(GrpoOptions(peer="verl", contenders=("gcore", "gcore-ray"))))


def test_a_step_has_the_seconds_and_scores_of_its_rewards() -> None:
    recorder = StepRecorder(lambda _prompt, completion, _row: float(len(completion)))
    assert [recorder.score("", "ab", {}), recorder.score("", "abcd", {})] == [2.0, 4.0]
    for _ in range(2):
        recorder.ended([2, 4], gen_s=0.0, train_s=0.0)
    first, second = recorder.steps
    assert first["reward_s"] > 0
    assert first["score"] == 3.0
    assert (second["reward_s"], second["score"]) == (0.0, 0.0)


def test_bad_options_are_refused() -> None:
    with pytest.raises(BenchError, match="rounds is 0; expected at least 1"):
        GrpoOptions(rounds=0)
    with pytest.raises(BenchError, match="steps is -1; expected at least 0"):
        GrpoOptions(steps=-1)


def test_a_peer_brings_its_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCORE_VERL_PYTHON", sys.executable)
    assert GrpoOptions().running == ("gcore", "gcore-vllm", "trl", "trl-vllm")
    assert GrpoOptions(peer="verl").running == ("gcore", "gcore-ray", "verl")
    assert GrpoOptions(peer="verl", contenders=("gcore", "verl")).running == ("gcore", "verl")
    assert GrpoOptions(peer="verl").python_of_verl() == Path(sys.executable)


def test_verl_without_its_environment_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GCORE_VERL_PYTHON", raising=False)
    with pytest.raises(BenchError, match=r"GCORE_VERL_PYTHON is not set; .* scripts/verl-cpu/setup FOLDER makes"):
        GrpoOptions(peer="verl")
    with pytest.raises(BenchError, match=r"verl_python is '.*'; .* scripts/verl-cpu/setup FOLDER makes"):
        GrpoOptions(contenders=("verl",), verl_python=tmp_path)
    assert os.access(VERL_SCRIPTS / "setup", os.X_OK)
    # Who does not run verl needs none.
    assert GrpoOptions(peer="verl", contenders=("gcore",)).running == ("gcore",)


def in_processes(wall_s: float) -> Step:
    return step(wall_s) | {"cpu_s": None, "lengths": ()}


BESIDE_VERL = [
    run("gcore", step(0.1), pss_bytes=2**30),
    run("gcore-ray", in_processes(0.5), pss_bytes=3 * 2**30, num_processes=12),
    run("verl", in_processes(2.1), pss_bytes=6 * 2**30, num_processes=30),
]


def test_aims_against_verl_are_met_or_not() -> None:
    inline, on_ray = aims(WORKLOADS["short"], summarise_steps(BESIDE_VERL).lines)
    assert inline == (
        "gcore / verl: 21.0x the speed (aim: at least 20x, met), 0.17 of the memory (aim: at most 0.33, met)"
    )
    assert on_ray == (
        "gcore-ray / verl: 4.2x the speed (aim: at least 5x, not met), 0.50 of the memory (aim: at most 0.33, not met)"
    )
    assert aims(WORKLOADS["long"], summarise_steps(RUNS).lines) == []


def test_the_aim_against_trl_is_that_of_short_answers() -> None:
    lines = summarise_steps(RUNS).lines
    assert aims(WORKLOADS["short"], lines) == ["gcore / trl: 4.00x the speed (aim: at least 3.3x, met)"]
    slower = [line | {"step_s": 2 * line["step_s"]} if line["contender"] == "gcore" else line for line in lines]
    assert aims(WORKLOADS["short"], slower) == ["gcore / trl: 2.00x the speed (aim: at least 3.3x, not met)"]


def test_contenders_of_several_processes_have_no_cpu_seconds() -> None:
    summary = summarise_steps(BESIDE_VERL)
    assert [line["cpu_s"] for line in summary.lines] == [1.0, None, None]
    assert summary.cpu_ratios == {"gcore": {}}
    assert summary.speed_ratios["gcore-ray"]["verl"] == pytest.approx(4.2)
    cells = cells_of(summary)
    assert cells["verl"][6:9] == ["", "6,144", "30"]
    assert "not met" in shown(summary)


def test_verl_is_given_the_job_of_all(tmp_path: Path) -> None:
    """What `train_config` says stands in verl's command line, and its prompts are those of the others."""
    workload = WORKLOADS["long"]
    make_tiny_model(tmp_path / "model", seed=0)
    task = replace(task_of(workload), contender="verl", model=tmp_path / "model", steps=200, seed=3)
    verl = verl_program(task, python=Path("python"), folder=tmp_path)
    settings = dict(a.split("=", 1) for a in verl.command if "=" in a)
    config = train_config(task)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert float(settings[f"{actor}.optim.lr"]) == config.actor.optim.lr
    assert float(settings[f"{actor}.optim.clip_grad"]) == config.actor.optim.grad_clip
    assert float(settings[f"{actor}.clip_ratio_high"]) == config.actor.loss.clip_ratio_high
    assert settings[f"{actor}.ppo_micro_batch_size_per_gpu"] == "32"
    assert int(settings[f"{rollout}.n"]) == config.rollout.n
    assert int(settings["data.max_response_length"]) == config.data.max_response_length
    assert settings["+reward.custom_reward_function.reward_kwargs.reward"] == f"'{config.reward}'"
    assert settings[f"++{actor}.fsdp_config.mixed_precision"].startswith("{param_dtype:'fp32',")
    # An epoch has about 125 steps.
    assert int(settings["trainer.total_epochs"]) >= 2
    rows = pyarrow.parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    prompts = load_train_prompts(config, build_tokenizer(tmp_path / "model")).train
    assert [row["prompt"][0]["content"] for row in rows] == [prompt.text for prompt in prompts]


def test_verls_rewards_are_those_of_all() -> None:
    stand_in = run_path(str(VERL_SCRIPTS / "stand_in/gcore_bench_reward.py"))
    compute_score: Callable[..., float] = stand_in["compute_score"]
    for workload in WORKLOADS.values():
        config = train_config(task_of(workload))
        reward = reward_function(config)
        for prompt in load_train_prompts(config, tiny_tokenizer()).train[:20]:
            truth = json.dumps(prompt.row["entry"])
            answer = prompt.row["answer"]
            scores: set[float] = set()
            for completion in (answer, f" +0{answer}.0\n", f"{answer}5a", "x", ""):
                given = cast("Any", reward(prompt.text, completion, prompt.row))
                expected = given.score if isinstance(given, Scored) else given
                assert compute_score("", completion, truth, {}, reward=workload.reward) == expected
                scores.add(expected)
            assert len(scores) > 1


@pytest.mark.slow
def test_a_program_is_watched_with_what_it_starts_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '100'], start_new_session=True); "
    code += "print(p.pid, flush=True); memory = b'x' * 2**27; p.wait(2.5)"
    program = Program(command=[sys.executable, "-c", code], environment={}, folder=tmp_path, read=list)
    with pytest.raises(BenchError, match=r"it failed: .*TimeoutExpired.* \(see "):
        run_program(program, name="it", log=tmp_path / "log")
    pid = int((tmp_path / "log").read_text().split()[0])
    assert left_after([pid], timeout_s=300) == []

    footprint = run_program(
        replace(program, command=[sys.executable, "-c", code.replace("p.wait(2.5)", "import time; time.sleep(2.5)")]),
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
    options = ["--workload", "short", "--contenders", "gcore", "trl", "--rounds", "1", "--steps", "2"]
    options += ["--warmup-steps", "1", "--threads", "1", "--work-dir", str(tmp_path / "work")]
    command = [sys.executable, "-m", "gcore_bench", "grpo", *options, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False)
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
        for field in ("samples_per_s", "step_s", "gen_s", "reward_s", "train_s", "other_s", "cpu_s", "peak_pss_bytes"):
            assert line[field] > 0, field
    runs = {r["contender"]: r["steps"] for r in workload["runs"]}
    assert all(len(s["lengths"]) == 256 for name in ("gcore", "trl") for s in runs[name])


@pytest.mark.verl
@pytest.mark.skipif(not VERL, reason="needs an environment with verl: scripts/verl-cpu/setup FOLDER")
def test_bench_measures_gcore_on_ray_and_verl(tmp_path: Path) -> None:
    options = ["--workload", "short", "--peer", "verl", "--verl-python", VERL, "--rounds", "1", "--steps", "2"]
    options += ["--warmup-steps", "1", "--work-dir", str(tmp_path / "work")]
    command = [sys.executable, "-m", "gcore_bench", "grpo", *options, "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "gcore-ray / verl" in done.stdout
    (workload,) = json.loads((tmp_path / "figures.json").read_text())["workloads"]
    for line in workload["summary"]["lines"]:
        assert (line["num_steps"], line["samples_per_step"]) == (2, 256)
        assert 1 <= line["mean_length"] <= line["max_length"] <= 6
        # All begin with the same model, and have hardly moved it.
        assert 0.2 < line["score"] < 0.8
    assert [line["num_processes"] > 5 for line in workload["summary"]["lines"]] == [False, True, True]

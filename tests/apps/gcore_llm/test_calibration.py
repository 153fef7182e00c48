"""`gcore-llm simulate --calibrate`: parameters come back from runs of a known model, and real runs are described."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, option_set

from gcore_llm.learning.preparation import workload_of
from gcore_llm.simulate import parse_simulate, read_run, simulate, train_config
from gcore_runs.errors import UserError
from gcore_runs.settings.parsing import to_toml
from gcore_runs.simulation.command import parse_calibrate
from gcore_runs.simulation.config import (
    EngineModel,
    LearnerModel,
    LengthModel,
    RewardModel,
    SimulateConfig,
)
from gcore_runs.simulation.fit import (
    STAGES,
    MeasuredRun,
    Parameters,
    fit,
    num_simulations,
)
from gcore_runs.simulation.tokens import coarse_workload
from gcore_trainer import ParallelConfig

TRUE = Parameters(
    base_s=0.02,
    per_sample_s=1e-4,
    prefill_s=8e-5,
    latency_s=0.3,
    flop_s=4e-11,
    micro_batch_s=0.08,
    forward_share=0.4,
    sync_s=0.5,
    overhead_s=0.2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json alone."""
    folder = tmp_path_factory.mktemp("model")
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "vocab_size": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape, **heads}))
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> SimulateConfig:
    """One device; all that a step samples runs at once."""
    return SimulateConfig(
        devices=1,
        controllers=1,
        steps=10,
        token_unit=1,
        model=str(model),
        train_batch_size=8,
        n=4,
        max_prompt_length=64,
        max_response_length=256,
        prompt_length=LengthModel(median=20, sigma=0),
        response_length=LengthModel(median=40, sigma=0.8),
        filter_groups=False,
        kl_loss_coef=0.1,
        engine=EngineModel(devices_per_replica=1),
        reward=RewardModel(latency_sigma=0.0, max_concurrency=1024),
        learner=LearnerModel(devices_per_replica=1),
    )


@pytest.fixture(scope="module")
def many(alone: SimulateConfig) -> SimulateConfig:
    """Two controllers, replicas that wait for each other, responses that wait for a place, several waves a step."""
    return replace(
        alone,
        devices=4,
        controllers=2,
        filter_groups=True,
        train_batch_size=8,
        prompt_length=LengthModel(median=20, sigma=0.4),
        ppo_mini_batch_size=4,
        ppo_max_token_len=500,
        engine=EngineModel(devices_per_replica=2, max_num_seqs=10, prompts="shared"),
        reward=replace(alone.reward, acceptance=0.7),
        learner=LearnerModel(devices_per_replica=2),
    )


def write_run(folder: Path, config: SimulateConfig, *, noise: float = 0.0, **settings: Any) -> str:
    """The folder of a run whose services are those of `TRUE`, its stages' seconds off by log-normal noise."""
    trained = train_config(config)
    ranks = config.devices // config.num_learner_replicas
    trained = replace(
        trained,
        runtime="inline",
        rollout=replace(
            trained.rollout,
            num_processes=config.num_engine_replicas,
            max_num_seqs=config.engine.max_num_seqs,
        ),
        trainer=replace(trained.trainer, parallel=ParallelConfig(context_parallel_size=ranks)),
        **settings,
    )
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(trained))
    random = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in simulate(
            TRUE.apply(config, coarse_workload(config.model, 1, workload_of))
        ).steps:
            row: dict[str, Any] = {"step": step.step, **step.metrics}
            row["timing_s/sync"] -= TRUE.overhead_s
            for stage in STAGES[:-1]:
                name = f"timing_s/{stage}"
                exact_s = row.get(name, 0.0)
                row[name] = exact_s * float(np.exp(noise * random.standard_normal()))
                row["timing_s/step"] += row[name] - exact_s
            file.write(json.dumps(row) + "\n")
    return str(folder)


def fitted(run: MeasuredRun, last: int) -> tuple[Parameters, Mapping[str, float]]:
    """To the steps up to this one."""
    return fit([run], [np.arange(len(run.rows)) < last], lambda: None)


def step_error(run: MeasuredRun, parameters: Parameters, steps: slice) -> float:
    """Of the mean step time."""
    return (
        float(run.simulate_seconds(parameters)[steps].sum() / run.measured_seconds()[steps].sum())
        - 1
    )


def test_known_parameters_come_back(alone: SimulateConfig, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", alone), max_steps=100)
    parameters, _ = fitted(run, 6)
    # Lengths are known by their sum and maximum alone, so that the work of attention is not quite that of the run.
    for name, value in asdict(parameters).items():
        assert value == pytest.approx(
            getattr(TRUE, name), rel=0.15 if name == "micro_batch_s" else 0.03
        ), name
    assert run.measured_seconds() == pytest.approx(
        run.simulate_seconds(parameters), rel=0.1, abs=1e-6
    )
    assert abs(step_error(run, parameters, slice(6, None))) < 0.01


def test_noise_stays_within_the_errors(alone: SimulateConfig, tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", alone, noise=0.1), max_steps=100)
    parameters, errors = fitted(run, 10)
    assert errors.keys() == asdict(TRUE).keys()
    for name, error in errors.items():
        assert abs(getattr(parameters, name) - getattr(TRUE, name)) < 3 * error + 0.05 * getattr(
            TRUE, name
        )
    assert errors["base_s"] < 0.1 * TRUE.base_s
    # What is fitted to adds up, stage by stage.
    means = run.simulate_seconds(parameters).mean(axis=0)
    assert means == pytest.approx(run.measured_seconds().mean(axis=0), rel=0.01)


def test_another_size_is_predicted(many: SimulateConfig, tmp_path: Path) -> None:
    small = read_run(write_run(tmp_path / "small", many, noise=0.1), max_steps=100)
    longer = LengthModel(median=70, sigma=0.8)
    large = replace(
        many, steps=5, train_batch_size=16, max_response_length=384, response_length=longer
    )
    other = read_run(write_run(tmp_path / "large", large), max_steps=100)
    parameters, _ = fitted(small, 6)
    # The lengths of these four steps are drawn again: over seeds this error has a standard deviation of 0.13.
    assert abs(step_error(small, parameters, slice(6, None))) < 0.1
    assert (
        other.measured_seconds().sum(axis=1).mean()
        > 1.5 * small.measured_seconds().sum(axis=1).mean()
    )
    assert abs(step_error(other, parameters, slice(None))) < 0.15


def test_runs_are_fitted_together(alone: SimulateConfig, tmp_path: Path) -> None:
    """Steps of one size do not tell a micro-batch's own time from its FLOPs'; those of two sizes do."""
    paths = [
        write_run(tmp_path / str(size), replace(alone, train_batch_size=size, steps=6))
        for size in (4, 16)
    ]
    runs = [read_run(path, max_steps=4) for path in paths]
    calls: list[None] = []
    parameters, _ = fit(runs, [np.ones(4, bool)] * 2, lambda: calls.append(None))
    assert parameters.micro_batch_s == pytest.approx(TRUE.micro_batch_s, rel=0.1)
    assert len(calls) == num_simulations(runs)


def test_what_is_not_seen_stays(alone: SimulateConfig, tmp_path: Path) -> None:
    run = read_run(
        write_run(tmp_path / "run", replace(alone, steps=4, kl_loss_coef=0.0)), max_steps=100
    )
    parameters, errors = fitted(run, 4)
    assert "forward_share" not in errors
    assert parameters.forward_share == Parameters().forward_share
    assert run.measured_seconds()[:, STAGES.index("prepare")].tolist() == [0.0] * 4


def test_command_writes_what_simulate_takes(cli: Cli, alone: SimulateConfig) -> None:
    write_run(cli.cwd / "a", replace(alone, steps=8))
    write_run(cli.cwd / "b", replace(alone, steps=4, train_batch_size=16))
    out = cli.ok(
        "simulate", "--calibrate", "a", "--check", "b", "--warmup-steps", "2", "--out", "own.toml"
    )
    for title in ("a: 3 steps fitted to", "a: 3 steps held out", "b: 2 steps held out"):
        assert title in out
    for row in ("decoding step", "token of a prompt", "generation", "weight sync", "the rest"):
        assert row in out
    written = tomllib.loads((cli.cwd / "own.toml").read_text())
    assert written["engine"]["base_s"] == pytest.approx(TRUE.base_s, rel=0.05)
    assert written["train_batch_size"] == 8
    out = cli.ok(
        "simulate",
        "--config",
        "own.toml",
        "--train-batch-size",
        "16",
        "--steps",
        "4",
        "--json",
        "out.json",
    )
    assert "1 simulated devices, 1 controllers, 4 steps" in out
    simulated = [step["step_s"] for step in json.loads((cli.cwd / "out.json").read_text())["steps"]]
    measured = [
        json.loads(line)["timing_s/step"]
        for line in (cli.cwd / "b/metrics.jsonl").read_text().splitlines()
    ]
    # The lengths are drawn: as long as those of the run on average, and no more than that.
    assert np.mean(simulated) == pytest.approx(np.mean(measured), rel=0.25)
    assert not (cli.cwd / "a/simulate.toml").exists()


@pytest.mark.slow
def test_a_real_run_is_described(cli: Cli, own_args: list[str], chatty: Path) -> None:
    args = own_args
    for name, value in (
        ("--model", chatty),
        ("--data.max-response-length", 32),
        ("--trainer.total-training-steps", 9),
    ):
        args = option_set(args, name, str(value))
    cli.ok(*args, "--name", "real")
    out = cli.ok("simulate", "--calibrate", "runs/real", "--held-out", "0.34")
    assert "runs/real: 4 steps fitted to" in out
    assert "runs/real: 2 steps held out" in out
    run = read_run(str(cli.cwd / "runs/real"), max_steps=100)
    parameters, _ = fitted(run, 9)
    seconds = run.simulate_seconds(parameters)
    assert np.isfinite(seconds).all()
    assert seconds.mean(axis=0) == pytest.approx(
        run.measured_seconds().mean(axis=0), rel=0.05, abs=1e-4
    )
    written = parse_simulate(["--config", str(cli.cwd / "runs/real/simulate.toml")])
    assert (written.train_batch_size, written.n, written.max_response_length) == (8, 4, 32)
    assert written.learner.flops_per_s > 0


def cut_metrics(folder: Path, num_lines: int) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:num_lines]))


def test_runs_of_another_kind_are_refused(cli: Cli, alone: SimulateConfig) -> None:
    config = replace(alone, steps=4)
    algorithm = train_config(config).algorithm
    write_run(cli.cwd / "gae", config, algorithm=replace(algorithm, adv_estimator="gae"))
    write_run(cli.cwd / "short", config)
    write_run(cli.cwd / "empty", config)
    cut_metrics(cli.cwd / "empty", 0)
    for args, message in (
        (["nowhere"], "nowhere is not a run's folder"),
        (["gae"], "gae: algorithm.adv_estimator is 'gae'; expected a run without a critic"),
        (["empty"], "empty/metrics.jsonl has no steps with responses"),
        (
            ["short"],
            "short has 1 steps after the first 3 (warmup_steps), 1 of them to fit to; expected at least 2",
        ),
        (
            ["short", "--out", "no/file.toml"],
            "out is 'no/file.toml'; expected a file in an existing folder",
        ),
    ):
        assert message in cli.refused("simulate", "--calibrate", *args)
    assert not list(cli.cwd.rglob("simulate.toml"))


@pytest.mark.parametrize(
    ("parse", "options", "message"),
    [
        (
            partial(parse_calibrate, prog="x"),
            ["--held-out", "1"],
            r"held_out is 1.0; expected a number in \[0, 1\)",
        ),
        (
            partial(parse_calibrate, prog="x"),
            ["--warmup-steps", "-1"],
            "warmup_steps is -1[:;] .*0",
        ),
        (partial(parse_calibrate, prog="x"), ["--max-steps", "1"], "max_steps is 1[:;] .*2"),
        (
            parse_simulate,
            ["--learner.flops-per-s", "-1"],
            "learner.flops_per_s is -1.0; expected a finite number, 0 or more",
        ),
        (
            parse_simulate,
            ["--learner.forward-share", "0"],
            "learner.forward_share is 0.0; expected a finite number above 0",
        ),
        (
            parse_simulate,
            ["--overhead-s", "inf"],
            "overhead_s is inf; expected a finite number, 0 or more",
        ),
    ],
)
def test_wrong_settings_are_refused(
    parse: Callable[[list[str]], object], options: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        parse([*(["--calibrate", "run"] if isinstance(parse, partial) else []), *options])


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("[engine]\nbase = 0.01\n")
    with pytest.raises(
        UserError, match=r"own.toml: unknown field engine.base; did you mean engine.base_s\?"
    ):
        parse_simulate(["--config", str(file)])
    file.write_text("[engine]\nbase_s = 0.5\n")
    assert parse_simulate(["--config", str(file), "--n", "4"]).engine.base_s == 0.5

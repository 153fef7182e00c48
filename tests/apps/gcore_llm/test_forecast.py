"""Predictions of a run's steps, and their corrections."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli, option_set, step_rows

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.forecast import planner_job, run_forecast, slowest_judge
from gcore_llm.learning.device_plan import shape_of
from gcore_llm.recipes.shapes import shape_folder
from gcore_llm.sections import FurtherJudgeConfig, JudgeConfig, RewardModelConfig, TrainerConfig
from gcore_placement import Correction, Efficiency, PlacementError
from gcore_placement.quantities import lengths_of


def config(tiny: Path, **fields: Any) -> TrainConfig:
    return TrainConfig(model=str(tiny), device="cpu", **fields)  # pyright: ignore[reportArgumentType]


def metrics(mean: float, *, longest: float, times: float = 1.0) -> dict[str, float]:
    """Of a step whose stages take a second for a mean of 100 tokens, and in proportion."""
    seconds = dict.fromkeys(("gen", "train", "sync"), times * mean / 100)
    return {
        "sampling/groups": 32.0,
        "sampling/acceptance": 1.0,
        "prompt_length/mean": 20.0,
        "response_length/mean": mean,
        "response_length/max": longest,
        **{f"timing_s/{stage}": value for stage, value in seconds.items()},
    }


def test_measurements_correct_predictions(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    forecast = run_forecast(config(tiny), tiny, path)
    first = forecast(metrics(100.0, longest=200.0))
    found: dict[str, float] = {}
    for _ in range(6):
        found = forecast(metrics(100.0, longest=200.0))
    assert abs(first["forecast/error"]) > 0.05
    assert found["forecast/error"] == pytest.approx(0.0, abs=1e-9)
    assert found["forecast/stages_s"] == pytest.approx(3.0)
    # The law carries over to other lengths, but for the seconds that do not depend on them.
    longer = forecast(metrics(150.0, longest=300.0))
    assert -0.5 < longer["forecast/error"] < 0.05
    # And what was learned to the next process of the run, and to a plan.
    again = run_forecast(config(tiny), tiny, path)
    assert again(metrics(100.0, longest=200.0))["forecast/error"] == pytest.approx(0.0, abs=1e-9)
    assert Correction.load(path).factor("training") > 0
    assert again({"sampling/groups": 0.0}) == {}


@pytest.mark.parametrize(("num_engines", "slowest"), [(1, "judge_style"), (30, "judge")])
def test_the_slowest_of_several_judges_is_predicted(
    num_engines: int, slowest: str, tiny: Path
) -> None:
    """One of 0.5B, and a larger one, of 7B, that has as many engines or 30 times as many."""
    small, large = (str(shape_folder(f"Qwen2.5-{size}-Instruct")) for size in ("0.5B", "7B"))
    style = FurtherJudgeConfig(path=large, num_processes=num_engines, max_response_length=64)
    judges = RewardModelConfig(
        kind="judge",
        path=small,
        judge=JudgeConfig(num_processes=1, max_response_length=64),
        judges={"style": style},
    )
    run = config(tiny, runtime="ray", reward_model=judges, rollout=RolloutConfig(num_processes=2))
    found = slowest_judge(run, shape_of)
    assert found is not None
    assert found.role == slowest
    assert planner_job(run, tiny, shape_of).judge == shape_of(Path(found.path))


def test_engines_of_one_device_each(tiny: Path, tmp_path: Path) -> None:
    """Two of the policy and one of a judge, whose forecast has no engine over two devices."""
    judge = RewardModelConfig(kind="judge", path=str(tiny))
    cluster = config(
        tiny, runtime="ray", reward_model=judge, rollout=RolloutConfig(num_processes=2)
    )
    for ranks in (1, 3):
        sized = replace(cluster, trainer=TrainerConfig(num_processes=ranks))
        found = run_forecast(sized, tiny, tmp_path / "placement.json")(
            metrics(100.0, longest=200.0)
        )
        assert found["forecast/stages_s"] > 0


def test_micro_batches_are_those_of_the_run(tiny: Path, tmp_path: Path) -> None:
    """Many small ones take longer, which the fastest plan for such a run does not have."""
    predicted_s: list[float] = []
    for tokens in (1536, 12_288):
        run = config(tiny)
        run = replace(run, actor=replace(run.actor, ppo_max_token_len=tokens))
        forecast = run_forecast(run, tiny, tmp_path / f"{tokens}.json")
        step = metrics(100.0, longest=1000.0) | {"sampling/groups": 1024.0}
        predicted_s.append(forecast(step)["forecast/stages_s"])
    num_tokens = 1024 * (20 + config(tiny).rollout.n * 100)
    num_more = num_tokens / 1536 - num_tokens / 12_288
    more_s = predicted_s[0] - predicted_s[1]
    assert more_s == pytest.approx(num_more * Efficiency().micro_batch_s, rel=0.02)


def test_drawn_lengths_are_those_of_the_law() -> None:
    """Log-normal lengths by their mean and their longest alone: tokens are predicted to a tenth."""
    drawn = np.random.default_rng(0).lognormal(5.0, 0.7, 4096)
    law = lengths_of(float(drawn.mean()), float(drawn.max()), count=4096)
    assert law.mean == pytest.approx(drawn.mean(), rel=0.05)
    assert law.mean_square == pytest.approx((drawn**2).mean(), rel=0.25)
    assert law.expected_longest(4096) == pytest.approx(drawn.max(), rel=0.1)


def test_models_that_the_planner_does_not_know(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(PlacementError, match=r"model_type is .*; expected one of"):
        run_forecast(config(tiny), other, tmp_path / "placement.json")


def test_a_run_keeps_what_it_learned(cli: Cli, own_args: list[str]) -> None:
    cli.ok(*option_set(own_args, "--trainer.total-training-steps", "6"))
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    assert all(row["forecast/stages_s"] > 0 for row in rows)
    for row in rows[3:]:
        stages = sum(row.get(f"timing_s/{stage}", 0.0) for stage in ("gen", "train", "sync"))
        assert row["forecast/stages_s"] == pytest.approx(stages * (1 + row["forecast/error"]))
    assert Correction.load(run).factor("generation") != 1.0

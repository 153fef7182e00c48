"""`gcore-bench algorithms`: one quick real run, and its arithmetic with curves made by hand."""

import json
from pathlib import Path
from typing import get_args

import pytest

from gcore_bench.algorithms import OPTIONS, AlgorithmName, AlgorithmsOptions, summarise_curves
from gcore_bench.cli import main
from gcore_llm.cli import parse_train


def test_curves_are_summarised_over_seeds() -> None:
    curves = [
        {"0": 0.5, "5": 0.82, "10": 0.91},
        {"0": 0.5, "5": 0.7, "10": 0.87},
        {"0": 0.5, "5": 0.79, "10": 0.83},
    ]
    assert summarise_curves(curves) == {
        "0": "0.50",
        "5": "0.77 (0.70 to 0.82)",
        "10": "0.87 (0.83 to 0.91)",
        "to_0.8": "8 (5 to 10)",
        "to_0.9": "1 of 3 seeds",
    }


def test_runs_are_evaluated_at_their_ends_too() -> None:
    assert AlgorithmsOptions(steps=7, test_freq=3).evaluated_steps == [0, 3, 6, 7]
    assert AlgorithmsOptions(steps=6, test_freq=3).evaluated_steps == [0, 3, 6]


@pytest.mark.parametrize("name", get_args(AlgorithmName))
def test_each_algorithm_differs_from_grpo_in_its_own_settings(name: AlgorithmName) -> None:
    config = parse_train(OPTIONS[name].split())
    has_own = {
        "grpo": config.algorithm.adv_estimator == "grpo"
        and config.actor.loss.loss_mode == "vanilla",
        "dapo": config.algorithm.filter_groups and config.actor.loss.clip_ratio_high == 0.28,
        "gspo": config.actor.loss.loss_mode == "gspo",
        "dppo_tv": config.actor.loss.loss_mode == "dppo_tv",
        "maxrl": config.algorithm.adv_estimator == "maxrl",
        "rloo": config.algorithm.adv_estimator == "rloo",
    }
    assert has_own[name]
    assert config.algorithm.filter_groups == (name == "dapo")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_a_quick_run_is_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["algorithms", "--quick", "--algorithms", "grpo", "dapo", "--work-dir", str(tmp_path)]
    outputs = ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "curves.png")]
    main(words)
    assert "making the model" in capsys.readouterr().out
    runs = tmp_path / "2-steps" / "runs"
    metrics = {run.name: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs.iterdir()}
    assert sorted(metrics) == ["dapo-1", "grpo-1"]

    # One of them was interrupted: the other is used as it is.
    rows = (runs / "dapo-1" / "metrics.jsonl").read_text().splitlines()
    (runs / "dapo-1" / "metrics.jsonl").write_text("\n".join(rows[:1]) + "\n")
    main([*words, *outputs])
    assert "making the model" not in capsys.readouterr().out
    assert (runs / "grpo-1" / "metrics.jsonl").stat().st_mtime_ns == metrics["grpo-1"]
    (part,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    assert list(part["rows"]) == ["grpo", "dapo"]
    for run in part["runs"]:
        (curve,) = run["rows"].values()
        assert list(curve) == ["0", "1", "2"]
        assert all(0 <= accuracy <= 1 for accuracy in curve.values())
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

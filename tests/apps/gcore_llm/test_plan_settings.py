"""What the planner recommends is what a run takes: `gcore-placement plan --toml` for `gcore-llm train --config`."""

from pathlib import Path

import pytest
from command_line import Cli, read_rows, step_rows

from gcore_llm.cli import main, parse_train
from gcore_llm.learning.cluster_plan import plan_cluster
from gcore_llm.recipes.shapes import shape_folder
from gcore_placement import Device
from gcore_placement.cli import main as placement

MODELS = {
    "Qwen2.5-0.5B-Instruct": (1, 8),
    "Qwen2.5-1.5B-Instruct": (1, 8),
    "Qwen2.5-7B-Instruct": (8, 32),
    "Qwen3-32B": (64,),
    "Qwen3-30B-A3B": (32,),
    "Qwen2.5-VL-7B-Instruct": (8,),
    "Qwen2.5-7B": (32,),
}
"""Models of the recipes, each with numbers of GPUs."""
JUDGES = {
    "Qwen2.5-7B-Instruct": "Qwen3-32B",
    "Qwen3-32B": "Qwen3-30B-A3B",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct",
}
EXTRAS = (["--reference"], ["--critic", "--old-log-probs"], ["--strategy", "colocated"])


def recommended(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    """The settings that the planner prints."""
    capsys.readouterr()
    assert placement(["plan", "--toml", *map(str, options)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("with_judge", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_every_recommendation_is_taken_and_fits(
    model: str, *, with_judge: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the settings' own checks, on the devices that the plan uses, with the memory of each of them."""
    judge = JUDGES.get(model, "Qwen2.5-0.5B-Instruct") if with_judge else None
    folder, file = shape_folder(model), tmp_path / "plan.toml"
    for num_gpus in MODELS[model]:
        for extra in EXTRAS:
            if judge and num_gpus == 1:
                continue
            judged = ["--judge", shape_folder(judge)] if judge else []
            text = recommended(capsys, "--model", folder, "--gpus", num_gpus, *judged, *extra)
            file.write_text(text)
            config = parse_train(["--config", str(file), "--device", "cuda", "--dtype", "bfloat16"])
            assert config.model == str(folder)
            found = plan_cluster(config, folder, Device.named("H100"))
            assert found.cluster.num_devices <= -(-num_gpus // 8) * 8
            assert found.tightest.fits, (extra, found.tightest.peaks)
            assert config.takes_turns
            if judge:
                assert config.placement.strategy in ("dynamic", "colocated")


@pytest.mark.parametrize(
    ("device", "model", "num_gpus"),
    [
        ("RTX3090", "Qwen2.5-0.5B-Instruct", 1),
        ("RTX4090", "Qwen2.5-1.5B-Instruct", 2),
        ("L4", "Qwen2.5-1.5B-Instruct", 8),
        ("RTX5090", "Qwen2.5-1.5B-Instruct", 4),
        ("A100-40GB", "Qwen2.5-7B-Instruct", 8),
        ("A6000", "Qwen2.5-7B-Instruct", 8),
        # With the optimizer's state on the host, and with adapters.
        ("RTX4090", "Qwen2.5-1.5B-Instruct", 1),
        ("A6000", "Qwen2.5-7B-Instruct", 4),
        ("RTX4090", "Qwen2.5-7B-Instruct", 2),
        ("H100", "Qwen2.5-7B-Instruct", 1),
        ("A6000", "Qwen3-32B", 8),
    ],
)
def test_small_devices_have_plans_that_fit(
    device: str, model: str, num_gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = shape_folder(model), tmp_path / "plan.toml"
    file.write_text(recommended(capsys, "--model", folder, "--gpus", num_gpus, "--device", device))
    config = parse_train(["--config", str(file), "--device", "cuda", "--dtype", "bfloat16"])
    assert plan_cluster(config, folder, Device.named(device)).tightest.fits


def test_a_plan_of_a_tiny_model_is_parsed_and_dry_run(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(recommended(capsys, *tiny_job(tiny)))
    assert "num_processes = 4" in file.read_text()
    main(
        [
            "train",
            "--config",
            str(file),
            "--dry-run",
            "--dry-run-nodes",
            "2",
            "--dry-run-gpus-per-node",
            "2",
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "fits"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    devices = [row for row in rows if len(row) == 6]
    assert [row[:2] for row in devices] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert [row[4] for row in devices] == ["0", "1", "2", "3"], "all devices train"
    assert all((row[2] == "") != (row[3] == "") for row in devices), (
        "each generates or judges before"
    )


def test_layouts_that_no_run_has_are_not_written(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert placement(["plan", "--toml", "--all-layouts", "--model", str(tiny), "--gpus", "4"]) == 2
    assert "--all-layouts is True; expected none with --toml" in capsys.readouterr().err


def tiny_job(tiny: Path) -> list[object]:
    lengths = [
        "--prompt-median",
        16,
        "--max-prompt-length",
        64,
        "--response-median",
        8,
        "--max-response-length",
        8,
    ]
    judge = ["--judge", tiny, "--judge-median", 4, "--max-judge-length", 8, "--strategy", "dynamic"]
    return ["--model", tiny, "--gpus", 4, "--train-batch-size", 8, "--n", 4, *lengths, *judge]


@pytest.mark.slow
def test_a_plan_runs_on_a_cluster(
    cli: Cli, own_args: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real steps on four device slots of a Ray cluster, with engines of transformers in the place of vLLM's."""
    file = cli.cwd / "plan.toml"
    file.write_text(
        recommended(capsys, *tiny_job(tiny)).replace('engine = "vllm"', 'engine = "hf"')
    )
    verdicts = [
        "--reward-model.judge.pattern",
        "(.)",
        "--reward-model.judge.unparsable-score",
        "0.5",
    ]
    finished = cli(*own_args, "--config", str(file), *verdicts, "--name", "planned")
    assert finished.code == 0, finished
    run = cli.cwd / "runs/planned"
    assert len(step_rows(run)) == 2
    places = {name for row in read_rows(run / "spans.jsonl") for name in row["devices"]}
    assert places == {f"device {i}" for i in range(4)}

"""`gcore-placement plan` as a user meets it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planning_jobs import QWEN_7B, QWEN_32B

from gcore_placement import Correction
from gcore_placement.cli import COMMANDS, main


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with two models' folders."""
    for name, config in (("policy", QWEN_7B), ("judge", QWEN_32B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_a_plan_is_printed_with_its_reasons(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            "plan",
            "--model",
            models / "judge",
            "--judge",
            models / "policy",
            "--gpus",
            64,
            "--reference",
        )
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("64 of 64 x H100, dynamic: ")
    for words in (
        "policy",
        "judge",
        "training",
        "weight_sync",
        "optimizer",
        "KV cache",
        "reference",
        "does not fit: ",
    ):
        assert words in text
    assert all(len(line) < 250 for line in text.splitlines())


def test_a_plan_is_json(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = models / "policy" / "config.json"
    assert (
        run(
            "plan",
            "--model",
            config,
            "--gpus",
            8,
            "--device",
            "H200",
            "--strategy",
            "colocated",
            "--json",
        )
        == 0
    )
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["cluster"]["device"]["name"] == "H200"
    assert data["judge"] is None
    assert data["step_s"] == pytest.approx(sum(data["step"].values()))


def test_adapters_are_the_answer_where_all_parameters_do_not_fit(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["plan", "--model", models / "policy", "--gpus", 2, "--device", "RTX4090"]
    assert run(*job) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "takes at least 82.0 GB of each; LoRA of rank 16 trains 40.4 million parameters" in line
    assert run(*job, "--toml", "--lora-rank", 8) == 0
    assert "lora_rank = 8" in capsys.readouterr().out


def test_updates_of_fewer_prompts_take_longer(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each exchanges gradients; the plan's settings have them, too."""
    job = ["plan", "--model", models / "policy", "--gpus", 8, "--train-batch-size", 256]
    training_s: list[float] = []
    for size in (0, 256, 16):
        assert run(*job, "--ppo-mini-batch-size", size, "--json") == 0
        training_s.append(json.loads(capsys.readouterr().out)["step"]["training_s"])
    assert training_s[0] == training_s[1] < training_s[2]
    assert run(*job, "--ppo-mini-batch-size", 16, "--toml") == 0
    assert "ppo_mini_batch_size = 16" in capsys.readouterr().out
    assert run(*job, "--ppo-mini-batch-size", -1) == 2
    assert "ppo_mini_batch_size is -1" in capsys.readouterr().err


def test_a_plan_is_corrected_by_what_a_run_has_kept(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correction = Correction()
    for _ in range(3):
        correction.observe("training", predicted_s=1.0, measured_s=2.5)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "placement.json").write_text(
        json.dumps({"correction": correction.state(), "partition": 3})
    )
    (tmp_path / "state.json").write_text(json.dumps(correction.state()))
    job = ["plan", "--model", models / "policy", "--gpus", 8]
    assert run(*job) == 0
    assert "measured / predicted" not in capsys.readouterr().out
    assert run(*job, "--json") == 0
    plain: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plain["correction"] is None

    texts: list[str] = []
    for kept in (tmp_path / "run", tmp_path / "run" / "placement.json", tmp_path / "state.json"):
        assert run(*job, "--correction", kept) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    factors = [line.split() for line in texts[0].split("measured / predicted")[1].splitlines()]
    assert ["training", "2.50"] in factors
    assert ["generation", "1.00"] in factors

    assert run(*job, "--correction", tmp_path / "run", "--json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert data["correction"]["training"] == 2.5
    # Less than 2.5 times as much, where another layout has become the fastest.
    assert (
        2 * plain["step"]["training_s"]
        < data["step"]["training_s"]
        <= 2.5 * plain["step"]["training_s"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "nowhere"],
            "model is 'nowhere'; expected a Hugging Face folder or its config.json",
        ),
        (["--model", "MODELS/broken.json"], "broken.json is not JSON; expected"),
        (["--model", "MODELS/list.json"], "list.json is a JSON list; expected an object"),
        (
            ["--model", "MODELS/policy", "--gpus", "0"],
            "num_devices is 0; expected an integer of at least 1",
        ),
        (
            ["--model", "MODELS/policy", "--acceptance", "0"],
            "acceptance is 0.0; expected a finite number above 0",
        ),
        (["--model", "MODELS/judge", "--gpus", "1"], "nothing fits on 1 x H100"),
        (
            ["--model", "MODELS/judge", "--gpus", "2", "--lora-rank", "0"],
            "nothing fits on 2 x H100",
        ),
        (
            ["--model", "MODELS/policy", "--lora-rank", "-1"],
            "lora_rank is -1; expected an integer of at least 0",
        ),
        (
            ["--model", "MODELS/policy", "--correction", "MODELS/policy"],
            "correction is 'MODELS/policy/placement.json'; expected a run's folder with placement.json, or such a file",
        ),
        (
            ["--model", "MODELS/policy", "--correction", "MODELS/broken.json"],
            "broken.json is not JSON; expected",
        ),
        (
            ["--model", "MODELS/policy", "--correction", "MODELS/list.json"],
            "list.json is a JSON list; expected an object",
        ),
        (
            ["--model", "MODELS/policy", "--correction", "MODELS/policy/config.json"],
            "expected of Correction.state(): ratios of generation, ",
        ),
        (
            ["--model", "MODELS/policy", "--strategy", "split"],
            "strategy is 'split'; expected colocated, or None, without a judge",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "broken.json").write_text("{")
    (models / "list.json").write_text("[]")
    given = [argument.replace("MODELS", str(models)) for argument in arguments]
    assert run("plan", "--gpus", "8", *given) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("gcore-placement: error: ")
    assert message.replace("MODELS", str(models)) in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_names_what_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    text = capsys.readouterr().out
    assert (
        "--train-batch-size" in text
        if "plan" in arguments
        else all(name in text for name in COMMANDS)
    )


def test_unknown_commands_and_devices_are_refused(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plam"])
    with pytest.raises(SystemExit, match="2"):
        run("plan", "--model", models / "policy", "--gpus", 8, "--device", "H900")
    assert "choose from" in capsys.readouterr().err


def test_without_rich_the_install_command_is_given(models: Path) -> None:
    program = "import sys; sys.modules['rich'] = None; from gcore_placement.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "plan",
        "--model",
        str(models / "policy"),
        "--gpus",
        "8",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 2
    assert (
        result.stderr
        == "gcore-placement: error: 'rich' is not installed: pip install 'gcore-placement[cli]'\n"
    )
    assert (
        subprocess.run(
            [*command, "--json"], capture_output=True, timeout=600, check=False
        ).returncode
        == 0
    )

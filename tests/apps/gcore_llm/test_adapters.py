"""Runs that train adapters: what they export, what they start from, and what they refuse."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from command_line import Cli, step_rows, val_rows, write_rows
from finetune_cases import pairs
from transformers import AutoModelForCausalLM, AutoTokenizer

from gcore_llm.config import TrainConfig
from gcore_runs.run_folder import RunFolder

LORA = ["--actor.lora-rank", "4", "--actor.use-rslora", "True", "--actor.optim.lr", "1e-2"]
TOLERANCE = 1e-5
"""Largest difference of logits between adapters next to the weights and merged into them, in float32."""


@pytest.fixture(scope="module")
def trained(shared_cli: Cli, own_args: list[str]) -> Path:
    shared_cli.ok(*own_args, *LORA)
    return shared_cli.cwd / "runs/default"


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokenizer("12+34=")["input_ids"]])).logits


def test_a_run_with_adapters_can_be_looked_at(shared_cli: Cli, trained: Path) -> None:
    """Its checkpoint holds adapters only; `eval` merges them with the model that they belong to."""
    last = val_rows(trained)[-1]
    expected = (
        f"{last['val/greedy/score/mean']:.3f} greedy, {last['val/sampled/score/mean']:.3f} sampled"
    )
    assert f"step 2: held-out score {expected}\n" in shared_cli.ok("eval", "runs/default")


def test_adapters_leave_as_a_folder_of_peft_and_merged_when_asked(
    shared_cli: Cli, trained: Path, own_args: list[str], tiny: Path
) -> None:
    """The same command with another form exports a finished run again."""
    export = trained / "export"
    assert not list(export.glob("model*.safetensors"))
    tokenizer = AutoTokenizer.from_pretrained(export)
    base: Any = AutoModelForCausalLM.from_pretrained(tiny)
    before = logits(base, tokenizer)
    by_adapters = logits(peft.PeftModel.from_pretrained(base, export), tokenizer)
    assert not torch.allclose(by_adapters, before, atol=1e-2)
    out = shared_cli.ok(*own_args, *LORA, "--actor.export-merged", "True")
    assert "resuming after step 2 of 2" in out
    assert not (export / "adapter_config.json").exists()
    merged = logits(AutoModelForCausalLM.from_pretrained(export), tokenizer)
    torch.testing.assert_close(by_adapters, merged, rtol=0, atol=TOLERANCE)
    shared_cli.ok(*own_args, *LORA)
    assert (export / "adapter_config.json").is_file()


@pytest.mark.slow
def test_a_run_starts_from_adapters(shared_cli: Cli, trained: Path, own_args: list[str]) -> None:
    """Engine, trainer and reference all have them from the first response on."""
    start = [
        "--actor.lora-adapter-path",
        "runs/default/export",
        "--name",
        "further",
        "--trainer.save-freq",
        "1",
    ]
    options = [*start, "--actor.loss.kl-loss-coef", "0.1", "--actor.optim.lr", "1e-3"]
    shared_cli.ok(*own_args, *options, "--trainer.total-training-steps", "1")
    run = RunFolder(shared_cli.cwd / "runs/further")
    lora = run.load_config(TrainConfig).actor.lora
    assert lora is not None
    assert (lora.rank, lora.use_rslora) == (4, True)
    first, before = val_rows(run.path)[0], val_rows(trained)[-1]
    for name in ("val/greedy/score/mean", "val/sampled/score/mean"):
        assert first[name] == before[name]
    [row] = step_rows(run.path)
    assert row["training/rollout_probs_diff_mean"] < 1e-5
    assert row["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    shared_cli.ok(*own_args, *options)  # resumes with the same command
    assert len(step_rows(run.path)) == 2
    assert "step 2" in shared_cli.ok("eval", "runs/further")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_fine_tuning_trains_adapters_too(cli: Cli, tiny: Path, command: str) -> None:
    if command == "sft":
        rows: list[Any] = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(40)]
    else:
        rows = pairs(40, seed=0)
    write_rows(cli.cwd / "rows.jsonl", rows)
    job = [
        command,
        "--threads",
        "1",
        "--device",
        "cpu",
        "--model",
        str(tiny),
        "--data.train-files",
        "rows.jsonl",
    ]
    job += [
        "--data.max-length",
        "32",
        "--data.train-batch-size",
        "8",
        "--trainer.total-training-steps",
        "2",
    ]
    job += ["--optim.lr", "1e-2"]
    cli.ok(*job, "--lora-rank", "2", "--name", "first")
    first = cli.cwd / "runs/first"
    files = {path.name for path in (first / "export").iterdir()}
    assert files > {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert "config.json" not in files
    cli.ok(
        *job,
        "--lora-adapter-path",
        "runs/first/export",
        "--export-merged",
        "True",
        "--name",
        "second",
    )
    assert (cli.cwd / "runs/second/export/config.json").is_file()


def test_adapters_that_do_not_fit_are_refused(
    shared_cli: Cli, trained: Path, own_args: list[str], tiny: Path
) -> None:
    path = ["--actor.lora-adapter-path", "runs/default/export", "--name", "refused"]
    for options, expected in (
        (
            [*path, "--actor.lora-rank", "8"],
            "actor.lora_rank is 8; expected 4, as the adapters in runs/default/export",
        ),
        ([*path, "--actor.lora-alpha", "7"], "actor.lora_alpha is 7; expected 32"),
        (
            ["--actor.lora-adapter-path", str(tiny), "--name", "refused"],
            f"actor.lora_adapter_path is '{tiny}'; expected a folder of peft, with adapter_config.json",
        ),
        (
            ["--model", "runs/default/export", "--name", "refused"],
            "model is 'runs/default/export'; expected a Hugging Face folder with config.json; it has adapters, which",
        ),
    ):
        assert expected in shared_cli.refused(*own_args, *options)
    assert not (shared_cli.cwd / "runs/refused").exists()

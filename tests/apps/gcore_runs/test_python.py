"""The apps from Python: settings in, a result out, and nothing on the screen."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from command_line import step_rows

import gcore_diffusion
import gcore_llm
import gcore_runs
from gcore_ckpt import Checkpointer


def job(folder: Path, model: Path) -> gcore_llm.TrainConfig:
    """Two steps on prompts and a reward in files."""
    (folder / "evens.py").write_text(
        "def reward(prompt, completion, row):\n    return sum(ord(c) % 2 == 0 for c in completion) / 8\n"
    )
    rows = [json.dumps({"prompt": f"{i}+{i % 7}="}) + "\n" for i in range(40)]
    (folder / "train.jsonl").write_text("".join(rows))
    return gcore_llm.TrainConfig(
        runs_dir=str(folder / "runs"),
        model=str(model),
        threads=1,
        device="cpu",
        reward=f"{folder / 'evens.py'}:reward",
        data=gcore_llm.DataConfig(
            train_files=(str(folder / "train.jsonl"),), train_batch_size=4, max_response_length=8
        ),
        rollout=gcore_llm.RolloutConfig(n=4),
        trainer=gcore_llm.TrainerConfig(total_training_steps=2, tensorboard=False),
    )


def test_train_and_resume(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In another thread, which gets no signals, and then in this one."""
    config = job(tmp_path, tiny)
    with ThreadPoolExecutor(1) as thread, caplog.at_level(logging.INFO):
        first = thread.submit(gcore_llm.train, config).result()
    assert first.run == tmp_path / "runs/default"
    assert first.has_signal
    assert 0 < first.before["val/sampled/score/mean"] <= 1
    assert f"run folder: {first.run}" in caplog.messages
    longer = replace(config, trainer=replace(config.trainer, total_training_steps=3))
    second = gcore_llm.train(longer)
    assert [row["step"] for row in step_rows(second.run)] == [1, 2, 3]
    assert second.before == first.before
    assert (second.run / "export/model.safetensors").is_file()
    assert (second.run / "report.html").is_file()
    assert capsys.readouterr().out == ""


def test_wrong_settings_are_reported() -> None:
    with pytest.raises(
        gcore_runs.UserError, match="model is not set; expected a Hugging Face folder, or a model"
    ):
        gcore_llm.train(gcore_llm.TrainConfig(data=gcore_llm.DataConfig(train_files=("x.jsonl",))))


def test_fine_tune(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = gcore_llm.fine_tune(
        gcore_llm.SFTRunConfig(
            runs_dir=str(tmp_path),
            model=str(tiny),
            threads=1,
            device="cpu",
            task=gcore_llm.TaskConfig(name="chain_sum", num_train=64, num_val=8),
            data=gcore_llm.RowsConfig(train_batch_size=8, max_length=128),
            trainer=gcore_llm.LengthConfig(total_training_steps=2, tensorboard=False),
        )
    )
    assert Checkpointer(result.run / "checkpoints").steps() == [2]
    assert result.after["val/sft/loss"] != result.before["val/sft/loss"]
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_train_a_diffusion_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedded = gcore_diffusion.embedded()
    result = gcore_diffusion.train(
        replace(
            embedded,
            runs_dir=str(tmp_path),
            device="cpu",
            data=replace(embedded.data, train_batch_size=2),
            rollout=replace(embedded.rollout, n=4),
            trainer=gcore_diffusion.DiffusionTrainerConfig(
                total_training_steps=1, tensorboard=False
            ),
        ),
        demo=gcore_diffusion.DemoConfig(num_steps=2, cache_dir=str(tmp_path / "cache")),
    )
    assert len(step_rows(result.run)) == 1
    assert result.after.keys() == result.before.keys() >= {"step", "val/score/mean"}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "app", [gcore_llm, gcore_diffusion, gcore_runs], ids=lambda app: app.__name__
)
def test_the_root_exports_what_it_declares(app: ModuleType) -> None:
    assert all(hasattr(app, name) for name in app.__all__)
    assert len(set(app.__all__)) == len(app.__all__)
    with pytest.raises(AttributeError, match="attribute nothing"):
        _ = app.nothing

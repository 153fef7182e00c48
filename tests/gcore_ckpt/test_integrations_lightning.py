"""Lightning's checkpoints are steps of ours, and training continues as if it had not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gcore_ckpt import CheckpointWriteError, load, verify
from gcore_ckpt.integrations.lightning import CheckpointerIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of Lightning with this torch
]


class Model(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }

    def train_dataloader(self) -> Any:
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(list(rows), batch_size=4)  # pyright: ignore[reportArgumentType]


class Bad(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"made": object()}


def make_trainer(folder: Path, epochs: int, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=[CheckpointerIO(**options)],
        callbacks=list(callbacks),
    )


def test_resumed_losses_are_those_of_one_run(tmp_path: Path) -> None:
    whole = Model()
    make_trainer(tmp_path / "whole", 4, ModelCheckpoint(save_top_k=-1)).fit(whole)
    first, second = Model(), Model()
    saver = ModelCheckpoint(
        tmp_path / "parts", save_last=True, save_top_k=2, monitor="loss", filename="{epoch}"
    )
    make_trainer(tmp_path, 2, saver).fit(first)
    for path in (tmp_path / "parts" / "epoch=1.ckpt", tmp_path / "parts" / "last.ckpt"):
        verify(path)
    trainer = make_trainer(tmp_path, 4, ModelCheckpoint(tmp_path / "parts", save_last=True))
    trainer.fit(second, ckpt_path="last")
    assert first.losses + second.losses == whole.losses
    assert len(whole.losses) == 24
    for a, b in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    state = load(tmp_path / "parts" / "epoch=1.ckpt")
    assert state["global_step"] == 12
    assert state["hyper_parameters"] == {"width": 8}


def test_the_best_are_kept_and_the_others_deleted(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=2, filename="{epoch}")
    make_trainer(tmp_path, 5, saver).fit(Model())
    kept = {path.name for path in tmp_path.glob("*.ckpt")}
    assert kept == {Path(path).name for path in saver.best_k_models}
    assert len(kept) == 2
    for path in saver.best_k_models:
        verify(path)


def test_what_no_state_may_hold_is_named(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, 1, Bad(), ModelCheckpoint(tmp_path))
    with pytest.raises(
        TypeError, match=r"state\['callbacks'\]\['Bad'\]\['made'\] is a builtins.object"
    ):
        trainer.fit(Model())


def test_a_save_that_fails_is_raised_by_the_next(tmp_path: Path) -> None:
    plugin = CheckpointerIO()
    plugin.save_checkpoint({"w": torch.ones(1), "global_step": 3}, tmp_path / "a.ckpt")
    plugin.save_checkpoint(
        {"w": torch.zeros(1), "global_step": 3}, tmp_path / "a.ckpt"
    )  # in its place
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["w"].tolist() == [0.0]
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointWriteError, match="file"):
        plugin.save_checkpoint({"w": torch.ones(1)}, tmp_path / "file" / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()
    with pytest.raises(TypeError, match="storage_options is 1; expected None"):
        plugin.save_checkpoint({}, tmp_path / "a.ckpt", storage_options=1)

"""Folders that are written a file at a time are those of transformers' `save_pretrained`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_config
from trainer_oracles import save_model
from transformers import AutoModelForCausalLM

from gcore_trainer import PackedModel
from gcore_trainer.torch import streamed_folder
from gcore_trainer.trainer import Replicas


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"]
)
@pytest.mark.parametrize("file_bytes", [1 << 30, 1 << 12], ids=["a file", "files"])
def test_folders_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, file_bytes: int
) -> None:
    """Experts that were fused on loading are separate again, and buffers that are saved are there."""
    packed = PackedModel.from_pretrained(
        save_model(tiny_config(model_type), tmp_path / "model", seed=0)
    )
    expected, folder = tmp_path / "expected", tmp_path / "streamed"
    packed.model.save_pretrained(expected)
    monkeypatch.setattr(streamed_folder, "MAX_FILE_BYTES", file_bytes)
    packed.save_pretrained(folder, iter(packed.named_parameters().items()), Replicas())
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (expected / "config.json").read_text()
    )
    found, wanted = tensors_of(folder), tensors_of(expected)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (file_bytes > 1 << 20)
    loaded, original = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder, tmp_path / "model")
    )
    torch.testing.assert_close(loaded, original, rtol=0, atol=0)

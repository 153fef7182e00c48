"""Folders that are written a file at a time are those of transformers' `save_pretrained`."""

import json
from collections.abc import Iterator
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


def test_a_folder_is_complete_once_it_has_its_name(tmp_path: Path) -> None:
    """Whatever fails meanwhile."""
    packed = PackedModel.from_pretrained(
        save_model(tiny_config("qwen2"), tmp_path / "model", seed=0)
    )
    folder = tmp_path / "export"

    def stop_in_the_middle() -> Iterator[tuple[str, torch.Tensor]]:
        assert not folder.exists()
        yield from list(packed.named_parameters().items())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed.save_pretrained(folder, stop_in_the_middle(), Replicas())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_files_of_a_folder_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model, of which no more are left than it has; and the others stay."""
    folder = tmp_path / "export"
    for model_type, file_bytes in [("qwen3_moe", 1 << 12), ("qwen2", 1 << 14)]:
        path = save_model(tiny_config(model_type), tmp_path / model_type, seed=0)
        packed = PackedModel.from_pretrained(path)
        monkeypatch.setattr(streamed_folder, "MAX_FILE_BYTES", file_bytes)
        packed.save_pretrained(folder, iter(packed.named_parameters().items()), Replicas())
        (folder / "tokenizer.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"")
    [index] = folder.glob("*.index.json")
    files = set(json.loads(index.read_text())["weight_map"].values())
    others = {"tokenizer.json", "adapter_model.safetensors", "config.json"}
    others |= {"generation_config.json", index.name}
    assert {path.name for path in folder.iterdir()} == files | others
    loaded, original = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, path)
    )
    torch.testing.assert_close(loaded, original, rtol=0, atol=0)

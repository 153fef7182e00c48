"""What transformers loads of an export, and what is loaded of its folders, are equal to the bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from gcore_ckpt import (
    Checkpointer,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
    PerRank,
    Shard,
    verify,
)
from gcore_ckpt.format.boxes import DTYPES
from gcore_ckpt.tools.hugging_face import export_hf

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def tiny_model(*, tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config).eval()


def from_pretrained(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def box(
    tensor: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...], name: str | None = None
) -> Shard:
    return Shard(tensor=tensor, global_shape=shape, offset=offset, name=name)


def save(path: Path, state: dict[str, Any]) -> Path:
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state)
    return path


def assert_equal_to_the_bit(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (name, found[name].dtype, found[name].shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        ), name


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(12).view(2, 6)).logits


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    tiny_model().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    (folder / "notes.txt").write_text("not to be copied")
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 4_000])
def test_transformers_loads_what_is_exported(
    tmp_path: Path, config_folder: Path, tied: bool, max_shard_bytes: int
) -> None:
    model = tiny_model(tied=tied)
    save(
        tmp_path / "ckpt",
        {"model": model.state_dict(), "optim": {"step": torch.ones(3)}, "lr": 0.1},
    )
    model.config.save_pretrained(tmp_path / "config")
    sizes: list[int] = []
    export_hf(
        tmp_path / "ckpt",
        tmp_path / "deep" / "hf",
        prefix="model",
        max_shard_bytes=max_shard_bytes,
        config_from=tmp_path / "config",
        progress=sizes.append,
    )
    loaded = from_pretrained(tmp_path / "deep" / "hf")
    assert_equal_to_the_bit(loaded.state_dict(), model.state_dict())
    assert torch.equal(logits(loaded), logits(model))
    assert sum(sizes) == sum(p.nbytes for p in model.parameters())
    weights = [
        path for path in (tmp_path / "deep" / "hf").iterdir() if path.suffix == ".safetensors"
    ]
    assert len(weights) == 1 or all(
        path.stat().st_size < max_shard_bytes + 2_000 for path in weights
    )
    assert (
        (tmp_path / "deep" / "hf" / INDEX).exists()
        == (len(weights) > 1)
        == (max_shard_bytes < 10**6)
    )


def test_the_index_file_is_what_transformers_would_write(tmp_path: Path) -> None:
    model = tiny_model()
    save(tmp_path / "ckpt", {"model": model.state_dict()})
    export_hf(tmp_path / "ckpt", tmp_path / "hf", prefix="model", max_shard_bytes=4_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=4_000)
    ours, theirs = (json.loads((tmp_path / name / INDEX).read_text()) for name in ("hf", "theirs"))
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    files = sorted(set(ours["weight_map"].values()))
    assert files == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]


def test_a_dtype_converts_floats_alone_and_is_stated_in_the_config(
    tmp_path: Path, config_folder: Path
) -> None:
    model = tiny_model()
    state = {
        **model.state_dict(),
        "count": torch.arange(3),
        "scale": torch.ones(3, dtype=torch.float8_e8m0fnu),
    }
    save(tmp_path / "ckpt", state)
    export_hf(tmp_path / "ckpt", tmp_path / "hf", dtype="bfloat16", config_from=config_folder)
    found = load_file(tmp_path / "hf" / WEIGHTS)
    expected = {
        name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in state.items()
    }
    del expected["lm_head.weight"]
    assert_equal_to_the_bit(found, expected)
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json", "generation_config.json", WEIGHTS, "tokenizer_config.json"
    ]  # fmt: skip
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((config_folder / "config.json").read_text())["dtype"] == "float32"


def test_every_dtype_that_safetensors_knows_is_exported(tmp_path: Path) -> None:
    state = {
        name: (torch.arange(48, dtype=torch.uint8) % 2).view(getattr(torch, name)).view(2, -1)
        for name, dtype in DTYPES.items()
        if dtype.safetensors is not None
    }
    state |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    save(tmp_path / "ckpt", {"a": [state, 3]})
    export_hf(tmp_path / "ckpt", tmp_path / "hf", prefix="a.0")
    with safe_open(tmp_path / "hf" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_equal_to_the_bit(load_file(tmp_path / "hf" / WEIGHTS), state)
    assert_equal_to_the_bit(
        Checkpointer(tmp_path / "hf").load(), load_file(tmp_path / "hf" / WEIGHTS)
    )


def test_sharded_tensors_are_exported_whole(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(6, 4)
    shards = {f"part{i}": box(weight[3 * i : 3 * i + 3], (6, 4), (3 * i, 0), "w") for i in range(2)}
    save(tmp_path / "ckpt", {"m": {"x": shards["part0"]}, "n": {"x": shards["part1"]}})
    export_hf(tmp_path / "ckpt", tmp_path / "hf", prefix="m")
    assert_equal_to_the_bit(load_file(tmp_path / "hf" / WEIGHTS), {"w": weight})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"prefix": "nothing"},
            CheckpointMismatchError,
            "no tensors under the prefix 'nothing'; it holds some under ",
        ),
        ({"prefix": "lr"}, CheckpointMismatchError, "no tensors under the prefix 'lr'"),
        (
            {"prefix": "complex"},
            CheckpointMismatchError,
            "complex.x has dtype complex64, for which safetensors has no",
        ),
        (
            {"prefix": "fp8"},
            CheckpointMismatchError,
            "fp8.x has dtype float8_e4m3fnuz, .* expected a dtype to convert",
        ),
        ({"prefix": "twice"}, CheckpointMismatchError, "holds two tensors of the name 'twice.a.b'"),
        ({"prefix": "own"}, CheckpointMismatchError, "own.rank 0.x is one rank's own"),
        (
            {"prefix": "kept"},
            CheckpointMismatchError,
            "kept.__metadata__ has a name that safetensors keeps",
        ),
        (
            {"dtype": "int8"},
            ValueError,
            "dtype is 'int8'; expected None or one of float16, float32, ",
        ),
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes is 0; expected 1 or more"),
        (
            {"config_from": "nowhere"},
            ValueError,
            "config_from is 'nowhere'; expected a folder that holds config.json",
        ),
        ({"step": 7}, CheckpointNotFoundError, r"holds no step 7; its committed steps are \[1\]"),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    state = {
        "lr": 0.1,
        "w": torch.ones(2),
        "complex": {"x": torch.ones(2, dtype=torch.complex64)},
        "fp8": {"x": torch.ones(2).to(torch.float8_e4m3fnuz)},
        "twice": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        "own": PerRank({"x": torch.ones(1)}),
        "kept": {"__metadata__": torch.ones(1)},
    }
    save(tmp_path / "ckpt", state)
    with pytest.raises(error, match=message):
        export_hf(tmp_path / "ckpt", tmp_path / "hf", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", {"w": torch.ones(2)})
    (tmp_path / "hf").mkdir()
    export_hf(tmp_path / "ckpt", tmp_path / "hf")
    before = (tmp_path / "hf" / WEIGHTS).stat()
    with pytest.raises(
        CheckpointWriteError, match="hf is there already; expected a new folder, or an empty one"
    ):
        export_hf(tmp_path / "ckpt", tmp_path / "hf")
    assert (tmp_path / "hf" / WEIGHTS).stat() == before


def test_an_export_into_the_folder_of_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2)})
    for name in (
        "step-00000002",
        "set-aside-00000002-0123456789ab",
        ".tmp-step-00000002-0123456789ab",
    ):
        with pytest.raises(
            CheckpointWriteError, match=f"{name} has a name that {tmp_path} keeps for itself"
        ):
            export_hf(tmp_path, tmp_path / name)

    def save_meanwhile(progress: int) -> None:
        with Checkpointer(tmp_path, keep=1) as other:
            other.save(2, {})

    export_hf(tmp_path, tmp_path / "hf", progress=save_meanwhile)
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], torch.ones(2))
    assert Checkpointer(tmp_path).steps() == [2]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", {"a": torch.ones(2), "w": torch.arange(2)})
    data = tmp_path / "ckpt" / "step-00000001" / "data-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptCheckpointError, match="has checksum"):
        export_hf(tmp_path / "ckpt", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("max_shard_size", ["1GB", 4_000])
def test_a_folder_of_transformers_loads_as_it_is(tmp_path: Path, max_shard_size: str | int) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX).exists() == (max_shard_size != "1GB")
    expected = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    checkpointer = Checkpointer(tmp_path)
    assert_equal_to_the_bit(checkpointer.load(), expected)
    assert_equal_to_the_bit(checkpointer.load(mmap=True), expected)
    assert_equal_to_the_bit(
        checkpointer.load(only=["model.norm"]), {"model.norm.weight": expected["model.norm.weight"]}
    )
    assert checkpointer.steps() == []
    verify(tmp_path)

    other = tiny_model()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    checkpointer.load(other.state_dict())
    assert_equal_to_the_bit(other.state_dict(), model.state_dict())

    narrow = {name: torch.empty_like(t, dtype=torch.bfloat16) for name, t in expected.items()}
    checkpointer.load(narrow)
    assert_equal_to_the_bit(narrow, {name: t.to(torch.bfloat16) for name, t in expected.items()})


def test_boxes_of_a_folder_of_transformers(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size=4_000)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = model.state_dict()[name]
    rows, columns = torch.empty(5, 16), torch.empty(24, 3, dtype=torch.float64)
    Checkpointer(tmp_path).load({name: box(rows, (24, 16), (7, 0))})
    Checkpointer(tmp_path).load({name: box(columns, (24, 16), (0, 2))})
    assert torch.equal(rows, weight[7:12])
    assert torch.equal(columns, weight[:, 2:5].double())

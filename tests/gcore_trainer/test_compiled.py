"""Compiled layers: results of the layers themselves, and a bounded number of graphs over rows of all lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from trainer_oracles import SIZES, Group, make_samples, save_model
from transformers import Qwen3MoeConfig

from gcore_trainer import (
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    TorchTrainer,
    UnsupportedModelError,
    compile_layers,
)
from gcore_trainer.torch import compiled

# Dynamo looks at the gradient of every tensor, also of those that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
ROWS = [
    [Group(12, [20, 1, 9])],
    [Group(5, [7])],
    [Group(100, [3, 70])],
    [Group(40, [33, 2, 8, 9])],
    [Group(3, [2])],
    [Group(300, [200])],
]
"""Rows of 42 to 500 tokens, with and without shared prompts, short and long."""


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    torch.compiler.reset()
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def make_trainer(path: Path, *, backend: str, **options: Any) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    if backend:
        compile_layers(packed, backend=backend)
    objective = PolicyObjective(PolicyLossConfig())
    return TorchTrainer(packed, optimizer=OptimizerConfig(lr=1e-3), objective=objective)


@pytest.mark.parametrize(
    ("options", "backend", "most"),
    [
        ({}, "aot_eager", 8),
        pytest.param(
            {"gradient_checkpointing": True, "checkpointed_layers": 0.5},
            "eager",
            8,
            marks=pytest.mark.slow,
        ),
        pytest.param({"lora": LoRAConfig(rank=4)}, "eager", 16, marks=pytest.mark.slow),
    ],
    ids=["plain", "checkpointed", "lora"],
)
def test_rows_of_all_lengths_pass_through_the_same_graphs(
    qwen2: Path, options: dict[str, Any], backend: str, most: int
) -> None:
    """Those of the first row: a layer's pieces before and after attention, with and without gradient."""
    # What Inductor makes of the graphs, also of checkpointed layers, is tested below.
    plain, other = (make_trainer(qwen2, backend=own, **options) for own in ("", backend))
    after_first = 0
    for seed, groups in enumerate(ROWS):
        samples = [make_samples(groups, seed=seed)]
        wanted, found = (
            [torch.from_numpy(x) for x in trainer.log_probs(samples)[0]]
            for trainer in (plain, other)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert other.train_step(samples) == pytest.approx(
            plain.train_step(samples), rel=1e-5, abs=1e-6
        )
        after_first = after_first or num_graphs()
        assert 0 < num_graphs() <= most
    assert num_graphs() == after_first
    torch.testing.assert_close(other.state(), plain.state(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor's own imports
def test_inductor_computes_the_same(qwen2: Path) -> None:
    plain, other = (
        make_trainer(qwen2, backend=own, gradient_checkpointing=True) for own in ("", "inductor")
    )
    for seed, groups in enumerate(ROWS):
        samples = [make_samples(groups, seed=seed)]
        assert other.train_step(samples) == pytest.approx(
            plain.train_step(samples), rel=1e-5, abs=1e-6
        )
    assert 0 < num_graphs() <= 8
    torch.testing.assert_close(other.state()["model"], plain.state()["model"], rtol=1e-4, atol=1e-4)


def test_without_a_c_compiler_layers_are_traced(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    assert compiled.compile_backend(torch.device("cuda")) == "inductor"
    monkeypatch.setattr("shutil.which", lambda *_: None)
    assert compiled.compile_backend(torch.device("cpu")) == "aot_eager"
    assert "no C++ compiler" in caplog.text


@pytest.mark.parametrize("options", [{"activation_offload": True}])
def test_offloaded_activations_are_refused(qwen2: Path, options: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"compile is true, and the model \(qwen2\) offloads activations",
    ):
        compile_layers(PackedModel.from_pretrained(qwen2, **options))


def test_experts_are_refused(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    )
    packed = PackedModel.from_pretrained(save_model(config, tmp_path, seed=0))
    with pytest.raises(
        UnsupportedModelError, match="has a mixture of experts; expected a dense model"
    ):
        compile_layers(packed)

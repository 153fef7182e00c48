"""The state of a `MegatronTrainer` has the same tensors in every layout, and continues in any other."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import (
    EP,
    GROUPS,
    GROUPS_OF_STATE,
    LOSS,
    OPTIMIZER,
    PP,
    SP,
    TP,
    Plain,
    assembled,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    train_plainly,
    uneven,
)
from rank_pool import RankPool
from trainer_oracles import make_samples

from gcore_trainer import OptimizerConfig, PolicyObjective, SFTObjective

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"optimizer": OPTIMIZER, "objective": PolicyObjective(LOSS)}
COUNTS = {"step": 2, "nonfinite_steps": 0, "optimizer_step": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@cache
def plain(path: Path) -> Plain:
    return train_plainly(path, 3)


@pytest.mark.parametrize(
    ("name", "layout", "layouts"),
    [
        ("qwen2", {TP: 2, PP: 2}, [{TP: 2, SP: True}, {PP: 2}, {}]),
        ("qwen3_moe", {EP: 2, PP: 2}, [{TP: 2, EP: 4, SP: True}]),
    ],
    ids=str,
)
def test_a_state_saved_by_parts_is_plain_adamws_and_continues_in_other_layouts(
    ranks: RankPool, root: Path, name: str, layout: dict[str, Any], layouts: list[dict[str, Any]]
) -> None:
    path = save_megatron_model(name, root)
    expected = plain(path)

    def steps(layout: dict[str, Any], first: int, last: int) -> Any:
        replicas = data_parallel_size(4, layout)
        return [uneven(expected.samples[i], replicas, seed=i) for i in range(first, last)]

    results = ranks.run("megatron_trains", str(path), layout, OPTIONS, steps(layout, 0, 2), size=4)
    saved = assembled(box for _, _, boxes in results for box in boxes)
    for group in GROUPS_OF_STATE:
        assert largest_difference(saved[group], expected.tensors[1][group]) < 1e-4, group
    for other in layouts:
        arguments = str(path), other, OPTIONS, COUNTS, saved, steps(other, 2, 3)
        metrics, weights = ranks.run("megatron_resumes", *arguments, size=4)[0]
        assert [m["actor/lr"] for m in metrics] == pytest.approx([OPTIMIZER.lr])
        assert largest_difference(weights, expected.tensors[-1]["model"]) < 1e-4, other


def test_a_state_of_other_parts_is_refused(ranks: RankPool, root: Path) -> None:
    path = save_megatron_model("qwen3_tied", root)
    first_stage = "names on one side only: ['model.norm.weight']"
    last_stage = "has parts []; expected this rank's, [((64,), (0,), (64,))]"
    errors = ranks.errors("megatron_loads_less", str(path), {TP: 2, PP: 2}, size=4)
    for error, reason in zip(errors, [first_stage] * 2 + [last_stage] * 2, strict=True):
        assert error.startswith("StateError: exp_avg")
        assert reason in error


def test_a_bfloat16_state_continues_to_the_bit(ranks: RankPool, root: Path) -> None:
    """Its ``model`` is the float32 original, more than what the weights hold."""
    path = save_megatron_model("qwen3_tied", root)
    options = {
        "optimizer": OptimizerConfig(lr=1e-3),
        "objective": SFTObjective(),
        "dtype": torch.bfloat16,
    }
    steps = [uneven(make_samples(GROUPS, seed=i), 2, seed=i) for i in range(3)]
    whole = ranks.run("megatron_trains", str(path), {TP: 2}, options, steps, size=4)
    part = ranks.run("megatron_trains", str(path), {TP: 2}, options, steps[:2], size=4)
    saved = assembled(box for _, _, boxes in part for box in boxes)
    assert any((t.bfloat16().float() != t).any() for t in saved["model"].values())
    resumed = ranks.run(
        "megatron_resumes", str(path), {TP: 2}, options, COUNTS, saved, steps[2:], size=4
    )
    weights = whole[0][1]
    assert resumed[0][0][0] == whole[0][0][2]
    assert all(torch.equal(resumed[0][1][name], w) for name, w in weights.items())

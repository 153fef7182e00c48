"""Ranks of a `MegatronTrainer` give their devices' memory back for a while, and continue to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import (
    EP,
    GROUPS,
    OPTIMIZER,
    TP,
    data_parallel_size,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import make_samples

from gcore_trainer import LoRAConfig, MegatronConfig, SFTObjective

pytestmark = pytest.mark.slow

OVERLAP = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen3_tied", {TP: 2}, {"dtype": torch.bfloat16}),
        ("qwen3_moe", {EP: 2}, {"megatron": OVERLAP}),
        ("qwen3", {TP: 2}, {"lora": LoRAConfig(rank=4)}),
    ],
    ids=["tp, bfloat16", "ep, late gathers", "adapters"],
)
def test_ranks_that_slept_continue_to_the_bit(
    rank_server: RankServer,
    tmp_path: Path,
    name: str,
    layout: dict[str, Any],
    options: dict[str, Any],
) -> None:
    path = save_megatron_model(name, tmp_path)
    replicas = data_parallel_size(2, layout)
    steps = [uneven(make_samples(GROUPS, seed=i), replicas, seed=i) for i in range(2)]
    options = {"optimizer": OPTIMIZER, "objective": SFTObjective(), **options}
    pool = rank_server.shared(2)
    expected = pool.run("megatron_trains", str(path), layout, options, steps, size=2)
    rested = pool.run("megatron_rests", str(path), layout, options, steps, size=2)
    for (metrics, weights, boxes), (own_metrics, own_weights, own_boxes, held, error) in zip(
        expected, rested, strict=True
    ):
        assert own_metrics == metrics
        torch.testing.assert_close(own_weights, weights, rtol=0, atol=0)
        (own, other) = ({str(box[:4]): box[4] for box in parts} for parts in (own_boxes, boxes))
        torch.testing.assert_close(own, other, rtol=0, atol=0)
        assert all(50 * asleep < awake - asleep for awake, asleep in held), held
        assert "expected a call of wake() before" in error

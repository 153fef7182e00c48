"""Router replay in Megatron-Core against the torch backend in one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_oracles import (
    CP,
    EP,
    GROUPS,
    MOE,
    PP,
    SP,
    TP,
    VPP,
    data_parallel_rank,
    data_parallel_size,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import make_samples, routed

from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    TorchTrainer,
)

pytestmark = pytest.mark.slow

SHAPE = (4, MOE["num_experts"], MOE["num_experts_per_tok"])
OPTIONS: dict[str, Any] = {
    "optimizer": OptimizerConfig(lr=1e-3),
    "objective": PolicyObjective(PolicyLossConfig(entropy_coeff=0.01)),
}


@pytest.mark.parametrize(
    ("size", "layout", "recompute"),
    [
        (2, {EP: 2}, True),
        (2, {CP: 2}, False),
        (4, {PP: 2, EP: 2}, True),
        (4, {PP: 2, VPP: 2}, False),
        (4, {TP: 2, EP: 4, SP: True}, True),
    ],
    ids=str,
)
def test_experts_are_recorded_and_imposed_in_every_layout(
    rank_server: RankServer, tmp_path: Path, size: int, layout: dict[str, Any], recompute: bool
) -> None:
    """Also where layers are computed again, with other rows in between."""
    path = save_megatron_model("qwen3_moe_deep", tmp_path)
    alone = TorchTrainer(PackedModel.from_pretrained(path), **OPTIONS)
    samples = make_samples(GROUPS, seed=0)
    recorded = {
        id(s): experts
        for s, (_, experts) in zip(samples, alone.log_probs_and_routing([samples])[0], strict=True)
    }
    steps = [routed(samples, SHAPE, seed=i) for i in range(2)]
    expected = [alone.train_step([s]) for s in steps]

    num_replicas = data_parallel_size(size, layout)
    dealt = [uneven(s, num_replicas, seed=1) for s in [samples, *steps]]
    options = OPTIONS | {"recompute": recompute}
    results = rank_server.shared(size).run(
        "megatron_replays", str(path), layout, options, dealt, size=size
    )
    for rank, (experts, metrics) in enumerate(results):
        own = [s for batch in dealt[0][data_parallel_rank(rank, size, layout)] for s in batch]
        assert len(experts) == len(own)
        for found, sample in zip(experts, own, strict=True):
            # Experts of a token have no order that counts.
            assert np.array_equal(np.sort(found), np.sort(recorded[id(sample)]))
        for a, b in zip(metrics, expected, strict=True):
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
            assert a["actor/entropy"] == pytest.approx(b["actor/entropy"], rel=1e-5)


def test_routing_of_another_model_is_refused(rank_server: RankServer, tmp_path: Path) -> None:
    path = save_megatron_model("qwen3_moe", tmp_path)
    [sample, *_] = routed(make_samples(GROUPS, seed=0), (3, 4, 2), seed=0)
    steps = [[[[replace(sample, old_log_probs=None)]]]]
    for error in rank_server.shared(1).errors(
        "megatron_replays", str(path), {}, OPTIONS, steps, size=1
    ):
        assert "routed_experts has layers and experts (3, 2): the model has (2, 2)" in error

"""Collectives of eight gloo ranks, recorded: what would hang or fail under NCCL, where gloo forgives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collectives import Collective, check_order
from megatron_oracles import CP, EP, PP, SP, TP, data_parallel_size, save_megatron_model
from rank_pool import RankServer
from test_fsdp import BOTH, GROUPS, RING, ULYSSES, dealt, steps_of
from trainer_oracles import make_samples, off_policy

from gcore_trainer import (
    MicroBatch,
    PackedModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
)

SIZE = 8
WORLD = tuple(range(SIZE))
OBJECTIVE = PolicyObjective(PolicyLossConfig(kl_loss_coef=0.05))


def check(stages: list[dict[str, list[Collective]]]) -> dict[tuple[int, ...], int]:
    """Check what all ranks did, and return the number of collectives of each group in training and scores."""
    assert all(own.keys() == stages[0].keys() for own in stages)
    counts: dict[tuple[int, ...], int] = {}
    for stage in stages[0]:
        calls = [own[stage] for own in stages]
        if stage.startswith("asleep"):
            assert calls == [[]] * SIZE
        found = check_order(calls)
        if stage.startswith(("training", "scores")):
            for ranks, count in found.items():
                counts[ranks] = counts.get(ranks, 0) + count
    assert not any(call.is_object for call in stages[0]["exporting"] if call.ranks != WORLD)
    return counts


def groups_of(size: int, *, stride: int = 1) -> set[tuple[int, ...]]:
    """Ranks in groups of a size, whose numbers are as far apart as `stride`."""
    first = [rank for rank in WORLD if rank // stride % size == 0]
    return {tuple(rank + i * stride for i in range(size)) for rank in first}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "groups"),
    [
        (ParallelConfig(), {WORLD}),
        (ParallelConfig(fsdp_size=4), {WORLD} | groups_of(4) | groups_of(2, stride=4)),
        (ULYSSES, {WORLD} | groups_of(2) | groups_of(4, stride=2)),
        (RING, {WORLD} | groups_of(2) | groups_of(4, stride=2)),
        (BOTH, {WORLD} | groups_of(2) | {(0, 2), (1, 3), (4, 6), (5, 7)} | groups_of(2, stride=4)),
    ],
    ids=["fsdp8", "hsdp2x4", "ulysses2", "ring2", "ulysses2-ring2"],
)
def test_torch_ranks_agree_on_their_collectives(
    rank_server: RankServer,
    qwen2: Path,
    tmp_path: Path,
    parallel: ParallelConfig,
    groups: set[tuple[int, ...]],
) -> None:
    steps = [
        dealt(samples, parallel.data_parallel_size(SIZE), seed=i)
        for i, samples in enumerate(steps_of(qwen2, 2))
    ]
    arguments = (str(qwen2), OBJECTIVE, parallel, steps, {}, str(tmp_path / "export"))
    stages = rank_server.shared(SIZE).run("torch_collectives", *arguments, size=SIZE)
    assert check(stages).keys() == groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", {TP: 2, PP: 2, SP: True}),
        ("llama", {CP: 2, PP: 2}),
        ("qwen3_moe", {TP: 2, PP: 2, EP: 2, SP: True}),
        ("qwen3_moe", {EP: 4, PP: 2}),
    ],
    ids=["tp2-pp2", "cp2-pp2", "tp2-pp2-ep2", "ep4-pp2"],
)
def test_megatron_ranks_agree_on_their_collectives(
    rank_server: RankServer, tmp_path: Path, name: str, layout: dict[str, Any]
) -> None:
    path = save_megatron_model(name, tmp_path)
    packed = PackedModel.from_pretrained(path)
    steps: list[list[list[MicroBatch]]] = []
    for i in range(2):
        samples = off_policy(make_samples(GROUPS, seed=i), packed, seed=i)
        steps.append(dealt(samples, data_parallel_size(SIZE, layout), seed=i))
    arguments = (str(path), OBJECTIVE, layout, steps, str(tmp_path / "export"))
    stages = rank_server.shared(SIZE).run("megatron_collectives", *arguments, size=SIZE)
    counts = check(stages)
    assert counts[WORLD] > 0
    assert any(call.name == "send" for call in stages[0]["training 0"])


def test_other_orders_are_found() -> None:
    """Two ranks that swap two collectives, and a message that no rank receives."""
    summed = Collective(
        name="allreduce_",
        ranks=(0, 1),
        shapes=((3,),),
        size_bytes=12,
        devices=frozenset({"cpu"}),
        is_object=False,
        peer=None,
    )
    gathered = replace(summed, name="_allgather_base_", shapes=((6,), (3,)))
    sent = replace(summed, name="send", peer=1)
    received = replace(sent, name="recv_", peer=0)
    assert check_order([[summed, gathered, sent], [summed, received, gathered]]) == {(0, 1): 2}
    with pytest.raises(AssertionError):
        check_order([[summed, gathered], [gathered, summed]])
    with pytest.raises(AssertionError):
        check_order([[summed], [summed, replace(summed, shapes=((4,),))]])
    with pytest.raises(KeyError):
        check_order([[summed, sent], [summed]])

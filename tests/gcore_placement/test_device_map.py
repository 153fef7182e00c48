"""Who is on which GPU: nothing twice, groups within nodes, everything placed or refused by name."""

from itertools import chain
from typing import Any, Literal, get_args

import pytest
from hypothesis import assume, given, strategies as st

from gcore_placement import (
    Cluster,
    Device,
    DeviceMap,
    PlacementError,
    RoleSizes,
    TrainingLayout,
    map_devices,
)

Stage = Literal["generation", "reward", "training"]


def layout(*, tp: int = 1, cp: int = 1, dp: int = 1, pp: int = 1) -> TrainingLayout:
    return TrainingLayout(
        backend="megatron" if tp * pp > 1 else "torch",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        data_parallel_size=dp,
        gradient_checkpointing=True,
        ppo_max_token_len=1024,
    )


def cluster_of(num_devices: int, devices_per_node: int = 8) -> Cluster:
    return Cluster(
        num_devices=num_devices, device=Device.named("H100"), devices_per_node=devices_per_node
    )


def sizes_of(ranks: TrainingLayout, num_engines: int, **changed: Any) -> RoleSizes:
    return RoleSizes(training=ranks, num_engines=num_engines, **changed)


few = st.integers(1, 4)
clusters = st.builds(cluster_of, st.integers(1, 40), st.integers(1, 8))
layouts = st.builds(layout, tp=few, cp=st.integers(1, 3), dp=few, pp=st.integers(1, 3))
role_sizes = st.builds(
    RoleSizes,
    training=layouts,
    num_engines=few,
    devices_per_engine=few,
    num_judges=st.integers(0, 2),
    devices_per_judge=few,
    num_reward_models=st.integers(0, 2),
    ranks_in_turns=st.booleans(),
)
in_turns = st.builds(
    lambda engines, judges, **rest: RoleSizes(
        num_engines=engines, num_judges=min(engines, judges), **rest
    ),
    few,
    few,
    training=layouts,
    ranks_in_turns=st.booleans(),
    judges_in_turns=st.just(value=True),
)
lending = st.builds(
    RoleSizes,
    training=layouts,
    num_engines=few,
    devices_per_engine=few,
    num_judges=st.integers(0, 2),
    lends_ranks=st.just(value=True),
)


@given(cluster=clusters, sizes=st.one_of(role_sizes, in_turns, lending))
def test_everything_is_placed_once_and_within_nodes_or_refused(
    cluster: Cluster, sizes: RoleSizes
) -> None:
    try:
        found = map_devices(cluster, sizes)
    except PlacementError as error:
        field = str(error).partition(" is ")[0].partition(" x ")[0]
        assert hasattr(sizes, field) or hasattr(sizes.training, field)
        return
    check(found, cluster)


def awake_roles(sizes: RoleSizes, stage: Stage) -> list[str]:
    """The roles that are awake at a stage."""
    roles: list[str] = ["reward model"]
    if stage == "training" or not (sizes.ranks_in_turns or sizes.lends_ranks):
        roles.append("training rank")
    elif sizes.lends_ranks:
        roles.append("lent engine")
    if stage != "training" or not sizes.ranks_in_turns:
        if stage != "reward" or not sizes.judges_in_turns:
            roles.append("policy engine")
        if stage == "reward" or not sizes.judges_in_turns:
            roles.append("judge")
    return roles


def check(found: DeviceMap, cluster: Cluster) -> None:
    sizes, placed = found.sizes, found.slots_by_role()
    counts = {
        "policy engine": sizes.num_engines,
        "judge": sizes.num_judges,
        "reward model": sizes.num_reward_models,
    }
    assert {role: len(processes) for role, processes in placed.items()} == {
        **counts,
        "training rank": sizes.training.num_ranks,
        "lent engine": sizes.num_lent,
    }
    assert not {slot for slots in found.lent for slot in slots} - {*found.ranks}
    for stage in get_args(Stage):
        awake = awake_roles(sizes, stage)
        busy = [slot for role in awake for slot in chain.from_iterable(placed[role])]
        assert len(set(busy)) == len(busy)
        assert all(
            slot.node * cluster.devices_per_node + slot.gpu < cluster.num_devices for slot in busy
        )
    widths: dict[str, int] = {
        "policy engine": sizes.devices_per_engine,
        "judge": sizes.devices_per_judge,
    }
    widths["lent engine"] = sizes.devices_per_engine
    for role, width in widths.items():
        assert all(
            len(slots) == width and len({slot.node for slot in slots}) == 1
            for slots in placed[role]
        )
    # Ranks of one TP and CP group are neighbours on one node.
    groups: dict[tuple[int, int], set[int]] = {}
    for rank, slot in enumerate(found.ranks):
        place = found.rank_place(rank)
        groups.setdefault((place["DP"], place["PP"]), set()).add(slot.node)
    assert all(len(nodes) == 1 for nodes in groups.values())
    shared = (
        {slot for slots in (*found.engines, *found.judges) for slot in slots}
        if sizes.ranks_in_turns
        else set()
    )
    own = [slot for slot in found.ranks if slot not in shared]
    together = [slot for slot in found.ranks if slot in shared]
    assert found.ranks == [*sorted(together), *sorted(own)]
    if sizes.ranks_in_turns:
        assert len(together) == min(len(shared), sizes.training.num_ranks)


@given(cluster=clusters, sizes=role_sizes)
@pytest.mark.slow
def test_single_devices_are_refused_only_where_they_are_too_few(
    cluster: Cluster, sizes: RoleSizes
) -> None:
    assume(sizes.training.tensor_model_parallel_size * sizes.training.context_parallel_size == 1)
    assume(sizes.devices_per_engine == sizes.devices_per_judge == 1)
    engines = sizes.num_engines + sizes.num_judges
    ranks = sizes.training.num_ranks
    needed = sizes.num_reward_models + (
        max(engines, ranks) if sizes.ranks_in_turns else engines + ranks
    )
    try:
        map_devices(cluster, sizes)
    except PlacementError:
        assert needed > cluster.num_devices
    else:
        assert needed <= cluster.num_devices


def test_half_and_half_of_a_node() -> None:
    found = map_devices(cluster_of(8), sizes_of(layout(tp=2, dp=2), 2, devices_per_engine=2))
    assert [slot.gpu for slot in found.ranks] == [0, 1, 2, 3]
    assert [[slot.gpu for slot in slots] for slots in found.engines] == [[4, 5], [6, 7]]


def test_pipeline_stages_and_replicas_go_across_nodes() -> None:
    found = map_devices(cluster_of(16), sizes_of(layout(tp=4, dp=1, pp=2), 2, devices_per_engine=4))
    assert [slot.node for slot in found.ranks] == [0] * 8
    found = map_devices(cluster_of(32), sizes_of(layout(tp=8, pp=2), 2, devices_per_engine=8))
    assert [(slot.node, found.rank_place(rank)["PP"]) for rank, slot in enumerate(found.ranks)] == [
        *[(0, 0)] * 8,
        *[(1, 1)] * 8,
    ]
    assert found.on(**vars(found.ranks[9])) == {"training rank": 9}


def test_all_devices_train_and_the_judge_has_some_of_them() -> None:
    found = map_devices(
        cluster_of(8, 4),
        sizes_of(
            layout(dp=8),
            3,
            devices_per_engine=2,
            num_judges=1,
            devices_per_judge=2,
            ranks_in_turns=True,
        ),
    )
    assert len(set(found.ranks)) == 8
    assert found.on(**vars(found.judges[0][0])) == {"judge": 0, "training rank": 6}


def test_ranks_lend_their_devices_to_engines_of_two() -> None:
    found = map_devices(
        cluster_of(8), sizes_of(layout(dp=5), 1, devices_per_engine=2, lends_ranks=True)
    )
    assert [[slot.gpu for slot in slots] for slots in found.lent] == [[0, 1], [2, 3]]
    assert found.on(**vars(found.ranks[3])) == {"training rank": 3, "lent engine": 1}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            sizes_of(layout(dp=6), 1, devices_per_engine=4, lends_ranks=True),
            "",
        ),
        (
            sizes_of(layout(dp=12), 1, devices_per_engine=3, lends_ranks=True),
            "devices_per_engine is 3; expected a divisor of the ranks of each node with lends_ranks",
        ),
        (
            sizes_of(layout(tp=16), 1),
            "tensor_model_parallel_size is 16; expected at most 8, the devices of a node",
        ),
        (
            sizes_of(layout(tp=4, cp=4), 1),
            "tensor_model_parallel_size x context_parallel_size is 16; expected at most 8, the devices of a node",
        ),
        (
            sizes_of(layout(), 1, devices_per_engine=16),
            "devices_per_engine is 16; expected at most 8",
        ),
        (
            sizes_of(layout(dp=8), 3, devices_per_engine=4),
            "num_engines is 3; expected at most 2, each of 4 of what is free of 16 devices in nodes of 8",
        ),
        (sizes_of(layout(dp=17), 1), "data_parallel_size is 17; expected at most 16"),
        (
            sizes_of(layout(cp=4, dp=1), 2, devices_per_engine=6, ranks_in_turns=True),
            "",
        ),
        (
            sizes_of(layout(cp=4, dp=3), 2, devices_per_engine=6, ranks_in_turns=True),
            "tensor_model_parallel_size x context_parallel_size is 4; expected a number that divides the devices of",
        ),
    ],
)
def test_what_does_not_fit_is_named(sizes: RoleSizes, expected: str) -> None:
    if not expected:
        map_devices(cluster_of(16), sizes)
        return
    with pytest.raises(PlacementError) as refused:
        map_devices(cluster_of(16), sizes)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"num_judges": -1}, "num_judges is -1; expected an integer of at least 0"),
        (
            {"num_judges": 2, "judges_in_turns": True},
            "num_judges is 2; expected at most num_engines",
        ),
        (
            {"num_judges": 1, "devices_per_judge": 2, "judges_in_turns": True},
            "devices_per_judge is 2; expected devices_per_engine",
        ),
        (
            {"lends_ranks": True, "ranks_in_turns": True},
            "lends_ranks is True; expected false with ranks_in_turns",
        ),
    ],
)
def test_contradictions_are_refused(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlacementError, match=expected):
        sizes_of(layout(), 1, **changed)

"""The GPUs of training ranks and of engines in processes of their own, on machines with one or several."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gcore_controller import Sizes
from gcore_controller.runtimes.ray import devices as on_ray
from gcore_llm import RolloutConfig, TrainConfig, sampling
from gcore_llm.learning.device_plan import engine_gpus, training_gpus
from gcore_placement import Cluster, Device, PlacementError, RoleSizes, TrainingLayout, map_devices


@pytest.mark.parametrize(
    ("count", "num_engines", "training", "options", "expected"),
    [
        (1, 1, {0}, {}, [0]),
        (2, 1, {0}, {}, [1]),
        (2, 2, {0}, {}, [1, 0]),
        (2, 1, {0, 1}, {}, [0]),
        (2, 1, {1}, {}, [0]),
        (4, 2, {0, 1}, {}, [2, 3]),
        (4, 3, {0, 1}, {}, [2, 3, 0]),
        (4, 1, {0, 1}, {"first": 1}, [3]),
        (2, 1, {0}, {"takes_turns": True}, [0]),
        (4, 4, {0, 1}, {"takes_turns": True}, [0, 1, 2, 3]),
        (2, 1, {1}, {"takes_turns": True}, [1]),
        (2, 0, {0}, {}, []),
    ],
)
def test_engines_take_the_gpus_without_a_rank_first(
    count: int, num_engines: int, training: set[int], options: dict[str, Any], expected: list[int]
) -> None:
    assert engine_gpus(count, num_engines, training, **options) == expected


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        ("cuda", {}, {0}),
        ("cuda:1", {}, {1}),
        ("cuda", {"num_processes": 2}, {0, 1}),
        ("cuda", {"num_processes": 3}, {0, 1}),
        ("cuda:1", {"backend": "megatron"}, {0}),
    ],
)
def test_gpus_of_the_models_in_training(
    device: str, changes: dict[str, Any], expected: set[int]
) -> None:
    config = TrainConfig(device=device)
    assert training_gpus(replace(config, trainer=replace(config.trainer, **changes)), 2) == expected


def test_processes_see_the_gpus_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names in CUDA_VISIBLE_DEVICES of this process; the judge's come after the policy's."""
    config = TrainConfig(device="cuda", rollout=RolloutConfig(num_processes=1))
    judge = replace(config.reward_model.judge, num_processes=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    places = [sampling._gpus(own, config) for own in (config.rollout, judge)]  # pyright: ignore[reportPrivateUsage]
    assert places == [["6"], ["7"]]
    assert sampling._gpus(config.rollout, replace(config, device="cpu")) == []  # pyright: ignore[reportPrivateUsage]
    config = replace(config, trainer=replace(config.trainer, num_processes=2))
    # The last two are on the devices of ranks, which are lent.
    assert sampling._gpus(config.rollout, config, 2) == ["7", "4", "6"]  # pyright: ignore[reportPrivateUsage]


few_ranks = st.integers(1, 40)


def cluster_of(num_devices: int, devices_per_node: int) -> Cluster:
    return Cluster(
        num_devices=num_devices, device=Device.named("H100"), devices_per_node=devices_per_node
    )


def layout_of(num_ranks: int, context_parallel_size: int = 1) -> TrainingLayout:
    return TrainingLayout(
        backend="torch",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=context_parallel_size,
        data_parallel_size=num_ranks // context_parallel_size,
        gradient_checkpointing=True,
        ppo_max_token_len=1024,
    )


@settings(max_examples=200)
@given(
    cluster=st.builds(cluster_of, st.integers(1, 32), st.integers(1, 8)),
    engines=st.integers(1, 8),
    judges=st.integers(0, 8),
    size=st.integers(1, 4),
    ranks=st.integers(1, 40),
    in_turns=st.booleans(),
)
def test_ray_has_ranks_where_the_planned_map_has_them(
    cluster: Cluster, engines: int, judges: int, size: int, ranks: int, *, in_turns: bool
) -> None:
    """Of engines where the map has them, Ray's rule gives the ranks and the shared devices of the map."""
    judges = min(judges, engines) if in_turns else judges
    sizes = RoleSizes(
        training=layout_of(ranks),
        num_engines=engines,
        devices_per_engine=size,
        num_judges=judges,
        devices_per_judge=size,
        judges_in_turns=in_turns,
        ranks_in_turns=True,
    )
    try:
        planned = map_devices(cluster, sizes)
    except PlacementError:
        return
    own_judges = [] if in_turns else planned.judges[::-1]
    blocks = [
        on_ray.ReservedDevice(f"{b[0].node:02}", [str(s.gpu) for s in b])
        for b in (*planned.engines, *own_judges)
    ]
    rank_devices, names = on_ray.share_devices(
        Sizes(
            controllers=1,
            engines=engines,
            judges={"judge": judges},
            ranks=ranks,
            in_turns=in_turns,
            devices_per_engine=size,
            ranks_in_turns=True,
        ),
        blocks,
    )
    found = [(int(device.node), *map(int, device.gpus)) for device in rank_devices]
    assert found == [(slot.node, slot.gpu) for slot in planned.ranks[: len(found)]]
    for rank in range(len(found)):
        on_device = planned.on(**vars(planned.ranks[rank]))
        live_roles = {"policy engine": "engine", "judge": "judge"}
        rows = {
            names[f"{live_roles[role]} {number}"]
            for role, number in on_device.items()
            if role in live_roles
        }
        assert rows == {names[f"trainer {rank}"]}


@given(
    cluster=st.builds(cluster_of, st.integers(1, 32), st.integers(1, 8)),
    size=st.integers(1, 4),
    ranks=few_ranks,
)
def test_ray_has_ranks_that_lend_their_devices_where_the_planned_map_has_them(
    cluster: Cluster, size: int, ranks: int
) -> None:
    sizes = RoleSizes(
        training=layout_of(ranks), num_engines=1, devices_per_engine=size, lends_ranks=True
    )
    try:
        planned = map_devices(cluster, sizes)
    except PlacementError:
        return
    blocks = [
        on_ray.ReservedDevice(f"{b[0].node:02}", [str(s.gpu) for s in b]) for b in planned.lent
    ]
    counts = Sizes(controllers=1, engines=1, ranks=ranks, devices_per_engine=size, lends_ranks=True)
    rank_devices, names = on_ray.share_devices(counts, [on_ray.ReservedDevice("own"), *blocks])
    found = [(int(device.node), *map(int, device.gpus)) for device in rank_devices]
    assert found == [(slot.node, slot.gpu) for slot in planned.ranks[: len(found)]]
    assert len(found) == counts.ranks - counts.num_own_ranks == sizes.num_lent * size
    for rank, slot in enumerate(planned.ranks[: len(found)]):
        assert (
            names[f"trainer {rank}"]
            == names[f"lent {planned.on(slot.node, slot.gpu)['lent engine']}"]
        )


@given(
    count=st.integers(1, 8),
    ranks=st.integers(1, 8),
    engines=st.integers(1, 8),
    judges=st.integers(0, 4),
    takes_turns=st.booleans(),
)
def test_this_machine_has_them_where_the_planned_map_has_them(
    count: int, ranks: int, engines: int, judges: int, *, takes_turns: bool
) -> None:
    sizes = RoleSizes(
        training=layout_of(ranks),
        num_engines=engines,
        num_judges=judges,
        ranks_in_turns=takes_turns,
    )
    try:
        planned = map_devices(cluster_of(count, count), sizes)
    except PlacementError:
        return
    config = TrainConfig(device="cuda")
    training = training_gpus(
        replace(config, trainer=replace(config.trainer, num_processes=ranks)), count
    )
    assert sorted(training) == [slot.gpu for slot in planned.ranks]
    places = [
        engine_gpus(count, number, training, takes_turns=takes_turns)
        for number in (engines, engines + judges)
    ]
    assert places == [
        [slot.gpu for slots in planned.engines for slot in slots],
        [slot.gpu for slots in (*planned.engines, *planned.judges) for slot in slots],
    ]

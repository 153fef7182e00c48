"""Who is where on a cluster whose engines and training ranks share devices."""

import time
from dataclasses import replace

from gcore_controller import DeviceTimers, Sizes
from gcore_controller.runtimes.ray.devices import ReservedDevice, share_devices

GPUS = [
    ReservedDevice("b", ["0"]),
    ReservedDevice("a", ["10"]),
    ReservedDevice("a", ["2"]),
    ReservedDevice("b", ["1"]),
]


def test_ranks_follow_nodes_and_gpus() -> None:
    """Engines are spread over the nodes; ranks that are next to each other are on one node."""
    sizes = Sizes(controllers=1, engines=3, judges={"judge": 1}, ranks=3, ranks_in_turns=True)
    rank_devices, names = share_devices(sizes, GPUS)
    assert rank_devices == [GPUS[2], GPUS[1], GPUS[0]]
    engines = {f"engine {i}": f"device {i}" for i in range(3)}
    ranks = {"trainer 0": "device 2", "trainer 1": "device 1", "trainer 2": "device 0"}
    assert names == {**engines, "judge 0": "device 3", **ranks}


def test_a_device_keeps_its_place_when_its_engine_moves() -> None:
    """The last engine of the policy becomes the last of the judge, and the ranks stay where they are."""
    ranks_before, before = share_devices(
        Sizes(controllers=1, engines=3, judges={"judge": 1}, ranks=4, ranks_in_turns=True), GPUS
    )
    ranks_after, after = share_devices(
        Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=4, ranks_in_turns=True), GPUS
    )
    assert ranks_after == ranks_before
    moved = before["engine 2"]
    assert after["judge 1"] == moved
    assert {**before, "judge 1": moved} == {**after, "engine 2": moved}


def test_judges_on_the_devices_of_engines() -> None:
    both = Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=3, in_turns=True)
    assert share_devices(both, []) == ([], {"judge 0": "engine 0", "judge 1": "engine 1"})
    ranks, names = share_devices(replace(both, ranks_in_turns=True), GPUS[:2])
    assert (names["judge 1"], names["trainer 0"]) == ("device 1", "device 1")
    assert len(ranks) == 2, "the third has a device of its own"
    assert "trainer 2" not in names


def test_engines_on_the_devices_of_ranks() -> None:
    """Two ranks for each lent engine of two devices, and a fifth with a device of its own."""
    sizes = Sizes(
        controllers=1,
        engines=1,
        judges={"judge": 1},
        ranks=5,
        devices_per_engine=2,
        lends_ranks=True,
    )
    assert (sizes.num_lent, sizes.num_own_ranks, sizes.num_reserved) == (2, 1, 10)
    assert str(sizes) == "1 controller, 1 engine, 2 lent engines, 1 judge and 5 training ranks"
    own = [ReservedDevice("a", ["0", "1"]), ReservedDevice("a", ["2", "3"])]
    rank_devices, names = share_devices(
        sizes, [*own, ReservedDevice("b", ["0", "1"]), ReservedDevice("a", ["4", "5"])]
    )
    assert [(device.node, *device.gpus) for device in rank_devices] == [
        ("a", "4"),
        ("a", "5"),
        ("b", "0"),
        ("b", "1"),
    ]
    ranks = {f"trainer {rank}": f"device {1 - rank // 2}" for rank in range(4)}
    assert names == {"lent 0": "device 0", "lent 1": "device 1", **ranks}


def test_roles_on_one_device_are_timed_together() -> None:
    timers = DeviceTimers(shared={"engine 0": "device 0", "trainer 0": "device 0"})
    for name, stage in (("engine 0", "gen"), ("trainer 0", "train"), ("trainer 1", "train")):
        with timers.stage(stage, name):
            time.sleep(0.001)
    with timers.stage("swap", "engine 0", "trainer 0"):
        time.sleep(0.001)
    found = {name: [span.stage for span in spans] for name, spans in timers.drain().spans.items()}
    assert found == {"device 0": ["gen", "train", "swap"], "trainer 1": ["train"]}

"""Which strategy is chosen, against steps that take what a small model of the two says."""

import itertools

import pytest
from hypothesis import given, strategies as st

from gcore_placement import PartitionSpace, PlacementError, RoleLimits, RoleLoad, StrategyChoice


def space_of(num_devices: int) -> PartitionSpace:
    one = RoleLimits(devices_per_replica=1)
    return PartitionSpace(num_devices=num_devices, roles=(one, one))


def load(work_s: float) -> RoleLoad:
    return RoleLoad(work_device_s=work_s, busy_device_s=work_s, finish_s=work_s, was_waiting=False)


class Cluster:
    """What steps really take: by the law, times a factor for each strategy."""

    def __init__(self, num_devices: int, *, work: tuple[float, float], swap_s: float = 0.0) -> None:
        self.num_devices = num_devices
        self.work = work
        self.swap_s = swap_s
        self.off = {"colocated": 1.0, "dynamic": 1.0}

    def seconds(self, strategy: str) -> float:
        policy, reward = self.work
        if strategy == "colocated":
            return ((policy + reward) / self.num_devices + self.swap_s) * self.off[strategy]
        parts = ((p, self.num_devices - p) for p in range(1, self.num_devices))
        return min(max(policy / p, reward / r) for p, r in parts) * self.off[strategy]

    def run(self, choice: StrategyChoice, num_steps: int) -> list[str]:
        """The strategy of each step."""
        chosen: list[str] = []
        for _ in range(num_steps):
            chosen.append(choice.strategy)
            seconds = self.seconds(choice.strategy)
            choice.observe(
                load(self.work[0]), load(self.work[1]), stage_s=seconds, swap_s=self.swap_s
            )
        return chosen


def num_changes(chosen: list[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(chosen))


def test_few_devices_and_uneven_loads_take_turns() -> None:
    """Of two devices each role has one, though one has nine times as much to do."""
    cluster = Cluster(2, work=(90.0, 10.0), swap_s=5.0)
    assert cluster.run(StrategyChoice(space_of(2)), 5) == ["dynamic"] * 3 + ["colocated"] * 2


@pytest.mark.parametrize(
    ("work", "swap_s", "switch_s"),
    [((90.0, 10.0), 60.0, 0.0), ((90.0, 10.0), 0.0, 1000.0), ((50.0, 50.0), 0.0, 0.0)],
    ids=["swaps cost more", "the change costs more", "an even load has its partition"],
)
def test_it_stays_where_a_change_does_not_pay(
    work: tuple[float, float], swap_s: float, switch_s: float
) -> None:
    choice = StrategyChoice(space_of(2), switch_s=switch_s)
    assert set(Cluster(2, work=work, swap_s=swap_s).run(choice, 30)) == {"dynamic"}


def test_it_goes_back_when_the_load_changes() -> None:
    cluster = Cluster(4, work=(98.0, 2.0), swap_s=1.0)
    choice = StrategyChoice(space_of(4))
    assert cluster.run(choice, 6)[-1] == "colocated"
    cluster.work, cluster.swap_s = (75.0, 25.0), 10.0
    assert cluster.run(choice, 6)[-1] == "dynamic"


@given(
    num_devices=st.integers(2, 12),
    policy=st.floats(1, 1000),
    reward=st.floats(1, 1000),
    swap_s=st.floats(0, 200),
    colocated=st.floats(0.2, 5),
    dynamic=st.floats(0.2, 5),
)
def test_a_law_that_errs_is_tried_at_most_once(
    num_devices: int, policy: float, reward: float, swap_s: float, colocated: float, dynamic: float
) -> None:
    """It ends with a strategy that is within the least gain of the better one, unless the law never let it be tried."""
    cluster = Cluster(num_devices, work=(policy, reward), swap_s=swap_s)
    cluster.off = {"colocated": colocated, "dynamic": dynamic}
    chosen = cluster.run(StrategyChoice(space_of(num_devices)), 40)
    assert num_changes(chosen) <= 2
    if len(set(chosen)) == 2:
        assert cluster.seconds(chosen[-1]) * 0.95 <= min(
            map(cluster.seconds, ("colocated", "dynamic"))
        ) * (1 + 1e-9)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"horizon_steps is .*; expected"):
        StrategyChoice(space_of(2), horizon_steps=0)
    with pytest.raises(PlacementError, match=r"swap_s is .*; expected"):
        StrategyChoice(space_of(2)).observe(load(1.0), load(1.0), stage_s=1.0, swap_s=-1.0)

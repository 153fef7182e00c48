"""The device map of a run: on which node and GPU each engine, judge, reward model and training rank is."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from gcore_placement.cluster import Cluster
from gcore_placement.errors import refusal
from gcore_placement.planning.layouts import TrainingLayout
from gcore_placement.quantities import Checked, Positive

Place = TypeVar("Place")
MappedRole = Literal["policy engine", "judge", "reward model", "training rank", "lent engine"]
"""A role that has devices."""


@dataclass(frozen=True, order=True)
class Slot:
    """One device of a cluster."""

    node: int
    gpu: int


@dataclass(frozen=True, kw_only=True)
class RoleSizes(Checked):
    """The processes of a run that have devices; controllers have none."""

    training: TrainingLayout
    num_engines: Positive
    """Engines of the policy."""
    devices_per_engine: Positive = 1
    """Devices over which the model of each engine is split."""
    num_judges: int = 0
    devices_per_judge: Positive = 1
    num_reward_models: int = 0
    """Reward models that are no engines, such as classifiers, each on a device of its own."""
    judges_in_turns: bool = False
    """Judge i is on the devices of engine i, and one of the two is awake."""
    ranks_in_turns: bool = False
    """Training ranks are on the devices of engines and judges, which sleep while the ranks work; where there are more
    ranks than such devices, the rest have their own."""
    lends_ranks: bool = False
    """Devices of ranks have further engines of the policy, which are awake while the ranks are asleep."""

    @property
    def num_lent(self) -> int:
        """Engines on the devices of ranks that are lent."""
        return self.training.num_ranks // self.devices_per_engine if self.lends_ranks else 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_judges", "num_reward_models"):
            if getattr(self, name) < 0:
                raise refusal(name, getattr(self, name), "an integer of at least 0")
        if self.judges_in_turns and self.num_judges > self.num_engines:
            raise refusal("num_judges", self.num_judges, f"at most num_engines ({self.num_engines}) in turns")
        if self.judges_in_turns and self.num_judges and self.devices_per_judge != self.devices_per_engine:
            accepted = f"devices_per_engine ({self.devices_per_engine}) in turns"
            raise refusal("devices_per_judge", self.devices_per_judge, accepted)
        if self.lends_ranks and self.ranks_in_turns:
            raise refusal("lends_ranks", True, "false with ranks_in_turns")


@dataclass(frozen=True, kw_only=True)
class DeviceMap:
    """The slots of every process, by its number in its role."""

    sizes: RoleSizes
    engines: Sequence[Sequence[Slot]]
    judges: Sequence[Sequence[Slot]]
    reward_models: Sequence[Slot]
    ranks: Sequence[Slot]
    """Sorted by node and GPU, those on the devices of engines and those on their own; see `rank_place`."""

    @property
    def lent(self) -> Sequence[Sequence[Slot]]:
        """The slots of the engines on the devices of ranks, in the order of these."""
        size = self.sizes.devices_per_engine
        return [self.ranks[i * size : (i + 1) * size] for i in range(self.sizes.num_lent)]

    def placed(self) -> Mapping[MappedRole, Sequence[Sequence[Slot]]]:
        """Return the slots of the processes of each role."""
        return {
            "policy engine": self.engines,
            "judge": self.judges,
            "reward model": [[slot] for slot in self.reward_models],
            "training rank": [[slot] for slot in self.ranks],
            "lent engine": self.lent,
        }

    def awake(self, stage: Literal["generation", "reward", "training"]) -> Collection[MappedRole]:
        """Return the roles that are awake at a stage."""
        found: list[MappedRole] = ["reward model"]
        if stage == "training" or not (self.sizes.ranks_in_turns or self.sizes.lends_ranks):
            found.append("training rank")
        elif self.sizes.lends_ranks:
            found.append("lent engine")
        if stage != "training" or not self.sizes.ranks_in_turns:
            if stage != "reward" or not self.sizes.judges_in_turns:
                found.append("policy engine")
            if stage == "reward" or not self.sizes.judges_in_turns:
                found.append("judge")
        return found

    def on(self, slot: Slot) -> Mapping[MappedRole, int]:
        """Return the number of the process of each role that is on a device."""
        return {
            role: number
            for role, processes in self.placed().items()
            for number, slots in enumerate(processes)
            if slot in slots
        }

    def rank_place(self, rank: int) -> Mapping[str, int]:
        """Return the place of a rank in its groups, by TP, CP, DP and PP; neighbours are in one TP group, then one CP.

        It is Megatron's order, and that of the torch backend, which has CP and DP alone.
        """
        layout = self.sizes.training
        found = dict[str, int]()
        rest = rank
        for name, size in (
            ("TP", layout.tensor_model_parallel_size),
            ("CP", layout.context_parallel_size),
            ("DP", layout.data_parallel_size),
            ("PP", layout.pipeline_model_parallel_size),
        ):
            rest, found[name] = divmod(rest, size)
        return found


def map_devices(cluster: Cluster, sizes: RoleSizes) -> DeviceMap:
    """Place all processes of a run on a cluster.

    TP x CP neighbours are on one node, and so is each engine; PP and DP go across. Side by side, ranks have the first
    devices, as many whole TP x CP groups as a node holds, and engines, judges and reward models have others. In turns,
    engines and judges are placed first, and the ranks are on their devices, sorted by node and GPU.

    Raises:
        PlacementError: a process or a group that has no place; it names the field, and what would fit.
    """
    layout = sizes.training
    per_node = cluster.devices_per_node
    together = layout.tensor_model_parallel_size * layout.context_parallel_size
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        _check_node(name, getattr(layout, name), per_node)
    _check_node("tensor_model_parallel_size x context_parallel_size", together, per_node)
    _check_node("devices_per_engine", sizes.devices_per_engine, per_node)
    _check_node("devices_per_judge", sizes.devices_per_judge if sizes.num_judges else 1, per_node)
    free = [Slot(*divmod(i, per_node)) for i in range(cluster.num_devices)]
    ranks: list[Slot] = []
    if not sizes.ranks_in_turns:
        ranks = _groups(free, layout.num_ranks // together, together, "data_parallel_size", cluster)
        free = engine_order(free, ranks, takes_turns=False)[: len(free) - len(ranks)]
    blocks = {"num_engines": (sizes.num_engines, sizes.devices_per_engine)}
    if not sizes.judges_in_turns:
        blocks["num_judges"] = (sizes.num_judges, sizes.devices_per_judge)
    blocks["num_reward_models"] = (sizes.num_reward_models, 1)
    found: dict[str, list[list[Slot]]] = {}
    # The largest first: small ones fit in what these leave of a node.
    for name, (count, size) in sorted(blocks.items(), key=lambda block: -block[1][1]):
        slots = _groups(free, count, size, name, cluster)
        found[name] = [slots[i : i + size] for i in range(0, len(slots), size)]
        free = [slot for slot in free if slot not in set(slots)]
    engines = found["num_engines"]
    judges = engines[: sizes.num_judges] if sizes.judges_in_turns else found["num_judges"]
    if sizes.ranks_in_turns:
        shared = sorted({slot for block in (*engines, *judges) for slot in block})[: layout.num_ranks]
        own = _groups(free, layout.num_ranks - len(shared), 1, "data_parallel_size", cluster)
        ranks = [*shared, *own]
        _check_groups(ranks, together)
    [*reward_models] = (slot for [slot] in found["num_reward_models"])
    placed = DeviceMap(sizes=sizes, engines=engines, judges=judges, reward_models=reward_models, ranks=ranks)
    if any(len({slot.node for slot in slots}) > 1 for slots in placed.lent):
        accepted = "a divisor of the ranks of each node with lends_ranks"
        raise refusal("devices_per_engine", sizes.devices_per_engine, accepted)
    return placed


def engine_order(places: Sequence[Place], training: Collection[Place], *, takes_turns: bool) -> list[Place]:
    """Return the order in which engines take places: those without a training rank first, or in turns those with one.

    Args:
        places: all of them, in their order.
        training: those of training ranks.
    """
    busy, free = ([place for place in places if (place in training) is is_busy] for is_busy in (True, False))
    return [*busy, *free] if takes_turns else [*free, *busy]


def _check_node(field: str, size: int, per_node: int) -> None:
    if size > per_node:
        raise refusal(field, size, f"at most {per_node}, the devices of a node")


def _groups(free: Iterable[Slot], count: int, size: int, field: str, cluster: Cluster) -> list[Slot]:
    """Return the slots of so many groups, each on one node; the first ones that there are."""
    nodes: dict[int, list[Slot]] = {}
    for slot in free:
        nodes.setdefault(slot.node, []).append(slot)
    whole = [slot for own in nodes.values() for slot in own[: len(own) // size * size]]
    if (fits := len(whole) // size) < count:
        left = f"of {cluster.num_devices} devices in nodes of {cluster.devices_per_node}"
        raise refusal(field, count, f"at most {fits}, each of {size} of what is free {left}")
    return whole[: count * size]


def _check_groups(ranks: Sequence[Slot], together: int) -> None:
    """Check that neighbours that are on the devices of engines are on one node."""
    for first in range(0, len(ranks), together):
        if len({slot.node for slot in ranks[first : first + together]}) > 1:
            accepted = "a number that divides the devices of engines and judges on each node"
            raise refusal("tensor_model_parallel_size x context_parallel_size", together, accepted)

"""The device map of a run: on which node and GPU each engine, judge, reward model and training rank is."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from gcore_placement.cluster import Cluster
from gcore_placement.errors import refusal
from gcore_placement.planning.layouts import TrainingLayout
from gcore_placement.quantities import CheckedQuantities, Positive

Place = TypeVar("Place")


@dataclass(frozen=True, order=True)
class Slot:
    """One device of a cluster."""

    node: int
    gpu: int


@dataclass(frozen=True, kw_only=True)
class RoleSizes(CheckedQuantities):
    """The processes of a run that have devices; controllers have none.

    Example:
        >>> layout = TrainingLayout(backend="torch", tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        ...     context_parallel_size=1, data_parallel_size=4, gradient_checkpointing=True, ppo_max_token_len=8192)
        >>> sizes = RoleSizes(training=layout, num_engines=2, devices_per_engine=2, lends_ranks=True)
        >>> sizes.num_lent
        2
    """

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
        if self.judges_in_turns and self.num_judges:
            if self.num_judges > self.num_engines:
                accepted = f"at most num_engines ({self.num_engines}) in turns"
                raise refusal("num_judges", self.num_judges, accepted)
            if self.devices_per_judge != self.devices_per_engine:
                accepted = f"devices_per_engine ({self.devices_per_engine}) in turns"
                raise refusal("devices_per_judge", self.devices_per_judge, accepted)
        if self.lends_ranks and self.ranks_in_turns:
            raise refusal("lends_ranks", True, "false with ranks_in_turns")


@dataclass(frozen=True, kw_only=True)
class DeviceMap:
    """The slots of every process, by its number in its role.

    Example:
        >>> layout = TrainingLayout(backend="torch", tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        ...     context_parallel_size=1, data_parallel_size=4, gradient_checkpointing=True, ppo_max_token_len=8192)
        >>> cluster = Cluster(num_devices=8, device=Device.named("H100"))
        >>> device_map = map_devices(cluster, RoleSizes(training=layout, num_engines=2, devices_per_engine=2))
        >>> device_map.engines[0]
        [Slot(node=0, gpu=4), Slot(node=0, gpu=5)]
        >>> device_map.on(node=0, gpu=7)
        {'policy engine': 1}
        >>> device_map.count_by_roles()
        {('training rank',): 4, ('policy engine',): 4}
    """

    sizes: RoleSizes
    engines: Sequence[Sequence[Slot]]
    judges: Sequence[Sequence[Slot]]
    reward_models: Sequence[Slot]
    ranks: Sequence[Slot]
    """By rank; first ranks on the devices of engines, then ranks on other devices, each sorted; see `rank_place`."""

    @property
    def lent(self) -> Sequence[Sequence[Slot]]:
        """The slots of the engines on the devices of ranks, in the order of these."""
        size = self.sizes.devices_per_engine
        return [self.ranks[i * size : (i + 1) * size] for i in range(self.sizes.num_lent)]

    def slots_by_role(self) -> Mapping[str, Sequence[Sequence[Slot]]]:
        """Return the slots of the processes of each role."""
        return {
            "policy engine": self.engines,
            "judge": self.judges,
            "reward model": [[slot] for slot in self.reward_models],
            "training rank": [[slot] for slot in self.ranks],
            "lent engine": self.lent,
        }

    def count_by_roles(self) -> Mapping[tuple[str, ...], int]:
        """Return the number of devices with the same roles, of those that have any, by these roles."""
        processes = chain.from_iterable(self.slots_by_role().values())
        slots = sorted(set(chain.from_iterable(processes)))
        return dict(Counter(tuple(self.on(slot.node, slot.gpu)) for slot in slots))

    def on(self, node: int, gpu: int) -> Mapping[str, int]:
        """Return the number of the process of each role that is on a device."""
        slot = Slot(node, gpu)
        numbers: dict[str, int] = {}
        for role, processes in self.slots_by_role().items():
            for number, slots in enumerate(processes):
                if slot in slots:
                    numbers[role] = number
        return numbers

    def rank_place(self, rank: int) -> Mapping[str, int]:
        """Return the index of a rank in each of its groups: TP, CP, DP and PP; TP varies fastest.

        The order is Megatron's, and that of the torch backend, which has only CP and DP.
        """
        tp, pp, cp, dp = self.sizes.training.group_sizes
        positions: dict[str, int] = {}
        rest = rank
        for name, size in (("TP", tp), ("CP", cp), ("DP", dp), ("PP", pp)):
            rest, positions[name] = divmod(rest, size)
        return positions


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
    if sizes.num_judges:
        _check_node("devices_per_judge", sizes.devices_per_judge, per_node)
    free = [Slot(*divmod(i, per_node)) for i in range(cluster.num_devices)]
    ranks: list[Slot] = []
    if not sizes.ranks_in_turns:
        ranks = _groups(free, layout.num_ranks // together, together, "data_parallel_size", cluster)
        free = engine_order(free, ranks, takes_turns=False)[: len(free) - len(ranks)]
    blocks = {"num_engines": (sizes.num_engines, sizes.devices_per_engine)}
    if not sizes.judges_in_turns:
        blocks["num_judges"] = (sizes.num_judges, sizes.devices_per_judge)
    blocks["num_reward_models"] = (sizes.num_reward_models, 1)
    placed: dict[str, list[list[Slot]]] = {}
    # The largest first: small ones fit in what these leave of a node.
    for name, (count, size) in sorted(blocks.items(), key=lambda block: -block[1][1]):
        slots = _groups(free, count, size, name, cluster)
        placed[name] = [slots[i : i + size] for i in range(0, len(slots), size)]
        free = [slot for slot in free if slot not in set(slots)]
    engines = placed["num_engines"]
    judges = engines[: sizes.num_judges] if sizes.judges_in_turns else placed["num_judges"]
    if sizes.ranks_in_turns:
        shared = sorted(set(chain(*engines, *judges)))[: layout.num_ranks]
        ranks = shared + _groups(
            free, layout.num_ranks - len(shared), 1, "data_parallel_size", cluster
        )
        for first in range(0, len(ranks), together):
            if not _is_on_one_node(ranks[first : first + together]):
                accepted = "a number that divides the devices of engines and judges on each node"
                raise refusal(
                    "tensor_model_parallel_size x context_parallel_size", together, accepted
                )
    reward_models = list(chain(*placed["num_reward_models"]))
    device_map = DeviceMap(
        sizes=sizes, engines=engines, judges=judges, reward_models=reward_models, ranks=ranks
    )
    if not all(map(_is_on_one_node, device_map.lent)):
        accepted = "a divisor of the ranks of each node with lends_ranks"
        raise refusal("devices_per_engine", sizes.devices_per_engine, accepted)
    return device_map


def engine_order(
    places: Sequence[Place], training: Collection[Place], *, takes_turns: bool
) -> list[Place]:
    """Return the places in the order in which engines take them: free ones first, or in turns those of ranks first.

    Args:
        places: all of them, in their order.
        training: those of training ranks.
    """
    busy = [slot for slot in places if slot in training]
    free = [slot for slot in places if slot not in training]
    return busy + free if takes_turns else free + busy


def _check_node(field: str, size: int, per_node: int) -> None:
    if size > per_node:
        raise refusal(field, size, f"at most {per_node}, the devices of a node")


def _groups(
    free: Iterable[Slot], count: int, size: int, field: str, cluster: Cluster
) -> list[Slot]:
    """Return the slots of the first `count` groups of `size` free devices, each group on one node."""
    nodes: dict[int, list[Slot]] = {}
    for slot in free:
        nodes.setdefault(slot.node, []).append(slot)
    usable: list[Slot] = []
    for slots in nodes.values():
        usable.extend(slots[: len(slots) // size * size])
    fits = len(usable) // size
    if fits < count:
        devices = f"of {cluster.num_devices} devices in nodes of {cluster.devices_per_node}"
        raise refusal(field, count, f"at most {fits}, each of {size} of what is free {devices}")
    return usable[: count * size]


def _is_on_one_node(slots: Iterable[Slot]) -> bool:
    return len({slot.node for slot in slots}) == 1

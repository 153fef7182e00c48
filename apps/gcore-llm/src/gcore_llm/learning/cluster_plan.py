"""The dry run of a cluster: its device map, the memory of every kind of GPU in it, and the predicted step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gcore_llm.config import TrainConfig
from gcore_llm.forecast import planner_job, slowest_judge, training_layout
from gcore_llm.learning.device_plan import (
    check_fits,
    list_sizes,
    plan_memory,
    shape_of,
)
from gcore_placement import (
    STRATEGIES,
    Cluster,
    Device,
    DeviceMap,
    DevicePlan,
    EngineLayout,
    PlacementError,
    Resident,
    RoleSizes,
    StepTime,
    map_devices,
    predict_layout,
)
from gcore_runs import UserError, print_table
from gcore_runs.settings.sections import EngineConfig

_GB = 1e9
GPUS_PER_NODE = 8
_MOST_DOUBLINGS = 4
"""Doublings of a size to try in search of one that fits."""
_RESIDENTS: Mapping[str, Resident] = {
    "training rank": "trainer",
    "policy engine": "policy engine",
    "judge": "judge",
    "lent engine": "policy engine",
}
_SETTINGS = {
    "num_engines": "rollout.num_processes",
    "devices_per_engine": "rollout.tensor_parallel_size",
    "num_judges": "reward_model.judge.num_processes",
    "devices_per_judge": "reward_model.judge.tensor_parallel_size",
    "num_reward_models": "controllers",
    "tensor_model_parallel_size": "trainer.parallel.tensor_model_parallel_size",
    "context_parallel_size": "trainer.parallel.context_parallel_size",
    "data_parallel_size": "data-parallel size (trainer.num_processes and trainer.parallel)",
}
"""For fields of the map, the settings that they are from."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A run on a cluster: the map of its processes, the memory of its GPUs, and the predicted step."""

    device_map: DeviceMap
    cluster: Cluster
    memory: Mapping[tuple[str, ...], DevicePlan]
    """The memory of a GPU, by the roles that are on it."""
    step: StepTime
    """Every prompt and response at its longest."""

    @property
    def tightest(self) -> DevicePlan:
        """The plan of the GPU whose memory is fullest."""
        return max(
            self.memory.values(), key=lambda plan: max(plan.peaks.values()) / plan.usable_bytes
        )


def plan_cluster(
    config: TrainConfig,
    model: Path,
    device: Device,
    *,
    nodes: int = 0,
    gpus_per_node: int = GPUS_PER_NODE,
) -> ClusterPlan:
    """Plan a run on a cluster of these devices, of as many nodes as it needs if ``nodes`` is 0.

    Raises:
        UserError: a process has no place.
    """
    config = replace(config, device="cuda")
    sizes = _role_sizes(config, model)
    num_nodes = nodes if config.runtime == "ray" else 1
    cluster, device_map = _map_devices(sizes, device, num_nodes, gpus_per_node)
    memory: dict[tuple[str, ...], DevicePlan] = {}
    for roles in device_map.count_by_roles():
        residents: list[Resident] = [_RESIDENTS[role] for role in roles if role in _RESIDENTS]
        if residents:
            memory[roles] = plan_memory(config, model, device, residents)
    step = _predict_step(config, model, cluster, sizes, memory)
    return ClusterPlan(device_map=device_map, cluster=cluster, memory=memory, step=step)


def _role_sizes(config: TrainConfig, model: Path) -> RoleSizes:
    counts = config.sizes
    _, judge = config.judge
    num_reward_models = 0
    if config.reward_model.kind == "classifier":
        num_reward_models = config.controllers
    if config.runtime != "ray":
        engines: dict[str, EngineConfig] = {"rollout": config.rollout}
        if judge is not None:
            engines["reward_model.judge"] = judge
        for section, settings in engines.items():
            if not settings.num_processes:
                raise UserError(
                    f"{section}.num_processes is 0; expected 1 or more with dry_run_gpus_per_node and runtime "
                    f"{config.runtime!r}: engines of the main process are on the GPU of its rank"
                )
    return RoleSizes(
        training=training_layout(config, shape_of(model)),
        num_engines=counts.engines,
        devices_per_engine=config.rollout.tensor_parallel_size,
        num_judges=counts.num_judges,
        devices_per_judge=judge.tensor_parallel_size if judge else 1,
        num_reward_models=num_reward_models,
        judges_in_turns=counts.in_turns and counts.num_judges > 0,
        ranks_in_turns=config.takes_turns,
        lends_ranks=config.lends_ranks,
    )


def _map_devices(
    sizes: RoleSizes, device: Device, num_nodes: int, per_node: int
) -> tuple[Cluster, DeviceMap]:
    """Return the cluster of so many nodes, or with 0 the smallest one that has enough devices, and the map."""
    engines = sizes.num_engines * sizes.devices_per_engine
    if not sizes.judges_in_turns:
        engines += sizes.num_judges * sizes.devices_per_judge
    ranks = sizes.training.num_ranks
    needed = max(engines, ranks) if sizes.ranks_in_turns else engines + ranks
    fewest = math.ceil((sizes.num_reward_models + needed) / per_node)
    # Groups that do not divide a node leave some of it free.
    numbers = [num_nodes] if num_nodes else range(fewest, 2 * fewest + 1)
    errors: list[PlacementError] = []
    for nodes in numbers:
        cluster = Cluster(num_devices=nodes * per_node, device=device, devices_per_node=per_node)
        try:
            return cluster, map_devices(cluster, sizes)
        except PlacementError as error:
            errors.append(error)
    message = str(errors[0])
    for field, setting in _SETTINGS.items():
        message = message.replace(field, setting, 1)
    raise UserError(message)


def _predict_step(
    config: TrainConfig,
    model: Path,
    cluster: Cluster,
    sizes: RoleSizes,
    memory: Mapping[tuple[str, ...], DevicePlan],
) -> StepTime:
    job = planner_job(config, model, shape_of)

    def engines(count: int, size: int, tokens: Sequence[int], longest: float) -> EngineLayout:
        fewest = min(filter(None, tokens), default=0)
        max_num_seqs = max(1, min(config.rollout.planned_num_seqs, int(fewest / longest)))
        return EngineLayout(num_engines=count, devices_per_engine=size, max_num_seqs=max_num_seqs)

    plans = memory.values()
    judge = None
    slowest = slowest_judge(config, shape_of)
    if slowest is not None:
        _, read, written = job.engine_role("reward")
        judge_tokens = [plan.judge_kv_tokens for plan in plans]
        count = config.sizes.judges[slowest.role]
        judge = engines(
            count, sizes.devices_per_judge, judge_tokens, read.longest + written.longest
        )
    policy_tokens = [plan.kv_tokens for plan in plans]
    num_engines = sizes.num_engines + sizes.num_lent
    policy = engines(num_engines, sizes.devices_per_engine, policy_tokens, job.longest_sequence)
    is_time_shared = job.judge is None or STRATEGIES[config.strategy].is_time_shared
    return predict_layout(
        cluster,
        job,
        sizes.training,
        policy,
        judge,
        strategy="colocated" if is_time_shared else "split",
        takes_turns=sizes.ranks_in_turns or sizes.lends_ranks,
    )


def dry_run_cluster(
    name: str,
    config: TrainConfig,
    model: Path,
    device: Device,
    *,
    nodes: int,
    gpus_per_node: int,
) -> None:
    """Print the map, the memory and the predicted step of a run on a cluster.

    ``name`` is the model's for users, ``model`` a folder with its shape.

    Raises:
        UserError: a process has no place; or the run does not fit, after the tables are printed.
    """
    plan = plan_cluster(config, model, device, nodes=nodes, gpus_per_node=gpus_per_node)
    _print_map(plan, device)
    _print_memory(plan, device)
    if device.flops_per_s > 1:
        _print_step(plan)
    if plan.tightest.fits:
        print("fits", flush=True)
    else:
        print("does not fit", flush=True)
        larger = list(_find_larger(config, model, device, gpus_per_node))
        check_fits(name, model, plan.tightest, device, larger)


def _find_larger(
    config: TrainConfig, model: Path, device: Device, gpus_per_node: int
) -> Iterator[str]:
    """Yield settings of more devices under which a run fits, the smallest of each kind."""
    rollout = config.rollout
    trainer = config.trainer
    factors = [2**doublings for doublings in range(1, _MOST_DOUBLINGS + 1)]
    if "tensor_parallel_size" in rollout.kind.own_options and config.judge[1] is None:
        for factor in factors:
            num_devices = rollout.tensor_parallel_size * factor
            if num_devices > gpus_per_node:
                break
            larger = replace(config, rollout=replace(rollout, tensor_parallel_size=num_devices))
            peak = _peak_bytes(larger, model, device, gpus_per_node)
            if peak is not None:
                yield f"rollout.tensor_parallel_size {num_devices} ({peak / _GB:.1f} GB)"
                break
    for factor in factors:
        num_ranks = trainer.num_processes * factor
        larger = replace(config, trainer=replace(trainer, num_processes=num_ranks))
        peak = _peak_bytes(larger, model, device, gpus_per_node)
        if peak is not None:
            yield f"trainer.num_processes {num_ranks} ({peak / _GB:.1f} GB)"
            break


def _peak_bytes(
    config: TrainConfig, model: Path, device: Device, gpus_per_node: int
) -> float | None:
    """Return the bytes of the fullest GPU at its peak; None where a run does not fit."""
    try:
        tightest = plan_cluster(config, model, device, gpus_per_node=gpus_per_node).tightest
    except UserError:
        return None
    if not tightest.fits:
        return None
    return max(tightest.peaks.values())


def _print_map(plan: ClusterPlan, device: Device) -> None:
    device_map = plan.device_map
    cluster = plan.cluster
    sizes = device_map.sizes
    names: list[str] = [role for role, processes in device_map.slots_by_role().items() if processes]
    sections: list[list[list[str]]] = []
    for node in range(cluster.num_nodes(cluster.num_devices)):
        rows: list[list[str]] = []
        for gpu in range(cluster.devices_per_node):
            on = device_map.on(node, gpu)
            cells = [str(on.get(role, "")) for role in names]
            rows.append(
                [str(node), str(gpu), *cells, _describe_rank(device_map, on.get("training rank"))]
            )
        sections.append(rows)
    columns = ["node", "GPU", *names, "place of the rank"]
    noun = "nodes" if len(sections) > 1 else "node"
    print(f"{len(sections)} {noun} of {cluster.devices_per_node} {device.name}: {sizes.training}")
    print_table("", columns, sections)
    if sizes.ranks_in_turns:
        print(
            "ranks and engines take turns on their GPUs (rollout.colocated): while one works, the other is asleep"
        )
    elif sizes.lends_ranks:
        print(
            "ranks lend their GPUs to engines (placement.lend_ranks): while one works, the other is asleep"
        )
    else:
        print("ranks and engines have GPUs of their own (rollout.colocated false)")
    if sizes.judges_in_turns:
        print("policy engines and judges take turns, too (placement.strategy)")
    print("controllers have no GPU")


def _describe_rank(device_map: DeviceMap, rank: int | None) -> str:
    if rank is None:
        return ""
    indices = device_map.rank_place(rank)
    tp, pp, cp, dp = device_map.sizes.training.group_sizes
    counts = {"TP": tp, "CP": cp, "DP": dp, "PP": pp}
    return " ".join(f"{name} {indices[name]}" for name, count in counts.items() if count > 1)


def _print_memory(plan: ClusterPlan, device: Device) -> None:
    counts = plan.device_map.count_by_roles()
    for roles, memory in plan.memory.items():
        sections = [
            [[role, f"{sum(items.values()) / _GB:.1f}", list_sizes(items)]]
            for role, items in memory.roles.items()
        ]
        print(f"{counts[roles]} GPUs with {' + '.join(roles)}, in GB")
        print_table("", ["role", "GB", "of which"], sections)
        peaks = ", ".join(f"{stage} {size / _GB:.1f}" for stage, size in memory.peaks.items())
        usable = f"{memory.usable_bytes / _GB:.1f} of {device.memory_bytes / _GB:.1f} usable"
        print(f"peak of each stage: {peaks}; {usable}")
        if memory.kv_tokens:
            number = memory.kv_tokens // memory.longest_sequence
            print(
                f"keys and values of {memory.kv_tokens:,} tokens: {number:,} of the longest sequences"
            )
        print(f"in the host's memory, for each such GPU: {memory.host_bytes / _GB:.1f}")


def _print_step(plan: ClusterPlan) -> None:
    seconds = cast("Mapping[str, float]", vars(plan.step))
    stages: list[list[str]] = []
    for name, value in seconds.items():
        stage = name.removesuffix("_s").replace("_", " ")
        stages.append([stage, f"{value:.1f}"])
    print("predicted seconds, with every prompt and response at its longest")
    print_table("", ["stage", "s"], [stages, [["step", f"{plan.step.total_s:.1f}"]]])

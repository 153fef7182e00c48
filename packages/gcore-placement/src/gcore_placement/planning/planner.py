"""The planner: predict each layout that fits, choose the fastest, and keep the costs of the others."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from itertools import product
from math import inf
from typing import Any

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import JobCosts, SwapCosts, times
from gcore_placement.errors import PlacementError, check_known, refusal
from gcore_placement.forecast import (
    STAGES,
    Correction,
    EngineStage,
    Job,
    StepTime,
    added_by_reward,
    num_swaps,
    predict_step,
)
from gcore_placement.planning.layouts import Setting, TrainingLayout, parts_at
from gcore_placement.planning.options import EngineOptions, EnginePlan, Engines, TrainingChoice, TrainingOptions
from gcore_placement.quantities import check_positive, gigabytes
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A placement that fits into memory."""

    step_s: float
    num_devices: int
    strategy: Strategy
    training: TrainingChoice
    policy: Engines
    policy_replicas: int
    judge: Engines | None
    judge_replicas: int


class Candidates:
    """The placements among which `plan` chooses."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.policy = EngineOptions(setting, "generation")
        self.judge = EngineOptions(setting, "reward") if setting.job.judge is not None else None
        self.training = cache(partial(TrainingOptions, setting))

    @cached_property
    def work_s(self) -> float:
        """A lower bound of a step's device-seconds: the matrix products of its tokens at the rate that is reached."""
        job, reached, factor = self.setting.job, self.setting.efficiency, self.setting.correction.factor
        products_s = sum(m.workload.flops_per_token for m in job.trained) * job.training_tokens / reached.training
        pairs_s = sum(m.workload.flops_per_attended_pair for m in job.trained) * job.training_pairs / reached.attention
        seconds = factor("training") * (products_s + pairs_s)
        seconds += factor("preparation") * job.num_forward_passes * products_s / (3 * len(job.trained))
        decoding = float(job.wave_chances @ job.wave_prompts) * job.n / reached.decode
        stages: list[EngineStage] = ["generation"] if job.judge is None else ["generation", "reward"]
        for stage in stages:
            model, _, written = job.engine_role(stage)
            seconds += factor(stage) * 2 * model.num_multiplied_parameters * written.mean * decoding
        return seconds / self.setting.cluster.device.flops_per_s

    def of(self, num_devices: int, strategy: Strategy | None) -> Iterator[Candidate]:
        """Yield all that fit on so many devices, each with its best partition; strategy None: under all strategies."""
        # Of strategies with the same prediction the one that follows the load comes first.
        strategies: list[Strategy] = [strategy] if strategy else []
        for name, traits in reversed(STRATEGIES.items()):
            serves = traits.is_time_shared or (self.judge is not None and traits.follows_load)
            if strategy is None and traits.is_planned and serves:
                strategies.append(name)
        for choice in self.training(num_devices).choices():
            free_bytes = self.setting.usable_bytes - (0.0 if choice.offload else choice.state_bytes)
            policies = self.policy.of(num_devices, free_bytes)
            judges = [None] if self.judge is None else self.judge.of(num_devices, free_bytes)
            for policy, judge in product(policies, judges):
                asleep = policy.weights_bytes + (judge.weights_bytes if judge else 0.0)
                in_host = asleep + (choice.state_bytes if choice.offload else 0.0)
                if in_host > self.setting.cluster.host_memory_bytes:
                    continue
                swap = self.swap_costs(policy, judge)
                for each in strategies:
                    swap_s = num_swaps(self.setting.job, strategy=each) * (swap.sleep_s + swap.wake_s)
                    other_s = choice.seconds + swap_s + self.sync_s(policy, num_devices)
                    if split := self._fastest_split(num_devices, each, policy, judge):
                        yield Candidate(
                            step_s=split[0] + other_s,
                            num_devices=num_devices,
                            strategy=each,
                            training=choice,
                            policy=policy,
                            policy_replicas=split[1],
                            judge=judge,
                            judge_replicas=split[2],
                        )

    def _fastest_split(
        self, num_devices: int, strategy: Strategy, policy: Engines, judge: Engines | None
    ) -> tuple[float, int, int] | None:
        """Return the least seconds of sampling, and the replicas of policy and judge; None where both do not fit."""
        policy_replicas, judge_replicas = np.array([num_devices // policy.tp]), np.array([0])
        if judge is not None and STRATEGIES[strategy].is_time_shared:
            judge_replicas = np.array([num_devices // judge.tp])
        elif judge is not None:
            policy_replicas = np.arange(1, (num_devices - judge.tp) // policy.tp + 1)
            judge_replicas = (num_devices - policy_replicas * policy.tp) // judge.tp
        if not policy_replicas.size:
            return None
        waves_s = policy.waves_s[:, policy_replicas - 1]
        if judge is not None:
            judging, last_s = judge.waves_s[:, judge_replicas - 1], judge.last_s[judge_replicas - 1]
            waves_s = waves_s + added_by_reward(waves_s, judging, strategy=strategy, last_s=last_s)
        sampling_s = self.setting.job.wave_chances @ waves_s
        best = int(sampling_s.argmin())
        return float(sampling_s[best]), int(policy_replicas[best]), int(judge_replicas[best])

    def swap_costs(self, policy: Engines, judge: Engines | None) -> SwapCosts:
        """Return the costs of moving the larger of the two models' weights."""
        size_bytes = max(policy.weights_bytes, judge.weights_bytes if judge else 0.0)
        host_s = size_bytes / (self.setting.cluster.device.host_bytes_per_s * self.setting.efficiency.host)
        device_s = size_bytes / (self.setting.cluster.inter_node_bytes_per_s * self.setting.efficiency.links)
        fixed_s = self.setting.efficiency.swap_s
        costs = SwapCosts(sleep_s=fixed_s + host_s, wake_s=fixed_s + host_s, load_s=fixed_s + device_s)
        return times(costs, self.setting.correction.factor("swap"))

    def sync_s(self, policy: Engines, num_devices: int) -> float:
        """Return the seconds in which each device of the policy's engines gets its part of the new weights."""
        rate = self.setting.cluster.link_bytes_per_s(num_devices) * self.setting.efficiency.links
        return self.setting.correction.factor("weight_sync") * policy.weights_bytes / rate


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A choice that the plan does not make."""

    choice: str
    """The kind of choice: strategy, policy engine, judge's engine, training."""
    option: str
    reason: str
    """The costs of the option, or why it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest layout that fits."""

    cluster: Cluster
    num_devices: int
    """Devices that the plan uses."""
    strategy: Strategy
    policy: EnginePlan
    judge: EnginePlan | None
    training: TrainingLayout
    offload: bool
    """Weights, gradients and moments go to the host's memory while engines work."""
    costs: JobCosts
    step: StepTime
    memory: Mapping[str, Mapping[str, float]]
    """Bytes of a device by phase (training, generation, reward) and part, at the peak."""
    usable_bytes: float
    """Usable memory of a device; see `Efficiency.free_memory`."""
    correction: Mapping[str, float] | None
    """Measured over predicted seconds by stage, 1 where too little was measured; None: not asked for."""
    alternatives: tuple[Alternative, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.step.total_s

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest device, at its peak."""
        return max(sum(parts.values()) for parts in self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "step_s": self.step_s, "peak_bytes": self.peak_bytes}


def plan(
    cluster: Cluster,
    job: Job,
    *,
    strategy: Strategy | None = None,
    efficiency: Efficiency | None = None,
    correction: Correction | None = None,
    most_num_seqs: int = 1024,
    engine_devices: int | None = None,
) -> Plan:
    """Choose the strategy, layouts, partition and micro-batches with the shortest predicted step.

    The plan may use fewer devices than there are where more do not help, and whole nodes where it uses several. Where
    split and dynamic take the same time, the plan is dynamic: its partition follows a workload that changes. Where
    nothing fits, PlacementError says what is too large, and what would fit.

    Args:
        strategy: None: the fastest; without a judge, colocated.
        correction: measurements of a run of such a job.
        most_num_seqs: most sequences of an engine at once, however much memory there is.
        engine_devices: devices of each engine; None: whatever is fastest.
    """
    if strategy is not None:
        check_known("strategy", strategy, PLANNED)
        if job.judge is None and not STRATEGIES[strategy].is_time_shared:
            raise refusal("strategy", strategy, "colocated, or None, without a judge that the devices are shared with")
    check_positive("most_num_seqs", most_num_seqs)
    setting = Setting(
        cluster=cluster,
        job=job,
        efficiency=efficiency or Efficiency(),
        correction=correction or Correction(),
        most_num_seqs=most_num_seqs,
        engine_devices=engine_devices,
    )
    known = Candidates(setting)
    best: Candidate | None = None
    for size in cluster.sizes():
        if best is None or known.work_s / size < best.step_s:
            for candidate in known.of(size, strategy):
                if best is None or candidate.step_s < best.step_s:
                    best = candidate
    if best is None:
        raise PlacementError(_why_nothing_fits(known, strategy))
    return _plan(known, best, correction)


def _plan(known: Candidates, chosen: Candidate, correction: Correction | None) -> Plan:
    options, index = known.training(chosen.num_devices), chosen.training.layout
    moving_s = float(options.moving_s[index]) if chosen.training.offload else 0.0
    costs = JobCosts(
        policy=chosen.policy.laws.costs(chosen.policy_replicas - 1),
        reward=chosen.judge.laws.costs(chosen.judge_replicas - 1) if chosen.judge else None,
        training=options.laws.costs(index, sync_s=known.sync_s(chosen.policy, chosen.num_devices), moving_s=moving_s),
        swap=known.swap_costs(chosen.policy, chosen.judge),
    )
    policy, judge = chosen.policy.plan(chosen.policy_replicas), None
    state = {"training state": 0.0 if chosen.training.offload else chosen.training.state_bytes}
    memory = {
        "training": parts_at(options.memory, index),
        "generation": {**parts_at(chosen.policy.memory, chosen.policy_replicas - 1), **state},
    }
    if chosen.judge:
        judge = chosen.judge.plan(chosen.judge_replicas)
        memory["reward"] = {**parts_at(chosen.judge.memory, chosen.judge_replicas - 1), **state}
    return Plan(
        cluster=known.setting.cluster,
        num_devices=chosen.num_devices,
        strategy=chosen.strategy,
        policy=policy,
        judge=judge,
        training=options.layouts[index],
        offload=chosen.training.offload,
        costs=costs,
        step=predict_step(
            costs,
            known.setting.job,
            strategy=chosen.strategy,
            num_devices=chosen.num_devices,
            policy_devices=policy.num_devices,
            reward_devices=judge.num_devices if judge else 0,
        ),
        memory=memory,
        usable_bytes=known.setting.usable_bytes,
        correction=None if correction is None else {stage: correction.factor(stage) for stage in STAGES},
        alternatives=tuple(_alternatives(known, chosen)),
    )


_MOST_LAYOUTS = 4
"""Training layouts to name among those that fit, and among those that do not."""
_MOST_DOUBLINGS = 6
"""Doublings of the devices, or halvings of the responses, to try in search of a job that fits."""


def _why_nothing_fits(known: Candidates, strategy: Strategy | None) -> str:
    """Describe what is too large on all devices, and changes with which the job would fit."""
    cluster, usable = known.setting.cluster, known.setting.usable_bytes
    lines: list[str] = []
    size, options = next((size, options) for size in cluster.sizes() if len((options := known.training(size)).layouts))
    smallest = int(options.total_bytes.argmin())
    if options.total_bytes[smallest] > usable:
        parts = sorted(((float(v[smallest]), k) for k, v in options.memory.items()), reverse=True)[:3]
        most = ", ".join(f"{name} {gigabytes(size)}" for size, name in parts)
        needs = gigabytes(options.total_bytes[smallest])
        lines.append(f"training needs at least {needs} on each device ({most}; {options.layouts[smallest]})")
    for name, engines in (("policy", known.policy), ("judge", known.judge)):
        if engines is not None:
            needs, tp = min((engines.least_bytes(tp), tp) for tp in engines.sizes(size))
            if needs > usable:
                lines.append(f"an engine of the {name} needs {gigabytes(needs)} on each device even at TP {tp}")
    host = gigabytes(cluster.host_memory_bytes)
    lines = lines or [f"roles do not fit on the same devices, nor states into {host} of the host"]
    fits = ", or ".join(_what_would_fit(known.setting, strategy)) or "nothing that was tried"
    memory, free = gigabytes(cluster.device.memory_bytes), gigabytes(usable)
    return (
        f"nothing fits on {cluster.num_devices} x {cluster.device.name}, of whose {memory} {free} are usable: "
        f"{'; '.join(lines)}. Would fit: {fits}"
    )


def _what_would_fit(setting: Setting, strategy: Strategy | None) -> Iterable[str]:
    def fits(**changed: Any) -> bool:
        known = Candidates(replace(setting, **changed))
        return any(True for size in known.setting.cluster.sizes() for _ in known.of(size, strategy))

    for doublings in range(1, _MOST_DOUBLINGS + 1):
        cluster = replace(setting.cluster, num_devices=setting.cluster.num_devices * 2**doublings)
        if fits(cluster=cluster):
            yield f"{cluster.num_devices} devices"
            break
    lengths = setting.job.response_lengths
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        longest = lengths.longest / 2**halvings
        if fits(job=replace(setting.job, response_lengths=lengths.cut(longest))):
            yield f"responses of at most {int(longest)} tokens"
            break


def _alternatives(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    """Yield the alternatives with one choice changed and the others free, on as many devices."""
    same_strategy = list(known.of(chosen.num_devices, chosen.strategy))
    yield from _strategies(known, chosen)
    yield from _engines(known, same_strategy, chosen)
    yield from _training(known, chosen)

    offload = not chosen.training.offload
    best = min((c.step_s for c in same_strategy if c.training.offload == offload), default=inf)
    reason = _compared(best, chosen.step_s, unfit="does not fit next to the engines")
    where = "moves to the host for sampling" if offload else "stays on the devices"
    yield Alternative(choice="training state", option=where, reason=reason)


def _strategies(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    for strategy in PLANNED:
        if strategy == chosen.strategy:
            continue
        reason = "there is no judge to share the devices with"
        if known.judge is not None:
            best = min((c.step_s for c in known.of(chosen.num_devices, strategy)), default=inf)
            reason = _compared(best, chosen.step_s)
            if best < inf and not STRATEGIES[strategy].is_time_shared and not STRATEGIES[strategy].follows_load:
                reason += "; its partition stays where it is as lengths drift"
        yield Alternative(choice="strategy", option=strategy, reason=reason)


def _engines(known: Candidates, same_strategy: list[Candidate], chosen: Candidate) -> Iterable[Alternative]:
    usable = known.setting.usable_bytes
    for choice, role, options in (("policy engine", "policy", known.policy), ("judge's engine", "judge", known.judge)):
        if options is None:
            continue
        best: dict[int, float] = {}
        for candidate in same_strategy:
            tp = getattr(candidate, role).tp
            best[tp] = min(candidate.step_s, best.get(tp, inf))
        for tp in options.sizes(chosen.num_devices):
            if tp != getattr(chosen, role).tp:
                needs = options.least_bytes(tp)
                unfit = f": {gigabytes(needs)} of {gigabytes(usable)}" if needs > usable else " next to the other roles"
                reason = _compared(best.get(tp, inf), chosen.step_s, unfit=f"does not fit{unfit}")
                yield Alternative(choice=choice, option=f"TP {tp}", reason=reason)


def _training(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    """Yield other sizes and backends, each with its best micro-batches and recomputation; and no recomputation."""
    options, usable = known.training(chosen.num_devices), known.setting.usable_bytes
    layouts = options.layouts
    own = layouts[chosen.training.layout]
    seconds = options.seconds + (options.moving_s if chosen.training.offload else 0.0)
    by_sizes: dict[str, list[int]] = {}
    for index in np.argsort(layouts.tp * layouts.pp * layouts.cp, kind="stable").tolist():
        by_sizes.setdefault(layouts[index].sizes, []).append(index)

    def reason(indices: list[int]) -> tuple[float, str]:
        """Return the least seconds of those that fit, and the reason as text."""
        least_s = min((float(seconds[i]) for i in indices if options.total_bytes[i] <= usable), default=inf)
        needs = min(float(options.total_bytes[i]) for i in indices)
        unfit = f"does not fit: {gigabytes(needs)} of {gigabytes(usable)}"
        return least_s, _compared(least_s, chosen.training.seconds, "to train", unfit=unfit)

    others = {sizes: reason(indices) for sizes, indices in by_sizes.items() if sizes != own.sizes}
    fit = sorted((found, sizes) for sizes, found in others.items() if found[0] < inf)[:_MOST_LAYOUTS]
    # Among those that do not fit, the simplest are the ones that a user would ask about.
    unfit = [(found, sizes) for sizes, found in others.items() if found[0] == inf][:_MOST_LAYOUTS]
    for (_, why), sizes in [*fit, *unfit]:
        yield Alternative(choice="training", option=sizes, reason=why)
    if own.gradient_checkpointing:
        without = [i for i in by_sizes[own.sizes] if not layouts.recompute[i]]
        yield Alternative(choice="training", option="no recomputation", reason=reason(without)[1])


def _compared(seconds: float, chosen_s: float, what: str = "a step", *, unfit: str = "does not fit") -> str:
    return f"{seconds:.1f} s {what}, {seconds - chosen_s:+.1f} s" if seconds < inf else unfit

"""The planner: predict each layout that fits, choose the fastest, and keep the costs of the others."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import JobCosts
from gcore_placement.errors import PlacementError, check_positive, refusal
from gcore_placement.forecast import STAGES, Correction, StepTime, check_planned, predict_step
from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.engines import EngineOptions, Engines
from gcore_placement.planning.layouts import Setting, TrainingLayout
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy
from gcore_placement.workload.job import Job


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A role's engines, all alike."""

    tensor_model_parallel_size: int
    num_replicas: int
    num_devices: int
    """Devices of the role while it works; all of them in the colocated strategy."""
    max_num_seqs: int


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
    """Usable memory of a device; the rest is for contexts, buffers and fragmentation."""
    correction: Mapping[str, float] | None
    """Factor of each stage's laws, measured over predicted seconds: 1 where too little was measured; None: it was not
    asked for."""
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


MOST_NUM_SEQS = 1024


def plan(
    cluster: Cluster,
    job: Job,
    *,
    strategy: Strategy | None = None,
    efficiency: Efficiency | None = None,
    correction: Correction | None = None,
    most_num_seqs: int = MOST_NUM_SEQS,
) -> Plan:
    """Choose the strategy, layouts, partition and micro-batches with the shortest predicted step.

    The plan may use fewer devices than there are where more do not help, and whole nodes where it uses several. Where
    split and dynamic take the same time, the plan is dynamic: its partition follows a workload that changes.

    Args:
        strategy: None: the fastest; without a judge, colocated.
        efficiency: shares of their data sheets that devices reach; None: `Efficiency`'s defaults.
        correction: measurements of a run of such a job; None: none.
        most_num_seqs: most sequences of an engine at once, however much memory there is.

    Raises:
        PlacementError: nothing fits: the message says what is too large, and what would fit; or split or dynamic is
            given without a judge.
    """
    if strategy is not None:
        check_planned(strategy)
    if strategy is not None and job.judge is None and not STRATEGIES[strategy].is_time_shared:
        raise refusal("strategy", strategy, "colocated, or None, without a judge that the devices are shared with")
    check_positive("most_num_seqs", most_num_seqs)
    setting = Setting(
        cluster=cluster,
        job=job,
        efficiency=efficiency or Efficiency(),
        correction=correction or Correction(),
        most_num_seqs=most_num_seqs,
    )
    known = Candidates(setting)
    best: Candidate | None = None
    for size in cluster.sizes():
        if best is None or known.bound_s(size) < best.step_s:
            for candidate in known.of(size, strategy):
                if best is None or candidate.step_s < best.step_s:
                    best = candidate
    if best is None:
        raise PlacementError(why_nothing_fits(known, strategy))
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
    policy = _engine_plan(chosen.policy, chosen.policy_replicas)
    judge = _engine_plan(chosen.judge, chosen.judge_replicas) if chosen.judge else None
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
        memory=_memory(known, chosen),
        usable_bytes=known.setting.usable_bytes,
        correction=None if correction is None else {stage: correction.factor(stage) for stage in STAGES},
        alternatives=alternatives(known, chosen),
    )


def _engine_plan(engines: Engines, num_replicas: int) -> EnginePlan:
    return EnginePlan(
        tensor_model_parallel_size=engines.tp,
        num_replicas=num_replicas,
        num_devices=num_replicas * engines.tp,
        max_num_seqs=int(engines.laws.max_num_seqs[num_replicas - 1]),
    )


def _memory(known: Candidates, chosen: Candidate) -> Mapping[str, Mapping[str, float]]:
    parts = known.training(chosen.num_devices).memory
    memory = {"training": {name: float(sizes[chosen.training.layout]) for name, sizes in parts.items()}}
    state = 0.0 if chosen.training.offload else chosen.training.state_bytes
    memory["generation"] = {**_engine_memory(chosen.policy, chosen.policy_replicas), "training state": state}
    if chosen.judge:
        memory["reward"] = {**_engine_memory(chosen.judge, chosen.judge_replicas), "training state": state}
    return memory


def _engine_memory(engines: Engines, num_replicas: int) -> dict[str, float]:
    num_seqs = float(engines.laws.max_num_seqs[num_replicas - 1])
    return {
        "weights": engines.weights_bytes,
        "workspace": engines.workspace_bytes,
        "KV cache": max(num_seqs * engines.kv_sequence_bytes, engines.longest_bytes),
    }


_MOST_LAYOUTS = 4
"""Training layouts to name among those that fit, and among those that do not."""
_MOST_DOUBLINGS = 6
"""Doublings of the devices, or halvings of the responses, to try in search of a job that fits."""


def alternatives(known: Candidates, chosen: Candidate) -> tuple[Alternative, ...]:
    """Return the alternatives with one choice changed and the others free, on as many devices."""
    size = chosen.num_devices
    same_strategy = list(known.of(size, chosen.strategy))
    found = [*_strategies(known, chosen)]
    found += _engines(
        "policy engine", known.policy, chosen.policy.tp, ((c.policy.tp, c) for c in same_strategy), known, chosen
    )
    if known.judge is not None and chosen.judge is not None:
        by_tp = ((c.judge.tp, c) for c in same_strategy if c.judge is not None)
        found += _engines("judge's engine", known.judge, chosen.judge.tp, by_tp, known, chosen)
    return (*found, *_training(known, chosen), *_state(same_strategy, chosen))


def why_nothing_fits(known: Candidates, strategy: Strategy | None) -> str:
    """Describe what is too large on all devices, and changes with which the job would fit."""
    cluster, job, usable = known.setting.cluster, known.setting.job, known.setting.usable_bytes
    lines: list[str] = []
    size, options = next((size, options) for size in cluster.sizes() if len((options := known.training(size)).layouts))
    smallest = int(options.total_bytes.argmin())
    if options.total_bytes[smallest] > usable:
        parts = sorted(((float(v[smallest]), k) for k, v in options.memory.items()), reverse=True)[:3]
        most = ", ".join(f"{name} {_gb(size)}" for size, name in parts)
        lines.append(
            f"training needs at least {_gb(options.total_bytes[smallest])} on each device ({most}; "
            f"{options.layouts[smallest]})"
        )
    for name, engines in (("policy", known.policy), ("judge", known.judge)):
        if engines is not None:
            needs, tp = min((engines.least_bytes(tp), tp) for tp in engines.sizes(size))
            if needs > usable:
                lines.append(f"an engine of the {name} needs {_gb(needs)} on each device even at TP {tp}")
    if not lines:
        lines.append(
            f"roles do not fit on the same devices, nor states into {_gb(cluster.host_memory_bytes)} of the host"
        )
    fits = _what_would_fit(known, job, strategy)
    return (
        f"nothing fits on {cluster.num_devices} x {cluster.device.name}, of whose {_gb(cluster.device.memory_bytes)} "
        f"{_gb(usable)} are usable: {'; '.join(lines)}. Would fit: {fits or 'nothing that was tried'}"
    )


def _what_would_fit(known: Candidates, job: Job, strategy: Strategy | None) -> str:
    found: list[str] = []
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        cluster = replace(known.setting.cluster, num_devices=known.setting.cluster.num_devices * 2**doublings)
        if _fits(Candidates(replace(known.setting, cluster=cluster)), strategy):
            found.append(f"{cluster.num_devices} devices")
            break
    for halvings in range(1, _MOST_DOUBLINGS + 1):
        longest = job.response_lengths.longest / 2**halvings
        shorter = replace(job, response_lengths=job.response_lengths.cut(longest))
        if _fits(Candidates(replace(known.setting, job=shorter)), strategy):
            found.append(f"responses of at most {int(longest)} tokens")
            break
    return ", or ".join(found)


def _fits(known: Candidates, strategy: Strategy | None) -> bool:
    return any(True for size in known.setting.cluster.sizes() for _ in known.of(size, strategy))


def _strategies(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    for strategy in PLANNED:
        if strategy == chosen.strategy:
            continue
        if known.setting.job.judge is None:
            yield Alternative(choice="strategy", option=strategy, reason="there is no judge to share the devices with")
            continue
        best = min((c.step_s for c in known.of(chosen.num_devices, strategy)), default=inf)
        traits = STRATEGIES[strategy]
        is_fixed = not traits.is_time_shared and not traits.follows_load
        stays = "; its partition stays where it is as lengths drift" if is_fixed else ""
        reason = f"{_compared(best, chosen.step_s)}{stays}" if best < inf else "does not fit"
        yield Alternative(choice="strategy", option=strategy, reason=reason)


def _engines(
    choice: str,
    engines: EngineOptions,
    chosen_tp: int,
    by_tp: Iterable[tuple[int, Candidate]],
    known: Candidates,
    chosen: Candidate,
) -> Iterable[Alternative]:
    best: dict[int, float] = {}
    for tp, candidate in by_tp:
        best[tp] = min(candidate.step_s, best.get(tp, inf))
    for tp in engines.sizes(chosen.num_devices):
        if tp == chosen_tp:
            continue
        needs = engines.least_bytes(tp)
        if tp in best:
            reason = _compared(best[tp], chosen.step_s)
        elif needs > known.setting.usable_bytes:
            reason = f"does not fit: {_gb(needs)} of {_gb(known.setting.usable_bytes)}"
        else:
            reason = "does not fit next to the other roles"
        yield Alternative(choice=choice, option=f"TP {tp}", reason=reason)


def _training(known: Candidates, chosen: Candidate) -> Iterable[Alternative]:
    """Yield other sizes and backends, each with its best micro-batches and recomputation; and no recomputation."""
    options = known.training(chosen.num_devices)
    layouts = options.layouts
    own = layouts[chosen.training.layout]
    seconds = options.seconds + (options.moving_s if chosen.training.offload else 0.0)
    order = np.argsort(layouts.tp * layouts.pp * layouts.cp, kind="stable").tolist()
    by_sizes: dict[str, list[int]] = {}
    for index in order:
        by_sizes.setdefault(_sizes(layouts[index]), []).append(index)

    def reason(indices: list[int]) -> tuple[float, str]:
        """Return the least seconds of those that fit, and the reason as text."""
        least_s = min(
            (float(seconds[i]) for i in indices if options.total_bytes[i] <= known.setting.usable_bytes), default=inf
        )
        if least_s < inf:
            return least_s, _compared(least_s, chosen.training.seconds, "to train")
        needs = min(float(options.total_bytes[i]) for i in indices)
        return inf, f"does not fit: {_gb(needs)} of {_gb(known.setting.usable_bytes)}"

    others = {sizes: reason(indices) for sizes, indices in by_sizes.items() if sizes != _sizes(own)}
    fit = sorted((found, sizes) for sizes, found in others.items() if found[0] < inf)[:_MOST_LAYOUTS]
    # Among those that do not fit, the simplest are the ones that a user would ask about.
    unfit = [(found, sizes) for sizes, found in others.items() if found[0] == inf][:_MOST_LAYOUTS]
    for (_, why), sizes in [*fit, *unfit]:
        yield Alternative(choice="training", option=sizes, reason=why)
    if own.gradient_checkpointing:
        without = [i for i in by_sizes[_sizes(own)] if not layouts.recompute[i]]
        yield Alternative(choice="training", option="no recomputation", reason=reason(without)[1])


def _state(same_strategy: list[Candidate], chosen: Candidate) -> Iterable[Alternative]:
    offload = not chosen.training.offload
    best = min((c.step_s for c in same_strategy if c.training.offload == offload), default=inf)
    reason = _compared(best, chosen.step_s) if best < inf else "does not fit next to the engines"
    where = "moves to the host for sampling" if offload else "stays on the devices"
    yield Alternative(choice="training state", option=where, reason=reason)


def _sizes(layout: TrainingLayout) -> str:
    return (
        f"{layout.backend} TP {layout.tensor_model_parallel_size} PP {layout.pipeline_model_parallel_size} "
        f"CP {layout.context_parallel_size} DP {layout.data_parallel_size}"
    )


def _compared(seconds: float, chosen_s: float, what: str = "a step") -> str:
    return f"{seconds:.1f} s {what}, {seconds - chosen_s:+.1f} s"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"

"""The planner: predict each layout that fits, choose the fastest, and keep the costs of the others."""

from collections.abc import Mapping

from gcore_placement.cluster import Cluster
from gcore_placement.correction import STAGES, Correction
from gcore_placement.costs import JobCosts
from gcore_placement.errors import PlacementError, check_positive, refusal
from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.efficiency import Efficiency
from gcore_placement.planning.engine_options import Engines
from gcore_placement.planning.plan import EnginePlan, Plan
from gcore_placement.planning.reasons import alternatives, why_nothing_fits
from gcore_placement.planning.step_time import check_planned, predict_step
from gcore_placement.strategies import Strategy, strategy_traits
from gcore_placement.workload.job import Job

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
    if strategy is not None and job.judge is None and not strategy_traits(strategy).is_time_shared:
        raise refusal("strategy", strategy, "colocated, or None, without a judge that the devices are shared with")
    check_positive("most_num_seqs", most_num_seqs)
    known = Candidates(
        cluster,
        job,
        efficiency=efficiency or Efficiency(),
        correction=correction or Correction(),
        most_num_seqs=most_num_seqs,
    )
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
        cluster=known.cluster,
        num_devices=chosen.num_devices,
        strategy=chosen.strategy,
        policy=policy,
        judge=judge,
        training=options.layouts[index],
        offload=chosen.training.offload,
        costs=costs,
        step=predict_step(
            costs,
            known.job,
            strategy=chosen.strategy,
            num_devices=chosen.num_devices,
            policy_devices=policy.num_devices,
            reward_devices=judge.num_devices if judge else 0,
        ),
        memory=_memory(known, chosen),
        usable_bytes=known.usable_bytes,
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

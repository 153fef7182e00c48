"""The predicted step of a given placement, by the laws with which plans are compared."""

from dataclasses import replace

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.errors import refusal
from gcore_placement.forecast import Job, StepTime, predict_step
from gcore_placement.planning.candidates import swap_costs
from gcore_placement.planning.layouts import EngineLayout, TrainingLayout, TrainingLayouts
from gcore_placement.planning.memory import resident_state, training_memory
from gcore_placement.planning.options import EngineRoofline, training_laws
from gcore_placement.quantities import Floats
from gcore_placement.strategies import Strategy


def predict_layout(
    cluster: Cluster,
    job: Job,
    layout: TrainingLayout,
    policy: EngineLayout,
    judge: EngineLayout | None = None,
    *,
    strategy: Strategy = "colocated",
    takes_turns: bool = True,
    host_moves: int | None = None,
    efficiency: Efficiency | None = None,
) -> StepTime:
    """Predict the mean time of a step of a placement, by the same laws as `plan`.

    Args:
        strategy: how policy and judge share the engines' devices; colocated also without a judge.
        takes_turns: ranks are on the engines' devices: states move to the host and back, and engines sleep and wake in
            each step; False: ranks have devices of their own, and nothing moves.
        host_moves: times in a step that the states of training come from the host and go back; None: once if roles
            take turns, else never.
    """
    if (judge is None) != (job.judge is None):
        raise refusal("judge", judge, "given with job.judge, and only then")
    efficiency = efficiency or Efficiency()
    if host_moves is None:
        host_moves = int(takes_turns)
    roofline = EngineRoofline.of(
        job, "generation", cluster=cluster, tp=policy.devices_per_engine, efficiency=efficiency
    )
    policy_costs = _engine_costs(job, policy, roofline)
    largest_bytes = roofline.weights_bytes
    judge_costs = None
    judge_devices = 0
    if judge is not None:
        judge_roofline = EngineRoofline.of(
            job, "reward", cluster=cluster, tp=judge.devices_per_engine, efficiency=efficiency
        )
        judge_costs = _engine_costs(job, judge, judge_roofline)
        judge_devices = judge.num_devices
        largest_bytes = max(largest_bytes, judge_roofline.weights_bytes)
    num_devices = max(layout.num_ranks, policy.num_devices + judge_devices)
    training = _training_costs(cluster, job, layout, num_devices, efficiency, host_moves=host_moves)
    sync_s = efficiency.weight_sync_seconds(
        cluster,
        roofline.weights_bytes * policy.devices_per_engine,
        num_ranks=layout.num_ranks,
        engine_devices=policy.num_devices + judge_devices,
        devices_per_engine=policy.devices_per_engine,
        colocated=takes_turns,
    )
    swap = SwapCosts()
    if takes_turns or strategy == "colocated":
        swap = swap_costs(cluster, efficiency, largest_bytes)
    costs = JobCosts(
        policy=policy_costs,
        reward=judge_costs,
        training=replace(training, sync_s=sync_s),
        swap=swap,
    )
    step = predict_step(
        costs,
        job,
        strategy=strategy,
        num_devices=num_devices,
        policy_devices=policy.num_devices,
        reward_devices=judge_devices,
    )
    if not takes_turns and judge is None:
        # No engine ever sleeps.
        return replace(step, swap_s=0.0)
    return step


def _training_costs(
    cluster: Cluster,
    job: Job,
    layout: TrainingLayout,
    num_devices: int,
    efficiency: Efficiency,
    *,
    host_moves: int,
) -> TrainingCosts:
    layouts = TrainingLayouts(layout)
    laws = training_laws(job, layouts, cluster=cluster, efficiency=efficiency)
    rate = cluster.device.host_bytes_per_s * efficiency.host
    moving_s = host_moves * 2 * float(resident_state(training_memory(job, layouts))[0]) / rate
    costs = laws.costs(0, sync_s=0.0, moving_s=moving_s)
    # Laws are of all devices, of which ranks may be some.
    share = num_devices / layout.num_ranks
    return replace(
        costs, per_token_s=costs.per_token_s * share, per_pair_s=costs.per_pair_s * share
    )


def _engine_costs(job: Job, engines: EngineLayout, roofline: EngineRoofline) -> EngineCosts:
    # No engine is sized for more sequences than it gets.
    engine_seqs: Floats = np.ceil(
        job.wave_prompts.max() * job.n / np.array([float(engines.num_engines)])
    )
    return roofline.laws(np.clip(engine_seqs, 1, engines.max_num_seqs)).costs(0)

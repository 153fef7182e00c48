"""The predicted step of a placement that is given, by the laws with which plans are compared."""

from dataclasses import dataclass, replace

import numpy as np

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.errors import refusal
from gcore_placement.forecast import EngineStage, Job, StepTime, predict_step
from gcore_placement.planning.candidates import swap_costs, sync_seconds
from gcore_placement.planning.layouts import TrainingLayout, TrainingLayouts, resident_state, training_memory
from gcore_placement.planning.options import EngineRoofline, training_laws
from gcore_placement.quantities import Checked, Floats, Positive
from gcore_placement.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class EngineLayout(Checked):
    """The engines of a role, all alike."""

    num_engines: Positive
    devices_per_engine: Positive = 1
    max_num_seqs: Positive = 256
    """Most sequences of each at once, also by the memory for their keys and values."""

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        return self.num_engines * self.devices_per_engine


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
    """Predict the mean time of a step of a placement, as `plan` predicts those that it compares.

    Args:
        strategy: how policy and judge share the engines' devices; colocated also without a judge.
        takes_turns: ranks are on the engines' devices: states move to the host and back, and engines sleep and wake in
            each step; False: ranks have devices of their own, and nothing moves.
        host_moves: times in a step that the states of training come from the host and go back; None: once if roles
            take turns, else never.
    """
    if (judge is None) != (job.judge is None):
        raise refusal("judge", judge, "given with job.judge, and only then")
    own = efficiency or Efficiency()
    num_devices = max(layout.num_ranks, policy.num_devices + (judge.num_devices if judge else 0))
    engines = (_engine(cluster, job, "generation", policy, own), judge and _engine(cluster, job, "reward", judge, own))
    moves = int(takes_turns) if host_moves is None else host_moves
    training = _training(cluster, job, layout, num_devices, own, host_moves=moves)
    rooflines = [_roofline(cluster, job, "generation", policy, own)]
    if judge is not None:
        rooflines.append(_roofline(cluster, job, "reward", judge, own))
    sync_s = sync_seconds(cluster, own, rooflines[0].weights_bytes, num_devices)
    is_still = not takes_turns and strategy != "colocated"
    swap = SwapCosts() if is_still else swap_costs(cluster, own, max(each.weights_bytes for each in rooflines))
    costs = JobCosts(policy=engines[0], reward=engines[1], training=replace(training, sync_s=sync_s), swap=swap)
    found = predict_step(
        costs,
        job,
        strategy=strategy,
        num_devices=num_devices,
        policy_devices=policy.num_devices,
        reward_devices=judge.num_devices if judge else 0,
    )
    # Without a judge and without turns no engine ever sleeps.
    return found if takes_turns or judge is not None else replace(found, swap_s=0.0)


def _training(
    cluster: Cluster, job: Job, layout: TrainingLayout, num_devices: int, efficiency: Efficiency, *, host_moves: int
) -> TrainingCosts:
    layouts = TrainingLayouts.of(layout)
    laws = training_laws(job, layouts, cluster=cluster, efficiency=efficiency)
    rate = cluster.device.host_bytes_per_s * efficiency.host
    moving_s = host_moves * 2 * float(resident_state(training_memory(job, layouts))[0]) / rate
    costs = laws.costs(0, sync_s=0.0, moving_s=moving_s)
    # Laws are of all devices, of which ranks may be some.
    share = num_devices / layout.num_ranks
    return replace(costs, per_token_s=costs.per_token_s * share, per_pair_s=costs.per_pair_s * share)


def _roofline(
    cluster: Cluster, job: Job, stage: EngineStage, engines: EngineLayout, efficiency: Efficiency
) -> EngineRoofline:
    return EngineRoofline(
        model=job.engine_role(stage)[0],
        cluster=cluster,
        tp=engines.devices_per_engine,
        compute_bytes=job.compute_bytes,
        efficiency=efficiency,
    )


def _engine(
    cluster: Cluster, job: Job, stage: EngineStage, engines: EngineLayout, efficiency: Efficiency
) -> EngineCosts:
    # No engine is sized for more sequences than it gets.
    each: Floats = np.ceil(job.wave_prompts.max() * job.n / np.array([float(engines.num_engines)]))
    laws = _roofline(cluster, job, stage, engines, efficiency).laws(np.clip(each, 1, engines.max_num_seqs))
    return laws.costs(0)

"""The planner: predict each layout that fits, choose the fastest, and keep the costs of the others."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gcore_placement.cluster import Cluster, Efficiency
from gcore_placement.costs import JobCosts
from gcore_placement.errors import refusal
from gcore_placement.forecast import STAGES, Correction, Job, StepTime, predict_step
from gcore_placement.planning.alternatives import Alternative, alternatives
from gcore_placement.planning.candidates import Candidate, Candidates
from gcore_placement.planning.layouts import EngineLayout, TrainingLayout
from gcore_placement.planning.memory import LORA_RANK, parts_at
from gcore_placement.planning.options import Setting
from gcore_placement.planning.unfit import (
    least_training_bytes,
    nothing_fits,
    settings_to_try,
)
from gcore_placement.quantities import check_known, check_positive
from gcore_placement.strategies import PLANNED, STRATEGIES, Strategy


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fastest layout that fits.

    Example:
        >>> policy = ModelShape(qkv_bias=True, workload=TransformerWorkload(
        ...     hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        ...     num_key_value_heads=4, head_dim=128, vocab_size=152064))
        >>> lengths = Lengths.log_normal(median=900, sigma=0.8, longest=4096)
        >>> job = Job(policy=policy, prompt_lengths=lengths, response_lengths=lengths, train_batch_size=64, n=8)
        >>> chosen = plan(Cluster(num_devices=8, device=Device.named("H100")), job)
        >>> print(chosen.training)
        torch TP 1 PP 1 CP 2 DP 4, 8192 tokens a micro-batch
        >>> round(chosen.step_s)
        41
    """

    cluster: Cluster
    num_devices: int
    """Devices that the plan uses."""
    strategy: Strategy
    policy: EngineLayout
    judge: EngineLayout | None
    training: TrainingLayout
    offload: bool
    """Weights, gradients and moments go to the host's memory while engines work."""
    lora_rank: int
    """Rank of the adapters that are trained; 0: all parameters are trained."""
    optimizer_offload: bool
    """The optimizer's state is in the host's memory at all times."""
    trained_parameters: int
    """Parameters of the policy that are trained."""
    whole_training_bytes: float
    """Least memory of each device to train all parameters with the optimizer's state on the devices."""
    costs: JobCosts
    step: StepTime
    memory: Mapping[str, Mapping[str, float]]
    """Bytes of a device at the peak by phase and part. Phases are training and generation, reward if there is a judge,
    and weight sync if it needs memory of its own."""
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
        return {
            **asdict(self),
            "policy": self.policy.to_dict(),
            "judge": self.judge.to_dict() if self.judge else None,
            "step_s": self.step_s,
            "peak_bytes": self.peak_bytes,
        }


def plan(
    cluster: Cluster,
    job: Job,
    *,
    strategy: Strategy | None = None,
    efficiency: Efficiency | None = None,
    correction: Correction | None = None,
    most_num_seqs: int = 1024,
    runnable: bool = False,
    lora_rank: int | None = None,
) -> Plan:
    """Choose the strategy, layouts, partition and micro-batches with the shortest predicted step.

    The plan may use fewer devices than there are where more do not help, and whole nodes where it uses several. Where
    split and dynamic take the same time, the plan is dynamic: its partition follows a workload that changes. Where
    nothing fits, PlacementError says what is too large, and what would fit.

    Args:
        strategy: None: the fastest; without a judge, colocated.
        correction: measurements of a run of such a job.
        most_num_seqs: most sequences of an engine at once, however much memory there is.
        runnable: only plans that have settings of `gcore-llm train`: torch ranks, whose state is in the host's memory
            while engines work, and engines within a node, those of a judge over as many devices as the policy's. Where
            all parameters cannot be trained with the optimizer's state on the devices, it is in the host's memory;
            where they cannot so either, adapters are trained.
        lora_rank: rank of adapters that are trained in place of all parameters; 0: all are trained, and None: adapters
            are in a runnable plan where nothing else fits.
    """
    if strategy is not None:
        check_known("strategy", strategy, PLANNED)
        if job.judge is None and not STRATEGIES[strategy].is_time_shared:
            raise refusal(
                "strategy",
                strategy,
                "colocated, or None, without a judge that the devices are shared with",
            )
    check_positive("most_num_seqs", most_num_seqs)
    if lora_rank is not None and lora_rank < 0:
        raise refusal("lora_rank", lora_rank, "an integer of at least 0, or None")
    setting = Setting(
        cluster=cluster,
        job=job,
        efficiency=efficiency or Efficiency(),
        correction=correction or Correction(),
        most_num_seqs=most_num_seqs,
        runnable=runnable,
    )
    settings = settings_to_try(setting, lora_rank)
    for option in settings:
        candidates = Candidates(option)
        best = _fastest(candidates, strategy)
        if best is not None:
            rank = (lora_rank or LORA_RANK) if option.state.adapter_parameters else 0
            return _plan(candidates, best, correction, rank)
    raise nothing_fits(settings, strategy)


def _fastest(candidates: Candidates, strategy: Strategy | None) -> Candidate | None:
    best: Candidate | None = None
    for size in candidates.setting.cluster.sizes():
        for candidate in candidates.of(size, strategy):
            if best is None or candidate.step_s < best.step_s:
                best = candidate
    return best


def _plan(
    candidates: Candidates, chosen: Candidate, correction: Correction | None, lora_rank: int
) -> Plan:
    options = candidates.training(chosen.num_devices)
    index = chosen.training.layout
    moving_s = float(options.moving_s[index]) if chosen.training.offload else 0.0
    sync_s = candidates.sync_s(chosen.policy, chosen.num_devices)
    policy = chosen.policy.layout(chosen.policy_replicas)
    judge = None
    judge_costs = None
    judge_devices = 0
    state = {"training state": 0.0 if chosen.training.offload else chosen.training.state_bytes}
    memory = {
        "training": parts_at(options.memory, index),
        "generation": {**parts_at(chosen.policy.memory, chosen.policy_replicas - 1), **state},
    }
    if chosen.judge:
        judge = chosen.judge.layout(chosen.judge_replicas)
        judge_costs = chosen.judge.laws.costs(chosen.judge_replicas - 1)
        judge_devices = judge.num_devices
        memory["reward"] = {**parts_at(chosen.judge.memory, chosen.judge_replicas - 1), **state}
    sync_bytes = candidates.sync_bytes(chosen.policy, chosen.training, chosen.num_devices)
    if sync_bytes:
        resident = {
            "training state": chosen.training.state_bytes,
            "weights": chosen.policy.weights_bytes,
        }
        memory["weight sync"] = {**resident, "on their way": sync_bytes - sum(resident.values())}
    costs = JobCosts(
        policy=chosen.policy.laws.costs(chosen.policy_replicas - 1),
        reward=judge_costs,
        training=options.laws.costs(index, sync_s=sync_s, moving_s=moving_s),
        swap=candidates.swap_costs(chosen.policy, chosen.judge),
    )
    factors = None
    if correction is not None:
        factors = {stage: correction.factor(stage) for stage in STAGES}
    return Plan(
        cluster=candidates.setting.cluster,
        num_devices=chosen.num_devices,
        strategy=chosen.strategy,
        policy=policy,
        judge=judge,
        training=options.layouts[index],
        offload=chosen.training.offload,
        lora_rank=lora_rank,
        optimizer_offload=candidates.setting.state.offload != "none",
        trained_parameters=int(
            candidates.setting.state.adapter_parameters
            or candidates.setting.job.policy.num_parameters
        ),
        whole_training_bytes=least_training_bytes(candidates.setting, chosen.num_devices),
        costs=costs,
        step=predict_step(
            costs,
            candidates.setting.job,
            strategy=chosen.strategy,
            num_devices=chosen.num_devices,
            policy_devices=policy.num_devices,
            reward_devices=judge_devices,
        ),
        memory=memory,
        usable_bytes=candidates.setting.usable_bytes,
        correction=factors,
        alternatives=tuple(alternatives(candidates, chosen)),
    )

"""Settings of a simulation: the cluster, the costs of its services, and the sizes of the program that runs on them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gcore_placement import Cluster, Device, Efficiency, EngineCosts, PlacementError
from gcore_runs.errors import UserError
from gcore_runs.settings.checks import (
    Amount,
    Count,
    Fraction,
    FractionAbove0,
    NonNegative,
    Positive,
    check_bounds,
)


def _check_divides(field: str, value: int, total_name: str, total: int) -> None:
    if total % value:
        divisor = math.gcd(total, value)
        expected = f"expected a divisor of {total_name} ({total}), such as {divisor} or {total}"
        raise UserError(f"{field} is {value}; {expected}")


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """Log-normal lengths, in tokens; or numbers of turns, or seconds."""

    median: Positive
    """Half of the lengths are longer."""
    sigma: Amount
    """Standard deviation of the lengths' logarithm; 0: all are equal."""

    @classmethod
    def of_moments(cls, mean: float, variance: float) -> "LengthModel":
        """Return the lengths with this mean, at least a millionth, and this variance."""
        mean = max(mean, 1e-6)
        sigma = math.sqrt(math.log1p(variance / mean**2))
        return cls(median=mean * math.exp(-(sigma**2) / 2), sigma=sigma)


@dataclass(frozen=True, kw_only=True)
class SessionModel:
    """Sessions of several turns, as of an agent: while its tools run, no engine works for it."""

    turns: LengthModel = LengthModel(median=1, sigma=0)
    """Turns of a session, each as long as a response without sessions; one: there are no sessions."""
    message_length: LengthModel = LengthModel(median=64, sigma=0.5)
    """Lengths of the messages between two turns; with the turns they are a response."""
    tool_s: LengthModel = LengthModel(median=1, sigma=0)
    """Seconds of the agent after each turn."""
    start_s: Amount = 0.0
    """Seconds before the first turn."""

    @property
    def is_used(self) -> bool:
        return self.turns != LengthModel(median=1, sigma=0)


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Replicas that generate with continuous batching."""

    devices_per_replica: Count = 2
    """Devices of one replica."""
    max_num_seqs: Count = 256
    """Most responses that a replica generates at once; the others wait."""
    base_s: Positive = 0.01
    """Seconds of a decoding step, which gives each running response a token."""
    per_sample_s: Amount = 2e-5
    """Seconds that each running response adds to a decoding step."""
    prompts: Literal["stealing", "own", "shared"] = "stealing"
    """The prompts that a replica takes. own: those of its controller; stealing: also those of other controllers when it
    has capacity and its own are all taken, as on ray; shared: those of all controllers, which share all replicas."""
    prefill_tokens_per_s: Positive = 40_000.0
    """Prompt tokens that a replica computes in a second; it decodes nothing meanwhile."""

    @property
    def costs(self) -> EngineCosts:
        """The law of one replica."""
        return EngineCosts(
            devices_per_replica=self.devices_per_replica,
            max_num_seqs=self.max_num_seqs,
            decode_base_s=self.base_s,
            decode_per_sequence_s=self.per_sample_s,
            prefill_per_token_s=1 / self.prefill_tokens_per_s,
        )


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """The scoring of responses: by a rule at once, or by a judge that takes time."""

    acceptance: FractionAbove0 = 0.7
    """Share of groups whose scores differ."""
    latency_s: Amount = 0.0
    """Median seconds of a call, which are log-normal; 0: none."""
    latency_sigma: Amount = 0.5
    """Standard deviation of the latency's logarithm."""
    devices: NonNegative = 0
    """Devices that score while the others generate; all devices train. 0: the reward runs elsewhere."""
    devices_per_replica: Count = 2
    """Devices of one replica, where the reward has devices."""
    max_concurrency: Count = 64
    """Most calls at once of each replica; without devices, most calls in all."""

    @property
    def num_replicas(self) -> int:
        """Replicas on devices."""
        return self.devices // self.devices_per_replica


@dataclass(frozen=True, kw_only=True)
class LearnerModel:
    """Training on all devices."""

    devices_per_replica: Count = 8
    """Devices of one data-parallel replica: with torch its context-parallel ranks, with megatron tensor-parallel ones,
    times pipeline_model_parallel_size and context_parallel_size."""
    backend: Literal["torch", "megatron"] = "torch"
    """torch: weights and gradients are sharded over all devices (FSDP, ZeRO-3) and gathered in each micro-batch.
    megatron: the optimizer's state is, and gradients are exchanged once an update (ZeRO-1)."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages, with megatron."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence, with megatron."""
    collectives: bool = True
    """Add the seconds of collectives, of pipelines' bubbles and of AdamW's update, by the planner's laws and the links
    of the cluster. With flops_per_s none are added, because it was measured with them."""
    device: str = "H100"
    """The device whose dense bfloat16 peak is used: B200, H200, H100, A100, ..."""
    utilisation: FractionAbove0 = 0.4
    """Share of that peak that training reaches (MFU)."""
    flops_per_s: Amount = 0.0
    """Measured FLOPs per second of a device, in place of peak and utilisation; 0: use these."""
    micro_batch_s: Amount = 0.0
    """Seconds of a micro-batch in addition to its FLOPs."""
    forward_share: Positive = 1 / 3
    """Seconds of a pass that only scores, as a share of those of a training pass."""
    sync_gb_per_s: Amount = 0.0
    """Rate at which new weights, in bfloat16, reach the engines; 0: through the hosts' memory, as dry runs predict."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tensor-, pipeline- and context-parallel ranks of a replica."""
        if self.backend == "torch":
            return 1, 1, self.devices_per_replica
        pp = self.pipeline_model_parallel_size
        cp = self.context_parallel_size
        return self.devices_per_replica // (pp * cp), pp, cp

    @property
    def has_collectives(self) -> bool:
        """True if collectives are modelled."""
        return self.collectives and not self.flops_per_s

    @property
    def device_flops_per_s(self) -> float:
        """FLOPs per second of one device."""
        return self.flops_per_s or Device.named(self.device).flops_per_s * self.utilisation


@dataclass(frozen=True, kw_only=True)
class BaseSimConfig:
    """A cluster of modelled devices, on which the run's engines, reward and training take simulated time.

    It takes the place of the processes that other settings ask for.
    """

    devices: Count = 512
    """Devices of the cluster: all train, and all but those of the reward generate."""
    devices_per_node: Count = 8
    """Devices of a node, which are linked as the data sheet of learner.device says."""
    inter_node_gb_per_s: Positive = 50.0
    """GB/s of each device to other nodes, one way."""
    overhead_s: Amount = 0.0
    """Seconds of a step in addition to all that is modelled, such as the program's own code."""
    engine: EngineModel = field(default_factory=EngineModel)
    reward: RewardModel = field(default_factory=RewardModel)
    learner: LearnerModel = field(default_factory=LearnerModel)

    def check(self, section: str, controllers: int) -> None:
        """Raise `UserError` if the settings contradict each other; ``section`` is "sim.", or empty."""
        reward = self.reward
        engine = self.engine
        learner = self.learner
        try:
            Device.named(learner.device)
        except PlacementError as error:
            raise UserError(f"{section}learner.{error}") from None
        pp = learner.pipeline_model_parallel_size
        cp = learner.context_parallel_size
        size = learner.devices_per_replica
        if learner.backend == "torch" and (pp, cp) != (1, 1):
            raise UserError(
                f"{section}learner.backend is 'torch'; expected megatron with pipeline_model_parallel_size {pp} and "
                f"context_parallel_size {cp}: torch has context-parallel ranks alone, learner.devices_per_replica"
            )
        if size % (pp * cp):
            raise UserError(
                f"{section}learner.devices_per_replica is {size}; expected a multiple of pipeline_model_parallel_size "
                f"x context_parallel_size ({pp * cp})"
            )
        name = f"{section}reward.devices"
        total = reward.devices
        if total and not reward.latency_s:
            raise UserError(
                f"{section}reward.latency_s is 0; expected above 0 where {name} is above 0 ({total})"
            )
        if total >= self.devices:
            raise UserError(
                f"{name} is {total}; expected fewer than {section}devices ({self.devices})"
            )
        for model, per_replica, total_name, devices in (
            ("reward", reward.devices_per_replica, name, total),
            (
                "engine",
                engine.devices_per_replica,
                "the devices that generate",
                self.devices - total,
            ),
            ("learner", learner.devices_per_replica, f"{section}devices", self.devices),
        ):
            _check_divides(
                f"{section}{model}.devices_per_replica", per_replica, total_name, devices
            )
        if engine.prompts != "shared" and self.num_engine_replicas < controllers:
            raise UserError(
                f"controllers is {controllers}; expected at most the replicas of the engine "
                f"({self.num_engine_replicas}), or {section}engine.prompts 'shared'"
            )

    @property
    def cluster(self) -> Cluster:
        """The devices and their links."""
        return Cluster(
            num_devices=self.devices,
            device=Device.named(self.learner.device),
            devices_per_node=self.devices_per_node,
            inter_node_bytes_per_s=self.inter_node_gb_per_s * 1e9,
        )

    def sync_s(self, weights_bytes: float) -> float:
        """Return the seconds in which new weights reach all engines."""
        if self.learner.sync_gb_per_s:
            return weights_bytes / (self.learner.sync_gb_per_s * 1e9)
        return Efficiency().weight_sync_seconds(
            self.cluster,
            weights_bytes,
            num_ranks=self.devices,
            engine_devices=self.devices,
            devices_per_engine=self.engine.devices_per_replica,
            colocated=True,
        )

    @property
    def num_engine_replicas(self) -> int:
        return (self.devices - self.reward.devices) // self.engine.devices_per_replica

    @property
    def num_learner_replicas(self) -> int:
        return self.devices // self.learner.devices_per_replica


@dataclass(frozen=True, kw_only=True)
class SimConfig(BaseSimConfig):
    """See `BaseSimConfig`; what is generated is text."""

    token_unit: Count = 1
    """Tokens per entry of the program's arrays; more save memory and time, and lengths are rounded to them."""
    prompt_length: LengthModel = LengthModel(median=256, sigma=0.5)
    """Lengths of prompts, cut at the longest prompt; where the run has prompts of its own, they have theirs."""
    response_length: LengthModel = LengthModel(median=1500, sigma=0.8)
    """Lengths of responses, cut at the longest response."""
    prompt_share: Fraction = 0.0
    """Share of the variance of response lengths that is between prompts; 1: responses to a prompt are equally long."""
    sessions: SessionModel = field(default_factory=SessionModel)

    def check_unit(self, section: str, lengths: Mapping[str, int]) -> None:
        """Raise `UserError` unless each length, by its setting, is made of whole units."""
        for name, tokens in lengths.items():
            _check_divides(f"{section}token_unit", self.token_unit, name, tokens)


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SimConfig):
    """The program of `train` on simulated devices. Lengths are in tokens."""

    lengths: ClassVar = (
        "max_prompt_length",
        "max_response_length",
        "short_response_length",
        "ppo_max_token_len",
    )
    """The settings that are whole units of ``token_unit``."""

    controllers: Count = 8
    """SPMD controllers."""
    steps: Count = 10
    """Training steps."""
    model: str = ""
    """A Hugging Face folder whose config.json gives the work per token; empty: a model of 7.6 billion parameters."""
    seed: int = 0
    """Seed of lengths, latencies and scores."""
    token_unit: Count = 64
    """Tokens per entry of the program's arrays; more save memory and time, and lengths are rounded to them."""
    json: str = ""
    """Write every step's figures to this file."""
    train_batch_size: NonNegative = 0
    """Prompts a step, each with n responses; 0: one for every two devices."""
    n: int = 8
    """Responses a prompt."""
    max_prompt_length: Count = 1024
    """Longest prompt."""
    max_response_length: Count = 8192
    """Longest response."""
    filter_groups: bool = True
    """Dynamic sampling: drop groups whose responses all score alike and sample again."""
    max_num_gen_batches: int = 4
    """Most waves of sampling a step."""
    partial_rollout: bool = False
    """Continue long responses in the next step, as rollout.partial-rollout of train."""
    tail_batching: bool = False
    """Defer prompts with long responses to a few long steps, as rollout.tail-batching of train."""
    short_response_length: NonNegative = 0
    """Longest response of the others, as rollout.short-response-length of train."""
    over_sample_rate: float = 0.5
    """Further prompts to start in partial rollout or tail batching, as a share of those that are needed."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """trainer: the trainer scores all responses before the first of several updates."""
    kl_loss_coef: float = 0.0
    """Above 0: a reference model scores all responses."""
    ppo_mini_batch_size: int = 0
    """Prompts an update; 0: the whole batch in one update."""
    ppo_max_token_len: int = 32_768
    """Most tokens a micro-batch."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.n > 65_536:
            raise UserError(f"n is {self.n}; expected at most 65536")
        self.check_unit("", {name: getattr(self, name) for name in self.lengths})
        self.check("", self.controllers)

    @property
    def batch_size(self) -> int:
        """Prompts a step."""
        return self.train_batch_size or max(1, self.devices // 2)

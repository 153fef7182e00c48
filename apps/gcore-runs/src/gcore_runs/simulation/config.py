"""Settings of a simulation: the cluster, the costs of its services, and the sizes of the program that runs on them."""

from dataclasses import dataclass, field
from typing import Literal

from gcore_placement import Device, EngineCosts, PlacementError
from gcore_runs import check_at_least, check_finite, check_fraction
from gcore_runs.errors import UserError


def _check_divides(field: str, value: int, whole: str, total: int) -> None:
    check_at_least(field, value, 1)
    if total % value:
        raise UserError(f"{field} is {value}; expected a divisor of {whole} ({total})")


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Log-normal lengths, in tokens."""

    median: float
    """Half of the lengths are longer."""
    sigma: float
    """Standard deviation of the lengths' logarithm; 0: all are equal."""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Replicas that generate with continuous batching."""

    devices_per_replica: int = 2
    """Devices of one replica."""
    max_num_seqs: int = 256
    """Most responses that a replica generates at once; the others wait."""
    base_s: float = 0.01
    """Seconds of a decoding step, which gives each running response a token."""
    per_sample_s: float = 2e-5
    """Seconds that each running response adds to a decoding step."""
    prompts: Literal["stealing", "own", "shared"] = "stealing"
    """The prompts that a replica takes. own: those of its controller; stealing: also those of other controllers when it
    has capacity and its own are all taken, as on ray; shared: those of all controllers, which share all replicas."""
    prefill_tokens_per_s: float = 40_000.0
    """Prompt tokens that a replica computes in a second; it decodes nothing meanwhile."""

    def __post_init__(self) -> None:
        check_at_least("engine.max_num_seqs", self.max_num_seqs, 1)
        check_finite("engine.base_s", self.base_s, above_zero=True)
        check_finite("engine.prefill_tokens_per_s", self.prefill_tokens_per_s, above_zero=True)
        check_finite("engine.per_sample_s", self.per_sample_s)

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

    acceptance: float = 0.7
    """Share of groups whose scores differ."""
    latency_s: float = 0.0
    """Median seconds of a call, which are log-normal; 0: none."""
    latency_sigma: float = 0.5
    """Standard deviation of the latency's logarithm."""
    devices: int = 0
    """Devices that score while the others generate; all devices train. 0: the reward runs elsewhere."""
    devices_per_replica: int = 2
    """Devices of one replica, where the reward has devices."""
    max_concurrency: int = 64
    """Most calls at once of each replica; without devices, most calls in all."""

    def __post_init__(self) -> None:
        check_fraction("reward.acceptance", self.acceptance, above_zero=True)
        for name in ("latency_s", "latency_sigma"):
            check_finite(f"reward.{name}", getattr(self, name))
        check_at_least("reward.devices", self.devices, 0)
        _check_divides("reward.devices_per_replica", self.devices_per_replica, "reward.devices", self.devices)
        check_at_least("reward.max_concurrency", self.max_concurrency, 1)
        if self.devices and not self.latency_s:
            raise UserError(f"reward.latency_s is 0; expected above 0 where reward.devices is above 0 ({self.devices})")

    @property
    def num_replicas(self) -> int:
        """Replicas on devices."""
        return self.devices // self.devices_per_replica


@dataclass(frozen=True, kw_only=True)
class LearnerModel:
    """Training on all devices."""

    devices_per_replica: int = 8
    """Devices of one data-parallel replica."""
    device: str = "H100"
    """The device whose dense bfloat16 peak is used: B200, H200, H100, A100, ..."""
    utilisation: float = 0.4
    """Share of that peak that training reaches (MFU)."""
    flops_per_s: float = 0.0
    """Measured FLOPs per second of a device, in place of peak and utilisation; 0: use these."""
    micro_batch_s: float = 0.0
    """Seconds of a micro-batch in addition to its FLOPs."""
    forward_share: float = 1 / 3
    """Seconds of a pass that only scores, as a share of those of a training pass."""
    sync_gb_per_s: float = 10.0
    """Rate at which new weights, in bfloat16, reach the engine."""

    def __post_init__(self) -> None:
        try:
            Device.named(self.device)
        except PlacementError as error:
            raise UserError(f"learner.{error}") from None
        check_fraction("learner.utilisation", self.utilisation, above_zero=True)
        for name in ("flops_per_s", "micro_batch_s", "forward_share", "sync_gb_per_s"):
            above_zero = name in ("forward_share", "sync_gb_per_s")
            check_finite(f"learner.{name}", getattr(self, name), above_zero=above_zero)

    @property
    def device_flops_per_s(self) -> float:
        """FLOPs per second of one device."""
        return self.flops_per_s or Device.named(self.device).flops_per_s * self.utilisation


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """The program of `train` on simulated devices. Lengths are in tokens."""

    devices: int = 512
    """Devices of the cluster: all train, and all but those of the reward generate."""
    controllers: int = 8
    """SPMD controllers."""
    steps: int = 10
    """Training steps."""
    model: str = ""
    """A Hugging Face folder whose config.json gives the work per token; empty: a model of 7.6 billion parameters."""
    seed: int = 0
    """Seed of lengths, latencies and scores."""
    token_unit: int = 64
    """Tokens per entry of the program's arrays; more save memory and time, and lengths are rounded to them."""
    json: str = ""
    """Write every step's figures to this file."""
    train_batch_size: int = 0
    """Prompts a step, each with n responses; 0: one for every two devices."""
    n: int = 8
    """Responses a prompt."""
    max_prompt_length: int = 1024
    """Longest prompt."""
    max_response_length: int = 8192
    """Longest response."""
    prompt_length: LengthConfig = field(default_factory=lambda: LengthConfig(median=256, sigma=0.5))
    """Lengths of prompts, cut at max-prompt-length."""
    response_length: LengthConfig = field(default_factory=lambda: LengthConfig(median=1500, sigma=0.8))
    """Lengths of responses, cut at max-response-length."""
    filter_groups: bool = True
    """Dynamic sampling: drop groups whose responses all score alike and sample again."""
    max_num_gen_batches: int = 4
    """Most waves of sampling a step."""
    prompt_share: float = 0.0
    """Share of the variance of response lengths that is between prompts; 1: responses to a prompt are equally long."""
    partial_rollout: bool = False
    """Continue long responses in the next step, as rollout.partial-rollout of train."""
    over_sample_rate: float = 0.5
    """Further prompts to start in partial rollout, as a share of those that are needed."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """trainer: the trainer scores all responses before the first of several updates."""
    kl_loss_coef: float = 0.0
    """Above 0: a reference model scores all responses."""
    ppo_mini_batch_size: int = 0
    """Prompts an update; 0: the whole batch in one update."""
    ppo_max_token_len: int = 32_768
    """Most tokens a micro-batch."""
    overhead_s: float = 0.0
    """Seconds of a step in addition to all that is modelled, such as the program's own code."""
    engine: EngineModel = field(default_factory=EngineModel)
    reward: RewardModel = field(default_factory=RewardModel)
    learner: LearnerModel = field(default_factory=LearnerModel)

    def __post_init__(self) -> None:
        for name in ("devices", "controllers", "steps", "token_unit", "max_prompt_length", "max_response_length"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("train_batch_size", self.train_batch_size, 0)
        check_finite("overhead_s", self.overhead_s)
        if self.n > 65_536:
            raise UserError(f"n is {self.n}; expected at most 65536")
        for name in ("prompt_length", "response_length"):
            check_finite(f"{name}.median", getattr(self, name).median, above_zero=True)
            check_finite(f"{name}.sigma", getattr(self, name).sigma)
        for name in ("max_prompt_length", "max_response_length", "ppo_max_token_len"):
            _check_divides("token_unit", self.token_unit, name, getattr(self, name))
        check_fraction("prompt_share", self.prompt_share)
        if self.reward.devices >= self.devices:
            raise UserError(f"reward.devices is {self.reward.devices}; expected fewer than devices ({self.devices})")
        rollout, per_engine = self.devices - self.reward.devices, self.engine.devices_per_replica
        _check_divides("engine.devices_per_replica", per_engine, "the devices that generate", rollout)
        if self.engine.prompts != "shared" and self.num_engine_replicas < self.controllers:
            raise UserError(
                f"controllers is {self.controllers}; expected at most the replicas of the engine "
                f"({self.num_engine_replicas}), or engine.prompts 'shared'"
            )
        _check_divides("learner.devices_per_replica", self.learner.devices_per_replica, "devices", self.devices)

    @property
    def batch_size(self) -> int:
        """Prompts a step."""
        return self.train_batch_size or max(1, self.devices // 2)

    @property
    def num_engine_replicas(self) -> int:
        return (self.devices - self.reward.devices) // self.engine.devices_per_replica

    @property
    def num_learner_replicas(self) -> int:
        return self.devices // self.learner.devices_per_replica

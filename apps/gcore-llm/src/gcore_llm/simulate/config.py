"""Settings of a simulation: the cluster, what its services take, and the program that runs on them."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gcore_llm.config import ActorConfig, AlgorithmConfig, DataConfig, TrainConfig
from gcore_llm.performance import PEAK_FLOPS
from gcore_llm.rollout_config import RolloutConfig
from gcore_llm.trainer_config import TrainerConfig
from gcore_runs.errors import UserError, check_at_least
from gcore_trainer import PolicyLossConfig


def _check_above_0(field: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise UserError(f"{field} is {value}: a finite number above 0 is needed")


def _check_divides(field: str, value: int, whole: str, total: int) -> None:
    check_at_least(field, value, 1)
    if total % value:
        raise UserError(f"{field} is {value}: a divisor of {whole} ({total}) is needed")


def _check_not_negative(field: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"{field} is {value}: a finite number, 0 or more is needed")


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """Log-normal lengths, in tokens."""

    median: float
    """Half are longer."""
    sigma: float
    """Standard deviation of the lengths' logarithm; 0: all are alike."""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """Replicas that generate, by continuous batching."""

    devices_per_replica: int = 2
    """Devices of one replica."""
    max_num_seqs: int = 256
    """Most responses generated at once, by each replica; the others wait."""
    base_s: float = 0.01
    """Seconds of a decoding step, which gives every running response a token, ..."""
    per_sample_s: float = 2e-5
    """... and seconds that each running response adds to it."""
    prompts: Literal["stealing", "own", "shared"] = "stealing"
    """Whose prompts a replica takes. own: those of the controller whose it is; stealing: others' too, when it has room
    and its own are all taken, as on ray; shared: everyone's, as all replicas are of all controllers."""
    prefill_tokens_per_s: float = 40_000.0
    """Prompt tokens that a replica computes in a second, decoding nothing meanwhile."""

    def __post_init__(self) -> None:
        check_at_least("engine.max_num_seqs", self.max_num_seqs, 1)
        _check_above_0("engine.base_s", self.base_s)
        _check_above_0("engine.prefill_tokens_per_s", self.prefill_tokens_per_s)
        _check_not_negative("engine.per_sample_s", self.per_sample_s)


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """What scores responses: a rule at once, or a judge that takes its time."""

    acceptance: float = 0.7
    """Share of groups whose scores differ."""
    latency_s: float = 0.0
    """Median seconds of a call, which are log-normal; 0: none."""
    latency_sigma: float = 0.5
    """Standard deviation of the latency's logarithm."""
    devices: int = 0
    """Devices that score while the others generate; all of them train. 0: it runs elsewhere."""
    devices_per_replica: int = 2
    """Devices of one replica, where it has devices."""
    max_concurrency: int = 64
    """Most calls at once, by each replica; without devices, by all of it."""

    def __post_init__(self) -> None:
        if not 0 < self.acceptance <= 1:
            raise UserError(f"reward.acceptance is {self.acceptance}: a number above 0, at most 1 is needed")
        for name in ("latency_s", "latency_sigma"):
            _check_not_negative(f"reward.{name}", getattr(self, name))
        check_at_least("reward.devices", self.devices, 0)
        _check_divides("reward.devices_per_replica", self.devices_per_replica, "reward.devices", self.devices)
        check_at_least("reward.max_concurrency", self.max_concurrency, 1)
        if self.devices and not self.latency_s:
            raise UserError(f"reward.devices is {self.devices} and reward.latency_s is 0: a latency above 0 is needed")

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
    """Whose dense bfloat16 peak it is: B200, H200, H100, A100, ..."""
    utilisation: float = 0.4
    """Share of that peak that is reached (MFU)."""
    flops_per_s: float = 0.0
    """What a device reaches, as measured, in the place of both; 0: they give it."""
    micro_batch_s: float = 0.0
    """Seconds that a micro-batch takes beside its FLOPs."""
    forward_share: float = 1 / 3
    """Seconds of a pass that scores, as a share of those of one that trains."""
    sync_gb_per_s: float = 10.0
    """Rate at which new weights, in bfloat16, reach the engine."""

    def __post_init__(self) -> None:
        if self.device not in PEAK_FLOPS:
            raise UserError(f"learner.device is {self.device!r}: one of {', '.join(PEAK_FLOPS)} is needed")
        if not 0 < self.utilisation <= 1:
            raise UserError(f"learner.utilisation is {self.utilisation}: a number above 0, at most 1 is needed")
        for name in ("flops_per_s", "micro_batch_s"):
            _check_not_negative(f"learner.{name}", getattr(self, name))
        for name in ("forward_share", "sync_gb_per_s"):
            _check_above_0(f"learner.{name}", getattr(self, name))

    @property
    def device_flops_per_s(self) -> float:
        """Of one device."""
        return self.flops_per_s or PEAK_FLOPS[self.device] * self.utilisation


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """The program of `train` on modelled devices. Lengths are in tokens."""

    devices: int = 512
    """Devices of the cluster: all train; but for those of the reward, all generate."""
    controllers: int = 8
    """SPMD controllers."""
    steps: int = 10
    """Training steps."""
    model: str = ""
    """A Hugging Face folder whose config.json gives the work of a token; empty: a model of 7.6 billion parameters."""
    seed: int = 0
    """Seed of lengths, latencies and scores."""
    token_unit: int = 64
    """Tokens that one entry of the program's arrays stands for: memory and seconds fall, lengths are rounded to it."""
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
    """How alike the responses to a prompt are in length: the share of the variance that is between prompts."""
    partial_rollout: bool = False
    """Long responses go on in the next step, as rollout.partial-rollout of train."""
    over_sample_rate: float = 0.5
    """In partial rollout, how many more prompts are begun, as a share of those that are needed."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """trainer: it scores all responses before its first of several updates."""
    kl_loss_coef: float = 0.0
    """Above 0: a reference model scores all responses."""
    ppo_mini_batch_size: int = 0
    """Prompts an update; 0: the whole batch in one update."""
    ppo_max_token_len: int = 32_768
    """Most tokens a micro-batch."""
    overhead_s: float = 0.0
    """Seconds that a step takes beside all that is modelled, such as for the program's own code."""
    engine: EngineModel = field(default_factory=EngineModel)
    reward: RewardModel = field(default_factory=RewardModel)
    learner: LearnerModel = field(default_factory=LearnerModel)

    def __post_init__(self) -> None:
        for name in ("devices", "controllers", "steps", "token_unit", "max_prompt_length", "max_response_length"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("train_batch_size", self.train_batch_size, 0)
        _check_not_negative("overhead_s", self.overhead_s)
        if self.n > 65_536:
            raise UserError(f"n is {self.n}: 65536 or less is needed")
        for name in ("prompt_length", "response_length"):
            _check_above_0(f"{name}.median", getattr(self, name).median)
            _check_not_negative(f"{name}.sigma", getattr(self, name).sigma)
        for name in ("max_prompt_length", "max_response_length", "ppo_max_token_len"):
            _check_divides("token_unit", self.token_unit, name, getattr(self, name))
        if not 0 <= self.prompt_share <= 1:
            raise UserError(f"prompt_share is {self.prompt_share}: a number from 0 to 1 is needed")
        if self.reward.devices >= self.devices:
            raise UserError(f"reward.devices is {self.reward.devices}: fewer than devices ({self.devices}) are needed")
        rollout = self.devices - self.reward.devices
        _check_divides(
            "engine.devices_per_replica", self.engine.devices_per_replica, "the devices that generate", rollout
        )
        if self.engine.prompts != "shared" and self.num_engine_replicas < self.controllers:
            raise UserError(
                f"controllers is {self.controllers} and the engine has {self.num_engine_replicas} replicas: one for "
                "each controller is needed, or engine.prompts 'shared'"
            )
        _check_divides("learner.devices_per_replica", self.learner.devices_per_replica, "devices", self.devices)
        self.train_config()

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

    def train_config(self) -> TrainConfig:
        """The settings of the program, its lengths in units of ``token_unit`` tokens.

        Raises:
            UserError: see there.
        """
        return TrainConfig(
            seed=self.seed,
            controllers=self.controllers,
            device="cpu",
            data=DataConfig(
                train_batch_size=self.batch_size,
                max_prompt_length=self.max_prompt_length // self.token_unit,
                max_response_length=self.max_response_length // self.token_unit,
                shuffle_seed=self.seed,
            ),
            rollout=RolloutConfig(
                n=self.n, partial_rollout=self.partial_rollout, over_sample_rate=self.over_sample_rate
            ),
            algorithm=AlgorithmConfig(
                filter_groups=self.filter_groups,
                max_num_gen_batches=self.max_num_gen_batches,
                old_log_probs=self.old_log_probs,
                # Modelled engines and learners have no policy that could differ.
                max_rollout_kl=0.0,
            ),
            actor=ActorConfig(
                loss=PolicyLossConfig(kl_loss_coef=self.kl_loss_coef),
                ppo_mini_batch_size=self.ppo_mini_batch_size,
                ppo_max_token_len=self.ppo_max_token_len // self.token_unit,
            ),
            trainer=TrainerConfig(num_processes=self.devices, total_training_steps=self.steps),
        )

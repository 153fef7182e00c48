"""Every setting of a run. Names follow verl's where both have the thing."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from gcore_llm.reward_config import RewardCallsConfig, RewardModelConfig
from gcore_llm.rollout_config import RolloutConfig
from gcore_llm.trainer_config import TrainerConfig
from gcore_runs.errors import UserError, check_at_least, check_run_name
from gcore_runs.placement_config import PlacementConfig
from gcore_runs.ray_config import RayConfig
from gcore_runs.sizes import Sizes, check_engines, check_judges_in_turns
from gcore_trainer import (
    AdvantageEstimator,
    ConfigError,
    LoRAConfig,
    OptimizerConfig,
    PolicyLossConfig,
    RewardKL,
    RolloutCorrectionConfig,
    ValueLossConfig,
    advantage_estimators,
    get_advantage_estimator,
)

MAY_CHANGE = (
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "resume",
    "runtime",
    "ray",
    "controllers",
    "threads",
    "device",
    "trainer.backend",
    "trainer.num_processes",
    "trainer.parallel",
    "trainer.prometheus_port",
    "trainer.prometheus_host",
    "placement",
    "rollout.num_processes",
    "rollout.urls",
    "rollout.weights_dir",
    "reward_model.judge.num_processes",
    "reward_model.judge.urls",
    "reward_calls.max_failed_share",
)
"""Settings that a resumed run may be given anew."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A reasoning-gym task, generated instead of read from files."""

    name: str = ""
    """Task of reasoning-gym, such as chain_sum; empty: prompts come from data.train-files."""
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    """The task's own settings, of the types that reasoning-gym gives them; on the command line --task.params.NAME and a
    number, true or false, text, several values, or a TOML value such as '{a = [1, 2]}'; None where it is accepted."""
    num_train: int = 10_000
    """Training problems to generate; those that occur among the held-out ones are left out."""
    num_val: int = 256
    """Held-out problems to generate."""

    def __post_init__(self) -> None:
        for name in ("num_train", "num_val"):
            check_at_least(f"task.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts: from the user's files, or from a task."""

    train_files: tuple[str, ...] = ()
    """JSONL or Parquet files of prompts; further columns reach the reward as they are."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts; none: data.val-size prompts are taken out of the training files."""
    val_size: int = 64
    """How many prompts to hold out if there are no val-files; never more than a tenth of them."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    image_key: str = ""
    """Column of a prompt's images, for a vision-language model: one, or a list, each a path (relative to the data file)
    or the bytes of an image file; they stand where text has <image>, or a message a part of type image. Empty: none."""
    apply_chat_template: Literal["auto", "never"] = "auto"
    """auto: text becomes a user message wherever the tokenizer has a chat template."""
    train_batch_size: int = 32
    """Prompts a step, each with rollout.n responses."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens; longer ones are left out, counted and reported."""
    max_response_length: int = 512
    """Longest response in tokens."""
    shuffle_seed: int = 0
    """Seed of the order of prompts."""
    num_workers: int = 0
    """Threads that read rows ahead."""

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "max_prompt_length", "max_response_length"):
            check_at_least(f"data.{name}", getattr(self, name), 1)
        for name in ("val_size", "num_workers", "shuffle_seed"):
            check_at_least(f"data.{name}", getattr(self, name), 0)

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.max_prompt_length + self.max_response_length


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """Supervised fine-tuning of the embedded model on worked examples, before reinforcement learning."""

    max_steps: int = 0
    """Most updates; 0: no warm-up."""
    batch_size: int = 128
    """Worked examples an update."""
    lr: float = 2e-3
    """Learning rate."""
    target_accuracy: float = 0.4
    """Stop as soon as sampled answers reach this accuracy on held-out problems."""
    test_freq: int = 25
    """Updates between two such checks."""

    def __post_init__(self) -> None:
        check_at_least("warmup.max_steps", self.max_steps, 0)
        for name in ("batch_size", "test_freq"):
            check_at_least(f"warmup.{name}", getattr(self, name), 1)
        if not 0 < self.lr < math.inf:
            raise UserError(f"warmup.lr is {self.lr}; expected a finite number above 0")
        check_at_least("warmup.target_accuracy", self.target_accuracy, 0)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """What becomes of responses that reach or come close to data.max-response-length."""

    buffer_len: int = 0
    """Over the last so many tokens a response's score falls linearly (DAPO's soft punishment); 0: not at all."""
    penalty_factor: float = 1.0
    """By how much it has fallen at the limit."""
    filter: bool = False
    """Responses that were cut off are not trained on."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.overlong.buffer_len", self.buffer_len, 0)
        if not 0 <= self.penalty_factor < math.inf:
            raise UserError(
                f"algorithm.overlong.penalty_factor is {self.penalty_factor}: a finite number, 0 or more is needed"
            )


@dataclass(frozen=True, kw_only=True)
class KLControlConfig:
    """The KL penalty in the reward."""

    kl_coef: float = 0.0
    """Weight of the divergence from the initial policy in every token's reward; 0: none."""
    kl_penalty: RewardKL = "k1"
    """Estimator of that divergence."""
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the weight follows the divergence."""
    target_kl: float = 0.1
    """Mean divergence per token that is sought, in adaptive."""
    horizon: int = 10_000
    """Responses over which the weight adapts, in adaptive."""

    def __post_init__(self) -> None:
        if not 0 <= self.kl_coef < math.inf:
            raise UserError(f"algorithm.kl_ctrl.kl_coef is {self.kl_coef}: a finite number, 0 or more is needed")
        if not 0 < self.target_kl < math.inf:
            raise UserError(f"algorithm.kl_ctrl.target_kl is {self.target_kl}: a finite number above 0 is needed")
        check_at_least("algorithm.kl_ctrl.horizon", self.horizon, 1)
        if self.type == "adaptive" and not self.kl_coef:
            raise UserError("algorithm.kl_ctrl.type is 'adaptive': a kl_coef above 0 is needed to begin with")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """From scores to advantages."""

    adv_estimator: str = "grpo"
    """How scores become advantages: against the group (grpo, dr_grpo, rloo, reinforce_plus_plus_baseline), against a
    greedy response (remax), against the whole batch (reinforce_plus_plus), against a critic (gae), or by a function of
    one's own (PATH.py:function)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation, in grpo."""
    gamma: float = 1.0
    """Discount per token, in reinforce_plus_plus and gae."""
    lam: float = 1.0
    """Weight of longer horizons, in gae."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    filter_groups: bool = True
    """Dynamic sampling: drop groups whose responses all score alike and sample again."""
    max_num_gen_batches: int = 4
    """Most waves of sampling a step; then the step trains on what it has."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio: the engine's own log-probs, or the trainer's before its first update of the step."""
    max_rollout_kl: float = 0.01
    """A line on the screen warns when engine and trainer, with the same weights, differ by more nats per token
    (training/rollout_k3_kl, of a sample of each step's responses); 0: they are not compared."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.max_num_gen_batches", self.max_num_gen_batches, 1)
        if not 0 <= self.max_rollout_kl < math.inf:
            raise UserError(f"algorithm.max_rollout_kl is {self.max_rollout_kl}; expected a finite number, 0 or more")
        estimator = self.estimator
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"algorithm.{name} is {getattr(self, name)}: a number from 0 to 1 is needed")
        if self.kl_ctrl.kl_coef and not estimator.reads_token_rewards:
            accepted = " or ".join(n for n, e in advantage_estimators().items() if e.reads_token_rewards)
            raise UserError(
                f"algorithm.kl_ctrl.kl_coef is {self.kl_ctrl.kl_coef} and algorithm.adv_estimator is "
                f"{self.adv_estimator!r}: rewards of single tokens need {accepted}; "
                "actor.loss.kl_loss_coef works with all"
            )
        if self.rollout_correction.is_active and self.old_log_probs == "rollout":
            raise UserError(
                "algorithm.rollout_correction is set and algorithm.old_log_probs is 'rollout': 'trainer' is needed, "
                "with the engine's own log-probs there is nothing to correct"
            )

    @property
    def estimator(self) -> AdvantageEstimator:
        """The advantage estimator, with what it needs.

        Raises:
            UserError: there is no such estimator, or the user's file has none.
        """
        try:
            return get_advantage_estimator(self.adv_estimator)
        except ConfigError as error:
            raise UserError(f"algorithm.{error}") from None


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy's training."""

    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    lora_rank: int = 0
    """Train adapters of this rank, and nothing else; 0: all parameters."""
    lora_alpha: int = 32
    """An adapter's output is scaled by lora-alpha / lora-rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, such as q_proj; all-linear: all but the head."""
    enable_gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work."""
    router_replay: Literal["disabled", "R2"] = "disabled"
    """R2: in a mixture of experts, the updates of a step send tokens through the experts that they passed through when
    the old log-probs were computed, so that ratios do not jump where a router is near a tie."""
    ppo_mini_batch_size: int = 0
    """Prompts an update; 0: the whole batch in one update."""
    ppo_epochs: int = 1
    """Passes over the batch."""
    ppo_max_token_len: int = 16_384
    """Most tokens a micro-batch: bounds memory, changes nothing else."""

    def __post_init__(self) -> None:
        check_at_least("actor.ppo_mini_batch_size", self.ppo_mini_batch_size, 0)
        check_at_least("actor.ppo_epochs", self.ppo_epochs, 1)
        check_at_least("actor.ppo_max_token_len", self.ppo_max_token_len, 1)
        check_at_least("actor.lora_rank", self.lora_rank, 0)
        check_at_least("actor.lora_alpha", self.lora_alpha, 1)

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters, if there are any."""
        if not self.lora_rank:
            return None
        return LoRAConfig(rank=self.lora_rank, alpha=self.lora_alpha, target_modules=self.target_modules)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic, where algorithm.adv-estimator is gae."""

    model: str = ""
    """A Hugging Face folder to begin with; empty: the policy's, with a head of zeros."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    warmup_steps: int = 0
    """First steps that train the critic alone."""

    def __post_init__(self) -> None:
        check_at_least("critic.warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """LLM RLHF: GRPO on a reasoning-gym task, or on your own prompts and reward."""

    name: str = "default"
    """The run's folder is RUNS_DIR/NAME."""
    runs_dir: str = "runs"
    """Where run folders are."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on with the run of this name; never: start over in a new folder NAME-2, NAME-3, ..."""
    model: str = ""
    """A local Hugging Face folder of a causal LM; empty: a tiny one is made and warmed up."""
    reward: str = ""
    """PATH.py:function, a function of (prompt, completion, row); math-verify; or code, which runs the row's tests in a
    sandbox. Tasks bring their own verifier."""
    answer_after: str = ""
    """A task's answer is what follows the last occurrence of this; empty: the whole completion."""
    seed: int = 0
    """Seed of everything random but the order of prompts."""
    runtime: Literal["inline", "ray"] = "inline"
    """inline: all controllers in this process; ray: controllers, engines and training ranks are actors of a Ray
    cluster, and what dies is replaced."""
    controllers: int = 1
    """SPMD controllers, each with a slice of the prompts, and on ray with engines of its own."""
    threads: int = 0
    """Threads of matrix products; 0: one a core."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the engine's weights and of all activations; the weights in training are float32."""
    task: TaskConfig = field(default_factory=TaskConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_calls: RewardCallsConfig = field(default_factory=RewardCallsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        check_at_least("controllers", self.controllers, 1)
        check_at_least("threads", self.threads, 0)
        check_at_least("seed", self.seed, 0)
        check_run_name(self.name)
        self._check_group()
        longest = self.data.max_length
        if self.actor.ppo_max_token_len < longest:
            raise UserError(
                f"actor.ppo_max_token_len is {self.actor.ppo_max_token_len}: at least data.max_prompt_length + "
                f"data.max_response_length = {longest} is needed, so that every sample fits a micro-batch"
            )
        if self.actor.router_replay == "R2" and self.algorithm.old_log_probs != "trainer":
            raise UserError(
                f"actor.router_replay is 'R2' and algorithm.old_log_probs is {self.algorithm.old_log_probs!r}: "
                "'trainer' is needed, whose pass for the old log-probs is what is replayed"
            )
        if self.algorithm.overlong.buffer_len > self.data.max_response_length:
            raise UserError(
                f"algorithm.overlong.buffer_len is {self.algorithm.overlong.buffer_len}: at most "
                f"data.max_response_length={self.data.max_response_length} is needed"
            )
        if self.rollout.multi_turn.max_revisions and not self.data.train_files:
            raise UserError(
                f"rollout.multi_turn.max_revisions is {self.rollout.multi_turn.max_revisions} without "
                "data.train_files: prompts of files are needed, whose messages a revision can follow"
            )
        if self.rollout.partial_rollout and self.algorithm.estimator.needs_greedy:
            raise UserError(
                f"rollout.partial_rollout is true and algorithm.adv_estimator is {self.algorithm.adv_estimator!r}: "
                "another estimator is needed, for its greedy responses are of the present weights"
            )
        if self.runtime == "ray":
            self._check_ray()
        if self.placement.strategy != "split":
            self._check_placement()
        if self.data.image_key:
            self._check_images()
        if self.data.train_files and self.task.name:
            raise UserError(
                f"data.train_files and task.name={self.task.name!r} are both set: one source of prompts is needed"
            )

    @property
    def num_ray_engines(self) -> int:
        """Replicas of the policy's engine on ray."""
        return self.rollout.num_processes or self.controllers

    @property
    def num_ray_judges(self) -> int:
        """Replicas of a judge's engine on ray; 0: no model that the run starts is asked for verdicts."""
        if not self.reward_model.is_judge or self.reward_model.judge.is_on_servers:
            return 0
        if self.placement.strategy == "colocated":
            return self.num_ray_engines
        return self.reward_model.judge.num_processes or 1

    @property
    def sizes(self) -> Sizes:
        """Processes of each role on ray."""
        return Sizes(
            controllers=self.controllers,
            engines=self.num_ray_engines,
            judges=self.num_ray_judges,
            ranks=self.trainer.num_processes,
            in_turns=self.placement.strategy == "colocated",
        )

    @property
    def rank_unit(self) -> int:
        """Ranks come and go by whole replicas, and experts are on so many of them."""
        parallel = self.trainer.parallel
        return math.lcm(
            parallel.model_parallel_size, parallel.pipeline_model_parallel_size * parallel.expert_model_parallel_size
        )

    def with_sizes(self, sizes: Sizes) -> Self:
        """The same settings for other sizes."""
        reward_model = self.reward_model
        if sizes.judges:
            reward_model = replace(reward_model, judge=replace(reward_model.judge, num_processes=sizes.judges))
        return replace(
            self,
            controllers=sizes.controllers,
            rollout=replace(self.rollout, num_processes=sizes.engines),
            reward_model=reward_model,
            trainer=replace(self.trainer, num_processes=sizes.ranks),
            placement=replace(self.placement, strategy="colocated") if sizes.in_turns else self.placement,
        )

    def _check_group(self) -> None:
        fewest = self.algorithm.estimator.min_group_size
        if self.rollout.n < fewest:
            raise UserError(
                f"rollout.n is {self.rollout.n}; expected at least {fewest} for algorithm.adv_estimator "
                f"{self.algorithm.adv_estimator!r}, which compares the responses of a group"
            )
        if self.rollout.n > 1:
            return
        if self.algorithm.filter_groups:
            raise UserError(
                f"rollout.n is {self.rollout.n}; expected at least 2 with algorithm.filter_groups, which drops groups "
                "whose responses all score alike, or algorithm.filter_groups False"
            )
        if self.reward_model.is_pairwise:
            raise UserError(
                f"rollout.n is {self.rollout.n}; expected at least 2 with reward_model.judge.pairwise, which compares "
                "the responses of a group"
            )

    def _check_ray(self) -> None:
        if self.rollout.is_on_servers:
            raise UserError(f"runtime is 'ray' and rollout.engine is {self.rollout.engine!r}: hf or vllm is needed")
        check_engines(self.rollout.num_processes, controllers=self.controllers)

    def _check_placement(self) -> None:
        if self.runtime != "ray" or not self.num_ray_judges:
            raise UserError(
                f"placement.strategy is {self.placement.strategy!r}, runtime is {self.runtime!r} and "
                f"reward_model.kind is {self.reward_model.kind!r}: the policy and a judge share engines or devices, "
                "for which 'ray' and a judge that is not on servers are needed"
            )
        if self.placement.strategy == "colocated":
            judges = self.reward_model.judge.num_processes
            check_judges_in_turns(judges, engines=self.num_ray_engines, setting="reward_model.judge.num_processes")

    def _check_images(self) -> None:
        sizes = self.trainer.parallel
        unfit = {
            "model is ''": not self.model,
            f"trainer.backend is {self.trainer.backend!r}": self.trainer.backend != "torch",
            f"trainer.parallel.context_parallel_size is {sizes.context_parallel_size}": sizes.context_parallel_size > 1,
            f"rollout.engine is {self.rollout.engine!r}": not self.rollout.takes_images,
            "rollout.multi_turn makes several turns": bool(
                self.rollout.multi_turn.environment or self.rollout.multi_turn.max_revisions
            ),
            f"algorithm.adv_estimator is {self.algorithm.adv_estimator!r}": self.algorithm.estimator.needs_critic,
        }
        if found := [name for name, is_unfit in unfit.items() if is_unfit]:
            raise UserError(
                f"data.image_key is {self.data.image_key!r} and {found[0]}: images need a vision-language model, torch "
                "without context parallelism, the hf or vllm engine, single turns and no critic"
            )

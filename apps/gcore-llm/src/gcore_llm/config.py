"""Every setting of `gcore-llm train`, under verl's name where verl has it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from gcore_controller import RLHFConfig
from gcore_llm.agents.config import AgentConfig, MultiTurnConfig
from gcore_llm.evaluation.config import NEEDS_TOP_K, ValConfig
from gcore_llm.learning.config import AlgorithmConfig, DistillationConfig
from gcore_llm.sections import (
    ActorConfig,
    ActorOptimConfig,
    CriticConfig,
    DataConfig,
    JudgeConfig,
    RewardCallsConfig,
    RewardModelConfig,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
)
from gcore_rollout import reward_names
from gcore_runs import (
    BEST_SETTINGS,
    Amount,
    BaseRLConfig,
    BaseRolloutConfig,
    Bound,
    Count,
    FractionAbove0,
    NonNegative,
    ReadWith,
    UserError,
    adapter_settings,
    at_least,
    one_of,
    schedule_settings,
)
from gcore_runs.settings.checks import ABOVE_0, IS_SET, IS_TRUE, above, override
from gcore_runs.settings.sections import BACKEND_SETTINGS, EngineConfig
from gcore_trainer import get_advantage_estimator, get_policy_loss


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(EngineConfig, BaseRolloutConfig, section="rollout"):
    """Generation.

    Example:
        >>> rollout = RolloutConfig(engine="vllm", n=16, engine_options={"gpu_memory_utilization": 0.6})
        >>> rollout.is_on_servers
        False
    """

    n: Count = 8
    """Responses a prompt: the size of a group; at least 2 where the responses of a group are compared."""
    temperature: Annotated[float, above(0, "above 0: greedy samples never differ")] = 1.0
    """Divides the logits when sampling, and when the trainer scores."""
    top_p: FractionAbove0 = 1.0
    """Responses are drawn from the fewest most probable tokens with at least this probability together, after the
    temperature; 1: from all. The trainer normalises over the tokens that the engine kept."""
    top_k: Annotated[int, at_least(-1, "1 or more, or -1 for all tokens")] = -1
    """Responses are drawn from so many most probable tokens; -1 or 0: from all."""
    stop: Annotated[tuple[str, ...], Bound(all, "strings that are not empty")] = ()
    """Strings that end a response, such as '</answer>', as an end-of-sequence token does. The token that completes one
    and those before it are a part of the response, and are learned; in several turns, they end a turn."""
    max_num_seqs: NonNegative = 0
    """Most responses generated at once, by each replica; 0: with vllm on a GPU by its memory, and else 256."""
    partial_rollout: bool | Literal["wait"] = False
    """Start more prompts than are needed, stop when enough groups are complete, and continue the others in the next
    step, under its weights: no step waits for the longest responses. Agents continue to work. True: a group that gets
    older than max_staleness is dropped, and its prompt sampled again; wait: the step waits for it."""
    tail_batching: bool = False
    """Defer prompts with a long response to a few long steps, each of a whole batch of them; all others are short, and
    sample some more prompts than they need. Every prompt is trained on once, by samples of the present weights."""
    short_response_length: NonNegative = 0
    """In tail batching, the length at which a response defers its prompt, in tokens; 0: it starts as a quantile of the
    first step's lengths and follows the share that is deferred, which shall be half of the additional prompts."""
    over_sample_rate: Amount = 0.5
    """In partial rollout and in tail batching's short steps, how many more prompts are started, as a share of those
    that are needed. With trainer.schedule async, partial rollout starts as many as the engines have capacity for."""
    max_staleness: Count = 8
    """Largest age of a group that is trained on: the number of steps from the weights of its oldest token to those that
    it updates."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    val_kwargs: ValConfig = field(default_factory=ValConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_on_servers and not self.weights_dir:
            raise UserError(
                f"rollout.engine_options.weights_dir is not set; expected a folder with rollout.engine {self.engine!r}"
            )

    @property
    def planned_num_seqs(self) -> int:
        """Most responses at once, for plans and for engines that do not choose it."""
        return self.max_num_seqs or 256

    @property
    def has_several_turns(self) -> bool:
        """True if an environment, an agent or the reward answers turns."""
        return self.multi_turn.is_used or bool(self.agent.run)

    @property
    def weights_dir(self) -> str:
        """The folder through which servers get new weights; empty: there are no servers."""
        return str(self.engine_options.get("weights_dir", "")) if self.is_on_servers else ""


_NEEDS_CRITIC = Bound(
    lambda name: get_advantage_estimator(name).needs_critic,
    "gae, or PATH.py:function with a critic",
)
_READS_TOKEN_REWARDS = Bound(
    lambda name: get_advantage_estimator(name).reads_token_rewards,
    "gae, reinforce_plus_plus, or PATH.py:function that reads rewards of tokens",
)
_HAS_DUAL_CLIP = Bound(
    lambda loss_mode: getattr(get_policy_loss(loss_mode), "has_dual_clip", False),
    "vanilla, dppo_tv, dppo_kl, or PATH.py:function",
)
_ESTIMATOR = "algorithm.adv_estimator"
_LOSS = "actor.loss.loss_mode"
_CLIPS = one_of("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl", own=True)
_CONTINUES = Bound(bool, "true or wait")
_LEARNS_FROM_SCORES = Bound(
    lambda name: name not in ("distillation", "grpo_process"),
    "other than distillation and grpo_process",
)
_READ_WITH = (
    ReadWith(
        settings=("algorithm.kl_ctrl.kl_coef",),
        chosen_by={_ESTIMATOR: _READS_TOKEN_REWARDS},
        hint="actor.loss.kl_loss_coef is read with all",
    ),
    ReadWith(
        settings=("algorithm.kl_ctrl.kl_penalty",), chosen_by={"algorithm.kl_ctrl.kl_coef": ABOVE_0}
    ),
    ReadWith(
        settings=("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"),
        chosen_by={"algorithm.kl_ctrl.type": one_of("adaptive")},
    ),
    ReadWith(
        settings=("algorithm.overlong.buffer_len",), chosen_by={_ESTIMATOR: _LEARNS_FROM_SCORES}
    ),
    ReadWith(
        settings=("algorithm.overlong.penalty_factor",),
        chosen_by={"algorithm.overlong.buffer_len": ABOVE_0},
    ),
    ReadWith(
        settings=("algorithm.max_num_gen_batches",), chosen_by={"algorithm.filter_groups": IS_TRUE}
    ),
    ReadWith(
        settings=("algorithm.rollout_correction",),
        chosen_by={"algorithm.old_log_probs": one_of("trainer")},
    ),
    ReadWith(
        settings=("algorithm.rollout_correction.rollout_is_threshold",),
        chosen_by={"algorithm.rollout_correction.rollout_is": IS_SET},
    ),
    ReadWith(
        settings=("actor.loss.clip_ratio_low", "actor.loss.clip_ratio_high"),
        chosen_by={_LOSS: _CLIPS},
    ),
    ReadWith(settings=("actor.loss.clip_ratio_c",), chosen_by={_LOSS: _HAS_DUAL_CLIP}),
    ReadWith(settings=("actor.loss.kl_loss_type",), chosen_by={"actor.loss.kl_loss_coef": ABOVE_0}),
    ReadWith(
        settings=("actor.loss.max_response_length",),
        chosen_by={"actor.loss.loss_agg_mode": one_of("seq-mean-token-sum-norm")},
    ),
    ReadWith(
        settings=("actor.activation_offload", "actor.compile"),
        chosen_by={"trainer.backend": one_of("torch")},
    ),
    ReadWith(settings=("critic",), chosen_by={_ESTIMATOR: _NEEDS_CRITIC}),
    ReadWith(
        settings=("distillation.coef",),
        chosen_by={"distillation.teachers": IS_SET, "distillation.prompt": IS_SET},
    ),
    ReadWith(settings=("distillation.source_key",), chosen_by={"distillation.sources": IS_SET}),
    ReadWith(
        settings=("rollout.short_response_length",), chosen_by={"rollout.tail_batching": IS_TRUE}
    ),
    ReadWith(
        settings=("rollout.over_sample_rate",),
        chosen_by={"rollout.partial_rollout": _CONTINUES, "rollout.tail_batching": IS_TRUE},
    ),
    ReadWith(
        settings=("rollout.max_staleness",),
        chosen_by={
            "rollout.partial_rollout": _CONTINUES,
            "trainer.schedule": one_of("one_step_off", "async"),
        },
    ),
    ReadWith(settings=("reward_model.weight",), chosen_by={"reward_model.path": IS_SET}),
    ReadWith(settings=("reward_model.judge",), chosen_by={"reward_model.kind": one_of("judge")}),
    ReadWith(
        settings=("reward_model.steps", "reward_model.step_separator"),
        chosen_by={
            "reward_model.kind": one_of("classifier"),
            "reward_model.judge.method": one_of("steps"),
        },
    ),
    ReadWith(
        settings=("reward_model.step_end",), chosen_by={"reward_model.kind": one_of("classifier")}
    ),
    adapter_settings("actor.", "export_merged"),
    ReadWith(settings=("actor.optim.muon_lr",), chosen_by={"actor.optim.name": one_of("muon")}),
    schedule_settings("actor.optim"),
    *BACKEND_SETTINGS,
    BEST_SETTINGS,
)
"""The settings that only some algorithms or libraries read; `docs/reference/settings-train.md` lists them."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(BaseRLConfig):
    """LLM RLHF: GRPO on a reasoning-gym task, or on your own prompts and reward.

    Example:
        >>> config = replace(embedded(), rollout=RolloutConfig(n=16))
        >>> config.loop.train_batch_size * config.rollout.n  # responses a step
        512
    """

    model_settings: ClassVar[tuple[str, ...]] = (
        "model",
        "critic.model",
        "reward_model.path",
        "reward_model.judges.*.path",
        "distillation.teachers",
    )
    tables: ClassVar[Mapping[str, str]] = {
        "critic.optim": "critic_optimizer",
        "trainer.megatron": "trainer.megatron_config",
    }
    read_with: ClassVar[tuple[ReadWith, ...]] = _READ_WITH
    may_change: ClassVar[tuple[str, ...]] = (
        *BaseRLConfig.may_change,
        "trainer.backend",
        "trainer.parallel",
        "trainer.megatron",
        "rollout.urls",
        "rollout.engine_options",
        "reward_model.judge*.num_processes",
        "reward_model.judge*.urls",
        "reward_calls.max_failed_share",
        "rollout.colocated",
        "rollout.val_kwargs",
        "actor.export_merged",
    )

    model: str = ""
    """A causal LM: a Hugging Face folder, or NAMESPACE/NAME[@REVISION] on its Hub; empty: a tiny one is made."""
    reward: str = ""
    """PATH.py:function, a function of (prompt, completion, row); math-verify, gsm8k, aime or multiple-choice, which
    compare with the row's column answer; or code, which runs the row's tests in a sandbox. Tasks bring their own
    verifier."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the reward by name, such as a threshold, in addition to those of each call; on the command line
    --reward-kwargs.NAME and a value. In a sum of rewards, each gets those that it has a parameter for."""
    answer_after: str = ""
    """A task's answer is what follows the last occurrence of this; empty: the whole completion."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations, of engines and in training; auto: bfloat16 on CUDA, else float32. In
    bfloat16, updates are made to float32 copies of the weights, and checkpoints hold these."""
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    reward_calls: RewardCallsConfig = field(default_factory=RewardCallsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task.check_only_source(self.data.train_files, of="prompts")
        self._check_group()
        samples_more = self.rollout.over_sample_rate > 0 or not self.rollout.tail_batching
        self.require("rollout.over_sample_rate", samples_more, "above 0 with rollout.tail_batching")
        # Raises for an entry that the optimizer does not have.
        assert self.critic_optimizer
        algorithm = self.algorithm
        self._check_options()
        rollout = self.rollout
        longest = self.data.max_length
        response = self.data.max_response_length
        together = f"data.max_prompt_length + data.max_response_length = {longest}"
        if rollout.agent.run or rollout.multi_turn.has_branches:
            longest += response
            together = f"data.max_prompt_length + 2 * data.max_response_length = {longest}"
        expected = f"at least {together}, so that every sample fits a micro-batch"
        self.require("actor.ppo_max_token_len", self.actor.ppo_max_token_len >= longest, expected)
        limit = f"data.max_response_length={response}"
        fits = algorithm.overlong.buffer_len <= response
        self.require("algorithm.overlong.buffer_len", fits, f"at most {limit}")
        is_below = rollout.short_response_length < response
        self.require("rollout.short_response_length", is_below, f"below {limit}")
        replay = self.actor.router_replay
        has_old = algorithm.old_log_probs == "trainer" or replay != "R2"
        expected = "'trainer' with actor.router_replay 'R2', which replays its pass"
        self.require("algorithm.old_log_probs", has_old, expected)
        has_experts = "return_routed_experts" in rollout.kind.own_options or replay != "R3"
        expected = f"'disabled' or 'R2' with rollout.engine {rollout.engine!r}, which returns none"
        self.require("actor.router_replay", has_experts, expected)
        has_messages = self.data.train_files or not rollout.multi_turn.max_revisions
        files = "data.train_files, whose messages a revision can follow"
        self.require("rollout.multi_turn.max_revisions", has_messages, f"0 without {files}")
        rollout.agent.check_with(self)
        several_turns = "several turns" if rollout.has_several_turns else ""
        estimator = f"algorithm.adv_estimator {algorithm.adv_estimator!r}"
        greedy = estimator if algorithm.estimator.needs_greedy else ""
        squares = estimator if algorithm.estimator.needs_squared_norms else ""
        trainer = self.trainer
        overlapped = f"trainer.schedule {trainer.schedule!r}" if trainer.schedule != "sync" else ""
        simulated = "a simulation" if self.is_simulated else ""
        partial = str(rollout.partial_rollout).lower()
        continued = f"rollout.partial_rollout {partial}" if rollout.partial_rollout else ""
        conflicts: dict[tuple[str, str], dict[str, str]] = {}
        if rollout.partial_rollout:
            reason = "whose greedy responses are of the present weights"
            conflicts["rollout.partial_rollout", "false"] = {greedy: reason}
        if self.reward_model.compares:
            conflicts["reward_model.judge.method", "score, rubric or steps"] = {
                several_turns: "because one response to one prompt is compared",
                greedy: "whose greedy response is in no group",
            }
        truncates = rollout.top_p < 1 or rollout.top_k > 0
        if truncates:
            name = ("rollout.top_p", "1") if rollout.top_p < 1 else ("rollout.top_k", "-1")
            conflicts[name] = {several_turns: "which keep no sets of tokens"}
            if "return_sampling_mask" not in rollout.kind.own_options:
                reason = "which does not return the tokens it kept; hf and vllm do"
                conflicts[name][f"rollout.engine {rollout.engine!r}"] = reason
        if rollout.tail_batching:
            conflicts["rollout.tail_batching", "false"] = {
                overlapped: "whose batches are not by the present weights",
                continued: "which continues long responses instead",
            }
        if self.takes_turns:
            conflicts["rollout.colocated", "false"] = {
                overlapped: "which samples while it trains",
                simulated: "whose roles have devices of their own",
            }
        if algorithm.filter_groups:
            taught = ""
            if self.distillation.is_used:
                taught = "distillation.teachers or distillation.prompt"
            elif algorithm.learns_environment:
                taught = "algorithm.options.echo_coef"
            elif algorithm.estimator.moves_baselines or algorithm.estimator.centers_batch:
                taught = estimator
            reason = "from which every group learns"
            conflicts["algorithm.filter_groups", "false"] = {taught: reason}
        if self.distillation.prompt:
            images = f"data.image_key {self.data.image_key!r}" if self.data.image_key else ""
            conflicts["distillation.prompt", "''"] = {
                several_turns: "whose conversation is not one prompt's",
                images: "whose images the text has no place for",
            }
        if algorithm.old_log_probs == "rollout":
            reason = "which needs probabilities of all tokens"
            conflicts["algorithm.old_log_probs", "'trainer'"] = {squares: reason}
        if algorithm.rollout_correction.rollout_is:
            reason = "which has no importance weights"
            conflicts["algorithm.rollout_correction.rollout_is", "none"] = {squares: reason}
        for (name, accepted), reasons in conflicts.items():
            # A condition that does not hold is empty.
            for condition, reason in reasons.items():
                self.require(name, not condition, f"{accepted} with {condition}, {reason}")
        on_gpu = self.device.startswith("cuda")
        needs_top_k = on_gpu and rollout.engine == "vllm" and truncates
        self.require("rollout.top_k", rollout.top_k > 0 or not needs_top_k, NEEDS_TOP_K)
        rollout.val_kwargs.check(
            self.data.val_files, compares=self.reward_model.compares, needs_top_k=needs_top_k
        )
        self.distillation.check_with(algorithm.adv_estimator, is_simulated=self.is_simulated)
        if not algorithm.rollout_correction.is_active:
            rollout.check_precision()
        self._check_memory_settings()
        has_adapters = self.actor.lora_rank > 0
        on_cpu = self.device == "cpu"
        unfit = {"overlap_param_gather": has_adapters, "transformer_engine": has_adapters or on_cpu}
        condition = "actor.lora_rank" if has_adapters else "device cpu"
        for name, is_unfit in unfit.items():
            if is_unfit and getattr(trainer.megatron_config, name) is True:
                expected = f"expected auto or false with {condition}"
                raise UserError(f"trainer.megatron.{name} is true; {expected}")
        if self.runtime == "ray" and rollout.is_on_servers:
            self._check_servers_on_ray()
        if self.data.image_key:
            self._check_images()

    def check_inputs(self) -> None:
        """Raise `UserError` if the model, the prompts or the reward is missing; a task brings them all."""
        self.require(
            "reward_kwargs", bool(self.reward) or not self.reward_kwargs, "none without reward"
        )
        if self.task.name:
            return
        if not self.model:
            raise UserError(
                "model is not set; expected a Hugging Face folder, or a model's name on its Hub, with data.train_files"
            )
        if not self.data.train_files:
            raise UserError(
                "data.train_files is not set; expected one or more files, or data sets on the Hub, with model"
            )
        if not self.has_reward and self.algorithm.adv_estimator != "distillation":
            raise UserError(
                f"reward is not set: PATH.py:function, {', '.join(reward_names())} is needed with data.train_files, "
                "or a reward_model, or an environment or agent that rewards, or algorithm.adv_estimator distillation"
            )

    @property
    def has_reward(self) -> bool:
        """True if rows of files are scored: by a reward, a reward model, an environment or an agent."""
        has_world = bool(self.rollout.multi_turn.environment or self.rollout.agent.run)
        return bool(self.reward) or self.reward_model.is_used or has_world

    @property
    def critic_optimizer(self) -> ActorOptimConfig:
        """The critic's optimizer: the actor's with a rate of its own, and with what critic.optim has."""
        return override(self.actor.optim, {"lr": 1e-5} | self.critic.optim, "critic.optim")

    @property
    def set_rewards(self) -> dict[str, str]:
        """The rewards that held-out sets have in place of the run's, by the set's name."""
        if not self.data.val_files:
            return {}
        return self.rollout.val_kwargs.rewards(self.data.val_files)

    @property
    def can_take_turns(self) -> bool:
        return self.trainer.schedule == "sync" and (self.num_engines > 0 or self.runtime != "ray")

    @property
    def num_engines(self) -> int:
        if self.rollout.is_on_servers:
            return 0
        return super().num_engines

    @property
    def judge(self) -> tuple[str, EngineConfig | None]:
        return "reward_model.judge", next(iter(self.judges.values()), None)

    @property
    def judges(self) -> dict[str, JudgeConfig]:
        return self.reward_model.started_judges

    @property
    def gpus_per_controller(self) -> float:
        if self.reward_model.kind == "classifier" and self.device.startswith("cuda"):
            return self.ray.gpus_per_reward_model
        return 0.0

    @property
    def devices_per_engine(self) -> int:
        return self.rollout.tensor_parallel_size

    @property
    def rank_unit(self) -> int:
        """Training ranks are started and stopped by whole model-parallel, expert-parallel and sharding groups."""
        parallel = self.trainer.parallel
        experts = parallel.pipeline_model_parallel_size * parallel.expert_model_parallel_size
        return math.lcm(parallel.model_parallel_size, experts, parallel.fsdp_size or 1)

    @property
    def loop(self) -> RLHFConfig:
        return replace(
            super().loop,
            schedule=self.trainer.schedule,
            partial_rollout=self.rollout.partial_rollout,
            tail_batching=self.rollout.tail_batching,
            short_length=self.rollout.short_response_length,
            over_sample_rate=self.rollout.over_sample_rate,
            max_staleness=self.rollout.max_staleness,
            num_workers=self.data.num_workers,
            max_failed_share=self.reward_calls.max_failed_share,
        )

    def _check_options(self) -> None:
        algorithm = self.algorithm
        loss = self.actor.loss.loss_mode
        known = {**algorithm.advantage_options}
        # Without options the default loss has nothing to check, and is not imported.
        if algorithm.options or loss != "vanilla":
            known |= algorithm.loss_options(loss)
        chosen = f"{_ESTIMATOR} {algorithm.adv_estimator!r} and {_LOSS} {loss!r}"
        expected = f"{', '.join(known)} with {chosen}"
        for name, value in algorithm.options.items():
            if name not in known:
                raise UserError(f"algorithm.options.{name} is {value!r}; expected {expected}")
        if algorithm.learns_environment and not self.rollout.has_several_turns:
            raise UserError(
                f"algorithm.options.echo_coef is {algorithm.options['echo_coef']}; expected 0 without rollout.agent or "
                "rollout.multi_turn, whose environment's tokens it is for"
            )

    def _check_group(self) -> None:
        algorithm = self.algorithm
        needed_by = {
            f"for algorithm.adv_estimator {algorithm.adv_estimator!r}, which compares the responses of a group": (
                algorithm.estimator.min_group_size
            ),
            "with algorithm.filter_groups, which drops groups whose responses all score alike, or "
            "algorithm.filter_groups False": 2 * algorithm.filter_groups,
            "with a reward_model.judge.method that compares responses": 2
            * self.reward_model.compares,
        }
        for reason, fewest in needed_by.items():
            self.require("rollout.n", self.rollout.n >= fewest, f"at least {fewest} {reason}")

    def _check_servers_on_ray(self) -> None:
        """Raise `UserError` for settings of a cluster that servers of the policy do not take."""
        num_urls = len(self.rollout.urls)
        engine = f"rollout.engine {self.rollout.engine!r} and runtime 'ray'"
        expected = f"at most one for each of the {num_urls} rollout.urls"
        self.require("controllers", self.controllers <= num_urls, expected)
        self.require(
            "rollout.colocated", self.rollout.colocated is not True, f"auto or false with {engine}"
        )
        self.require("ray.weight_sync", self.ray.weight_sync == "full", f"'full' with {engine}")

    def _check_memory_settings(self) -> None:
        """Raise `UserError` for optimizers and compilation that do not fit other settings of memory."""
        is_torch = self.trainer.backend == "torch"
        with_backend = f"with trainer.backend {self.trainer.backend!r}"
        optimizers = {"actor": self.actor.optim, "critic": self.critic_optimizer}
        for role, optimizer in optimizers.items():
            if not is_torch and optimizer.name != "adamw":
                raise UserError(
                    f"{role}.optim.name is {optimizer.name!r}; expected 'adamw' {with_backend}"
                )
        share = self.actor.enable_gradient_checkpointing
        self.require(
            "actor.enable_gradient_checkpointing",
            is_torch or share in (True, False, "auto"),
            f"auto, true or false {with_backend}",
        )
        self.require(
            "actor.offload",
            is_torch or self.actor.offload != "all",
            f"'none' or 'optimizer' {with_backend}",
        )
        offloads = self.actor.compile and self.actor.activation_offload
        self.require(
            "actor.compile",
            not offloads,
            "false with actor.activation_offload, whose hooks are not compiled",
        )

    @property
    def image_conflicts(self) -> list[str]:
        """The settings with which no image can be taken, whatever the model is."""
        trainer = self.trainer
        num_cp = trainer.parallel.context_parallel_size
        unfit = {
            "model is ''": not self.model,
            f"trainer.backend is {trainer.backend!r}": trainer.backend != "torch",
            f"trainer.parallel.context_parallel_size is {num_cp}": num_cp > 1,
            f"rollout.engine is {self.rollout.engine!r}": not self.rollout.kind.takes_images,
            f"algorithm.adv_estimator is {self.algorithm.adv_estimator!r}": self.algorithm.estimator.needs_critic,
        }
        return [name for name, is_unfit in unfit.items() if is_unfit]

    def _check_images(self) -> None:
        conflicts = self.image_conflicts
        if self.rollout.has_several_turns:
            conflicts.append("rollout makes several turns")
        if conflicts:
            raise UserError(
                f"{conflicts[0]}; expected a vision-language model, torch without context parallelism, the hf or vllm "
                f"engine, single turns and no critic with data.image_key {self.data.image_key!r}"
            )


@dataclass(frozen=True, kw_only=True)
class TrainArgs(TrainConfig):
    """The settings of a run, and options of the command train that are no settings of the run."""

    dry_run: bool = False
    """Print which role would be on which GPU with how many bytes, and whether it fits; load and start nothing."""
    dry_run_device: str = ""
    """GPU that a dry run plans for: H100, H200, A100, ... or its gigabytes; empty: this machine's, or H100 without."""
    dry_run_nodes: NonNegative = 0
    """Nodes that a dry run with runtime ray plans for; 0: as many as the processes need."""
    dry_run_gpus_per_node: NonNegative = 0
    """GPUs of each; 0: 8 with runtime ray, and otherwise the plan is of the one GPU with the first rank and engine."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)

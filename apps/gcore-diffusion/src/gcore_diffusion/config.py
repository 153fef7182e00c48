"""Every setting of a run. Names follow verl's and Flow-GRPO's where they have the thing."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from gcore_diffusion.reward_config import RewardConfig
from gcore_runs.errors import UserError, check_at_least, check_port, check_run_name
from gcore_runs.placement_config import PlacementConfig
from gcore_runs.ray_config import RayConfig
from gcore_runs.sizes import Sizes, check_engines, check_judges_in_turns
from gcore_trainer import DenoisingPolicyConfig, DiffusionDPOConfig, LoRAConfig, NFTConfig, OptimizerConfig

Algorithm = Literal["flow_grpo", "ddpo", "grpo_guard", "nft", "dpo", "reward_gradient"]
KernelName = Literal["flow_sde", "dance_sde", "cps", "ddim", "ode"]

NOISELESS: tuple[Algorithm, ...] = ("nft", "dpo", "reward_gradient")
"""Algorithms that look at no log-probability: their images may be made without noise."""

MAY_CHANGE = (
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.prometheus_port",
    "trainer.prometheus_host",
    "resume",
    "runtime",
    "ray",
    "placement",
    "controllers",
    "threads",
    "device",
    "trainer.num_processes",
    "rollout.num_processes",
    "rollout.max_num_images",
    "reward.judge.num_processes",
    "reward.judge.max_num_seqs",
)
"""Settings that a resumed run may be given anew."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The embedded model: a tiny Stable Diffusion 3 of coloured digits, taught on scikit-learn's."""

    num_steps: int = 300
    """Updates of its teaching; less makes it worse at digits."""
    batch_size: int = 128
    """Images of an update."""
    cache_dir: str = ""
    """Where a taught model is kept for later runs; empty: gcore-diffusion in the user's cache folder."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size"):
            check_at_least(f"demo.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts: from the user's files; with the embedded model, its own."""

    train_files: tuple[str, ...] = ()
    """JSONL files of prompts, or text files with one in each line; further columns reach the reward as they are."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts; none: data.val-size prompts are taken out of the training files."""
    val_size: int = 32
    """How many prompts to hold out if there are no val-files; never more than a tenth of them."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    train_batch_size: int = 8
    """Prompts a step, each with rollout.n images."""
    shuffle_seed: int = 0
    """Seed of the order of prompts."""

    def __post_init__(self) -> None:
        check_at_least("data.train_batch_size", self.train_batch_size, 1)
        for name in ("val_size", "shuffle_seed"):
            check_at_least(f"data.{name}", getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How images are made."""

    n: int = 16
    """Images of each prompt: the group that advantages compare."""
    num_inference_steps: int = 10
    """Denoising steps of an image in training."""
    guidance_scale: float = 1.0
    """Of classifier-free guidance in training; 1: none."""
    kernel: KernelName = "flow_sde"
    """How steps with noise are made: Flow-GRPO's (flow_sde), DanceGRPO's (dance_sde), coefficient-preserving (cps),
    DDIM's (ddim, for models of DDPM's kind), or none with noise (ode)."""
    noise_level: float = 0.7
    """Of that noise; of ddim its eta."""
    window_size: int = 0
    """Steps with noise, which are those trained on: Flow-GRPO-Fast's one or two; 0: all."""
    window_range: tuple[int, int] = (0, 0)
    """First step and the one behind the last that a window may have; (0, 0): the first half of the steps."""
    window_schedule: Literal["random", "sliding"] = "random"
    """random: each prompt has a window of its own, drawn anew (Flow-GRPO-Fast); sliding: all have the same, which goes
    from the first steps to the last (MixGRPO)."""
    window_steps: int = 25
    """Training steps after which a sliding window moves by one."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels; (0, 0): the pipeline's own."""
    max_sequence_length: int = 0
    """Tokens of a prompt, where the pipeline has a limit to set; 0: its own. Shorter is faster."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the sampler's weights."""
    max_num_images: int = 64
    """Most images that an engine makes at once."""
    num_processes: int = 0
    """Engines, each a process of its own; 0: one in the controllers' process, or on ray one for each controller."""
    eval_num_inference_steps: int = 0
    """Steps of held-out images, made without noise; 0: as in training."""
    eval_guidance_scale: float = 0.0
    """Of held-out images; 0: as in training."""
    eval_n: int = 4
    """Held-out images of a prompt."""

    def __post_init__(self) -> None:
        if self.n < 2:
            raise UserError(f"rollout.n is {self.n}: at least 2 is needed, for images of a prompt are compared")
        for name in ("num_inference_steps", "window_steps", "max_num_images", "eval_n"):
            check_at_least(f"rollout.{name}", getattr(self, name), 1)
        for name in (
            "window_size",
            "num_processes",
            "eval_num_inference_steps",
            "max_sequence_length",
            "guidance_scale",
            "eval_guidance_scale",
        ):
            check_at_least(f"rollout.{name}", getattr(self, name), 0)
        if not 0 < self.noise_level < math.inf:
            raise UserError(f"rollout.noise_level is {self.noise_level}: a finite number above 0 is needed")
        if self.window_size > self.num_inference_steps:
            raise UserError(
                f"rollout.window_size is {self.window_size}: at most rollout.num_inference_steps="
                f"{self.num_inference_steps} is needed"
            )
        first, end = self.range_of_window
        if not 0 <= first < end <= self.num_inference_steps or end - first < self.window_size:
            raise UserError(
                f"rollout.window_range is {self.window_range}: steps from 0 to {self.num_inference_steps}, at least "
                f"rollout.window_size={self.window_size} of them, are needed"
            )

    @property
    def pipeline_options(self) -> dict[str, int]:
        """Further arguments of the pipeline's call."""
        return {"max_sequence_length": self.max_sequence_length} if self.max_sequence_length else {}

    @property
    def range_of_window(self) -> tuple[int, int]:
        """First step and the one behind the last that a window may have."""
        if self.window_range != (0, 0):
            return self.window_range
        return 0, max(self.window_size, -(-self.num_inference_steps // 2))


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """From scores to an update."""

    name: Algorithm = "flow_grpo"
    """flow_grpo, ddpo, grpo_guard: policy gradients of the sampler's steps; nft: DiffusionNFT; dpo: Diffusion-DPO of
    the best and worst images of each prompt; reward_gradient: the gradient of a differentiable reward itself."""
    norm_adv_by: Literal["group", "global"] = "global"
    """Advantages are scores less their prompt's mean, over the standard deviation of the prompt's (group) or of the
    whole batch's (global)."""
    adv_clip_max: float = 5.0
    """Advantages are clipped to +- this."""
    filter_groups: bool = True
    """Prompts whose images all score alike are dropped, and others sampled in their place."""
    max_num_gen_batches: int = 4
    """Most waves of sampling a step; then the step trains on what it has."""
    timestep_fraction: float = 1.0
    """Share of the recorded steps that is trained on, drawn anew for each batch."""
    reward_gradient_steps: int = 1
    """Last steps of sampling that reward_gradient goes back through."""

    def __post_init__(self) -> None:
        check_at_least("algorithm.max_num_gen_batches", self.max_num_gen_batches, 1)
        check_at_least("algorithm.reward_gradient_steps", self.reward_gradient_steps, 1)
        if not 0 < self.timestep_fraction <= 1:
            raise UserError(f"algorithm.timestep_fraction is {self.timestep_fraction}: a number in (0, 1] is needed")
        if not 0 < self.adv_clip_max < math.inf:
            raise UserError(f"algorithm.adv_clip_max is {self.adv_clip_max}: a finite number above 0 is needed")


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The policy's training."""

    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-4, weight_decay=1e-4))
    loss: DenoisingPolicyConfig = field(default_factory=DenoisingPolicyConfig)
    nft: NFTConfig = field(default_factory=NFTConfig)
    dpo: DiffusionDPOConfig = field(default_factory=DiffusionDPOConfig)
    lora_rank: int = 0
    """Train adapters of this rank, and nothing else; 0: all parameters."""
    lora_alpha: int = 32
    """An adapter's output is scaled by lora-alpha / lora-rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, such as to_q; all-linear: all."""
    num_updates: int = 2
    """Updates a step, each on its share of the batch."""
    micro_batch_size: int = 96
    """Most images in a pass: bounds memory, changes nothing else."""
    ema_decay: float = 0.0
    """Of an average of the weights, which is what is evaluated and exported; 0: there is none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the passes; weights stay in float32."""
    enable_gradient_checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the rest again."""

    def __post_init__(self) -> None:
        for name in ("num_updates", "micro_batch_size", "lora_alpha"):
            check_at_least(f"actor.{name}", getattr(self, name), 1)
        check_at_least("actor.lora_rank", self.lora_rank, 0)
        if not 0 <= self.ema_decay < 1:
            raise UserError(f"actor.ema_decay is {self.ema_decay}: a number in [0, 1) is needed")

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters, if there are any."""
        if not self.lora_rank:
            return None
        return LoRAConfig(rank=self.lora_rank, alpha=self.lora_alpha, target_modules=self.target_modules)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The run."""

    total_training_steps: int = 50
    """Steps of the whole run."""
    num_processes: int = 1
    """Ranks that parameters (FSDP2) and images are divided among; more than one on ray."""
    test_freq: int = 10
    """Steps between evaluations on held-out prompts."""
    save_freq: int = 20
    """Steps between checkpoints."""
    max_ckpt_to_keep: int = 2
    """Checkpoints that are kept, the last ones."""
    tensorboard: bool = True
    """Write TensorBoard files beside metrics.jsonl."""
    prometheus_port: int = 0
    """Serve metrics for Prometheus at this port; 0: do not."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve at."""

    def __post_init__(self) -> None:
        for name in ("total_training_steps", "test_freq", "save_freq", "max_ckpt_to_keep", "num_processes"):
            check_at_least(f"trainer.{name}", getattr(self, name), 1)
        check_port("trainer.prometheus_port", self.prometheus_port)


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """RLHF of a diffusion or flow-matching model: on coloured digits, or on your own pipeline, prompts and reward."""

    name: str = "default"
    """The run's folder is RUNS_DIR/NAME."""
    runs_dir: str = "runs"
    """Where run folders are."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on with the run of this name; never: start over in a new folder NAME-2, NAME-3, ..."""
    model: str = ""
    """A local folder of a diffusers pipeline with a flow-matching or DDIM scheduler; empty: a tiny one is made and
    taught."""
    seed: int = 0
    """Seed of everything random but the order of prompts."""
    runtime: Literal["inline", "ray"] = "inline"
    """inline: all controllers in this process; ray: controllers, engines, judges and training ranks are actors of a Ray
    cluster, and what dies is replaced."""
    controllers: int = 1
    """Controllers, each with a share of the prompts, and on ray with engines of its own."""
    threads: int = 0
    """Threads of torch in each process; 0: all cores."""
    device: str = "auto"
    """cpu, cuda, cuda:NUMBER or auto."""
    command: Literal["diffusion"] = "diffusion"
    """What made the run; for its report."""
    demo: DemoConfig = field(default_factory=DemoConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    @property
    def policy_loss(self) -> DenoisingPolicyConfig:
        """Of the algorithm's mode."""
        return replace(self.actor.loss, loss_mode="guard" if self.algorithm.name == "grpo_guard" else "vanilla")

    @property
    def engine_device(self) -> str:
        """Of an engine; on ray each sees its own GPU alone."""
        return "cuda" if self.runtime == "ray" and self.device.startswith("cuda") else self.device

    @property
    def sizes(self) -> Sizes:
        """Processes of each role on ray."""
        engines = self.rollout.num_processes or self.controllers
        in_turns = self.placement.strategy == "colocated"
        judges = 0
        if self.reward.is_judged:
            judges = engines if in_turns else self.reward.judge.num_processes or 1
        return Sizes(
            controllers=self.controllers,
            engines=engines,
            judges=judges,
            ranks=self.trainer.num_processes,
            in_turns=in_turns,
        )

    @property
    def rank_unit(self) -> int:
        """Any number of ranks will do."""
        return 1

    def with_sizes(self, sizes: Sizes) -> Self:
        """The same settings for other sizes."""
        judge = replace(self.reward.judge, num_processes=sizes.judges)
        return replace(
            self,
            controllers=sizes.controllers,
            rollout=replace(self.rollout, num_processes=sizes.engines),
            reward=replace(self.reward, judge=judge) if sizes.judges else self.reward,
            trainer=replace(self.trainer, num_processes=sizes.ranks),
            placement=replace(self.placement, strategy="colocated") if sizes.in_turns else self.placement,
        )

    def _check_runtime(self) -> None:
        if self.runtime == "inline" and self.trainer.num_processes > 1:
            raise UserError(
                f"trainer.num_processes is {self.trainer.num_processes} and runtime is 'inline': 'ray' is needed"
            )
        if self.runtime == "ray":
            check_engines(self.rollout.num_processes, controllers=self.controllers)
        if self.placement.strategy != "split" and (self.runtime != "ray" or not self.reward.is_judged):
            raise UserError(
                f"placement.strategy is {self.placement.strategy!r}, runtime is {self.runtime!r} and reward.kind is "
                f"{self.reward.kind!r}: engines and a judge share devices, for which 'ray' and 'judge' are needed"
            )
        if self.placement.strategy == "colocated":
            judges = self.reward.judge.num_processes
            check_judges_in_turns(judges, engines=self.sizes.engines, setting="reward.judge.num_processes")

    def __post_init__(self) -> None:
        check_at_least("controllers", self.controllers, 1)
        check_at_least("threads", self.threads, 0)
        check_at_least("seed", self.seed, 0)
        check_run_name(self.name)
        self._check_runtime()
        name, kernel = self.algorithm.name, self.rollout.kernel
        if name not in NOISELESS and kernel == "ode":
            raise UserError(
                f"rollout.kernel is 'ode' and algorithm.name is {name!r}: a kernel with noise is needed, for its steps "
                "have log-probabilities"
            )
        if name in NOISELESS and kernel not in ("ode", "ddim"):
            raise UserError(f"rollout.kernel is {kernel!r} and algorithm.name is {name!r}: 'ode' is needed, or 'ddim'")
        if name == "grpo_guard" and kernel == "ddim":
            raise UserError("rollout.kernel is 'ddim' and algorithm.name is 'grpo_guard': a kernel of a flow is needed")
        if self.algorithm.reward_gradient_steps > self.rollout.num_inference_steps:
            raise UserError(
                f"algorithm.reward_gradient_steps is {self.algorithm.reward_gradient_steps}: at most "
                f"rollout.num_inference_steps={self.rollout.num_inference_steps} is needed"
            )
        if self.model and not self.data.train_files:
            raise UserError("data.train_files is not set: one or more files of prompts are needed with model")
        if self.model and self.reward.needs_embedded_model:
            raise UserError(f"reward.kind is {self.reward.kind!r}: with model another one is needed")

"""Every setting of `gcore-diffusion train`, under verl's or Flow-GRPO's name, and recipes: settings to start from."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import tyro

from gcore_diffusion.reward_config import DEMO_REWARDS, DiffusionJudgeConfig, RewardConfig
from gcore_runs import (
    BEST_SETTINGS,
    AdapterSettings,
    Amount,
    BaseAlgorithmConfig,
    BaseDataConfig,
    BaseOptimConfig,
    BaseRLConfig,
    BaseRolloutConfig,
    Bound,
    Checked,
    Count,
    FractionAbove0,
    NonNegative,
    Positive,
    ReadWith,
    RLTrainerConfig,
    UserError,
    adapter_settings,
    at_least,
    one_of,
    schedule_settings,
)
from gcore_runs.settings.checks import ABOVE_0, IS_TRUE, FractionBelow1, override
from gcore_runs.simulation.config import BaseSimConfig, EngineModel
from gcore_trainer import DenoisingPolicyConfig

Algorithm = Literal[
    "flow_grpo",
    "ddpo",
    "grpo_guard",
    "flow_dppo",
    "nft",
    "awm",
    "dgpo",
    "crd",
    "dpo",
    "opd",
    "reward_gradient",
]
KernelName = Literal["flow_sde", "dance_sde", "cps", "ddim", "ode"]

_SHARDS = Bound(lambda size: size == "auto" or size >= 0, "auto, or 0 or more")

FORWARD: tuple[Algorithm, ...] = ("nft", "awm", "dgpo", "crd", "dpo")
"""Algorithms of finished images: they read no step of the sampler."""
GROUPED: tuple[Algorithm, ...] = ("dgpo", "crd")
"""Algorithms of which an update has all images of a prompt."""
NOISELESS: tuple[Algorithm, ...] = (*FORWARD, "reward_gradient")
"""Algorithms that use no log-probability: their images are made without noise, or by ddim."""
EVALUATED = {
    "val/score/mean": "reward",
    "val/held_out/mean": "reward not trained on",
    "val/diversity": "diversity within prompts",
}
"""Metrics of evaluations, and how they are called on the screen."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Checked, section="demo"):
    """The embedded model: a tiny Stable Diffusion 3 of coloured handwritten digits.

    Example:
        >>> demo = DemoConfig(num_steps=50, cache_dir="models")
        >>> DiffusionTrainArgs(demo=demo, reward=RewardConfig(kind="digit")).demo.batch_size
        128
    """

    num_steps: Count = 400
    """Updates of its pretraining; fewer make it worse at digits."""
    batch_size: Count = 128
    """Images an update."""
    cache_dir: str = ""
    """Folder where a pretrained model is kept for later runs; empty: gcore-diffusion in the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class DiffusionDataConfig(BaseDataConfig):
    """Prompts: from your files; with the embedded model, its own.

    Example:
        >>> data = DiffusionDataConfig(train_files=("prompts.jsonl",), prompt_key="caption", train_batch_size=32)
        >>> config = DiffusionConfig(model="model", data=data, reward=RewardConfig(kind="jpeg_compressibility"))
        >>> config.data.train_batch_size * config.rollout.n
        512
    """

    train_files: tuple[str, ...] = ()
    """JSONL, Parquet, Arrow or CSV files of prompts, text files with one in each line, or splits on the Hugging Face
    Hub, hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]; the reward gets the other columns as they are."""
    val_size: NonNegative = 32
    """How many prompts to hold out if there are no val-files; never more than a tenth of them."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    image_key: str = ""
    """Column of a prompt's images, for a pipeline that takes them: one, or a list, each a path (relative to the data
    file) or the bytes of an image file; the reward gets absolute paths in its row. Empty: none."""
    train_batch_size: Count = 8
    """Prompts a step, each with rollout.n images."""


@dataclass(frozen=True, kw_only=True)
class DiffusionRolloutConfig(BaseRolloutConfig, section="rollout"):
    """Sampling of images.

    Example:
        >>> rollout = DiffusionRolloutConfig(num_inference_steps=10, window_size=2)
        >>> rollout.range_of_window
        (0, 5)
        >>> replace(rollout, window_steps=25).range_of_window
        (0, 10)
    """

    n: Annotated[int, at_least(2, "at least 2: images of a prompt are compared")] = 16
    """Images of each prompt: the group that advantages compare."""
    num_inference_steps: Count = 10
    """Denoising steps of an image in training."""
    guidance_scale: Amount = 1.0
    """Scale of classifier-free guidance in training; 1: none."""
    negative_prompt: str = ""
    """Text that guidance leads away from, for all prompts, in training, evaluation and sampling; empty: the
    pipeline's own."""
    kernel: KernelName = "flow_sde"
    """How steps with noise are made: Flow-GRPO's (flow_sde), DanceGRPO's (dance_sde), Flow-CPS's with its unnormalised
    log-probs (cps), DDIM's (ddim, for models of DDPM's kind), or none with noise (ode)."""
    noise_level: Positive = 0.7
    """Level of the kernel's noise; of ddim its eta."""
    shared_noise: bool = False
    """Images of a prompt start from the same noise in training, and differ by that of their steps (DanceGRPO)."""
    window_size: NonNegative = 0
    """Number of steps with noise, which are those trained on: Flow-GRPO-Fast's one or two; 0: all."""
    window_range: tuple[int, int] = (0, 0)
    """First step and the one after the last that a window may have; (0, 0): the first half of the steps
    (Flow-GRPO-Fast), with window-steps above 0 all of them (MixGRPO)."""
    window_steps: NonNegative = 0
    """0: each prompt has a window of its own, drawn for each step (Flow-GRPO-Fast). Above 0: all have the same, which
    moves by one after so many training steps, from the first steps to the last, and then starts again (MixGRPO, arXiv
    2507.21802, which has 25)."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels; (0, 0): the pipeline's own."""
    max_sequence_length: NonNegative = 0
    """Tokens of a prompt, where the pipeline has a limit to set; 0: its own. Shorter is faster."""
    num_frames: NonNegative = 0
    """Frames of a video, where the pipeline makes videos; 0: its own number."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the sampler's weights."""
    compile: bool = False
    """Compile the blocks of the engines' denoiser (torch.compile), which takes a minute or more at the start."""
    offload_text_encoders: bool = False
    """Text encoders are in host memory, and on a GPU only while prompts are encoded; of no effect on CPU."""
    max_num_images: Count = 64
    """Most images that an engine makes at once."""
    colocated: bool | Literal["auto"] = "auto"
    """true: the trainer leaves the memory of its devices while the engines, and a judge's, work, and these while the
    trainer works; on ray each training rank is then on the device of an engine. false: all stay in memory, on ray on
    devices of their own. auto: true on a cluster with GPUs."""
    eval_num_inference_steps: NonNegative = 0
    """Steps of held-out images, made without noise; 0: as in training."""
    eval_guidance_scale: Amount = 0.0
    """Scale of guidance for held-out images; 0: as in training."""
    eval_n: Count = 4
    """Held-out images of a prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.window_size
        steps = self.num_inference_steps
        first, end = self.range_of_window
        self.require("window_size", size <= steps, f"at most rollout.num_inference_steps={steps}")
        is_within = 0 <= first < end <= steps and end - first >= size
        expected = f"steps from 0 to {steps}, at least rollout.window_size={size} of them"
        self.require("window_range", is_within, expected)
        if self.negative_prompt:
            self.require(
                "guidance_scale", self.guidance_scale > 1, "above 1 with rollout.negative_prompt"
            )
            is_guided = self.eval_guidance_scale == 0 or self.eval_guidance_scale > 1
            self.require(
                "eval_guidance_scale", is_guided, "0, or above 1 with rollout.negative_prompt"
            )

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width in pixels; None: the pipeline's own."""
        return self.size if self.size != (0, 0) else None

    @property
    def pipeline_options(self) -> dict[str, int]:
        """Further arguments of the pipeline's call."""
        options = {"max_sequence_length": self.max_sequence_length, "num_frames": self.num_frames}
        return {name: value for name, value in options.items() if value}

    @property
    def range_of_window(self) -> tuple[int, int]:
        """First step and the one after the last that a window may have."""
        if self.window_range != (0, 0):
            return self.window_range
        if self.window_steps:
            return (0, self.num_inference_steps)
        return (0, max(self.window_size, -(-self.num_inference_steps // 2)))


@dataclass(frozen=True, kw_only=True)
class DiffusionAlgorithmConfig(BaseAlgorithmConfig):
    """From scores to an update.

    Example:
        >>> algorithm = DiffusionAlgorithmConfig(name="nft")
        >>> rollout = DiffusionRolloutConfig(kernel="ode")
        >>> config = DiffusionConfig(algorithm=algorithm, rollout=rollout, reward=RewardConfig(kind="digit"))
        >>> config.algorithm.norm_adv_by
        'global'
    """

    name: Algorithm = "flow_grpo"
    """flow_grpo, ddpo, grpo_guard, flow_dppo: policy gradients of the sampler's steps; nft, awm, dgpo, crd:
    DiffusionNFT, advantage weighted matching, direct group preference optimization and centered reward distillation, of
    finished images; dpo: Diffusion-DPO of the best and worst images of each prompt; opd: distillation of a teacher,
    options.teacher; reward_gradient: the gradient of a differentiable reward itself."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters of the chosen algorithm alone, listed in docs/reference/algorithms.md; on the command line
    --algorithm.options.NAME and a value."""
    norm_adv_by: Literal["group", "global"] = "global"
    """Advantages are scores less their prompt's mean, over the standard deviation of the prompt's (group) or of the
    whole batch's (global)."""
    adv_clip_max: Positive = 5.0
    """Advantages are clipped to +- this."""
    timestep_fraction: FractionAbove0 = 1.0
    """Share of the recorded steps that is trained on, drawn for each batch."""
    old_log_probs: Literal["auto", "rollout", "trainer"] = "auto"
    """Denominator of the ratio: the engine's own log-probs (rollout), or the trainer's before its first update of the
    step (trainer), which costs a forward pass for each recorded step and makes the first update's ratios 1; auto:
    trainer unless rollout.dtype and actor.dtype are float32."""
    reward_gradient_steps: Count = 1
    """Last steps of sampling that reward_gradient goes back through."""

    @property
    def loss(self) -> str:
        """Name of the loss in gcore-trainer, if it is one that has options."""
        return "flow_grpo" if self.name in ("ddpo", "reward_gradient") else self.name


@dataclass(frozen=True, kw_only=True)
class DiffusionOptimConfig(BaseOptimConfig):
    """AdamW with gradient clipping, and a rate that warms up and then stays or decays.

    Example:
        >>> DiffusionOptimConfig(name="adamw_8bit", lr=3e-4).grad_clip
        1.0
    """

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: the two moments in 8 bits each, with a scale for every 256 values (bitsandbytes): 2 bytes a parameter
    instead of 8."""


@dataclass(frozen=True, kw_only=True)
class DiffusionActorConfig(AdapterSettings, section="actor"):
    """The policy's training.

    Example:
        >>> actor = DiffusionActorConfig(num_updates=4, loss=DenoisingPolicyConfig(kl_loss_coef=0.04), ema_decay=0.9)
        >>> actor.optim.lr
        0.0003
    """

    optim: DiffusionOptimConfig = field(
        default_factory=lambda: DiffusionOptimConfig(lr=3e-4, weight_decay=1e-4)
    )
    loss: DenoisingPolicyConfig = field(default_factory=DenoisingPolicyConfig)
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work;
    auto: on CUDA for models of a billion parameters or more."""
    num_updates: Count = 2
    """Updates a step, each on its share of the batch."""
    micro_batch_size: Count = 96
    """Most images in a pass: bounds memory, changes nothing else."""
    ema_decay: FractionBelow1 = 0.0
    """Decay of a moving average of the weights, which is evaluated and exported; 0: there is none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the passes, and of frozen weights (under adapters, and of a reference); trained ones stay in float32."""
    component: Literal["", "transformer", "transformer_2"] = ""
    """Which transformer is trained, where the pipeline has two (Wan 2.2: the one of the first or of the last steps);
    rollout.window_range must then be of its steps. Empty: the pipeline has one."""
    compile: bool = False
    """Compile the blocks of the models in training (torch.compile), which takes a minute or more at the start."""


@dataclass(frozen=True, kw_only=True)
class DiffusionTrainerConfig(RLTrainerConfig):
    """Training ranks, and the run's length.

    Example:
        >>> trainer = DiffusionTrainerConfig(num_processes=8, fsdp_size=4, total_training_steps=200)
        >>> DiffusionConfig(trainer=trainer, reward=RewardConfig(kind="digit")).rank_unit
        4
    """

    total_training_steps: Count = 50
    """Steps of the whole run."""
    num_processes: Count = 1
    """Ranks that images are divided among, each a process with a device of its own."""
    fsdp_size: Annotated[int | Literal["auto"], _SHARDS] = "auto"
    """Ranks that share parameters (FSDP2), such as a node's; the others have copies. 0: all ranks share them; 1: each
    has all of them. auto: 1 if weights, gradients and moments take at most 4 GiB (268 million trained parameters),
    otherwise 0."""
    test_freq: Count = 10
    """Steps between evaluations on held-out prompts."""
    save_freq: Count = 20
    """Steps between checkpoints."""
    export: Literal["last", "best"] = "last"
    """Step whose policy is exported. best: that of the evaluation with the highest reward not trained on, or without
    one with the highest reward, of those without a warning; it is saved at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_divisor = self.fsdp_size == "auto" or self.num_processes % (self.fsdp_size or 1) == 0
        self.require(
            "fsdp_size",
            is_divisor,
            f"auto, 0, or a divisor of trainer.num_processes={self.num_processes}",
        )
        exports_best = not self.early_stopping_patience or self.export == "best"
        self.require(
            "early_stopping_patience",
            exports_best,
            "0 with trainer.export 'last': later steps are no better",
        )


@dataclass(frozen=True, kw_only=True)
class DiffusionSimConfig(BaseSimConfig):
    """See `BaseSimConfig`; what is generated is images, of Stable Diffusion 3.5 medium at 512 x 512 by default."""

    parameters: Positive = 2.2e9
    """Parameters of the denoiser."""
    tokens: Positive = 1357
    """Tokens of an image and its prompt, in a pass of the denoiser."""
    engine: EngineModel = field(
        default_factory=lambda: EngineModel(
            devices_per_replica=1, max_num_seqs=16, per_sample_s=0.012
        )
    )


_NAME = "algorithm.name"
_POLICY_GRADIENTS = ("flow_grpo", "ddpo", "grpo_guard", "flow_dppo")
_OF_STEPS = one_of(*_POLICY_GRADIENTS)
_RECORDED = one_of(*_POLICY_GRADIENTS, "opd")
_COMPARED = one_of(*_POLICY_GRADIENTS, "dpo", "opd")
_NOISY = one_of("flow_sde", "dance_sde", "cps", "ddim")
_READ_WITH = (
    ReadWith(
        settings=("actor.loss.clip_ratio",),
        chosen_by={_NAME: one_of("flow_grpo", "ddpo", "grpo_guard")},
    ),
    ReadWith(
        settings=("actor.loss.kl_loss_coef", "algorithm.old_log_probs"),
        chosen_by={_NAME: _OF_STEPS},
    ),
    ReadWith(settings=("algorithm.timestep_fraction",), chosen_by={_NAME: _RECORDED}),
    ReadWith(settings=("actor.loss.kl_loss_type",), chosen_by={"actor.loss.kl_loss_coef": ABOVE_0}),
    ReadWith(
        settings=("algorithm.norm_adv_by", "algorithm.adv_clip_max"),
        chosen_by={_NAME: one_of(*_POLICY_GRADIENTS, "nft", "awm", "dgpo", "crd")},
    ),
    ReadWith(
        settings=("algorithm.reward_gradient_steps",), chosen_by={_NAME: one_of("reward_gradient")}
    ),
    ReadWith(
        settings=("rollout.noise_level", "rollout.shared_noise"),
        chosen_by={"rollout.kernel": _NOISY},
    ),
    # Of images by reward_gradient none are compared.
    ReadWith(settings=("rollout.shared_noise",), chosen_by={_NAME: _COMPARED}),
    # DPO trains on no step, but of images that are made by ddim, the window's steps alone have noise.
    ReadWith(settings=("rollout.window_size",), chosen_by={_NAME: _COMPARED}),
    ReadWith(settings=("rollout.window_size",), chosen_by={"rollout.kernel": _NOISY}),
    ReadWith(
        settings=("rollout.window_range", "rollout.window_steps"),
        chosen_by={"rollout.window_size": ABOVE_0},
    ),
    ReadWith(
        settings=("algorithm.max_num_gen_batches",), chosen_by={"algorithm.filter_groups": IS_TRUE}
    ),
    adapter_settings("actor."),
    schedule_settings("actor.optim"),
    BEST_SETTINGS,
)
"""The settings that only some algorithms read; `docs/reference/settings-images.md` lists them."""


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(BaseRLConfig):
    """RLHF of a diffusion or flow-matching model: on coloured digits, or on your own pipeline, prompts and reward.

    Example:
        >>> config = embedded()
        >>> shorter = replace(config, trainer=replace(config.trainer, total_training_steps=5))
        >>> shorter.trainer.total_training_steps
        5
        >>> shorter.reward.kind
        'digit'
    """

    may_change: ClassVar[tuple[str, ...]] = (
        *BaseRLConfig.may_change,
        "rollout.max_num_images",
        "trainer.fsdp_size",
        "reward.judge.num_processes",
        "reward.judge.max_num_seqs",
    )

    read_with: ClassVar[tuple[ReadWith, ...]] = _READ_WITH

    model: str = ""
    """A local folder of a diffusers pipeline with a flow-matching or DDIM scheduler; empty: a tiny one is made and
    pretrained."""
    command: Annotated[Literal["diffusion", "simulate"], tyro.conf.Suppress] = "diffusion"
    """Which command made the run; for its report."""
    data: DiffusionDataConfig = field(default_factory=DiffusionDataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: DiffusionRolloutConfig = field(default_factory=DiffusionRolloutConfig)
    algorithm: DiffusionAlgorithmConfig = field(default_factory=DiffusionAlgorithmConfig)
    actor: DiffusionActorConfig = field(default_factory=DiffusionActorConfig)
    trainer: DiffusionTrainerConfig = field(default_factory=DiffusionTrainerConfig)

    @property
    def engine_device(self) -> str:
        """Device of an engine; on ray each sees only its own GPU."""
        if self.runtime == "ray" and self.device.startswith("cuda"):
            return "cuda"
        return self.device

    @property
    def judge(self) -> tuple[str, DiffusionJudgeConfig | None]:
        return "reward.judge", self.reward.judge if self.reward.is_judged else None

    @property
    def rank_unit(self) -> int:
        """Training ranks are started and stopped by whole sharding groups."""
        size = self.trainer.fsdp_size
        return 1 if size == "auto" else max(1, size)

    @property
    def gpus_per_controller(self) -> float:
        if self.reward.has_models and self.device.startswith("cuda"):
            return self.ray.gpus_per_reward_model
        return 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        name = self.algorithm.name
        kernel = self.rollout.kernel
        steps = self.rollout.num_inference_steps
        suffix = f"with algorithm.name {name!r}"
        self._check_options()
        if name in NOISELESS:
            self.require("rollout.kernel", kernel in ("ode", "ddim"), f"'ode' or 'ddim' {suffix}")
        elif name == "opd":
            self.require(
                "algorithm.filter_groups",
                not self.algorithm.filter_groups,
                f"false {suffix}, which learns from all images",
            )
        else:
            self.require(
                "rollout.kernel",
                kernel != "ode",
                f"a kernel with noise, whose steps have log-probabilities, {suffix}",
            )
        if name == "grpo_guard":
            self.require("rollout.kernel", kernel != "ddim", f"a kernel of a flow {suffix}")
        is_of_sde = self.actor.loss.kl_loss_type == "gaussian" or kernel in (
            "flow_sde",
            "dance_sde",
        )
        self.require(
            "actor.loss.kl_loss_type", is_of_sde, f"'gaussian' with rollout.kernel {kernel!r}"
        )
        if self.actor.component:
            self.require(
                "actor.component",
                name not in FORWARD,
                f"'' {suffix}, which trains on levels of all steps",
            )
            has_window = name == "reward_gradient" or self.rollout.window_size > 0
            self.require(
                "rollout.window_size",
                has_window,
                f"1 or more with actor.component {self.actor.component!r}",
            )
        is_shorter = self.algorithm.reward_gradient_steps <= steps
        self.require(
            "algorithm.reward_gradient_steps",
            is_shorter,
            f"at most rollout.num_inference_steps={steps}",
        )
        is_one = name != "reward_gradient" or len(self.reward.trained_weights) < 2
        self.require("reward.kind", is_one, "one reward with algorithm.name 'reward_gradient'")
        if self.model and not self.data.train_files:
            raise UserError(
                "data.train_files is not set; expected one or more files of prompts with model"
            )
        if self.model:
            is_of_user = {"", *DEMO_REWARDS}.isdisjoint(
                {self.reward.kind, *self.reward.trained_weights}
            )
            self.require(
                "reward.kind", is_of_user, "a reward that is not the embedded model's with model"
            )

    def _check_options(self) -> None:
        algorithm = self.algorithm
        # That of opd must be set.
        if algorithm.options or algorithm.name == "opd":
            # It needs torch, which reading settings does not.
            from gcore_trainer import diffusion_options

            override(diffusion_options(algorithm.loss), algorithm.options, "algorithm.options")


@dataclass(frozen=True, kw_only=True)
class DiffusionTrainArgs(DiffusionConfig):
    """The settings of a run, and options of the command train that are no settings of the run."""

    dry_run: bool = False
    """Print parameters, passes and memory, and whether they fit, by the pipeline's config.json files; start nothing."""
    dry_run_device: str = ""
    """GPU that a dry run plans for: H100, H200, A100, ... or its gigabytes; empty: H100."""
    demo: DemoConfig = field(default_factory=DemoConfig)


@dataclass(frozen=True, kw_only=True)
class SimulatedDiffusionConfig(DiffusionConfig):
    """The settings of train, and the cluster on which `gcore-diffusion simulate` simulates a run of them."""

    is_simulated: ClassVar[bool] = True

    command: Annotated[Literal["simulate"], tyro.conf.Suppress] = "simulate"
    """Which command made the run; for its report."""
    sim: DiffusionSimConfig = field(default_factory=DiffusionSimConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sim.check("sim.", self.controllers)


def embedded() -> DiffusionConfig:
    """Under four minutes on a core: Flow-GRPO-Fast teaches a tiny model to draw legible digits."""
    return DiffusionConfig(
        threads=1,
        data=DiffusionDataConfig(train_batch_size=16),
        reward=RewardConfig(kind="digit", held_out="digit_judge"),
        rollout=DiffusionRolloutConfig(
            n=16,
            num_inference_steps=10,
            window_size=2,
            max_sequence_length=1,
            max_num_images=256,
            eval_n=8,
        ),
        actor=DiffusionActorConfig(
            optim=DiffusionOptimConfig(lr=3e-4, weight_decay=1e-4),
            # Much less of it lets images of a prompt become alike, and the reward be exploited.
            loss=DenoisingPolicyConfig(clip_ratio=5e-3, kl_loss_coef=0.07),
            ema_decay=0.9,
        ),
        trainer=DiffusionTrainerConfig(total_training_steps=20, test_freq=5, export="best"),
    )


def embedded_nft() -> DiffusionConfig:
    """The same by DiffusionNFT, which needs no noise in sampling."""
    base = embedded()
    return replace(
        base,
        algorithm=DiffusionAlgorithmConfig(name="nft", filter_groups=False),
        rollout=replace(base.rollout, kernel="ode", window_size=0),
        actor=replace(base.actor, num_updates=1, loss=DenoisingPolicyConfig()),
    )


RECIPES: dict[str, Callable[[], DiffusionConfig]] = {
    "embedded": embedded,
    "embedded_nft": embedded_nft,
    "own_data": DiffusionConfig,
}

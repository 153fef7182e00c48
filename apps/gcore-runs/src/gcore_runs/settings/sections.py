"""Sections of settings that the commands share, documented and bounded in their types; apps extend them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from gcore_placement import Strategy
from gcore_rollout import (
    EngineKind,
    JudgeModel,
    Reduce,
    RequestError,
    SamplingParams,
    check_engine_options,
    engine_kind,
    engine_names,
    make_score_parser,
)
from gcore_runs.errors import UserError
from gcore_runs.settings.checks import (
    ABOVE_0,
    IS_SET,
    Amount,
    Bound,
    Checked,
    Count,
    Fraction,
    NonNegative,
    Positive,
    ReadWith,
    above,
    at_least,
    one_of,
    override,
)
from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    LRSchedulerType,
    MegatronConfig,
    OptimizerConfig,
    OptimizerName,
    ParallelConfig,
)


def _is_address(address: str) -> bool:
    port = address.rpartition(":")[2]
    return not address or (port.isdecimal() and 1 <= int(port) <= 65_535)


_ADDRESS = Bound(_is_address, "HOST:PORT or PORT, from 1 to 65535, or nothing")
_SERVER_PYTHON = "server_python"
_BATCHED_TOKENS = "max_num_batched_tokens"
_TENSOR_PARALLEL = "tensor_parallel_size"
_BOUNDED_OPTIONS = {
    _BATCHED_TOKENS: Bound(lambda v: type(v) is int and v >= 1, "an integer, 1 or more"),
    "gpu_memory_utilization": Bound(
        lambda v: type(v) in (int, float) and 0 < v <= 1, "a number in (0, 1]"
    ),
}
"""Engine options whose values are checked before an engine is started."""
_LOW_PRECISION = ("quantization", "kv_cache_dtype")
"""Options of vLLM and SGLang by which an engine computes in fewer bits than the trainer."""
_TRAINER_PRECISION = (None, "", "auto", "bfloat16", "bf16", "float16", "half", "float32")


@dataclass(frozen=True, kw_only=True)
class BaseDataConfig(Checked, section="data"):
    """Files of training and held-out rows.

    Example:
        >>> BaseDataConfig(train_files=("a.jsonl", "b.jsonl"), weights=(3.0, -1.0))
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: data.weights holds -1.0; expected a finite number above 0
    """

    train_files: tuple[str, ...] = ()
    """JSONL, Parquet, Arrow or CSV files, patterns such as 'part-*.parquet', or splits on the Hugging Face Hub,
    hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]."""
    weights: tuple[Positive, ...] = ()
    """How often each of train-files is drawn from, relative to the others; empty: in proportion to its rows."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Columns to compute from those of a row: --data.columns.NAME and a Jinja expression of them, such as
    "answer.split('####')[-1].strip()"."""
    val_files: tuple[str, ...] = ()
    """Files of held-out rows; empty: data.val-size rows are taken out of the training files."""
    val_size: NonNegative = 64
    """How many rows to hold out if there are no val-files; never more than a tenth of them."""
    train_batch_size: Count = 32
    """Rows a step."""
    shuffle_seed: NonNegative = 0
    """Seed of the order of rows, and of which are held out."""


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Checked):
    """Adapters that are trained in place of all parameters.

    Example:
        >>> AdapterSettings(lora_rank=16, lora_alpha=32, target_modules=("q_proj", "v_proj")).lora.scaling
        2.0
    """

    lora_rank: NonNegative = 0
    """Train adapters of this rank, and nothing else; 0: all parameters."""
    lora_alpha: Count = 32
    """An adapter's output is scaled by lora-alpha / lora-rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Layers that get an adapter, such as q_proj or to_q; all-linear: all but the head."""
    use_rslora: bool = False
    """Scale an adapter's output by lora-alpha / sqrt(lora-rank) instead (rsLoRA, arXiv 2312.03732), so that a higher
    rank does not make it smaller."""
    lora_adapter_path: str = ""
    """Adapters of the model to start from, a folder of peft, or of image models also a LoRA of diffusers; rank, alpha
    and layers are those of the adapters."""

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters; None without any."""
        if not self.lora_rank:
            return None
        return LoRAConfig(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            target_modules=self.target_modules,
            use_rslora=self.use_rslora,
            path=self.lora_adapter_path,
        )


def adapter_settings(section: str, *further_names: str) -> ReadWith:
    """Return the settings of adapters, whose names begin with ``section``, that nothing reads without adapters."""
    names = ("lora_alpha", "target_modules", "use_rslora", *further_names)
    return ReadWith(
        settings=tuple(f"{section}{name}" for name in names),
        chosen_by={f"{section}lora_rank": ABOVE_0, f"{section}lora_adapter_path": IS_SET},
    )


BACKEND_SETTINGS = (
    ReadWith(
        settings=("trainer.parallel.fsdp_size", "trainer.parallel.gradient_sync"),
        chosen_by={"trainer.backend": one_of("torch")},
    ),
    ReadWith(settings=("trainer.megatron",), chosen_by={"trainer.backend": one_of("megatron")}),
)
"""Settings of one library for training, in commands that have two of them."""
BEST_SETTINGS = ReadWith(
    settings=("trainer.best_metric",),
    chosen_by={"trainer.export": one_of("best"), "trainer.early_stopping_patience": ABOVE_0},
)
"""Settings of the best evaluation, in commands that look for it."""


def schedule_settings(section: str) -> ReadWith:
    """Return the settings of an optimizer, in ``section``, that only some schedules read."""
    return ReadWith(
        settings=(f"{section}.min_lr_ratio",),
        chosen_by={f"{section}.lr_scheduler_type": one_of("linear", "cosine")},
    )


@dataclass(frozen=True, kw_only=True)
class BaseOptimConfig(Checked):
    """The optimizer, and a rate that warms up and then stays or decays to the run's end.

    Example:
        >>> optim = BaseOptimConfig(lr=2e-5, lr_warmup_steps=10, lr_scheduler_type="cosine")
        >>> optim.build(total_training_steps=500).total_training_steps
        500
    """

    error: ClassVar[type[Exception]] = ConfigError

    name: OptimizerName = "adamw"
    """adamw_8bit: the two moments in 8 bits each, with a scale for every 256 values (bitsandbytes): 2 bytes a parameter
    instead of 8. muon: the matrices of hidden layers by Muon, with one moment, 4 bytes a parameter; embeddings, head,
    norms, biases and fused experts by AdamW. Both are not for megatron."""
    lr: Positive = 1e-6
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments, two in [0, 1)."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay."""
    lr_warmup_steps: NonNegative = 0
    """Updates over which the rate rises linearly to lr."""
    lr_scheduler_type: LRSchedulerType = "constant"
    """After the warm-up, the rate stays (constant), or falls until the run's last update (linear, cosine)."""
    min_lr_ratio: Fraction = 0.0
    """Share of the rate that is left at the last update, in linear and cosine."""
    grad_clip: Annotated[float, above(0, "above 0")] = 1.0
    """Largest global gradient norm; a larger one is scaled down to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # The trainer's checks; they do not depend on how long the run is.
        self.build(total_training_steps=0)

    def build(self, *, total_training_steps: int) -> OptimizerConfig:
        """Return the trainer's settings for a run of this many updates; 0: it is not known yet."""
        return OptimizerConfig(**vars(self), total_training_steps=total_training_steps)


TrackerName = Literal["wandb", "trackio", "mlflow", "swanlab"]


@dataclass(frozen=True, kw_only=True)
class BaseTrainerConfig(Checked, section="trainer"):
    """Training ranks, the run's length, its checkpoints and evaluations, and where its metrics go."""

    num_processes: Count = 1
    """Training ranks, each a process with a device of its own."""
    total_training_steps: Count = 200
    """Steps of the whole run."""
    save_freq: Count = 25
    """Steps between checkpoints."""
    max_ckpt_to_keep: Count = 2
    """Checkpoints kept, the last ones."""
    test_freq: Count = 50
    """Steps between evaluations on held-out rows; the first and last step always evaluate."""
    tensorboard: bool = True
    """Write TensorBoard events alongside metrics.jsonl."""
    trackers: tuple[TrackerName, ...] = ()
    """Send metrics, images and samples to these (each an extra of its name); their own variables, such as
    WANDB_MODE=offline or MLFLOW_TRACKING_URI, apply."""
    project_name: str = "gcore"
    """Project of the trackers that the run belongs to."""
    prometheus: Annotated[str, _ADDRESS] = ""
    """Serve the metrics for Prometheus at http://HOST:PORT/metrics: HOST:PORT, or PORT for 127.0.0.1, which is this
    machine alone; empty: do not."""
    heartbeat_timeout_s: Annotated[float, above(0, "above 0")] = 120.0
    """Seconds without a sign of life of a training rank's process, or a controller's on Ray, after which it counts as
    lost: it was stopped, or its machine hangs. A call of ranks that are alive may take ten times as long as the longest
    one so far, and five times this at least. Collectives may take fifty times this (verl's nccl_timeout)."""


@dataclass(frozen=True, kw_only=True)
class RLTrainerConfig(BaseTrainerConfig):
    """Training ranks, and the length of a run of reinforcement learning.

    Example:
        >>> merge(RLTrainerConfig(), {"export": "best", "early_stopping_patience": "3"}).early_stopping_patience
        3
    """

    total_epochs: Amount = 0.0
    """Passes over the training rows, which set total-training-steps: rows / data.train-batch-size a pass; 0: none."""
    log_samples: NonNegative = 4
    """Random samples of each step that samples.jsonl, the report and the trackers show; 0: none."""
    early_stopping_patience: NonNegative = 0
    """Evaluations in a row without improvement after which the run ends early; 0: it never does."""
    export: Literal["last", "best"] = "last"
    """Step whose policy is exported. best: that of the best evaluation; it is saved at once."""
    best_metric: str = ""
    """Metric of evaluations whose highest value is best, such as val/aime24/avg@8, or with a - before it whose lowest;
    empty: the mean of greedy scores, or of a reward not trained on."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig(BaseTrainerConfig):
    """Training ranks and the library that they compute with.

    Example:
        >>> RanksConfig(backend="megatron", megatron={"bucket_size": 1_000_000}).megatron_config.bucket_size
        1000000
    """

    backend: Literal["torch", "megatron"] = "torch"
    """torch: a transformers model, sharded by FSDP2 over several processes; megatron: Megatron-Core."""
    num_processes: Count = 1
    """Ranks, each a process with a device of its own; 1 with torch: training runs in the main process."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    megatron: dict[str, Any] = field(default_factory=dict[str, Any])
    """How Megatron-Core computes, by the fields of gcore_trainer.MegatronConfig: recompute_granularity,
    overlap_grad_reduce, overlap_param_gather, bucket_size, grouped_gemm, transformer_engine and
    bias_activation_fusion, such as --trainer.megatron.overlap-grad-reduce true."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            if self.backend == "torch":
                self.parallel.check_torch()
            self.parallel.data_parallel_size(self.num_processes)
        except ConfigError as error:
            raise UserError(
                f"trainer.parallel: {error} (trainer.num_processes={self.num_processes})"
            ) from None
        try:
            self.megatron_config.check()
        except ConfigError as error:
            raise UserError(f"trainer.megatron.{error}") from None

    @property
    def megatron_config(self) -> MegatronConfig:
        """The settings of Megatron-Core."""
        return override(MegatronConfig(), self.megatron, "trainer.megatron")


@dataclass(frozen=True, kw_only=True)
class BaseAlgorithmConfig(Checked, section="algorithm"):
    """Dynamic sampling, from scores to the groups of a step.

    Example:
        >>> merge(BaseAlgorithmConfig(), {"max_num_gen_batches": "8"})
        BaseAlgorithmConfig(filter_groups=True, max_num_gen_batches=8, curriculum=False)
    """

    filter_groups: bool = True
    """Dynamic sampling: drop groups whose responses all score alike and sample again."""
    max_num_gen_batches: Count = 4
    """Most waves of sampling a step; then the step trains on what it has."""
    curriculum: bool = False
    """Sample prompts less often whose responses all scored alike, or nearly so, when they were last sampled."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(Checked, section="placement"):
    """Division of a run's devices: of engines on ray between the policy and the judges, and of ranks in a step.

    Example:
        >>> from gcore_placement import STRATEGIES
        >>> placement = PlacementConfig(strategy="dynamic", horizon_steps=50)
        >>> STRATEGIES[placement.strategy].follows_load
        True
    """

    strategy: Strategy | None = None
    """split: rollout.num-processes engines generate, reward-model.judge.num-processes judge. dynamic: this at first;
    then, between steps and waves of sampling, engines move from roles that idle to those that are busy, where it saves
    more than it costs. colocated: each of rollout.num-processes devices has an engine of every role, and all generate,
    then all judge; those that wait sleep. auto: dynamic, or colocated where that takes less, swaps included. None or
    unset: dynamic on a cluster with GPUs, more engines than roles, and schedule sync; otherwise split."""
    horizon_steps: Count = 20
    """Steps over which a move between two of them must save more time than it takes, which is measured."""
    lend_ranks: bool | Literal["auto"] = False
    """true: while the policy samples, the training ranks are asleep, and each device of theirs has a further engine of
    the policy, besides the rollout.num-processes ones with devices of their own; it sleeps while the ranks work. auto:
    in the steps in which that saves more time than the swaps take, as measured. With runtime inline or ray and schedule
    sync, and not with rollout.colocated, where all engines share devices so."""


@dataclass(frozen=True, kw_only=True)
class RayConfig(Checked, section="ray"):
    """The cluster, where runtime is ray. All its nodes see the files of this machine under the same paths.

    Each controller, engine and training rank reserves one CPU.
    """

    address: str = ""
    """HOST:PORT of its head; empty: what RAY_ADDRESS names, or a new one on this machine, for this run. Its token is
    that of RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""
    gpus_per_engine: Amount = 1.0
    """GPUs that each engine, of the policy or a judge, reserves where device is cuda; parts of one may be shared."""
    gpus_per_rank: Amount = 1.0
    """GPUs that each training rank reserves where device is cuda."""
    gpus_per_reward_model: Amount = 1.0
    """GPUs that each controller reserves for reward models that are no engines, such as a classifier or CLIP, where
    device is cuda."""
    elastic: bool = True
    """Where nodes are lost or missing, continue with as many processes as the cluster has capacity for, and grow to the
    numbers of controllers, engines and ranks that are set as nodes join; False: the run ends without that capacity."""
    weight_sync: Literal["full", "delta"] = "full"
    """full: ranks send all new weights. delta: what has changed, where that is less, as in bfloat16 at small learning
    rates; ranks and engines then keep a copy of what they send and have in the host's memory. With actor.lora-rank
    delta sends the adapters alone, after the frozen weights; engines keep these, and ranks keep no copy."""
    env: tuple[str, ...] = ()
    """Names of variables of this command's environment that the processes of a cluster which runs already get, such as
    the key of a reward's service; their values are not written to a log."""
    timeout_s: Annotated[float, above(0, "above 0")] = 600.0
    """Seconds until the cluster has capacity for the processes of a role, and they have started."""


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointsConfig(Checked, section="local_checkpoints"):
    """Checkpoints on the machines after each step, besides those of trainer.save-freq: a rank that dies costs a step.

    Each machine has a copy of the next one's: of several, any one may be lost with its folder.
    """

    folder: str = ""
    """Folder that each machine has of its own, such as one on its disk or in /dev/shm, for two checkpoints at a time;
    $NAME stands for a variable of the rank's environment. Empty: none."""


@dataclass(frozen=True, kw_only=True)
class BaseRolloutConfig(Checked, section="rollout"):
    """The policy's engines, next to the trainer.

    Example:
        >>> BaseRolloutConfig(num_processes=4, colocated=False).num_processes
        4
    """

    num_processes: NonNegative = 0
    """Engines, each a process of its own; 0: one in the main process, or on ray one for each controller."""
    colocated: bool | Literal["auto"] = "auto"
    """true: the trainer leaves the memory of its devices while the engines, and a judge of this run's own, generate,
    and these while the trainer works; on ray each training rank is then on the device of an engine. false: all stay in
    memory, on ray on devices of their own. auto: true on a cluster with GPUs, with schedule sync;
    and where trainer and engine share a GPU of this machine that cannot hold both, by the plan of its memory that is
    shown at the start."""


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig(Checked):
    """An engine in this process, or replicas of it in processes of their own."""

    engine: str = "hf"
    """hf: transformers; vllm: vLLM; sglang: an SGLang server that the run starts, in an environment of its own
    (engine_options.server_python); vllm_server and sglang_server: servers of these at urls, which are running already.
    PATH.py:function: an engine of your own (gcore_rollout.Engine), made by a function of the model's folder and the
    keywords device, dtype, max_num_seqs and eos_token_ids."""
    num_processes: NonNegative = 0
    """Replicas of an engine that is not on servers, each a process of its own that is replaced if it dies; 0: one, in
    the main process. All processes that generate share the threads, and each has a GPU of its own as long as there are
    any."""
    tensor_parallel_size: Count = 1
    """Devices of each replica in vllm or sglang, over which the model is split; of one machine, and with vllm on CPU a
    process each."""
    engine_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keyword arguments of the engine: of vllm, fields of its EngineArgs, such as quantization = "fp8",
    kv_cache_dtype, max_num_batched_tokens or speculative_config, and seed_per_sample; of sglang, server_python (the
    Python of an environment with SGLang, such as ~/sglang/bin/python, on every machine with an engine) and fields of
    its ServerArgs; of both, gpu_memory_utilization (the share of the GPU's memory for weights, keys and values; not
    set: as much as is left next to a trainer on the same GPU, or what they choose); of hf, decode_mode (dynamic,
    static, cuda_graphs) and kv_cache_bytes; of servers of the policy, weights_dir (an existing folder that this machine
    and the servers see under the same path: new weights go through it); of your own engine, any. On the command line
    NAME=VALUE, several of them, or JSON."""

    @property
    def kind(self) -> EngineKind:
        return engine_kind(self.engine)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            engine_kind(self.engine)
        except RequestError as error:
            raise UserError(f"{self.section}.{error}") from None
        is_taken = self.tensor_parallel_size == 1 or _TENSOR_PARALLEL in self.kind.own_options
        more = "vllm and sglang take more"
        self.require(
            "tensor_parallel_size",
            is_taken,
            f"1 with {self.section}.engine {self.engine!r}; {more}",
        )
        try:
            check_engine_options(self.engine, self.engine_options)
        except RequestError as error:
            raise UserError(f"{self.section}.{error}") from None
        for name, bound in _BOUNDED_OPTIONS.items():
            value = self.engine_options.get(name)
            if value is not None and not bound.holds(value):
                raise UserError(
                    f"{self.section}.engine_options.{name} is {value!r}; expected {bound.expected}"
                )
        if _SERVER_PYTHON in self.kind.engine_options and not self.server_python:
            raise UserError(
                f"{self.section}.engine_options.{_SERVER_PYTHON} is not set; expected the Python of an environment "
                f"with SGLang with {self.section}.engine {self.engine!r}"
            )

    @property
    def draft_model(self) -> str:
        """Folder or name of the model that guesses in speculative decoding; empty: none does."""
        speculation = self.engine_options.get("speculative_config")
        if not isinstance(speculation, Mapping):
            return ""
        return str(speculation.get("model", ""))

    def check_precision(self) -> None:
        """Raise `UserError` for an option by which the engine computes in fewer bits than the trainer, uncorrected."""
        for name in _LOW_PRECISION:
            value = self.engine_options.get(name)
            if self.kind.library_options and value not in _TRAINER_PRECISION:
                raise UserError(
                    f"{self.section}.engine_options.{name} is {value!r}; expected none without "
                    "algorithm.rollout_correction, such as rollout_is 'token' with algorithm.old_log_probs 'trainer'"
                )

    @property
    def max_num_batched_tokens(self) -> int | None:
        """Most tokens that vllm computes in a step; None: its own choice."""
        return self.engine_options.get(_BATCHED_TOKENS)

    @property
    def server_python(self) -> str:
        """The Python of the environment of an engine's own server; empty: it has none."""
        if _SERVER_PYTHON not in self.kind.engine_options:
            return ""
        return str(self.engine_options.get(_SERVER_PYTHON, ""))

    def check_server_python(self) -> None:
        """Raise `UserError` if there is no such file on this machine."""
        python = Path(self.server_python).expanduser()
        if self.server_python and not (python.is_file() and os.access(python, os.X_OK)):
            raise UserError(
                f"{self.section}.engine_options.server_python is {self.server_python!r}; expected the Python of an "
                "environment with SGLang"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(LocalEngineConfig):
    """The engine of a model, here or on servers."""

    urls: tuple[str, ...] = ()
    """Servers, such as http://10.0.0.7:8000, each a replica, and used by this run alone while it lasts."""

    @property
    def is_on_servers(self) -> bool:
        return self.kind.is_server

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.section
        if self.is_on_servers != bool(self.urls):
            servers = " or ".join(engine_names(lambda engine: engine.is_server))
            raise UserError(
                f"{prefix}.engine is {self.engine!r} and {prefix}.urls is {list(self.urls)}; expected {servers} with "
                "one or more urls, or another engine without"
            )
        if len(set(self.urls)) < len(self.urls):
            raise UserError(f"{prefix}.urls is {list(self.urls)}; expected each server once")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"{prefix}.urls has {url!r}; expected http://HOST:PORT or https://HOST:PORT"
                )
        if self.is_on_servers and self.num_processes:
            raise UserError(
                f"{prefix}.num_processes is {self.num_processes} and {prefix}.engine is {self.engine!r}; expected 0, "
                f"because the replicas are the servers at {prefix}.urls"
            )


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(LocalEngineConfig):
    """A generative reward model: its engine, the questions to it, and the reading of its verdicts."""

    template: str = ""
    """File with the question, with fields in braces; empty: how good it is, from 0 to 10."""
    n: Annotated[int, at_least(1, "at least 1")] = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: Annotated[float, at_least(0, "at least 0")] = 1.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: Annotated[int, at_least(1, "at least 1")] = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """The scores that are scaled to 0 and to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_enough = self.num_processes or not self.kind.needs_own_process
        self.require(
            "num_processes", is_enough, f"1 or more with {self.section}.engine {self.engine!r}"
        )

    def question(self) -> str:
        """Read the file of the question; empty: there is none. `UserError` if it cannot be read."""
        if not self.template:
            return ""
        try:
            return Path(self.template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.section}.template is {self.template!r}: {error}") from None

    def model(self, **fields: Any) -> JudgeModel:
        """Return the model that is asked so; ``fields`` are the others of `JudgeModel`."""
        sampling = SamplingParams(max_tokens=self.max_response_length, temperature=self.temperature)
        return JudgeModel(sampling=sampling, n=self.n, **fields)

    def scores(self) -> Callable[[str], float | None]:
        """Return what reads the score of a verdict; `UserError` if the scores to scale are not in order."""
        low, high = self.score_range
        if not -math.inf < low < high < math.inf:
            raise UserError(
                f"{self.section}.score_range is {self.score_range}; expected two finite scores, the lower one first"
            )
        return make_score_parser(self.pattern, low=low, high=high)

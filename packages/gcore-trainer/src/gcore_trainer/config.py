"""Settings of optimizers, losses, advantages, layouts and Megatron-Core, each with its bounds; algorithms by name."""

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, make_dataclass
from functools import cache, cached_property
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from gcore_trainer.errors import ConfigError

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
KLPenalty = Literal["k1", "k2", "k3", "k1+", "k3+"]
RewardKL = Literal["k1", "k2", "k3"]
LRSchedulerType = Literal["constant", "linear", "cosine"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
DPOLossType = Literal["sigmoid", "ipo", "hinge"]
RolloutIS = Literal["token", "sequence"]
_TokenRS = Literal["token_k1", "token_k2", "token_k3", "token_kl", "token_tv"]
_SequenceRS = Literal[
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3"
]
RolloutRS = Literal[_TokenRS, _SequenceRS, "seq_max_k2", "seq_max_k3", "seq_mean_kl", "seq_mean_tv"]
Switch = bool | Literal["auto"]


class Registry:
    """The algorithms of one kind: a folder of this package holds a file for each; a user's own is PATH.py:function."""

    def __init__(self, package: str, setting: str) -> None:
        self._package = package
        self._setting = setting

    @cached_property
    def _modules(self) -> dict[str, str]:
        spec = importlib.util.find_spec(self._package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        files = [file.relative_to(root).with_suffix("") for file in root.rglob("[a-z]*.py")]
        return {file.name: ".".join((self._package, *file.parts)) for file in files}

    @property
    def names(self) -> list[str]:
        """Names of the built-in algorithms; none of their files is imported."""
        return sorted(self._modules)

    def load(self, name: str) -> Any:
        """Import a built-in algorithm by its name, or a user's own by ``PATH.py:function``; raise `ConfigError`."""
        if name in self._modules:
            return getattr(importlib.import_module(self._modules[name]), name)
        file, _, function = name.rpartition(":")
        is_path = file.endswith(".py") and function.isidentifier()
        require(
            self._setting, name, is_path, f"one of {', '.join(self.names)}, or PATH.py:function"
        )
        return _load_function(Path(file).resolve(), function, f"{self._setting} is {name!r}")


@cache
def _load_function(path: Path, name: str, setting: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ConfigError(f"{setting}; expected a file that exists, and {path} does not")
    module_name = f"gcore_trainer_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{setting}: {path} does not import ({type(error).__name__}: {error})"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(
            f"{setting}; expected one of {', '.join(public) or 'none'}, which {path} defines"
        )
    return function


POLICY_LOSSES = Registry("gcore_trainer.losses.policy", "loss_mode")


@cache
def get_policy_loss(loss_mode: str) -> Callable[..., Any]:
    """Return the policy loss of this name, or ``PATH.py:function``; raise `ConfigError` if there is none."""
    return POLICY_LOSSES.load(loss_mode)


class ConfigBound(NamedTuple):
    """A check of a setting, with a text that says which values it accepts."""

    holds: Callable[[Any], bool]
    accepted: str

    def require(self, field: str, value: object) -> None:
        """Raise `ConfigError` for a value out of the bound."""
        require(field, value, self.holds(value), self.accepted)


def require(field: str, value: object, holds: bool, accepted: str) -> None:
    """Raise `ConfigError` unless a check of a setting holds."""
    if not holds:
        raise ConfigError(f"{field} is {value!r}; expected {accepted}")


ABOVE_ZERO = ConfigBound(lambda v: 0 < v < math.inf, "a finite number above 0")
NOT_NEGATIVE = ConfigBound(lambda v: 0 <= v < math.inf, "a finite number, 0 or more")
BELOW_ONE = ConfigBound(lambda v: 0 <= v < 1, "a number in [0, 1)")
AT_LEAST_0 = ConfigBound(lambda v: v >= 0, "0 or more")
AT_LEAST_1 = ConfigBound(lambda v: v >= 1, "1 or more")
_MORE_THAN_0 = ConfigBound(lambda v: v > 0, "above 0")
_VETO = ConfigBound(lambda v: v is None or 0 < v < 1, "a number in (0, 1), or none")
_RATE = ConfigBound(lambda v: v is None or 0 < v < math.inf, "a finite number above 0, or none")
_BETAS = ConfigBound(lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two in [0, 1)")

Count = Annotated[int, AT_LEAST_1]
AboveZero = Annotated[float, ABOVE_ZERO]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, ConfigBound(lambda v: 0 <= v <= 1, "a number in [0, 1]")]
FractionAbove0 = Annotated[float, ConfigBound(lambda v: 0 < v <= 1, "a number in (0, 1]")]
_Length = Annotated[int | None, ConfigBound(lambda v: v is None or v >= 1, "1 or more")]


class CheckedConfig:
    """A dataclass that checks settings against their types: a ``Literal``, or ``Annotated`` with a `ConfigBound`."""

    def __post_init__(self) -> None:
        for name, bound in _bounds(type(self)):
            bound.require(name, getattr(self, name))


@cache
def _bounds(config_class: Any) -> list[tuple[str, ConfigBound]]:
    """Return the name of each bounded field, with its bound."""
    bounds: list[tuple[str, ConfigBound]] = []
    for field in fields(config_class):
        bounds += [(field.name, bound) for bound in getattr(field.type, "__metadata__", ())]
        members = get_args(field.type)
        for member in (field.type, *members):
            if get_origin(member) is not Literal:
                continue
            choices: list[Any] = list(get_args(member))
            accepted = f"one of {', '.join(choices)}"
            if bool in members:
                choices += [True, False]
                accepted += ", true, false"
            if NoneType in members:
                choices.append(None)
                accepted += ", or none"
            bounds.append((field.name, ConfigBound(choices.__contains__, accepted)))
    return bounds


@cache
def options_type(*functions: Callable[..., Any]) -> type[Any]:
    """Return a dataclass of the keyword-only parameters of algorithms: their options, with bounds and defaults.

    Example:
        >>> def my_loss(tokens, config, *, tau: AboveZero = 1.0): ...
        >>> options_type(my_loss)(tau=2.0)
        AlgorithmOptions(tau=2.0)
    """
    options: dict[str, tuple[str, Any, Any]] = {}
    for function in functions:
        parameters = signature(function).parameters.values()
        own = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        # A function without options may have annotations that do not resolve.
        hints = get_type_hints(function, include_extras=True) if own else {}
        for parameter in own:
            name = parameter.name
            options[name] = (name, hints.get(name, Any), parameter.default)
    return make_dataclass(
        "AlgorithmOptions", options.values(), bases=(CheckedConfig,), frozen=True, kw_only=True
    )


def read_options(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a kind of `options_type`, with its defaults for those that are not given.

    Raises:
        ConfigError: an option that the algorithm does not have, or a value out of its bounds.
    """
    names = [field.name for field in fields(kind)]
    for name in options:
        require("an option", name, name in names, ", ".join(names))
    return asdict(kind(**options))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedConfig):
    """AdamW or Muon with gradient clipping, and a rate that warms up and then stays or decays.

    Example:
        >>> config = OptimizerConfig(lr=1e-6, lr_warmup_steps=10, lr_scheduler_type="cosine", total_training_steps=500)
        >>> config.grad_clip
        1.0
    """

    name: OptimizerName = "adamw"
    """adamw_8bit: the two moments in 8 bits each, with a scale for every 256 values (bitsandbytes): 2 bytes a parameter
    instead of 8. muon: the matrices of hidden layers by Muon, with one moment, 4 bytes a parameter; embeddings, head,
    norms, biases and fused experts by AdamW. Both are not for megatron."""
    lr: AboveZero = 1e-6
    muon_lr: Annotated[float | None, _RATE] = None
    """Muon's rate; none: lr, which fits because its updates are scaled to the size of AdamW's (arXiv 2502.16982)."""
    betas: Annotated[tuple[float, float], _BETAS] = (0.9, 0.999)
    eps: AboveZero = 1e-8
    weight_decay: NotNegative = 0.0
    lr_warmup_steps: Annotated[int, AT_LEAST_0] = 0
    """Steps over which the rate rises linearly to ``lr``."""
    lr_scheduler_type: LRSchedulerType = "constant"
    """After the warm-up the rate stays (constant) or falls to ``min_lr_ratio * lr`` (linear, cosine)."""
    total_training_steps: int = 0
    """Update at which the rate ends; 0: not known yet, to be set before training."""
    min_lr_ratio: Fraction = 0.0
    """Fraction of ``lr`` that is left at the end."""
    grad_clip: Annotated[float, _MORE_THAN_0] = 1.0
    """Largest global gradient norm; a larger one is scaled down to it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.total_training_steps
        warmup = self.lr_warmup_steps
        accepted = f"more than lr_warmup_steps={warmup}, or 0 where it is not known yet"
        require("total_training_steps", total, total == 0 or total > warmup, accepted)


@dataclass(frozen=True, kw_only=True)
class OverlongConfig(CheckedConfig):
    """Scoring and training of responses that reach or come close to data.max-response-length.

    Example:
        >>> OverlongConfig(buffer_len=512, filter=True).penalty_factor
        1.0
    """

    buffer_len: Annotated[int, AT_LEAST_0] = 0
    """Number of last tokens over which a response's score falls linearly (DAPO's soft punishment); 0: none."""
    penalty_factor: NotNegative = 1.0
    """How far the score has fallen at the limit."""
    filter: bool = False
    """Do not train on responses that were cut off."""


@dataclass(frozen=True, kw_only=True)
class KLControlConfig(CheckedConfig):
    """The KL penalty in the reward.

    Example:
        >>> KLControlConfig(kl_coef=0.001, type="adaptive", target_kl=0.05).horizon
        10000
    """

    kl_coef: NotNegative = 0.0
    """Weight of the divergence from the initial policy in every token's reward; 0: none."""
    kl_penalty: RewardKL = "k1"
    """Estimator of that divergence."""
    type: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: the weight follows the divergence."""
    target_kl: AboveZero = 0.1
    """Mean divergence per token to reach, in adaptive."""
    horizon: Count = 10_000
    """Responses over which the weight adapts, in adaptive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.type == "adaptive" and not self.kl_coef:
            raise ConfigError(
                "kl_coef is 0; expected above 0 with algorithm.kl_ctrl.type 'adaptive'"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig(CheckedConfig):
    """The correction of a batch; with the defaults the mismatch is only measured.

    Example:
        >>> RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0).is_active
        True
    """

    rollout_is: RolloutIS | None = None
    """Importance sampling by each token's ratio (token) or by the product of a sequence's ratios (sequence)."""
    rollout_is_threshold: AboveZero = 2.0
    """A larger weight is truncated to this one."""
    rollout_is_threshold_lower: float | None = None
    """If this is set, a weight below it or above ``rollout_is_threshold`` becomes 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Weights are divided by their mean over the batch."""
    rollout_rs: RolloutRS | None = None
    """Rejection by a divergence of each token, or by a sequence's sum, mean or maximum of it.

    With r the ratio: k1 is -log r, k2 is (log r)^2 / 2 and k3 is r - 1 - log r. seq_mean_k1 is the geometric mean. kl
    and tv are divergences between a token and all others, as the losses dppo_kl and dppo_tv compute them.
    """
    rollout_rs_threshold: float | None = None
    """Upper bound, of the inverse ratio pi_rollout / pi_old in k1, otherwise of the divergence; more is rejected."""
    rollout_rs_threshold_lower: float | None = None
    """Lower bound of the inverse ratio in k1; None: 1 / ``rollout_rs_threshold``."""
    rollout_token_veto_threshold: Annotated[float | None, _VETO] = None
    """A sequence with a token whose ratio is below this is rejected as a whole."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_weights = self.rollout_is is not None
        limit = self.rollout_is_threshold
        least = self.rollout_is_threshold_lower
        is_valid = least is None or (has_weights and 0 < least <= limit)
        accepted = f"a number above 0 and up to rollout_is_threshold={limit}, and a rollout_is"
        require("rollout_is_threshold_lower", least, is_valid, accepted)
        normalize = self.rollout_is_batch_normalize
        require(
            "rollout_is_batch_normalize",
            normalize,
            has_weights or not normalize,
            "a rollout_is with it",
        )
        rule = self.rollout_rs
        upper = self.rollout_rs_threshold
        lower = self.rollout_rs_threshold_lower
        if rule is None:
            require("rollout_rs_threshold", upper, upper is None, "none without a rollout_rs")
            require("rollout_rs_threshold_lower", lower, lower is None, "none without a rollout_rs")
            return
        is_above_zero = upper is not None and 0 < upper < math.inf
        require(
            "rollout_rs_threshold",
            upper,
            is_above_zero,
            f"a finite number above 0 (rollout_rs is {rule!r})",
        )
        assert upper is not None
        if not rule.endswith("k1"):
            accepted = f"none (rollout_rs is {rule!r}, which has no lower bound)"
            require("rollout_rs_threshold_lower", lower, lower is None, accepted)
        elif lower is None:
            require(
                "rollout_rs_threshold",
                upper,
                upper >= 1,
                "1 or more, or a rollout_rs_threshold_lower with it",
            )
        else:
            accepted = f"a number above 0 and up to rollout_rs_threshold={upper}"
            require("rollout_rs_threshold_lower", lower, 0 < lower <= upper, accepted)

    @property
    def is_active(self) -> bool:
        """True if anything is corrected."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold)


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(CheckedConfig):
    """The policy's loss. Names and meanings are verl's.

    Example:
        >>> PolicyLossConfig(loss_mode="gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4).loss_agg_mode
        'token-mean'
    """

    loss_mode: str = "vanilla"
    """PPO's clipped ratio (vanilla), a sequence's ratio (gspo, geo_mean), a clipped weight (cispo), a smooth gate
    (sapo), a bound of the divergence in place of the ratio (dppo_tv, dppo_kl), none of these (gpg), or a user's own
    (PATH.py:function)."""
    clip_ratio_low: Fraction = 0.2
    """The ratio is clipped at 1 - clip_ratio_low, in geo_mean its logarithm at -clip_ratio_low; bound of the divergence
    in dppo_tv and dppo_kl."""
    clip_ratio_high: Annotated[float, AT_LEAST_0] = 0.28
    """The ratio is clipped at 1 + clip_ratio_high (DAPO's clip-higher); see clip_ratio_low."""
    clip_ratio_c: Annotated[
        float | None, ConfigBound(lambda v: v is None or v > 1, "above 1, or None")
    ] = None
    """Dual clip: bound of the loss of a negative advantage, in advantages; above 1. Bound of the ratio in dppo_tv and
    dppo_kl."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses (see `aggregation_weights`)."""
    kl_loss_coef: NotNegative = 0.0
    """Weight of the KL divergence to the reference policy in the loss; 0 needs no reference."""
    kl_loss_type: KLPenalty = "k3"
    """Estimator of that divergence; with a + its gradient is unbiased."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus."""
    max_response_length: _Length = None
    """Divisor of ``seq-mean-token-sum-norm``, which needs it: the longest response that the run allows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_mode not in POLICY_LOSSES.names:
            POLICY_LOSSES.load(self.loss_mode)


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig(CheckedConfig):
    """The critic's loss.

    Example:
        >>> ValueLossConfig(cliprange_value=0.2).loss_agg_mode
        'token-mean'
    """

    cliprange_value: Annotated[float, _MORE_THAN_0] = 0.5
    """A value moves at most this far from the one before the step's first update."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses (see `aggregation_weights`)."""
    max_response_length: _Length = None
    """Divisor of ``seq-mean-token-sum-norm``, which needs it: the longest response that the run allows."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(CheckedConfig):
    """Direct preference optimisation.

    Example:
        >>> DPOConfig(beta=0.05, loss_type="ipo").label_smoothing
        0.0
    """

    beta: AboveZero = 0.1
    """Strength of the pull to the reference policy."""
    loss_type: DPOLossType = "sigmoid"
    """DPO's logistic loss (sigmoid), IPO's squared one (ipo), SLiC's (hinge)."""
    label_smoothing: Annotated[
        float, ConfigBound(lambda v: 0 <= v < 0.5, "a number in [0, 0.5)")
    ] = 0.0
    """Assumed fraction of pairs with swapped labels, in sigmoid."""


@dataclass(frozen=True, kw_only=True)
class RewardModelLossConfig(CheckedConfig):
    """Bradley-Terry training of a reward model.

    Example:
        >>> RewardModelLossConfig(center_rewards_coefficient=0.01).center_rewards_coefficient
        0.01
    """

    center_rewards_coefficient: NotNegative = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""


_TP = "tensor_model_parallel_size"
_PP = "pipeline_model_parallel_size"
_CP = "context_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(CheckedConfig):
    """Sizes under verl's and Megatron's names; the data-parallel size follows from the world size.

    Example:
        >>> parallel = ParallelConfig(tensor_model_parallel_size=4, context_parallel_size=2)
        >>> parallel.data_parallel_size(world_size=16)
        2
    """

    tensor_model_parallel_size: Count = 1
    """Ranks that divide each layer's matrices (megatron)."""
    pipeline_model_parallel_size: Count = 1
    """Ranks that divide the layers (megatron)."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Chunks of layers that each pipeline rank has, interleaved (megatron)."""
    context_parallel_size: Count = 1
    """Ranks that divide the tokens of every sequence."""
    ulysses_sequence_parallel_size: Count = 1
    """Ranks among these that exchange tokens for attention heads (Ulysses); the others pass keys and values (ring)."""
    expert_model_parallel_size: Count = 1
    """Ranks that divide the experts of a mixture of experts (megatron)."""
    sequence_parallel: bool = False
    """Divide the tokens outside attention and MLP over the tensor-parallel ranks (megatron)."""
    fsdp_size: Annotated[int, AT_LEAST_0] = 0
    """Ranks that share parameters, such as a node's; the others have copies (torch, HSDP). 0: all ranks share them."""
    gradient_sync: Literal["auto", "update", "micro_batch"] = "auto"
    """When ranks exchange gradients (torch). update: in its last micro-batch, and until then each rank has all of them,
    in float32. micro_batch: in each one. auto: update where that takes at most 5 % of a GPU's memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cp = self.context_parallel_size
        ulysses = self.ulysses_sequence_parallel_size
        vpp = self.virtual_pipeline_model_parallel_size
        require(
            "ulysses_sequence_parallel_size", ulysses, cp % ulysses == 0, f"a divisor of {_CP}={cp}"
        )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(f"sequence_parallel is true; expected {_TP} above 1")
        require(_VPP, vpp, vpp == 1 or self.pipeline_model_parallel_size > 1, f"{_PP} above 1")

    def check_torch(self) -> None:
        """Raise `ConfigError` for a size that the torch backend does not have."""
        for name in (_TP, _PP, "expert_model_parallel_size"):
            size = getattr(self, name)
            require(name, size, size == 1, "1 for the torch backend, or the megatron backend")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of groups of ranks that work on different samples; `ConfigError` if there is a rest."""
        num_ranks = self.model_parallel_size
        shards = self.fsdp_size
        require(
            "fsdp_size",
            shards,
            world_size % (shards or 1) == 0,
            f"0, or a divisor of {world_size} ranks",
        )
        if world_size % num_ranks:
            sizes: list[str] = []
            for name in (_TP, _PP, _CP):
                size = getattr(self, name)
                if size > 1:
                    sizes.append(f"{name}={size}")
            raise ConfigError(
                f"{' x '.join(sizes)} is {num_ranks}; expected a divisor of the world of {world_size} ranks: "
                f"{num_ranks * max(1, world_size // num_ranks)} ranks would fit"
            )
        return world_size // num_ranks


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(CheckedConfig):
    """Performance settings of Megatron-Core, which reading them does not need; results stay the same up to rounding.

    What has no setting follows from the device and from what is installed; see "Megatron-Core on CUDA" in the
    documentation, which also says which fusions of Megatron-Core are off.

    Example:
        >>> MegatronConfig(recompute_granularity="selective", overlap_grad_reduce=True).bucket_size
        40000000
    """

    recompute_granularity: Literal["auto", "none", "selective", "full"] = "auto"
    """The backward pass computes again nothing (none), MLPs and experts (selective), or whole layers (full); auto: the
    first of these that fits, where a run plans the memory of its GPUs; otherwise full on CUDA for models of a billion
    parameters, else none."""
    overlap_grad_reduce: Switch = "auto"
    """Add up the replicas' gradients during the backward pass, bucket by bucket, instead of after it; auto: on CUDA
    where several ranks do."""
    overlap_param_gather: Switch = "auto"
    """Gather updated parameters during the next forward pass instead of before it; needs overlap_grad_reduce; auto: on
    CUDA with it, without adapters."""
    bucket_size: Count = 40_000_000
    """Parameters of a bucket, with overlap_grad_reduce."""
    grouped_gemm: Switch = "auto"
    """Experts of a rank are multiplied by one call of torch's grouped_mm, not one after the other; auto: on CUDA
    in bfloat16, where their sizes are multiples of 8. Dense models have none."""
    transformer_engine: Switch = "auto"
    """Linear layers of attention and of dense MLPs, each fused with the norm before it, are Transformer Engine's, and
    so is the sorting of tokens by expert; auto: on CUDA where it is installed, without adapters. Attention itself,
    experts and other norms are as without it."""
    bias_activation_fusion: Switch = "auto"
    """SwiGLU is one compiled kernel forward and one backward; auto: on CUDA."""

    def check(self) -> None:
        """Raise `ConfigError` for settings that do not go together."""
        gathers = self.overlap_param_gather
        holds = self.overlap_grad_reduce is not False or gathers is not True
        require("overlap_param_gather", gathers, holds, "auto or false without overlap_grad_reduce")

    @staticmethod
    def environment(parallel: ParallelConfig, device_type: str) -> dict[str, str]:
        """Variables that a rank needs before its process uses the device.

        With tensor parallelism, communication runs next to matrix products, in an order that CUDA keeps if it has
        one queue.
        """
        is_needed = device_type == "cuda" and parallel.tensor_model_parallel_size > 1
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_needed else {}

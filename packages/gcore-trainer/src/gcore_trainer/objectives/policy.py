"""The objective of a policy: its losses, and their KL and entropy terms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, assert_never

import torch

from gcore_trainer.advantages.estimator import MAX_LOG_RATIO, check_finite_tokens
from gcore_trainer.advantages.reward_shaping import MAX_K3
from gcore_trainer.config import (
    KLPenalty,
    PolicyLossConfig,
    get_policy_loss,
    options_type,
    read_options,
    require,
)
from gcore_trainer.errors import BatchError
from gcore_trainer.losses.echo import echo
from gcore_trainer.objectives.objective import (
    BatchTotals,
    Objective,
    PartialLoss,
    TokenScores,
    check_fields,
    field_of,
    mask_of,
    token_weights,
)
from gcore_trainer.sample import MicroBatch, Sample

_OPTIONAL = ("old_log_probs", "rollout_log_probs", "rollout_is_weights")


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a loss. All shape [N]; tokens that do not count have log-probabilities and advantages of 0.

    Example:
        >>> tokens = PolicyTokens(
        ...     log_probs=torch.tensor([-1.0, -2.0, -3.0]),
        ...     old_log_probs=torch.tensor([-1.0, -2.0, -3.0]),
        ...     advantages=torch.tensor([1.0, 1.0, -1.0]),
        ...     mask=torch.ones(3),
        ...     lengths=[2, 1],
        ... )
        >>> tokens.ratio
        tensor([1., 1., 1.])
    """

    log_probs: torch.Tensor
    """Log-probabilities under the policy, with their gradient."""
    old_log_probs: torch.Tensor
    """Log-probabilities under the policy before the step's first update: the ratio's denominator."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """Bool, True where a token counts."""
    lengths: Sequence[int]
    """Tokens of each sequence; N in all."""

    @property
    def ratio(self) -> torch.Tensor:
        """exp(log_probs - old_log_probs), with its gradient."""
        return torch.exp((self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

    @property
    def covariances(self) -> torch.Tensor:
        """(A - mean(A)) (log_probs - mean(log_probs)), the means over the tokens that count, [N], without gradient."""
        count = self.mask.sum().clamp(min=1)
        log_probs = self.log_probs.detach()
        advantages = self.advantages - self.advantages.sum() / count
        return advantages * (log_probs - log_probs.sum() / count)

    def share(self, ratio: float) -> int:
        """Return how many tokens are a share of those that count, rounded down; at least one."""
        return max(1, int(ratio * int(self.mask.sum())))

    def sequence_means(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return, at each token, the mean over the tokens of its sequence that count, [N]; 0 where none does."""
        lengths = list(self.lengths)
        values_N = torch.where(self.mask, values_N, 0.0)
        means: list[torch.Tensor] = []
        for part, mask in zip(values_N.split(lengths), self.mask.split(lengths), strict=True):
            mean = part.sum() / mask.sum().clamp(min=1)
            means.append(mean.expand(part.numel()))
        return torch.cat(means)


LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss of every token, and metrics of every token by name, all [N]: of a metric the mean is reported."""

_Function = Callable[..., LossAndMetrics | torch.Tensor]


def policy_loss_function(*, has_dual_clip: bool = False) -> Callable[[_Function], _Function]:
    """Declare that a function of `PolicyTokens` and a `PolicyLossConfig` reads ``clip_ratio_c``.

    It returns the losses [N], or a tuple of these and metrics [N] by name, whose means over the tokens that count are
    reported: ``actor/pg_clipfrac`` where the upper or lower clip cuts the gradient (in CISPO, clips the ratio),
    ``actor/pg_clipfrac_lower`` where the dual clip of a negative advantage does, and any of its own.
    """

    def declare(function: _Function) -> _Function:
        function.__dict__["has_dual_clip"] = has_dual_clip
        return function

    return declare


def policy_loss(
    config: PolicyLossConfig,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    lengths: Sequence[int],
    **options: Any,
) -> LossAndMetrics:
    """Compute the loss that ``config.loss_mode`` names, at every token; the arguments are those of `PolicyTokens`.

    Tokens that do not count have loss 0 and no gradient, even where they hold NaN.

    Args:
        options: the loss's own parameters, such as ``tau_pos``; see `read_options`.

    Returns:
        losses [N], and the loss's metrics [N] by name; see `policy_loss_function`.

    Raises:
        ConfigError: there is no such loss, no such file, or the file does not import.
        BatchError: a user's own loss has another shape than [N].
    """
    tokens = PolicyTokens(
        log_probs=torch.where(mask, log_probs, 0.0),
        old_log_probs=torch.where(mask, old_log_probs, 0.0),
        advantages=torch.where(mask, advantages, 0.0),
        mask=mask,
        lengths=lengths,
    )
    result = get_policy_loss(config.loss_mode)(tokens, config, **options)
    if isinstance(result, torch.Tensor):
        result = result, {}
    loss_N, metrics = result
    if loss_N.shape != mask.shape:
        raise BatchError(
            f"the policy loss has shape {tuple(loss_N.shape)}; expected that of its tokens, {tuple(mask.shape)}"
        )
    return loss_N, metrics


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, eq. 7).

    Returns:
        losses [N], and [N] bool, True where the clip is active, and with it the gradient cut.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def kl_penalty(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLPenalty
) -> torch.Tensor:
    """Estimate KL(policy || reference) at every token, shape [N] (J. Schulman, "Approximating KL divergence", 2020).

    k1: log p - log q;  k2: (log p - log q)^2 / 2;  k3: q/p - 1 - log(q/p), GRPO's (arXiv 2402.03300, eq. 4), at most
    10 as in verl: a token at the bound has no gradient.

    k1 and, below its bound, k3 estimate the divergence without bias, but their gradients do not estimate its gradient
    (k1's is zero in expectation); k2's does, under the policy's own samples (arXiv 2510.01555). k1+ and k3+ have the
    value of k1 and k3 and the gradient of k2.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            negative = (-log_ratio).clamp(-20.0, 20.0)
            return (negative.exp() - 1 - negative).clamp(max=MAX_K3)
        case "k1+" | "k3+":
            value = kl_penalty(log_probs.detach(), ref_log_probs, "k1" if kind == "k1+" else "k3")
            return value + log_ratio.square() / 2 - (log_ratio.square() / 2).detach()
        case _:
            assert_never(kind)


class PolicyObjective(Objective[TokenScores]):
    """The policy gradient losses, with their KL and entropy terms, and `losses.echo` if its option is set.

    Without these terms, samples whose advantages are all zero have no gradient. Metrics: ``actor/pg_loss``,
    ``actor/ppo_kl``, ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/entropy``, ``actor/kl_loss``,
    ``actor/echo_loss``, ``training/rollout_probs_diff_mean``; the means are over the samples that have a gradient.

    Args:
        options: of the loss and of `losses.echo`, by name; see `options_type`.

    Example:
        >>> objective = PolicyObjective(PolicyLossConfig(loss_mode="cispo"))
        >>> scores = {"old_log_probs": np.full(2, -1.0, np.float32), "advantages": np.ones(2, np.float32)}
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 2]), **scores)
        >>> objective.has_no_gradient(sample)
        False
    """

    scores = "tokens"
    loss_name = "actor/pg_loss"

    def __init__(self, config: PolicyLossConfig, options: Mapping[str, Any] | None = None) -> None:
        loss = get_policy_loss(config.loss_mode)
        self._options = read_options(self.options_type(config.loss_mode), options or {})
        self._echo_coef: float = self._options.pop("echo_coef")
        is_read = config.clip_ratio_c is None or getattr(loss, "has_dual_clip", False)
        require(
            "clip_ratio_c",
            config.clip_ratio_c,
            is_read,
            f"None with loss_mode {config.loss_mode!r}",
        )
        self._config = config
        self.entropy_grad = config.entropy_coeff > 0

    @staticmethod
    def options_type(loss_mode: str) -> type[Any]:
        """Return the dataclass of the options with a policy loss: its own, and those of `losses.echo`."""
        return options_type(get_policy_loss(loss_mode), echo)

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the policy loss", "advantages")
        if self._config.kl_loss_coef:
            check_fields(
                micro_batches, f"kl_loss_coef={self._config.kl_loss_coef}", "ref_log_probs"
            )
        for field in _OPTIONAL:
            are_missing = {
                getattr(sample, field) is None for sample in chain.from_iterable(micro_batches)
            }
            if len(are_missing) > 1:
                raise BatchError(
                    f"{field} is None for some samples of the step; expected it for all of them or none"
                )
        check_finite_tokens(micro_batches, *_OPTIONAL)

    def has_no_gradient(self, sample: Sample) -> bool:
        if self._echo_coef and sample.predicted.any():
            return False
        if self._config.kl_loss_coef or self._config.entropy_coeff or sample.advantages is None:
            return super().has_no_gradient(sample)
        return not sample.advantages[sample.mask].any()

    def partial_loss(
        self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        config = self._config
        mask = mask_of(samples, like=scores.log_probs)
        log_probs = torch.where(mask, scores.log_probs, 0.0)
        entropies = torch.where(mask, scores.entropies, 0.0)
        current = log_probs.detach()
        longest = config.max_response_length
        weight_N = token_weights(
            samples, config.loss_agg_mode, longest, totals=totals, like=current
        )
        optional: dict[str, torch.Tensor] = {}
        for field in _OPTIONAL:
            if getattr(samples[0], field) is not None:
                optional[field] = field_of(samples, field, like=current)
        old = optional.get("old_log_probs", current)
        advantages = field_of(samples, "advantages", like=current)
        lengths = [s.response_ids.size for s in samples]
        loss_N, token_metrics = policy_loss(
            config, log_probs, old, advantages, mask=mask, lengths=lengths, **self._options
        )
        if "rollout_is_weights" in optional:
            loss_N = optional["rollout_is_weights"] * loss_N
        pg_loss = (weight_N * loss_N).sum()
        loss = pg_loss
        count = mask.float()
        sums = {
            "actor/pg_loss": pg_loss.detach(),
            "mean:actor/ppo_kl": (count * (old - current)).sum(),
            "mean:actor/entropy": (count * entropies.detach()).sum(),
            "count": count.sum(),
        }
        nothing_N = torch.zeros_like(mask)
        clipping = {"actor/pg_clipfrac": nothing_N, "actor/pg_clipfrac_lower": nothing_N}
        for name, metric_N in (clipping | token_metrics).items():
            sums[f"mean:{name}"] = torch.where(mask, metric_N.detach(), 0).sum()
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (weight_N * entropies).sum()
        if config.kl_loss_coef:
            reference = field_of(samples, "ref_log_probs", like=current)
            kl_loss = (weight_N * kl_penalty(log_probs, reference, config.kl_loss_type)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        if self._echo_coef:
            mode = "seq-mean-token-mean"
            weight_N = token_weights(
                samples, mode, None, totals=totals, like=current, mask="predicted"
            )
            predicted_N = torch.where(weight_N > 0, scores.log_probs, 0.0)
            echo_loss = echo(predicted_N, weight_N, echo_coef=self._echo_coef)
            loss = loss + echo_loss
            sums["actor/echo_loss"] = echo_loss.detach() / self._echo_coef
        if "rollout_log_probs" in optional:
            difference = (current.exp() - optional["rollout_log_probs"].exp()).abs()
            sums["mean:training/rollout_probs_diff_mean"] = (count * difference).sum()
        return loss, sums

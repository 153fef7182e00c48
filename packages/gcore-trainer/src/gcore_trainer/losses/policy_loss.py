"""The interface of a policy loss: its input, its output, and what it declares.

Shapes: N response tokens of any number of sequences, laid end to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from gcore_trainer.config import POLICY_LOSSES, PolicyLossConfig
from gcore_trainer.errors import BatchError

_MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this much, so that no ratio overflows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a loss. All shape [N]; tokens that do not count have log-probabilities and advantages of 0."""

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
        return torch.exp((self.log_probs - self.old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of every token, and what became of its ratio. All shape [N]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """True where the upper or lower clip is active and cuts the gradient (in CISPO, the ratio alone)."""
    clipped_lower: torch.Tensor
    """True where the dual clip of a negative advantage is active."""

    @classmethod
    def without_clip(cls, loss: torch.Tensor, ratio: torch.Tensor) -> Self:
        """Make the result of a loss that clips nothing."""
        nothing = torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss=loss, ratio=ratio, clipped=nothing, clipped_lower=nothing)


_Function = Callable[[PolicyTokens, PolicyLossConfig], PolicyLoss | torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class PolicyLossFunction:
    """A function from tokens to their losses, with what it declares."""

    function: _Function
    """Returns a `PolicyLoss`, or the losses [N] alone if it clips nothing."""
    has_dual_clip: bool = False
    """The function reads ``clip_ratio_c``."""

    def __call__(self, tokens: PolicyTokens, config: PolicyLossConfig) -> PolicyLoss:
        """Compute the loss of every token.

        Raises:
            BatchError: the function returned another shape than [N].
        """
        found = self.function(tokens, config)
        if isinstance(found, torch.Tensor):
            found = PolicyLoss.without_clip(found, tokens.ratio.detach())
        if found.loss.shape != tokens.log_probs.shape:
            raise BatchError(
                f"the policy loss has shape {tuple(found.loss.shape)}; expected that of its tokens, "
                f"{tuple(tokens.log_probs.shape)}"
            )
        return found


def policy_loss_function(*, has_dual_clip: bool = False) -> Callable[[_Function], PolicyLossFunction]:
    """Make a function of `PolicyTokens` and a `PolicyLossConfig` a `PolicyLossFunction` that declares this."""

    def make(function: _Function) -> PolicyLossFunction:
        return PolicyLossFunction(function=function, has_dual_clip=has_dual_clip)

    return make


def get_policy_loss(name: str) -> PolicyLossFunction:
    """Return a policy loss by its name, or a user's own by ``PATH.py:function``.

    Raises:
        ConfigError: there is no such loss, no such file, or the file does not import.
    """
    found = POLICY_LOSSES.load(name)
    return found if isinstance(found, PolicyLossFunction) else PolicyLossFunction(function=found)


def policy_loss(
    config: PolicyLossConfig,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    lengths: Sequence[int],
) -> PolicyLoss:
    """Compute the loss that ``config.loss_mode`` names, at every token.

    Args:
        config: of the loss.
        log_probs: [N] of the policy, with its gradient.
        old_log_probs: [N] of the policy that the ratio is against.
        advantages: [N].
        mask: [N] bool, the tokens that count; the others have loss 0 and no gradient, even where they hold NaN.
        lengths: tokens of each sequence; N in all.
    """
    log_probs, old_log_probs, advantages = (torch.where(mask, x, 0.0) for x in (log_probs, old_log_probs, advantages))
    tokens = PolicyTokens(
        log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages, mask=mask, lengths=lengths
    )
    return get_policy_loss(config.loss_mode)(tokens, config)


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: PolicyLossConfig) -> PolicyLoss:
    """Compute max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)): PPO (arXiv 1707.06347, eq. 7)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    is_clipped = clipped > unclipped
    return PolicyLoss(
        loss=torch.maximum(unclipped, clipped),
        ratio=ratio,
        clipped=is_clipped,
        clipped_lower=torch.zeros_like(is_clipped),
    )

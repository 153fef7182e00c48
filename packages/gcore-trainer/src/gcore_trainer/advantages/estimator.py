"""The interface of an advantage estimator: its input, its output, and what it declares that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.config import AdvantageConfig
from gcore_trainer.errors import BatchError
from gcore_trainer.registry import Registry

_ESTIMATORS = Registry("gcore_trainer.advantages.estimators", "adv_estimator")


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredGroup:
    """The n responses to one prompt; R_i is the number of tokens of response i."""

    rewards: Sequence[NDArray[np.floating]]
    """[R_i] of each response: its score at the last token that counts, and any KL penalty at every token."""
    masks: Sequence[NDArray[np.bool_]]
    """[R_i] of each response: tokens that the policy wrote."""
    values: Sequence[NDArray[np.floating]] | None = None
    """[R_i] of each response: the critic's values, for an estimator that needs a critic."""
    greedy_score: float | None = None
    """Score of the greedy response to the prompt, for an estimator that needs one."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """[n] sum of each response's rewards."""
        return np.array([rewards.sum() for rewards in self.rewards])

    def at_every_token(self, advantages: ArrayLike) -> list[NDArray[np.floating]]:
        """Give all tokens of response i the advantage i."""
        return [np.full(mask.shape, a) for mask, a in zip(self.masks, np.asarray(advantages), strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantagesAndReturns:
    """The output of an estimator that needs a critic; [R_i] of each response."""

    advantages: Sequence[NDArray[np.floating]]
    returns: Sequence[NDArray[np.floating]]
    """The critic's targets."""


_Function = Callable[[ScoredGroup, AdvantageConfig], Sequence[NDArray[np.floating]] | AdvantagesAndReturns]


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """A function from the scored responses to one prompt to advantages, with its needs."""

    function: _Function
    """Returns the advantages [R_i] of each response, with returns if ``needs_critic``."""
    needs_critic: bool = False
    needs_greedy: bool = False
    """The greedy response to every prompt is generated and scored, too."""
    reads_token_rewards: bool = False
    """Rewards are read token by token, so that they may hold a KL penalty; otherwise only their sum is."""
    whiten: bool = False
    """The advantages are whitened over the batch."""
    min_group_size: int = 1
    """Fewest responses to a prompt that can be compared."""

    def __call__(
        self, group: ScoredGroup, config: AdvantageConfig
    ) -> tuple[Sequence[NDArray[np.floating]], Sequence[NDArray[np.floating]] | None]:
        """Return the advantages [R_i] of each response, and its returns [R_i] if the estimator needs a critic.

        Raises:
            BatchError: the group lacks something that the estimator needs, or the function's result does not fit it.
        """
        for field, is_needed in (("values", self.needs_critic), ("greedy_score", self.needs_greedy)):
            if is_needed and getattr(group, field) is None:
                raise BatchError(f"{field} is None; expected a value, which the advantage estimator needs")
        found = self.function(group, config)
        has_returns = isinstance(found, AdvantagesAndReturns)
        advantages, returns = (found.advantages, found.returns) if has_returns else (found, None)
        if (returns is None) == self.needs_critic:
            raise BatchError(
                f"returns is {returns}; expected {'returns' if self.needs_critic else 'None'} for an advantage "
                f"estimator with needs_critic={self.needs_critic}"
            )
        expected = [mask.shape for mask in group.masks]
        for field, arrays in (("advantages", advantages), ("returns", returns)):
            if arrays is not None and (shapes := [np.shape(a) for a in arrays]) != expected:
                raise BatchError(f"{field} has shapes {shapes}; expected those of the responses, {expected}")
        return advantages, returns


def advantage_estimator(
    *,
    needs_critic: bool = False,
    needs_greedy: bool = False,
    reads_token_rewards: bool = False,
    whiten: bool = False,
    min_group_size: int = 1,
) -> Callable[[_Function], AdvantageEstimator]:
    """Make a function of a `ScoredGroup` and an `AdvantageConfig` an `AdvantageEstimator` with these needs."""

    def make(function: _Function) -> AdvantageEstimator:
        return AdvantageEstimator(
            function=function,
            needs_critic=needs_critic,
            needs_greedy=needs_greedy,
            reads_token_rewards=reads_token_rewards,
            whiten=whiten,
            min_group_size=min_group_size,
        )

    return make


def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """Return an estimator by its name, or a user's own by ``PATH.py:function``; a plain function needs nothing.

    Raises:
        ConfigError: there is no such estimator, no such file, or the file does not import.
    """
    found = _ESTIMATORS.load(name)
    return found if isinstance(found, AdvantageEstimator) else AdvantageEstimator(function=found)


def advantage_estimators() -> dict[str, AdvantageEstimator]:
    """Return the built-in estimators by name."""
    return {name: get_advantage_estimator(name) for name in _ESTIMATORS.names}


def checked_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """Return the scores [n] of a group in float64.

    Raises:
        BatchError: there are none, or one is not finite.
    """
    r = np.asarray(scores, dtype=np.float64)
    if r.ndim != 1 or r.size == 0 or not np.isfinite(r).all():
        raise BatchError(f"scores is {r}; expected one dimension, at least one entry and finite numbers")
    return r

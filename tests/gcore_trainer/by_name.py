"""Advantage estimators and policy losses called by name, on flat arrays."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gcore_trainer import (
    PolicyLossConfig,
    ScoredGroup,
    get_advantage_estimator,
    policy_loss,
)


def group_advantages(scores: ArrayLike, estimator: str) -> NDArray[np.floating]:
    """Advantages [n] of responses of one token, by a group-relative estimator."""
    rewards = [np.array([score]) for score in np.asarray(scores)]
    group = ScoredGroup(rewards=rewards, masks=[np.ones(1, np.bool_) for _ in rewards])
    return np.concatenate(get_advantage_estimator(estimator)(group)[0])


def flat_loss(
    loss_mode: str, log_probs: torch.Tensor, *arrays: NDArray[Any], **settings: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and metrics [N] for log-probs, old log-probs and advantages [N] of one sequence, all of which count."""
    old, advantages = (torch.from_numpy(a) for a in arrays)
    names = settings.keys() & PolicyLossConfig.__dataclass_fields__.keys()
    config = PolicyLossConfig(loss_mode=loss_mode, **{name: settings.pop(name) for name in names})
    mask = torch.ones(len(old), dtype=torch.bool)
    return policy_loss(
        config, log_probs, old, advantages, mask=mask, lengths=[len(old)], **settings
    )

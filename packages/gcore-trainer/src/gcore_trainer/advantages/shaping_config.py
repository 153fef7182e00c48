"""Settings of the penalties that are added to scores; `gcore_trainer.advantages.reward_shaping` has their formulas."""

import math
from dataclasses import dataclass
from typing import Literal

from gcore_trainer.advantages.reward_shaping import RewardKL
from gcore_trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """Scoring and training of responses that reach or come close to data.max-response-length."""

    buffer_len: int = 0
    """Number of last tokens over which a response's score falls linearly (DAPO's soft punishment); 0: none."""
    penalty_factor: float = 1.0
    """How far the score has fallen at the limit."""
    filter: bool = False
    """Do not train on responses that were cut off."""

    def __post_init__(self) -> None:
        if self.buffer_len < 0:
            raise ConfigError(f"buffer_len is {self.buffer_len}; expected 0 or more")
        if not 0 <= self.penalty_factor < math.inf:
            raise ConfigError(f"penalty_factor is {self.penalty_factor}; expected a finite number, 0 or more")


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
    """Mean divergence per token to reach, in adaptive."""
    horizon: int = 10_000
    """Responses over which the weight adapts, in adaptive."""

    def __post_init__(self) -> None:
        if not 0 <= self.kl_coef < math.inf:
            raise ConfigError(f"kl_coef is {self.kl_coef}; expected a finite number, 0 or more")
        if not 0 < self.target_kl < math.inf:
            raise ConfigError(f"target_kl is {self.target_kl}; expected a finite number above 0")
        if self.horizon < 1:
            raise ConfigError(f"horizon is {self.horizon}; expected 1 or more")
        if self.type == "adaptive" and not self.kl_coef:
            raise ConfigError("kl_coef is 0; expected above 0 with algorithm.kl_ctrl.type 'adaptive'")

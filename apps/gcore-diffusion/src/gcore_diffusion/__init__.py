"""RLHF of diffusion models: the command `gcore-diffusion`, and the same from Python.

``train(DiffusionConfig(...))`` runs what ``gcore-diffusion train`` does, without a screen.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_diffusion.config import (
        ActorConfig,
        AlgorithmConfig,
        DataConfig,
        DemoConfig,
        DiffusionConfig,
        RolloutConfig,
        TrainerConfig,
    )
    from gcore_diffusion.recipes import embedded, embedded_nft
    from gcore_diffusion.sampling.reward_config import JudgeConfig, RewardConfig
    from gcore_diffusion.training import train

_MODULES = {
    "gcore_diffusion.config": (
        "ActorConfig AlgorithmConfig DataConfig DemoConfig DiffusionConfig RolloutConfig TrainerConfig"
    ),
    "gcore_diffusion.recipes": "embedded embedded_nft",
    "gcore_diffusion.sampling.reward_config": "JudgeConfig RewardConfig",
    "gcore_diffusion.training": "train",
}
"""The public names by module, which is imported when one of them is first used."""

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "DataConfig",
    "DemoConfig",
    "DiffusionConfig",
    "JudgeConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "embedded",
    "embedded_nft",
    "train",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(_importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

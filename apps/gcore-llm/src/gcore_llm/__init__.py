"""LLM RLHF: the command `gcore-llm`, and the same from Python.

``train(TrainConfig(...))`` runs what ``gcore-llm train`` does, without a screen; ``fine_tune`` takes the settings of
``gcore-llm sft``, ``reward-model`` and ``dpo``.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_llm.config import (
        ActorConfig,
        AlgorithmConfig,
        CriticConfig,
        DataConfig,
        KLControlConfig,
        OverlongConfig,
        TaskConfig,
        TrainConfig,
        WarmupConfig,
    )
    from gcore_llm.finetune.config import (
        DPORunConfig,
        LengthConfig,
        OptimConfig,
        RewardModelRunConfig,
        RowsConfig,
        SFTRunConfig,
    )
    from gcore_llm.finetune.run import fine_tune
    from gcore_llm.recipes import embedded, own_data
    from gcore_llm.settings.reward_config import JudgeConfig, RewardCallsConfig, RewardModelConfig
    from gcore_llm.settings.rollout_config import MultiTurnConfig, RolloutConfig
    from gcore_llm.settings.trainer_config import TrainerConfig
    from gcore_llm.training import train

_MODULES = {
    "gcore_llm.config": (
        "ActorConfig AlgorithmConfig CriticConfig DataConfig KLControlConfig OverlongConfig TaskConfig "
        "TrainConfig WarmupConfig"
    ),
    "gcore_llm.finetune.config": "DPORunConfig LengthConfig OptimConfig RewardModelRunConfig RowsConfig SFTRunConfig",
    "gcore_llm.finetune.run": "fine_tune",
    "gcore_llm.recipes": "embedded own_data",
    "gcore_llm.settings.reward_config": "JudgeConfig RewardCallsConfig RewardModelConfig",
    "gcore_llm.settings.rollout_config": "MultiTurnConfig RolloutConfig",
    "gcore_llm.settings.trainer_config": "TrainerConfig",
    "gcore_llm.training": "train",
}
"""The public names by module, which is imported when one of them is first used."""

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "CriticConfig",
    "DPORunConfig",
    "DataConfig",
    "JudgeConfig",
    "KLControlConfig",
    "LengthConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongConfig",
    "RewardCallsConfig",
    "RewardModelConfig",
    "RewardModelRunConfig",
    "RolloutConfig",
    "RowsConfig",
    "SFTRunConfig",
    "TaskConfig",
    "TrainConfig",
    "TrainerConfig",
    "WarmupConfig",
    "embedded",
    "fine_tune",
    "own_data",
    "train",
]


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names.split():
            return getattr(_importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

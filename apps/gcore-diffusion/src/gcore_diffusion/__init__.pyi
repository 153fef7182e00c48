from .config import (
    DemoConfig as DemoConfig,
    DiffusionActorConfig as DiffusionActorConfig,
    DiffusionAlgorithmConfig as DiffusionAlgorithmConfig,
    DiffusionConfig as DiffusionConfig,
    DiffusionDataConfig as DiffusionDataConfig,
    DiffusionRolloutConfig as DiffusionRolloutConfig,
    DiffusionTrainerConfig as DiffusionTrainerConfig,
    embedded as embedded,
    embedded_nft as embedded_nft,
)
from .reward_config import (
    DiffusionJudgeConfig as DiffusionJudgeConfig,
    NamedRewardConfig as NamedRewardConfig,
    RewardConfig as RewardConfig,
)
from .training import train as train

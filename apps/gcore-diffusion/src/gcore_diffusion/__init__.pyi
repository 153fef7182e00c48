from .config import (
    ActorConfig as ActorConfig,
    AlgorithmConfig as AlgorithmConfig,
    DataConfig as DataConfig,
    DemoConfig as DemoConfig,
    DiffusionConfig as DiffusionConfig,
    RolloutConfig as RolloutConfig,
    TrainerConfig as TrainerConfig,
    embedded as embedded,
    embedded_nft as embedded_nft,
)
from .reward_config import (
    JudgeConfig as JudgeConfig,
    NamedRewardConfig as NamedRewardConfig,
    RewardConfig as RewardConfig,
)
from .training import train as train

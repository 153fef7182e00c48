from .config import (
    ActorConfig as ActorConfig,
    AlgorithmConfig as AlgorithmConfig,
    DataConfig as DataConfig,
    DemoConfig as DemoConfig,
    DiffusionConfig as DiffusionConfig,
    JudgeConfig as JudgeConfig,
    RewardConfig as RewardConfig,
    RolloutConfig as RolloutConfig,
    TrainerConfig as TrainerConfig,
    embedded as embedded,
    embedded_nft as embedded_nft,
)
from .training import train as train

from .cli import embedded as embedded, own_data as own_data
from .config import (
    AlgorithmConfig as AlgorithmConfig,
    DataConfig as DataConfig,
    KLControlConfig as KLControlConfig,
    MultiTurnConfig as MultiTurnConfig,
    OverlongConfig as OverlongConfig,
    RolloutConfig as RolloutConfig,
    TaskConfig as TaskConfig,
    TrainConfig as TrainConfig,
    TrainerConfig as TrainerConfig,
    WarmupConfig as WarmupConfig,
)
from .finetune.config import (
    DPORunConfig as DPORunConfig,
    LengthConfig as LengthConfig,
    OptimConfig as OptimConfig,
    RewardModelRunConfig as RewardModelRunConfig,
    RowsConfig as RowsConfig,
    SFTRunConfig as SFTRunConfig,
)
from .finetune.run import fine_tune as fine_tune
from .learning.config import ActorConfig as ActorConfig, CriticConfig as CriticConfig
from .reward_config import (
    JudgeConfig as JudgeConfig,
    RewardCallsConfig as RewardCallsConfig,
    RewardModelConfig as RewardModelConfig,
)
from .training import train as train

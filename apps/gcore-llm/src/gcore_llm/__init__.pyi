from .cli import embedded as embedded
from .config import (
    RolloutConfig as RolloutConfig,
    TrainConfig as TrainConfig,
)
from .finetune.config import (
    DPORunConfig as DPORunConfig,
    LengthConfig as LengthConfig,
    RewardModelRunConfig as RewardModelRunConfig,
    RowsConfig as RowsConfig,
    SFTRunConfig as SFTRunConfig,
)
from .finetune.run import fine_tune as fine_tune
from .learning.config import AlgorithmConfig as AlgorithmConfig
from .sections import (
    ActorConfig as ActorConfig,
    ActorOptimConfig as ActorOptimConfig,
    DataConfig as DataConfig,
    TaskConfig as TaskConfig,
    TrainerConfig as TrainerConfig,
    WarmupConfig as WarmupConfig,
)
from .training import train as train

from .config import (
    DemoConfig as DemoConfig,
    DiffusionConfig as DiffusionConfig,
    DiffusionTrainerConfig as DiffusionTrainerConfig,
    embedded as embedded,
    embedded_nft as embedded_nft,
)
from .reward_config import (
    NamedRewardConfig as NamedRewardConfig,
)
from .training import train as train

from .checkpointer import Checkpointer as Checkpointer
from .errors import (
    CheckpointError as CheckpointError,
    CheckpointLockedError as CheckpointLockedError,
    CheckpointMismatchError as CheckpointMismatchError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CheckpointWriteError as CheckpointWriteError,
    CorruptCheckpointError as CorruptCheckpointError,
)
from .format.tree import PerRank as PerRank, State as State
from .handles import (
    LoadHandle as LoadHandle,
    SaveHandle as SaveHandle,
)
from .loading.reader import verify as verify
from .ranks.shards import Shard as Shard, Shards as Shards
from .shortcuts import load as load, save as save
from .stopping import StopSignals as StopSignals
from .tiers.checkpointer import TieredCheckpointer as TieredCheckpointer
from .tiers.tier import Tier as Tier
from .tools.dcp import import_dcp as import_dcp
from .tools.hugging_face import export_hf as export_hf
from .tools.torch_file import import_pt as import_pt

from .collectives.base import Collectives as Collectives
from .collectives.inline import InlineCollectives as InlineCollectives, InlineGroup as InlineGroup
from .context import Context as Context, Program as Program
from .devices import DeviceTimers as DeviceTimers, merge_spans as merge_spans, rank_name as rank_name
from .dynamic_sampling import DynamicSampler as DynamicSampler, SampledBatch as SampledBatch
from .errors import (
    ClusterError as ClusterError,
    ControllerDiedError as ControllerDiedError,
    ControllerError as ControllerError,
    DeadlineError as DeadlineError,
    RankError as RankError,
)
from .prompt_stealing import SharedPrompts as SharedPrompts
from .prompts import PromptLoader as PromptLoader, ShardedSampler as ShardedSampler
from .references import Reference as Reference
from .rlhf.config import RLHFConfig as RLHFConfig, RunStart as RunStart, State as State
from .rlhf.modality import (
    Generated as Generated,
    Group as Group,
    Modality as Modality,
    Prepared as Prepared,
    RLHFRoles as RLHFRoles,
    TrainingBatch as TrainingBatch,
    UnfinishedGroup as UnfinishedGroup,
    Wave as Wave,
)
from .rlhf.recorder import Recorder as Recorder
from .rlhf.step import RLHFLoop as RLHFLoop
from .runtimes.backend import Backend as Backend, InlineBackend as InlineBackend, Recovery as Recovery
from .runtimes.events import Announced as Announced, Announcer as Announcer, RemoteRecorder as RemoteRecorder
from .runtimes.inline import run_inline as run_inline
from .runtimes.inline_trainer import (
    InProcessTrainerGroup as InProcessTrainerGroup,
    SharedTrainerClient as SharedTrainerClient,
    share_trainer as share_trainer,
)
from .runtimes.local.trainer_group import LocalTrainerGroup as LocalTrainerGroup
from .runtimes.ray import (
    ActorRole as ActorRole,
    Handles as Handles,
    RayBackend as RayBackend,
    RayControllers as RayControllers,
    RayTrainerClient as RayTrainerClient,
    RayTrainerGroup as RayTrainerGroup,
    RoleActors as RoleActors,
    check_token as check_token,
    connect as connect,
    run_ray as run_ray,
)
from .runtimes.simulated import VirtualTimeLoop as VirtualTimeLoop, run_simulated as run_simulated
from .runtimes.sizes import SizedConfig as SizedConfig, Sizes as Sizes
from .stages import (
    Span as Span,
    StageTimer as StageTimer,
    on_wall_clock as on_wall_clock,
    seconds_by_stage as seconds_by_stage,
)
from .trainer_group import (
    SharedTrainerGroup as SharedTrainerGroup,
    TrainerClient as TrainerClient,
    TrainerGroup as TrainerGroup,
    TrainerSpec as TrainerSpec,
    TrainerWorker as TrainerWorker,
    deal as deal,
)

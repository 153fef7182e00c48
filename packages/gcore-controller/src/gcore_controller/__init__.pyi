from .collectives.base import Collectives as Collectives
from .context import (
    Context as Context,
    DeviceTimers as DeviceTimers,
    DeviceWork as DeviceWork,
    Program as Program,
    Reference as Reference,
    Span as Span,
    StageTimer as StageTimer,
    seconds_by_stage as seconds_by_stage,
)
from .errors import (
    ClusterError as ClusterError,
    ControllerError as ControllerError,
    RankCodeError as RankCodeError,
    RankError as RankError,
)
from .rlhf.dynamic_sampling import DynamicSampler as DynamicSampler
from .rlhf.events import (
    Evaluated as Evaluated,
    Event as Event,
    Recorder as Recorder,
    Round as Round,
    Stepped as Stepped,
    Updating as Updating,
    make_announcer as make_announcer,
)
from .rlhf.mixture import Mixture as Mixture
from .rlhf.modality import (
    Generated as Generated,
    Modality as Modality,
    Prepared as Prepared,
    RLHFConfig as RLHFConfig,
    RunStart as RunStart,
    TrainingBatch as TrainingBatch,
    Wave as Wave,
)
from .rlhf.prompts import PromptLoader as PromptLoader
from .rlhf.step import RLHFLoop as RLHFLoop
from .runtimes.backend import (
    LENT as LENT,
    Backend as Backend,
    Sizes as Sizes,
)
from .runtimes.inline import (
    InlineBackend as InlineBackend,
    InlineCollectives as InlineCollectives,
    InProcessTrainerGroup as InProcessTrainerGroup,
    run_inline as run_inline,
    share_trainer as share_trainer,
)
from .runtimes.local import LocalTrainerGroup as LocalTrainerGroup
from .runtimes.ray import (
    ActorRole as ActorRole,
    Handles as Handles,
    RayBackend as RayBackend,
    RayTrainerClient as RayTrainerClient,
    RoleActors as RoleActors,
    check_token as check_token,
    connect_quietly as connect_quietly,
    count_cluster_gpus as count_cluster_gpus,
    run_ray as run_ray,
)
from .runtimes.simulated import VirtualTimeLoop as VirtualTimeLoop, run_simulated as run_simulated
from .trainer_client import (
    DeviceTurns as DeviceTurns,
    Lending as Lending,
    TrainerClient as TrainerClient,
)
from .trainer_group import (
    SharedTrainerGroup as SharedTrainerGroup,
    State as State,
    TrainerGroup as TrainerGroup,
    TrainerSpec as TrainerSpec,
    deal as deal,
)

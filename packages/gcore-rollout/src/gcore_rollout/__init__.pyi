from .engines.device_leases import (
    LendingEngines as LendingEngines,
    TimeSharedEngines as TimeSharedEngines,
)
from .engines.diffusion.arrays import (
    host_array as host_array,
    host_tensor as host_tensor,
)
from .engines.diffusion.engine import (
    DiffusersEngine as DiffusersEngine,
)
from .engines.diffusion.kernels import (
    DDIM as DDIM,
    DanceSDE as DanceSDE,
    FlowCPS as FlowCPS,
    FlowODE as FlowODE,
    FlowSDE as FlowSDE,
    Kernel as Kernel,
)
from .engines.diffusion.recording import (
    adapt_kernel as adapt_kernel,
    load_pipeline as load_pipeline,
    weight_variant as weight_variant,
)
from .engines.diffusion.text_encoders import (
    cut_prompts as cut_prompts,
)
from .engines.diffusion.types import (
    ImageRequest as ImageRequest,
    ImageSample as ImageSample,
    ImageSampling as ImageSampling,
    Trajectory as Trajectory,
)
from .engines.hf.engine import (
    HFEngine as HFEngine,
)
from .engines.instrumented import (
    InstrumentedEngine as InstrumentedEngine,
    WeightRecord as WeightRecord,
)
from .engines.local_replicas import (
    start_replicas as start_replicas,
    visible_gpus as visible_gpus,
)
from .engines.protocol import (
    Completion as Completion,
    Engine as Engine,
    EngineStats as EngineStats,
    RepetitionDetection as RepetitionDetection,
    Request as Request,
    RequestT as RequestT,
    SampleT as SampleT,
    SamplingParams as SamplingParams,
)
from .engines.queueing import (
    Call as Call,
    QueueingEngine as QueueingEngine,
    TokenLimits as TokenLimits,
    sample_seeds as sample_seeds,
)
from .engines.registry import (
    PRELOAD_DIFFUSERS as PRELOAD_DIFFUSERS,
    EngineKind as EngineKind,
    check_engine_options as check_engine_options,
    check_servers as check_servers,
    engine_factory as engine_factory,
    engine_kind as engine_kind,
    engine_names as engine_names,
    register_engine as register_engine,
)
from .engines.remote.process import (
    EngineProcess as EngineProcess,
)
from .engines.remote.ray_engine import (
    EngineHandle as EngineHandle,
    RayEngine as RayEngine,
)
from .engines.replica import (
    fair_parts as fair_parts,
)
from .engines.replicas import (
    EngineReplicas as EngineReplicas,
)
from .engines.vllm.engine import (
    VLLMEngine as VLLMEngine,
)
from .engines.vllm.held_weights import (
    TiedHeadWorker as TiedHeadWorker,
)
from .episodes import (
    EpisodeRole as EpisodeRole,
    RunningEpisodes as RunningEpisodes,
)
from .errors import (
    EngineDiedError as EngineDiedError,
    EngineModelError as EngineModelError,
    EngineStartError as EngineStartError,
    EpisodeError as EpisodeError,
    NoScoreError as NoScoreError,
    RequestError as RequestError,
    RewardConfigError as RewardConfigError,
    RewardError as RewardError,
    RolloutError as RolloutError,
    WrongWeightsError as WrongWeightsError,
)
from .generation import Generation as Generation, RolloutRoles as RolloutRoles
from .groups import (
    Group as Group,
    LengthHistory as LengthHistory,
    SampledPart as SampledPart,
    sampled_metrics as sampled_metrics,
    sampled_part as sampled_part,
)
from .images.decoding import (
    decode_image as decode_image,
)
from .images.reward import (
    FrameReward as FrameReward,
    check_images as check_images,
    check_prompts as check_prompts,
    evaluate_images as evaluate_images,
    make_colour_reward as make_colour_reward,
)
from .images.vision_processor import (
    VisionProcessor as VisionProcessor,
)
from .prompts import (
    Prompt as Prompt,
    PromptImages as PromptImages,
)
from .rewards.comparison import GroupComparison as GroupComparison
from .rewards.kinds.composite import (
    CompositeReward as CompositeReward,
    ImageCompositeReward as ImageCompositeReward,
    reward_terms as reward_terms,
)
from .rewards.kinds.http import (
    HTTPReward as HTTPReward,
)
from .rewards.kinds.judge import (
    ImageJudgeReward as ImageJudgeReward,
    JudgeModel as JudgeModel,
    JudgeReward as JudgeReward,
    Reduce as Reduce,
    make_score_parser as make_score_parser,
)
from .rewards.kinds.pairwise import (
    PairwiseJudge as PairwiseJudge,
    make_winner_parser as make_winner_parser,
)
from .rewards.kinds.sequence_classifier import (
    SequenceClassifierReward as SequenceClassifierReward,
)
from .rewards.kinds.verifiers import (
    CodeReward as CodeReward,
    import_reasoning_gym as import_reasoning_gym,
)
from .rewards.process import (
    LimitedProcess as LimitedProcess,
    LimitExceededError as LimitExceededError,
    ProcessLimits as ProcessLimits,
)
from .rewards.registry import (
    ImageRewardKind as ImageRewardKind,
    ImageRewardSettings as ImageRewardSettings,
    build_image_reward as build_image_reward,
    build_reward as build_reward,
    build_task_reward as build_task_reward,
    image_reward_kind as image_reward_kind,
    load_function as load_function,
    register_image_reward as register_image_reward,
    register_reward as register_reward,
    reward_names as reward_names,
)
from .rewards.reward import (
    Failure as Failure,
    FailureLog as FailureLog,
    RewardFunction as RewardFunction,
    Scored as Scored,
    part_means as part_means,
    part_stds as part_stds,
)
from .rewards.runner import (
    OnError as OnError,
    RetryPolicy as RetryPolicy,
    RewardRunner as RewardRunner,
    RewardRunnerConfig as RewardRunnerConfig,
    evaluate as evaluate,
    score as score,
)
from .sandbox.sandbox import (
    Sandbox as Sandbox,
)
from .weight_sync.digests import (
    DigestedWeights as DigestedWeights,
    HeldWeights as HeldWeights,
    UnmergedWeights as UnmergedWeights,
)
from .weight_sync.history import (
    DeltaSender as DeltaSender,
)
from .weight_sync.layout import (
    divide_weights as divide_weights,
    write_part as write_part,
)
from .weight_sync.shared_weights import (
    SharedWeights as SharedWeights,
)
from .weight_sync.weight_references import (
    WeightReferences as WeightReferences,
)

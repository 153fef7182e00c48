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
    AnySample as AnySample,
    Completion as Completion,
    Engine as Engine,
    EngineStats as EngineStats,
    HeldTensor as HeldTensor,
    HeldWeights as HeldWeights,
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
    VLLM_RESERVED as VLLM_RESERVED,
    EngineKind as EngineKind,
    check_engine_options as check_engine_options,
    check_servers as check_servers,
    connect_servers as connect_servers,
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
    end_engine_actor as end_engine_actor,
    sleep_engine_actor as sleep_engine_actor,
    start_engine_actor as start_engine_actor,
)
from .engines.replica import (
    fair_parts as fair_parts,
)
from .engines.replicas import (
    EngineReplicas as EngineReplicas,
)
from .engines.servers.sglang import (
    SGLangServerEngine as SGLangServerEngine,
)
from .engines.servers.sglang_engine import (
    SGLangEngine as SGLangEngine,
)
from .engines.servers.vllm import (
    VLLMServerEngine as VLLMServerEngine,
)
from .engines.vllm.engine import (
    VLLMEngine as VLLMEngine,
)
from .engines.vllm.process import (
    TiedHeadWorker as TiedHeadWorker,
)
from .errors import (
    EngineDiedError as EngineDiedError,
    EngineModelError as EngineModelError,
    EngineStartError as EngineStartError,
    NoScoreError as NoScoreError,
    RequestError as RequestError,
    RewardConfigError as RewardConfigError,
    RewardError as RewardError,
    RolloutError as RolloutError,
    WrongWeightsError as WrongWeightsError,
)
from .generation import (
    Generation as Generation,
    GroupComparison as GroupComparison,
    RolloutRoles as RolloutRoles,
)
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
from .images.geneval import (
    GenEvalReward as GenEvalReward,
)
from .images.reward import (
    ColourReward as ColourReward,
    FrameReward as FrameReward,
    check_images as check_images,
    check_prompts as check_prompts,
    evaluate_images as evaluate_images,
)
from .images.text import (
    OCRReward as OCRReward,
)
from .images.vision_processor import (
    VisionProcessor as VisionProcessor,
    load_vision_processor as load_vision_processor,
)
from .multi_turn.chat import (
    ChatEncoder as ChatEncoder,
)
from .multi_turn.config import (
    MultiTurnConfig as MultiTurnConfig,
)
from .multi_turn.environment import (
    Environment as Environment,
    Opening as Opening,
    Reply as Reply,
    RevisionEnvironment as RevisionEnvironment,
    Tool as Tool,
    ToolEnvironment as ToolEnvironment,
)
from .multi_turn.episode import (
    run_episode as run_episode,
)
from .multi_turn.messages import (
    check_text as check_text,
    drop_none as drop_none,
    normalize_messages as normalize_messages,
    render_chat as render_chat,
)
from .prompts import (
    Prompt as Prompt,
    PromptImages as PromptImages,
    read_image as read_image,
)
from .rewards.kinds.composite import (
    CompositeReward as CompositeReward,
    ImageCompositeReward as ImageCompositeReward,
    reward_terms as reward_terms,
)
from .rewards.kinds.graders import (
    AIMEReward as AIMEReward,
    GSM8KReward as GSM8KReward,
    MultipleChoiceReward as MultipleChoiceReward,
)
from .rewards.kinds.http import (
    HTTPReward as HTTPReward,
)
from .rewards.kinds.judge import (
    ImageJudgeReward as ImageJudgeReward,
    JudgeModel as JudgeModel,
    JudgeReward as JudgeReward,
    PairwiseJudge as PairwiseJudge,
    Reduce as Reduce,
    ScorePattern as ScorePattern,
    WinnerPattern as WinnerPattern,
)
from .rewards.kinds.sequence_classifier import (
    SequenceClassifierReward as SequenceClassifierReward,
)
from .rewards.kinds.verifiers import (
    CodeReward as CodeReward,
    MathVerifyReward as MathVerifyReward,
    ReasoningGymReward as ReasoningGymReward,
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
    load_reward as load_reward,
    register_image_reward as register_image_reward,
    register_reward as register_reward,
    reward_names as reward_names,
)
from .rewards.reward import (
    Failure as Failure,
    FailureLog as FailureLog,
    RewardFunction as RewardFunction,
    Scored as Scored,
    ThreadedReward as ThreadedReward,
    part_means as part_means,
    part_stds as part_stds,
    reward_metrics as reward_metrics,
)
from .rewards.runner import (
    OnError as OnError,
    RetryPolicy as RetryPolicy,
    RewardRunner as RewardRunner,
    RewardRunnerConfig as RewardRunnerConfig,
    evaluate as evaluate,
    evaluate_group as evaluate_group,
    score as score,
)
from .sandbox.sandbox import (
    Sandbox as Sandbox,
    SandboxLimits as SandboxLimits,
)
from .weight_sync.digests import (
    DigestedWeights as DigestedWeights,
    UnmergedWeights as UnmergedWeights,
)
from .weight_sync.history import (
    DeltaSender as DeltaSender,
    WeightHistory as WeightHistory,
)
from .weight_sync.layout import (
    divide_weights as divide_weights,
    write_part as write_part,
)
from .weight_sync.shared_weights import (
    SharedCudaWeights as SharedCudaWeights,
    SharedWeights as SharedWeights,
    open_weights as open_weights,
)
from .weight_sync.updates import (
    AdapterWeights as AdapterWeights,
    FullWeights as FullWeights,
    WeightMirror as WeightMirror,
    apply_delta as apply_delta,
    make_delta as make_delta,
)
from .weight_sync.weight_references import (
    WeightReferences as WeightReferences,
)

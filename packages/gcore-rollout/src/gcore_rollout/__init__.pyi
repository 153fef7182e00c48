from .engines.diffusion.engine import DiffusersEngine as DiffusersEngine
from .engines.diffusion.kernels import (
    DDIM as DDIM,
    DanceSDE as DanceSDE,
    FlowCPS as FlowCPS,
    FlowODE as FlowODE,
    FlowSDE as FlowSDE,
    Kernel as Kernel,
    Transition as Transition,
)
from .engines.diffusion.recording import load_pipeline as load_pipeline, suited as suited
from .engines.diffusion.types import (
    ImageRequest as ImageRequest,
    ImageSample as ImageSample,
    ImageSampling as ImageSampling,
    Trajectory as Trajectory,
)
from .engines.hf.engine import HFEngine as HFEngine
from .engines.processes.engine_process import EngineProcess as EngineProcess
from .engines.processes.replicas import start_replicas as start_replicas, visible_gpus as visible_gpus
from .engines.protocol import Engine as Engine, EngineStats as EngineStats
from .engines.queueing import Call as Call
from .engines.ray.ray_engine import (
    EngineHandle as EngineHandle,
    RayEngine as RayEngine,
    end_engine_actor as end_engine_actor,
    start_engine_actor as start_engine_actor,
)
from .engines.registry import (
    PRELOAD_DIFFUSERS as PRELOAD_DIFFUSERS,
    PRELOAD_HF as PRELOAD_HF,
    PRELOAD_VLLM as PRELOAD_VLLM,
    EngineKind as EngineKind,
    connect_servers as connect_servers,
    engine_factory as engine_factory,
    engine_kind as engine_kind,
    engine_names as engine_names,
    register_engine as register_engine,
)
from .engines.replicas import EngineReplicas as EngineReplicas
from .engines.sampling import sample_seeds as sample_seeds
from .engines.servers.client import ServerClient as ServerClient
from .engines.servers.sglang import SGLangServerEngine as SGLangServerEngine
from .engines.servers.vllm import VLLMServerEngine as VLLMServerEngine
from .engines.servers.vllm_worker import TiedHeadWorker as TiedHeadWorker
from .engines.time_shared import TimeSharedEngines as TimeSharedEngines
from .engines.types import (
    Completion as Completion,
    RepetitionDetection as RepetitionDetection,
    Request as Request,
    RequestT as RequestT,
    SampleT as SampleT,
    SamplingParams as SamplingParams,
)
from .engines.vllm.engine import VLLMEngine as VLLMEngine
from .engines.wrappers import WrappedEngine as WrappedEngine
from .errors import (
    CorruptWeightsError as CorruptWeightsError,
    EngineDiedError as EngineDiedError,
    EngineStartError as EngineStartError,
    EpisodeError as EpisodeError,
    MissingExtraError as MissingExtraError,
    NoScoreError as NoScoreError,
    PeerLostError as PeerLostError,
    RequestError as RequestError,
    RewardConfigError as RewardConfigError,
    RewardError as RewardError,
    RewardExitError as RewardExitError,
    RolloutError as RolloutError,
    SandboxError as SandboxError,
    ServerRequestError as ServerRequestError,
    UnsupportedModelError as UnsupportedModelError,
    WeightSyncError as WeightSyncError,
    WrongBaseError as WrongBaseError,
    WrongWeightsError as WrongWeightsError,
)
from .generation import (
    Generation as Generation,
    GroupComparison as GroupComparison,
    RolloutRoles as RolloutRoles,
)
from .groups import (
    Group as Group,
    Prompt as Prompt,
    PromptImages as PromptImages,
    Response as Response,
    SampledPart as SampledPart,
    UnfinishedGroup as UnfinishedGroup,
    sampled_metrics as sampled_metrics,
    sampled_part as sampled_part,
    vision_processor as vision_processor,
)
from .images.blip import ImageRewardScore as ImageRewardScore
from .images.clip import AestheticReward as AestheticReward, CLIPReward as CLIPReward
from .images.colour import ColourReward as ColourReward
from .images.http import HTTPImageReward as HTTPImageReward
from .images.jpeg import JPEGCompressibility as JPEGCompressibility
from .images.judge import ImageJudgeReward as ImageJudgeReward
from .images.registry import (
    ImageRewardKind as ImageRewardKind,
    ImageRewardSettings as ImageRewardSettings,
    build_image_reward as build_image_reward,
    register_image_reward as register_image_reward,
)
from .images.reward import ImageRewardFunction as ImageRewardFunction, evaluate_images as evaluate_images
from .images.vision_processor import VisionProcessor as VisionProcessor
from .multi_turn.chat import ChatEncoder as ChatEncoder, Message as Message
from .multi_turn.config import EnvironmentRole as EnvironmentRole, MultiTurnConfig as MultiTurnConfig
from .multi_turn.environment import Environment as Environment, Opening as Opening, Reply as Reply
from .multi_turn.episode import (
    Episode as Episode,
    EpisodeEnd as EpisodeEnd,
    EpisodeLimits as EpisodeLimits,
    run_episode as run_episode,
)
from .multi_turn.revision import RevisionEnvironment as RevisionEnvironment
from .multi_turn.tools import (
    Tool as Tool,
    ToolCall as ToolCall,
    ToolEnvironment as ToolEnvironment,
    hermes_calls as hermes_calls,
)
from .python_file import load_function as load_function, load_reward as load_reward
from .rewards.composite import CompositeReward as CompositeReward
from .rewards.failures import Failure as Failure, FailureLog as FailureLog
from .rewards.kinds.code import CodeReward as CodeReward, last_code_block as last_code_block
from .rewards.kinds.http import HTTPReward as HTTPReward
from .rewards.kinds.judge import (
    JudgeOptions as JudgeOptions,
    JudgeReward as JudgeReward,
    Reduce as Reduce,
    ScorePattern as ScorePattern,
    Verdict as Verdict,
)
from .rewards.kinds.judge_model import (
    JudgeModel as JudgeModel,
    JudgeStats as JudgeStats,
    QuestionTemplate as QuestionTemplate,
)
from .rewards.kinds.math_verify import MathVerifyReward as MathVerifyReward
from .rewards.kinds.pairwise import PairwiseJudge as PairwiseJudge, Winner as Winner, WinnerPattern as WinnerPattern
from .rewards.kinds.reasoning_gym import (
    ReasoningGymReward as ReasoningGymReward,
    import_reasoning_gym as import_reasoning_gym,
)
from .rewards.kinds.sequence_classifier import SequenceClassifierReward as SequenceClassifierReward
from .rewards.registry import (
    build_reward as build_reward,
    register_reward as register_reward,
    reward_names as reward_names,
)
from .rewards.retry import RetryPolicy as RetryPolicy
from .rewards.reward import (
    GroupRewardFunction as GroupRewardFunction,
    RewardFunction as RewardFunction,
    Scored as Scored,
    evaluate as evaluate,
    evaluate_group as evaluate_group,
    score as score,
)
from .rewards.runner import (
    Failed as Failed,
    GroupRewardRunner as GroupRewardRunner,
    OnError as OnError,
    RewardRunner as RewardRunner,
    RewardRunnerConfig as RewardRunnerConfig,
    RewardStats as RewardStats,
    part_means as part_means,
    reward_metrics as reward_metrics,
)
from .rewards.threads import ThreadedReward as ThreadedReward
from .sandbox.sandbox import Isolation as Isolation, Sandbox as Sandbox
from .sandbox.types import Outcome as Outcome, SandboxLimits as SandboxLimits, SandboxResult as SandboxResult
from .weight_sync.adapters import AdapterWeights as AdapterWeights
from .weight_sync.broadcast import WeightReceiver as WeightReceiver, WeightSender as WeightSender
from .weight_sync.checked_engine import CheckedEngine as CheckedEngine, WeightRecord as WeightRecord
from .weight_sync.cuda_ipc import SharedCudaWeights as SharedCudaWeights, open_weights as open_weights
from .weight_sync.delta import WeightDelta as WeightDelta, apply_delta as apply_delta, make_delta as make_delta
from .weight_sync.digests import DigestedWeights as DigestedWeights
from .weight_sync.mirror import FullWeights as FullWeights, WeightMirror as WeightMirror
from .weight_sync.report import (
    Digest as Digest,
    Digests as Digests,
    HeldTensor as HeldTensor,
    HeldWeights as HeldWeights,
    all_digests as all_digests,
    check_weights as check_weights,
)
from .weight_sync.shared_weights import SharedWeights as SharedWeights
from .weight_sync.store.publisher import WeightPublisher as WeightPublisher
from .weight_sync.store.subscriber import WeightSubscriber as WeightSubscriber
from .weight_sync.weight_references import WeightReferences as WeightReferences

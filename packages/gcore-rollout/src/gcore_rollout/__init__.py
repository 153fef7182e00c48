"""Generation engines and rewards: how RLHF samples are made and scored."""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_rollout.engines.diffusion.engine import DiffusersEngine
    from gcore_rollout.engines.diffusion.kernels import DDIM, DanceSDE, FlowCPS, FlowODE, FlowSDE, Kernel, Transition
    from gcore_rollout.engines.diffusion.recording import load_pipeline, suited
    from gcore_rollout.engines.diffusion.types import ImageRequest, ImageSample, ImageSampling, Trajectory
    from gcore_rollout.engines.hf.engine import HFEngine
    from gcore_rollout.engines.processes.engine_process import EngineProcess
    from gcore_rollout.engines.processes.replicas import start_replicas, visible_gpus
    from gcore_rollout.engines.protocol import Engine, EngineStats
    from gcore_rollout.engines.queueing import Call
    from gcore_rollout.engines.ray.ray_engine import EngineHandle, RayEngine, end_engine_actor, start_engine_actor
    from gcore_rollout.engines.registry import (
        PRELOAD_DIFFUSERS,
        PRELOAD_HF,
        PRELOAD_VLLM,
        EngineKind,
        connect_servers,
        engine_factory,
        engine_kind,
        engine_names,
        register_engine,
    )
    from gcore_rollout.engines.replicas import EngineReplicas
    from gcore_rollout.engines.sampling import sample_seeds
    from gcore_rollout.engines.servers.client import ServerClient
    from gcore_rollout.engines.servers.sglang import SGLangServerEngine
    from gcore_rollout.engines.servers.vllm import VLLMServerEngine
    from gcore_rollout.engines.servers.vllm_worker import TiedHeadWorker
    from gcore_rollout.engines.time_shared import TimeSharedEngines
    from gcore_rollout.engines.types import Completion, RepetitionDetection, Request, RequestT, SampleT, SamplingParams
    from gcore_rollout.engines.vllm.engine import VLLMEngine
    from gcore_rollout.engines.wrappers import WrappedEngine
    from gcore_rollout.errors import (
        CorruptWeightsError,
        EngineDiedError,
        EngineStartError,
        EpisodeError,
        MissingExtraError,
        NoScoreError,
        PeerLostError,
        RequestError,
        RewardConfigError,
        RewardError,
        RewardExitError,
        RolloutError,
        SandboxError,
        ServerRequestError,
        UnsupportedModelError,
        WeightSyncError,
        WrongBaseError,
        WrongWeightsError,
    )
    from gcore_rollout.images.blip import ImageRewardScore
    from gcore_rollout.images.clip import AestheticReward, CLIPReward
    from gcore_rollout.images.colour import ColourReward
    from gcore_rollout.images.http import HTTPImageReward
    from gcore_rollout.images.jpeg import JPEGCompressibility
    from gcore_rollout.images.judge import ImageJudgeReward
    from gcore_rollout.images.registry import (
        ImageRewardKind,
        ImageRewardSettings,
        build_image_reward,
        register_image_reward,
    )
    from gcore_rollout.images.reward import ImageReward, ImageRewardFunction, evaluate_images
    from gcore_rollout.images.vision_processor import VisionProcessor
    from gcore_rollout.multi_turn.chat import ChatEncoder, Message
    from gcore_rollout.multi_turn.environment import Environment, Opening, Reply
    from gcore_rollout.multi_turn.episode import Episode, EpisodeEnd, EpisodeLimits, run_episode
    from gcore_rollout.multi_turn.revision import RevisionEnvironment
    from gcore_rollout.multi_turn.tools import Tool, ToolCall, ToolEnvironment, hermes_calls
    from gcore_rollout.python_file import load_function, load_reward
    from gcore_rollout.rewards.composite import CompositeReward
    from gcore_rollout.rewards.failures import Failure, FailureLog
    from gcore_rollout.rewards.kinds.code import CodeReward, last_code_block
    from gcore_rollout.rewards.kinds.http import HTTPReward
    from gcore_rollout.rewards.kinds.judge import JudgeOptions, JudgeReward, JudgeStats, Reduce, ScorePattern, Verdict
    from gcore_rollout.rewards.kinds.judge_model import JudgeModel, QuestionTemplate
    from gcore_rollout.rewards.kinds.math_verify import MathVerifyReward
    from gcore_rollout.rewards.kinds.pairwise import PairwiseJudge, Winner, WinnerPattern
    from gcore_rollout.rewards.kinds.reasoning_gym import ReasoningGymReward, import_reasoning_gym
    from gcore_rollout.rewards.kinds.sequence_classifier import SequenceClassifierReward
    from gcore_rollout.rewards.registry import build_reward, register_reward, reward_names
    from gcore_rollout.rewards.retry import RetryPolicy
    from gcore_rollout.rewards.reward import (
        GroupRewardFunction,
        RewardFunction,
        Scored,
        evaluate,
        evaluate_group,
        score,
    )
    from gcore_rollout.rewards.runner import (
        Failed,
        GroupRewardRunner,
        OnError,
        RewardRunner,
        RewardRunnerConfig,
        RewardStats,
        part_means,
        reward_metrics,
    )
    from gcore_rollout.rewards.threads import ThreadedReward
    from gcore_rollout.sandbox.sandbox import Isolation, Sandbox
    from gcore_rollout.sandbox.types import Outcome, SandboxLimits, SandboxResult
    from gcore_rollout.weight_sync.adapters import AdapterWeights
    from gcore_rollout.weight_sync.broadcast import WeightReceiver, WeightSender
    from gcore_rollout.weight_sync.checked_engine import CheckedEngine, WeightRecord
    from gcore_rollout.weight_sync.cuda_ipc import SharedCudaWeights, open_weights
    from gcore_rollout.weight_sync.delta import WeightDelta, apply_delta, make_delta
    from gcore_rollout.weight_sync.digests import DigestedWeights
    from gcore_rollout.weight_sync.mirror import FullWeights, WeightMirror
    from gcore_rollout.weight_sync.report import Digest, Digests, HeldTensor, HeldWeights, all_digests, check_weights
    from gcore_rollout.weight_sync.shared_weights import SharedWeights
    from gcore_rollout.weight_sync.store.publisher import WeightPublisher
    from gcore_rollout.weight_sync.store.subscriber import WeightSubscriber
    from gcore_rollout.weight_sync.weight_references import WeightReferences

__all__ = [
    "DDIM",
    "PRELOAD_DIFFUSERS",
    "PRELOAD_HF",
    "PRELOAD_VLLM",
    "AdapterWeights",
    "AestheticReward",
    "CLIPReward",
    "Call",
    "ChatEncoder",
    "CheckedEngine",
    "CodeReward",
    "ColourReward",
    "Completion",
    "CompositeReward",
    "CorruptWeightsError",
    "DanceSDE",
    "DiffusersEngine",
    "Digest",
    "DigestedWeights",
    "Digests",
    "Engine",
    "EngineDiedError",
    "EngineHandle",
    "EngineKind",
    "EngineProcess",
    "EngineReplicas",
    "EngineStartError",
    "EngineStats",
    "Environment",
    "Episode",
    "EpisodeEnd",
    "EpisodeError",
    "EpisodeLimits",
    "Failed",
    "Failure",
    "FailureLog",
    "FlowCPS",
    "FlowODE",
    "FlowSDE",
    "FullWeights",
    "GroupRewardFunction",
    "GroupRewardRunner",
    "HFEngine",
    "HTTPImageReward",
    "HTTPReward",
    "HeldTensor",
    "HeldWeights",
    "ImageJudgeReward",
    "ImageRequest",
    "ImageReward",
    "ImageRewardFunction",
    "ImageRewardKind",
    "ImageRewardScore",
    "ImageRewardSettings",
    "ImageSample",
    "ImageSampling",
    "Isolation",
    "JPEGCompressibility",
    "JudgeModel",
    "JudgeOptions",
    "JudgeReward",
    "JudgeStats",
    "Kernel",
    "MathVerifyReward",
    "Message",
    "MissingExtraError",
    "NoScoreError",
    "OnError",
    "Opening",
    "Outcome",
    "PairwiseJudge",
    "PeerLostError",
    "QuestionTemplate",
    "RayEngine",
    "ReasoningGymReward",
    "Reduce",
    "RepetitionDetection",
    "Reply",
    "Request",
    "RequestError",
    "RequestT",
    "RetryPolicy",
    "RevisionEnvironment",
    "RewardConfigError",
    "RewardError",
    "RewardExitError",
    "RewardFunction",
    "RewardRunner",
    "RewardRunnerConfig",
    "RewardStats",
    "RolloutError",
    "SGLangServerEngine",
    "SampleT",
    "SamplingParams",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "ScorePattern",
    "Scored",
    "SequenceClassifierReward",
    "ServerClient",
    "ServerRequestError",
    "SharedCudaWeights",
    "SharedWeights",
    "ThreadedReward",
    "TiedHeadWorker",
    "TimeSharedEngines",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "Trajectory",
    "Transition",
    "UnsupportedModelError",
    "VLLMEngine",
    "VLLMServerEngine",
    "Verdict",
    "VisionProcessor",
    "WeightDelta",
    "WeightMirror",
    "WeightPublisher",
    "WeightReceiver",
    "WeightRecord",
    "WeightReferences",
    "WeightSender",
    "WeightSubscriber",
    "WeightSyncError",
    "Winner",
    "WinnerPattern",
    "WrappedEngine",
    "WrongBaseError",
    "WrongWeightsError",
    "all_digests",
    "apply_delta",
    "build_image_reward",
    "build_reward",
    "check_weights",
    "connect_servers",
    "end_engine_actor",
    "engine_factory",
    "engine_kind",
    "engine_names",
    "evaluate",
    "evaluate_group",
    "evaluate_images",
    "hermes_calls",
    "import_reasoning_gym",
    "last_code_block",
    "load_function",
    "load_pipeline",
    "load_reward",
    "make_delta",
    "open_weights",
    "part_means",
    "register_engine",
    "register_image_reward",
    "register_reward",
    "reward_metrics",
    "reward_names",
    "run_episode",
    "sample_seeds",
    "score",
    "start_engine_actor",
    "start_replicas",
    "suited",
    "visible_gpus",
]

_NAMES = {
    "engines.diffusion.engine": "DiffusersEngine",
    "engines.diffusion.kernels": "DDIM DanceSDE FlowCPS FlowODE FlowSDE Kernel Transition",
    "engines.diffusion.recording": "load_pipeline suited",
    "engines.diffusion.types": "ImageRequest ImageSample ImageSampling Trajectory",
    "engines.hf.engine": "HFEngine",
    "engines.processes.engine_process": "EngineProcess",
    "engines.processes.replicas": "start_replicas visible_gpus",
    "engines.protocol": "Engine EngineStats",
    "engines.queueing": "Call",
    "engines.ray.ray_engine": "EngineHandle RayEngine end_engine_actor start_engine_actor",
    "engines.registry": (
        "EngineKind PRELOAD_DIFFUSERS PRELOAD_HF PRELOAD_VLLM connect_servers engine_factory engine_kind "
        "engine_names register_engine"
    ),
    "engines.replicas": "EngineReplicas",
    "engines.sampling": "sample_seeds",
    "engines.servers.client": "ServerClient",
    "engines.servers.sglang": "SGLangServerEngine",
    "engines.servers.vllm": "VLLMServerEngine",
    "engines.servers.vllm_worker": "TiedHeadWorker",
    "engines.time_shared": "TimeSharedEngines",
    "engines.types": "Completion RepetitionDetection Request RequestT SampleT SamplingParams",
    "engines.vllm.engine": "VLLMEngine",
    "engines.wrappers": "WrappedEngine",
    "errors": (
        "CorruptWeightsError EngineDiedError EngineStartError EpisodeError MissingExtraError NoScoreError "
        "PeerLostError RequestError RewardConfigError RewardError RewardExitError RolloutError SandboxError "
        "ServerRequestError UnsupportedModelError WeightSyncError WrongBaseError WrongWeightsError"
    ),
    "images.blip": "ImageRewardScore",
    "images.clip": "AestheticReward CLIPReward",
    "images.colour": "ColourReward",
    "images.http": "HTTPImageReward",
    "images.jpeg": "JPEGCompressibility",
    "images.judge": "ImageJudgeReward",
    "images.registry": "ImageRewardKind ImageRewardSettings build_image_reward register_image_reward",
    "images.reward": "ImageReward ImageRewardFunction evaluate_images",
    "images.vision_processor": "VisionProcessor",
    "multi_turn.chat": "ChatEncoder Message",
    "multi_turn.environment": "Environment Opening Reply",
    "multi_turn.episode": "Episode EpisodeEnd EpisodeLimits run_episode",
    "multi_turn.revision": "RevisionEnvironment",
    "multi_turn.tools": "Tool ToolCall ToolEnvironment hermes_calls",
    "python_file": "load_function load_reward",
    "rewards.composite": "CompositeReward",
    "rewards.failures": "Failure FailureLog",
    "rewards.kinds.code": "CodeReward last_code_block",
    "rewards.kinds.http": "HTTPReward",
    "rewards.kinds.judge": "JudgeOptions JudgeReward JudgeStats Reduce ScorePattern Verdict",
    "rewards.kinds.judge_model": "JudgeModel QuestionTemplate",
    "rewards.kinds.math_verify": "MathVerifyReward",
    "rewards.kinds.pairwise": "PairwiseJudge Winner WinnerPattern",
    "rewards.kinds.reasoning_gym": "ReasoningGymReward import_reasoning_gym",
    "rewards.kinds.sequence_classifier": "SequenceClassifierReward",
    "rewards.registry": "build_reward register_reward reward_names",
    "rewards.retry": "RetryPolicy",
    "rewards.reward": "GroupRewardFunction RewardFunction Scored evaluate evaluate_group score",
    "rewards.runner": (
        "Failed GroupRewardRunner OnError RewardRunner RewardRunnerConfig RewardStats part_means reward_metrics"
    ),
    "rewards.threads": "ThreadedReward",
    "sandbox.sandbox": "Isolation Sandbox",
    "sandbox.types": "Outcome SandboxLimits SandboxResult",
    "weight_sync.adapters": "AdapterWeights",
    "weight_sync.broadcast": "WeightReceiver WeightSender",
    "weight_sync.checked_engine": "CheckedEngine WeightRecord",
    "weight_sync.cuda_ipc": "SharedCudaWeights open_weights",
    "weight_sync.delta": "WeightDelta apply_delta make_delta",
    "weight_sync.digests": "DigestedWeights",
    "weight_sync.mirror": "FullWeights WeightMirror",
    "weight_sync.report": "Digest Digests HeldTensor HeldWeights all_digests check_weights",
    "weight_sync.shared_weights": "SharedWeights",
    "weight_sync.store.publisher": "WeightPublisher",
    "weight_sync.store.subscriber": "WeightSubscriber",
    "weight_sync.weight_references": "WeightReferences",
}
"""Public names by module. Each module is imported when one of its names is first used: many need torch, vLLM or Ray."""

_MODULE_OF = {_name: _module for _module, _names in _NAMES.items() for _name in _names.split()}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
